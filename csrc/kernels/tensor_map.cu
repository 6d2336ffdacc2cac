#include "kernels/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

#include "common/error.h"

namespace mok {
namespace {

// The driver's symbol is fetched at run time, so that the library loads where there is no driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? symbol : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

int encode(CUtensorMap* map, int rank, uint64_t base, const uint64_t* dims, const uint64_t* strides, int box_rows,
           const char* name) {
  const auto encode_tiled = encoder();
  if (encode_tiled == nullptr) return fail(MOK_ERR_CUDA, "cuTensorMapEncodeTiled: the driver does not offer it (12.0 or newer)");
  const uint32_t box[3] = {64, uint32_t(box_rows), 1}, ones[3] = {1, 1, 1};
  const CUresult result = encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, reinterpret_cast<void*>(base), dims, strides,
                                       box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return MOK_OK;
  return fail(MOK_ERR_CUDA, "tensor map of %s: driver error %d (base %#llx, %llu columns, %llu rows)", name, int(result),
              static_cast<unsigned long long>(base), static_cast<unsigned long long>(dims[0]),
              static_cast<unsigned long long>(dims[1]));
}

}  // namespace

int encode_rows_map(CUtensorMap* map, uint64_t base, int64_t columns, int64_t rows, int box_rows, const char* name) {
  const uint64_t dims[2] = {uint64_t(columns), uint64_t(rows)}, strides[1] = {uint64_t(columns) * 2};
  return encode(map, 2, base, dims, strides, box_rows, name);
}

int encode_experts_map(CUtensorMap* map, uint32_t* coordinate, const uint64_t* tensors, int count, int experts, int64_t columns,
                       int64_t rows, int box_rows, const char* name) {
  const uint64_t bytes = uint64_t(columns) * rows * 2;
  const auto address = [&](int e) { return count == 1 ? tensors[0] + e * bytes : tensors[e]; };
  uint64_t base = address(0), distances = 0, furthest = 0;
  for (int e = 1; e < experts; ++e) base = std::min(base, address(e));
  for (int e = 0; e < experts; ++e) {
    distances |= address(e) - base;
    furthest = std::max(furthest, address(e) - base);
  }
  if (base % 16 != 0 || distances % 16 != 0)
    return fail(MOK_ERR_ARGUMENT, "%s: tensors must start on 16 bytes, the lowest is %#llx", name,
                static_cast<unsigned long long>(base));
  // A stride has at most 39 bits; one expert needs none.
  const int shift = distances == 0 ? 30 : std::min(std::countr_zero(distances), 30);
  if (furthest >> shift > 0x7fffffffu)
    return fail(MOK_ERR_ARGUMENT, "%s: tensors lie %llu bytes apart but share only %d low zero bits; put them nearer together or align them",
                name, static_cast<unsigned long long>(furthest), shift);
  for (int e = 0; e < experts; ++e) coordinate[e] = uint32_t((address(e) - base) >> shift);
  const uint64_t dims[3] = {uint64_t(columns), uint64_t(rows), (furthest >> shift) + 1};
  const uint64_t strides[2] = {uint64_t(columns) * 2, uint64_t(1) << shift};
  return encode(map, 3, base, dims, strides, box_rows, name);
}

}  // namespace mok
