// What the host calls: one set of launchers an architecture. Arguments have been validated.
#ifndef MEGATRON_MOK_KERNELS_LAUNCH_H_
#define MEGATRON_MOK_KERNELS_LAUNCH_H_

#include <cuda_runtime.h>

#include "common/error.h"
#include "layout/workspace.h"

namespace mok {

inline int fail_cuda(cudaError_t error, const char* what) {
  return fail(MOK_ERR_CUDA, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}
inline int check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? MOK_OK : fail_cuda(error, what);
}

// CTAs whose spare warps move rows: what the user asks for, or all.
inline int comm_ctas(int comm_sms, int ctas, int* result) {
  *result = comm_sms > 0 ? comm_sms : ctas;
  if (*result % 2 == 0 && *result <= ctas) return MOK_OK;
  return fail(MOK_ERR_ARGUMENT, "comm_sms: got %d, need an even number, at most num_sms = %d", comm_sms, ctas);
}

namespace sm90 {
int launch_forward(const MokForwardArgs& args, cudaStream_t stream);
int launch_backward(const MokBackwardArgs& args, cudaStream_t stream);
int load_forward();  // loads every instance, so that none is loaded behind a kernel that waits
int load_backward();
}  // namespace sm90

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_LAUNCH_H_
