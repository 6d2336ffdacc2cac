// Where the tensors of all local experts lie, as two coordinates of one tensor map: address = base + near * 2^shift + far * 2^(shift + 31).
// So one map serves any number of tensors anywhere in memory, and a launch needs no copy to the device. (Two coordinates, because an
// allocator may take them from ranges that lie 2^46 bytes apart, while one counts to 2^31 in steps of the tensors' alignment. The near
// stride is smaller than a tensor, so the map's dimensions overlap: the driver takes that, its rules for strides are met.)
#ifndef MEGATRON_MOK_LAYOUT_PLACES_H_
#define MEGATRON_MOK_LAYOUT_PLACES_H_

#include "common/constants.h"
#include "megatron_mok/api.h"

namespace mok {

struct Places {
  static constexpr int kNearBits = 31;  // coordinates are signed
  static constexpr int kMaxShift = 8;   // the far stride must stay below 2^40
  uint64_t base;
  int shift;
  bool aligned;                    // to 16 bytes, as a tensor map needs
  uint32_t near_count, far_count;  // sizes of both dimensions
  uint64_t at[MOK_MAX_LOCAL_EXPERTS];  // near | far << 32

  // One stacked tensor (count 1) of `bytes` an expert, or one each (count = experts).
  static Places make(const uint64_t* tensors, int count, int experts, uint64_t bytes) {
    const auto address = [&](int e) { return count == 1 ? tensors[0] + uint64_t(e) * bytes : tensors[e]; };
    Places p{};
    p.base = address(0);
    for (int e = 1; e < experts; ++e) p.base = address(e) < p.base ? address(e) : p.base;
    uint64_t distances = 0;
    for (int e = 0; e < experts; ++e) distances |= address(e) - p.base;
    p.aligned = p.base % 16 == 0 && distances % 16 == 0;
    while (p.shift < kMaxShift && (distances >> p.shift & 1) == 0) ++p.shift;
    for (int e = 0; e < experts; ++e) {
      const uint64_t steps = (address(e) - p.base) >> p.shift;
      const uint32_t near = uint32_t(steps & ((uint64_t(1) << kNearBits) - 1)), far = uint32_t(steps >> kNearBits);
      p.at[e] = near | uint64_t(far) << 32;
      p.near_count = near >= p.near_count ? near + 1 : p.near_count;
      p.far_count = far >= p.far_count ? far + 1 : p.far_count;
    }
    return p;
  }
  MOK_HD uint64_t near_stride() const { return uint64_t(1) << shift; }
  MOK_HD uint64_t far_stride() const { return uint64_t(1) << (shift + kNearBits); }
  MOK_HD uint64_t address(int e) const { return base + (at[e] & 0xffffffffu) * near_stride() + (at[e] >> 32) * far_stride(); }
};

}  // namespace mok
#endif  // MEGATRON_MOK_LAYOUT_PLACES_H_
