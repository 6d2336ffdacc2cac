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

// CTAs that keep the pulls ahead of the MMAs: one computed row needs 2H bytes for 6HI FLOPs, so at 5 TFLOP/s an SM a computing SM asks for
// 1.7e12/I bytes/s; a pulling SM moves 45 GB/s (both measured on one H200).
inline int default_comm_ctas(const MokProblem& problem, int ctas) {
  const double wanted = ctas * (1.7e12 / problem.intermediate) / 45e9;
  const int even = 2 * int((wanted + 1.999) / 2);
  const int most = ctas / 4 * 2;
  return even < 2 ? 2 : (even < most ? even : (most < 2 ? 0 : most));
}

namespace sm90 {
int launch_forward(const MokForwardArgs& args, cudaStream_t stream);
int launch_backward(const MokBackwardArgs& args, cudaStream_t stream);
int load_forward();  // loads every instance, so that none is loaded behind a kernel that waits
int load_backward();
}  // namespace sm90

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_LAUNCH_H_
