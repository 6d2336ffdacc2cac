// Tensor maps of the operands, encoded on the host and passed with the launch.
#ifndef MEGATRON_MOK_KERNELS_TENSOR_MAP_H_
#define MEGATRON_MOK_KERNELS_TENSOR_MAP_H_

#include <cuda.h>
#include <stdint.h>

#include "layout/places.h"

namespace mok {

// A row-major bf16 matrix [rows, columns]; boxes of 64 columns (128 swizzled bytes) and `box_rows` rows.
int encode_rows_map(CUtensorMap* map, uint64_t base, int64_t columns, int64_t rows, int box_rows, const char* name);

// The same for stores of 16 rows and 256 columns, whose rows lie together: as [columns / 64, rows, 64], boxes of four blocks of columns.
int encode_row_group_map(CUtensorMap* map, uint64_t base, int64_t columns, int64_t rows, const char* name);

// The weights of all local experts, or their gradients: [rows, columns] bf16 or fp32 each, in one stacked tensor (count 1) or each in its
// own (count = experts), as one map (column, row, near, far); boxes of 128 bytes and `box_rows` rows.
struct ExpertTensors {
  CUtensorMap map;
  Places places;
};
int encode_experts(ExpertTensors* to, const uint64_t* tensors, int count, int experts, int64_t columns, int64_t rows, int box_rows,
                   const char* name, bool fp32 = false);

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_TENSOR_MAP_H_
