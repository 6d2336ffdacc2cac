// The only argument of the backward kernel.
#ifndef MEGATRON_MOK_KERNELS_BACKWARD_PARAMS_H_
#define MEGATRON_MOK_KERNELS_BACKWARD_PARAMS_H_

#include <cuda.h>

#include "kernels/tensor_map.h"
#include "layout/workspace.h"

namespace mok {

struct BackwardParams {
  CUtensorMap dy_map, x_map, dh_map, act_map;  // rings, [ring rows, columns]; all boxes are 64 rows x 128 bytes
  CUtensorMap dh_rows_map;                     // the dh ring, for stores of 16 rows x 256 columns
  ExpertTensors w1, w2, dw1, dw2;              // dw1, dw2 where they are wanted
  const char *dy, *x;                          // this rank's rows, read in place
  uint64_t peers[MOK_MAX_RANKS];               // symmetric regions
  char* local;
  MokErrorRecord* record;
  const int* ids;                              // [T, K]
  char* dx;                                    // [T, H] bf16
  float* dp;                                   // [T, K]
  const int* schedule;
  const char* h;                               // what the forward saved
  int save_groups;
  int rank, ranks, experts, top_k, hidden, intermediate;
  int64_t num_tokens;
  ScheduleLayout blob;
  SymmetricLayout symmetric;
  LocalLayout offsets;
  int ring_blocks, segment_units, batch_blocks, comm_ctas;
  int needs, accumulate;
  bool want_dw1, want_dw2, dw1_fp32, dw2_fp32;
  float act_limit;
  uint32_t layer;
  uint64_t timeout_ns;
};

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_BACKWARD_PARAMS_H_
