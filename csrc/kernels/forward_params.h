// The only argument of the forward kernel.
#ifndef MEGATRON_MOK_KERNELS_FORWARD_PARAMS_H_
#define MEGATRON_MOK_KERNELS_FORWARD_PARAMS_H_

#include <cuda.h>

#include "kernels/tensor_map.h"
#include "layout/workspace.h"

namespace mok {

struct ForwardParams {
  CUtensorMap x_map, act_map;   // rings [ring rows, H or I], boxes of 64 rows x 64 columns
  ExpertTensors w1, w2;
  const char* x;                // this rank's rows, read in place
  uint64_t peers[MOK_MAX_RANKS];  // symmetric regions
  char* local;
  MokErrorRecord* record;
  const int* ids;               // [T, K]
  char* out;                    // [T, H] bf16
  const int* schedule;
  char* h;                      // saved activations or null
  int save_groups;              // groups of 8 rows that fit into h
  int rank, ranks, experts, top_k, hidden, intermediate;
  int64_t num_tokens;
  ScheduleLayout blob;
  SymmetricLayout symmetric;
  LocalLayout offsets;
  int minibatch_units, ring_blocks, act_blocks, comm_ctas;
  float act_limit;
  uint32_t layer;
  uint64_t timeout_ns;
};

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_FORWARD_PARAMS_H_
