#include "kernels/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

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
           const char* name, bool fp32 = false, int box_depth = 1) {
  const auto encode_tiled = encoder();
  if (encode_tiled == nullptr) return fail(MOK_ERR_CUDA, "cuTensorMapEncodeTiled: the driver does not offer it (12.0 or newer)");
  const uint32_t box[4] = {fp32 ? 32u : 64u, uint32_t(box_rows), uint32_t(box_depth), 1}, ones[4] = {1, 1, 1, 1};
  const CUresult result = encode_tiled(map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, reinterpret_cast<void*>(base), dims, strides,
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

int encode_row_group_map(CUtensorMap* map, uint64_t base, int64_t columns, int64_t rows, const char* name) {
  const uint64_t dims[3] = {64, uint64_t(rows), uint64_t(columns) / 64}, strides[2] = {uint64_t(columns) * 2, 128};
  return encode(map, 3, base, dims, strides, 16, name, false, 4);
}

int encode_experts(ExpertTensors* to, const uint64_t* tensors, int count, int experts, int64_t columns, int64_t rows, int box_rows,
                   const char* name, bool fp32) {
  const uint64_t row_bytes = uint64_t(columns) * (fp32 ? 4 : 2);
  Places& places = to->places = Places::make(tensors, count, experts, row_bytes * rows);
  if (!places.aligned)
    return fail(MOK_ERR_ARGUMENT, "%s: tensors must start on 16 bytes, the lowest is %#llx", name,
                static_cast<unsigned long long>(places.base));
  const uint64_t dims[4] = {uint64_t(columns), uint64_t(rows), places.near_count, places.far_count};
  const uint64_t strides[3] = {row_bytes, places.near_stride(), places.far_stride()};
  return encode(&to->map, 4, places.base, dims, strides, box_rows, name, fp32);
}

}  // namespace mok
