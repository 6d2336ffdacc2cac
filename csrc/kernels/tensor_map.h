// Tensor maps of the operands, encoded on the host and passed with the launch.
#ifndef MEGATRON_MOK_KERNELS_TENSOR_MAP_H_
#define MEGATRON_MOK_KERNELS_TENSOR_MAP_H_

#include <cuda.h>
#include <stdint.h>

namespace mok {

// A row-major bf16 matrix [rows, columns]; boxes of 64 columns (128 swizzled bytes) and `box_rows` rows.
int encode_rows_map(CUtensorMap* map, uint64_t base, int64_t columns, int64_t rows, int box_rows, const char* name);

// The weights of all local experts, [rows, columns] bf16 each, as one map of three dimensions (column, row, expert), whether they lie in
// one stacked tensor (count 1) or each in its own (count = experts): the expert dimension counts in units of the largest power of two
// that divides every distance from the lowest tensor, and `coordinate` receives each expert's place on it. One map then serves any
// number of tensors, and a launch needs no copy to the device.
int encode_experts_map(CUtensorMap* map, uint32_t* coordinate, const uint64_t* tensors, int count, int experts, int64_t columns,
                       int64_t rows, int box_rows, const char* name);

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_TENSOR_MAP_H_
