// One element: conversions and optimizer formulas for device code, and for the host, where a test holds them
// against the CPU kernels bit by bit on machines without a device. kernels/adam.h, optimizer.h and quantize.h
// say what they are.
#ifndef PENSTOCK_KERNELS_CUDA_ELEMENT_CUH_
#define PENSTOCK_KERNELS_CUDA_ELEMENT_CUH_

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/optimizer.h"

#define PENSTOCK_HD __host__ __device__ __forceinline__

namespace penstock::kernels::cuda {

// Each rounded once to nearest; on the device by intrinsics that the compiler never fuses.
PENSTOCK_HD float Add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
PENSTOCK_HD float Mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
PENSTOCK_HD float Div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
PENSTOCK_HD float Sqrt(float a) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}
PENSTOCK_HD float Fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
PENSTOCK_HD uint32_t Bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}
PENSTOCK_HD float FromBits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}
PENSTOCK_HD bool IsNan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

PENSTOCK_HD float FromBf16(uint16_t x) { return FromBits(static_cast<uint32_t>(x) << 16); }
PENSTOCK_HD uint16_t ToBf16(float x) {
  const uint32_t bits = Bits(x);
  if (IsNan(bits)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Coded weights (kernels/weight_code.h): the bf16 bits of a group's scale from the bits of its largest
// magnitude and of the largest whole number, and the whole number of a value, whose scale is neither zero nor
// a NaN.
PENSTOCK_HD uint16_t WeightScale(uint32_t largest, float most) {
  if (largest >= 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((Bits(Div(FromBits(largest), most)) + 0xFFFFu) >> 16);
}
PENSTOCK_HD int WeightNumber(float x, float scale) {
  // The last place of 1.5 * 2^23 counts units.
  return static_cast<int>(Bits(Add(Div(x, scale), 12582912.0f)) - 0x4B400000u);
}
PENSTOCK_HD uint16_t ToBf16Stochastic(float x, uint32_t draw) {
  const uint32_t bits = Bits(x);
  if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return ToBf16(x);
  return static_cast<uint16_t>((bits + draw) >> 16);
}
PENSTOCK_HD float FromFp16(uint16_t x) {
  __half_raw raw;
  raw.x = x;
  return __half2float(__half(raw));
}
PENSTOCK_HD uint16_t ToFp16(float x) {
  const __half_raw raw = __float2half_rn(x);
  return raw.x;
}
PENSTOCK_HD float Join(uint16_t master_high, int16_t master_low) {
  return FromBits((static_cast<uint32_t>(master_high) << 16) +
                  static_cast<uint32_t>(static_cast<int32_t>(master_low)));
}
PENSTOCK_HD void Split(float x, uint16_t* master_high, int16_t* master_low) {
  const uint32_t bits = Bits(x);
  const bool nan = IsNan(bits);
  *master_high = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x8000u) >> 16);
  *master_low = nan ? int16_t{0} : static_cast<int16_t>(static_cast<uint16_t>(bits));
}

// The random bits of stochastic rounding: low half for first moments, high half for second ones.
PENSTOCK_HD uint32_t DrawKey(uint64_t seed) {
  seed += 0x9E3779B97F4A7C15ull;
  seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9ull;
  seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBull;
  seed ^= seed >> 31;
  return static_cast<uint32_t>(seed ^ (seed >> 32));
}
PENSTOCK_HD uint32_t Draw(uint32_t key, uint64_t element) {
  uint32_t x = static_cast<uint32_t>(element) ^ key;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 8-bit codes, kernels/quantize.h. `draw`: 16 bits, 0x8000 for nearest.
PENSTOCK_HD float ScaleOf(uint32_t largest_bits) {
  return largest_bits < 0x7F800000u ? Div(FromBits(largest_bits), 1.875f) : FromBits(0x7FC00000u);
}
template <int kCode>
PENSTOCK_HD uint8_t Encode8(float x, float scale, uint32_t draw) {
  constexpr uint32_t kLeastNormal = kCode == 0 ? (127u - 14u) << 23 : (127u - 30u) << 23;
  constexpr uint32_t kOffset = kCode == 0 ? (127u - 15u) << 3 : (127u - 31u) << 3;
  constexpr uint32_t kMost = kCode == 0 ? 0x7F : 0xFF;
  if (!(scale > 0.0f)) return 0;  // a block of zeros, or one that is not finite
  const uint32_t magnitude = Bits(x) & 0x7FFFFFFFu;
  const float y = Div(FromBits(magnitude), scale);
  uint32_t code;
  if (Bits(y) < kLeastNormal) {
    const float fraction = Mul(static_cast<float>(draw), 0x1p-16f);
    code = static_cast<uint32_t>(Add(Mul(y, kCode == 0 ? 0x1p17f : 0x1p33f), fraction));
  } else {
    code = ((Bits(y) + (draw << 4)) >> 20) - kOffset;
  }
  if (code > kMost) code = kMost;
  if (kCode == 0) return static_cast<uint8_t>(code | ((Bits(x) >> 24) & 0x80u));
  return static_cast<uint8_t>(code == 0 && magnitude != 0 ? 1u : code);
}
template <int kCode>
PENSTOCK_HD float Decode8(uint8_t code, float scale) {
  constexpr uint32_t kOffset = kCode == 0 ? (127u - 15u) << 3 : (127u - 31u) << 3;
  const uint32_t magnitude = kCode == 0 ? code & 0x7Fu : code;
  const uint32_t sign = kCode == 0 ? static_cast<uint32_t>(code & 0x80u) << 24 : 0u;
  const float denormal = Mul(static_cast<float>(magnitude), kCode == 0 ? 0x1p-17f : 0x1p-33f);
  const uint32_t value = magnitude < 8 ? Bits(denormal) : (magnitude + kOffset) << 20;
  return Mul(FromBits(value | sign), scale);
}

// The optimizers; `scale` is the gradient's whole factor.
struct AdamElement {
  using Step = AdamStep;
  static constexpr bool kM = true, kV = true;
  Step s;
  PENSTOCK_HD static void Moments(const AdamStep& s, float g, float* m, float* v) {
    *m = Fma(g, s.one_minus_beta1, Mul(*m, s.beta1));
    *v = Fma(Mul(g, s.one_minus_beta2), g, Mul(*v, s.beta2));
  }
  PENSTOCK_HD static float Denominator(const AdamStep& s, float v) {
    return Add(Div(Sqrt(v), s.sqrt_correction2), s.eps);
  }
  PENSTOCK_HD void operator()(float scale, float* p, float g, float* m, float* v) const {
    g = Mul(g, scale);
    if (s.mode == AdamMode::kAdam) {
      g = Fma(*p, s.weight_decay, g);
    } else {
      *p = Mul(*p, s.decay);
    }
    Moments(s, g, m, v);
    *p = Add(*p, Div(Mul(-s.step_size, *m), Denominator(s, *v)));
  }
};

struct AdagradElement {
  using Step = AdagradStep;
  static constexpr bool kM = false, kV = true;
  Step s;
  PENSTOCK_HD void operator()(float scale, float* p, float g, float*, float* v) const {
    g = Mul(g, scale);
    if (s.weight_decay != 0.0f) g = Fma(*p, s.weight_decay, g);
    *v = Fma(g, g, *v);
    *p = Add(*p, Div(Mul(-s.step_size, g), Add(Sqrt(*v), s.eps)));
  }
};

struct LionElement {
  using Step = LionStep;
  static constexpr bool kM = true, kV = false;
  Step s;
  PENSTOCK_HD void operator()(float scale, float* p, float g, float* m, float*) const {
    g = Mul(g, scale);
    const float c = Fma(g, s.one_minus_beta1, Mul(*m, s.beta1));
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c == 0.0f ? 0.0f : c;
    *p = Fma(-s.lr, sign, Mul(*p, s.decay));
    *m = Fma(g, s.one_minus_beta2, Mul(*m, s.beta2));
  }
};

struct SgdElement {
  using Step = SgdStep;
  static constexpr bool kM = true, kV = false;
  Step s;
  PENSTOCK_HD void operator()(float scale, float* p, float g, float* m, float*) const {
    g = Mul(g, scale);
    if (s.weight_decay != 0.0f) g = Fma(*p, s.weight_decay, g);
    if (s.momentum != 0.0f) {
      *m = Fma(g, s.one_minus_dampening, Mul(*m, s.momentum));
      g = s.nesterov ? Fma(*m, s.momentum, g) : *m;
    }
    *p = Fma(g, -s.lr, *p);
  }
};

PENSTOCK_HD float LambDirection(const LambStep& s, float p, float m, float v) {
  return Fma(p, s.weight_decay, Div(Mul(m, s.inverse_correction1), AdamElement::Denominator(s.adam, v)));
}

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_ELEMENT_CUH_
