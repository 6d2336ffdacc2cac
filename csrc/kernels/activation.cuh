// Activations of the experts on packed bf16 pairs, in fp32 with one rounding. Formulas as in docs/numerics.md.
#ifndef MEGATRON_MOK_KERNELS_ACTIVATION_CUH_
#define MEGATRON_MOK_KERNELS_ACTIVATION_CUH_

#include <cuda_bf16.h>
#include <stdint.h>

#include "megatron_mok/api.h"

namespace mok {

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ float2 unpack_bf16(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// The hardware's 2^x and 1/x (about 2^-22 each); subnormal steps are zeros, which change nothing here.
__device__ __forceinline__ float sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}

// `gate`, `up`: one value each of h, already rounded to bf16. Returns the activation before the probability.
template <MokActivation kAct>
__device__ __forceinline__ float activate(float gate, float up, float limit) {
  if constexpr (kAct == MOK_ACT_SWIGLU) {
    return gate * sigmoid(gate) * up;
  } else {
    static_assert(kAct == MOK_ACT_SWIGLU_CLAMPED);
    gate = gate > limit ? limit : gate;  // a NaN stays
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return gate * sigmoid(gate) * up;
  }
}

struct ActivationGradient {
  float activation;  // as activate() gives it: the same expression, so that both directions have the same bits
  float gate, up;    // its derivatives
};

template <MokActivation kAct>
__device__ __forceinline__ ActivationGradient activate_backward(float gate, float up, float limit) {
  bool gate_moves = true, up_moves = true;
  if constexpr (kAct == MOK_ACT_SWIGLU_CLAMPED) {
    gate_moves = !(gate > limit);
    up_moves = !(up > limit || up < -limit);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  const float s = sigmoid(gate), silu = gate * s;
  return {silu * up, gate_moves ? up * (s + (silu - silu * s)) : 0.f, up_moves ? silu : 0.f};
}

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_ACTIVATION_CUH_
