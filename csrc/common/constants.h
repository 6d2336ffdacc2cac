// Sizes that host and device agree on. No CUDA, so that everything that decides order and addresses compiles for the host.
#ifndef MEGATRON_MOK_COMMON_CONSTANTS_H_
#define MEGATRON_MOK_COMMON_CONSTANTS_H_

#include <stdint.h>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ __forceinline__
#else
#define MOK_HD inline
#endif

namespace mok {

// Rows come in granules (what one consumer warpgroup computes), blocks (the alignment of an expert's rows) and units (what
// one cluster of two CTAs computes).
constexpr int kGranuleRows = 64;
constexpr int kBlockRows = 128;
constexpr int kUnitRows = 256;
constexpr int kGroupRows = 8;    // saved rows and row copies come in groups
constexpr int kTileN = 256;      // output columns of a tile: 128 gate + 128 up in GEMM 1, 256 of H in GEMM 2
constexpr int kTileI = 128;      // columns of I that a GEMM 1 tile produces
constexpr int kTileK = 64;       // one 128-byte swizzle row of bf16

template <typename T>
MOK_HD constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <typename T>
MOK_HD constexpr T round_up(T a, T b) { return ceil_div(a, b) * b; }

}  // namespace mok
#endif  // MEGATRON_MOK_COMMON_CONSTANTS_H_
