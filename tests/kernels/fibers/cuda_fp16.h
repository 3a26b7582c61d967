// CUDA's half precision, for fibers.h: by the definition, rounded to nearest even.
#ifndef PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_FP16_H_
#define PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_FP16_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

struct __half_raw {
  unsigned short x;
};
struct __half {
  __half() = default;
  explicit __half(__half_raw raw) : raw_(raw) {}
  operator __half_raw() const { return raw_; }
  __half_raw raw_;
};
inline float __half2float(__half half) {
  const unsigned bits = half.raw_.x, exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
  float magnitude;
  if (exponent == 0x1F) {
    magnitude = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}
inline __half __float2half_rn(float x) {
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  unsigned bits;
  if (std::isnan(x)) {
    bits = 0x7FFF;
  } else if (magnitude >= 65520.0f) {
    bits = 0x7C00;
  } else {
    // Units in the last place, of which a carry goes into the exponent.
    const int exponent = magnitude == 0.0f ? -14 : std::max(std::ilogb(magnitude), -14);
    const float units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    bits = (static_cast<unsigned>(exponent + 14) << 10) + static_cast<unsigned>(units);
  }
  return __half(__half_raw{static_cast<unsigned short>(sign | bits)});
}

#endif  // PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_FP16_H_
