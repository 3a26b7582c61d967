// 16 lanes in plain C++: what every vector level must equal bit for bit, and what a processor without AVX2
// runs.
//
//   F  16 fp32      I  16 32-bit integers, unsigned wrap-around      M  16 truth values      D  16 doubles
// Load* and Store* with kTail move `count` < 16 elements (the other lanes load as zero and are not stored),
// without it 16 elements from any address. Fma rounds once. MaxS, MinS, GreaterS compare as signed.
#ifndef PENSTOCK_KERNELS_SIMD_VEC_PORTABLE_H_
#define PENSTOCK_KERNELS_SIMD_VEC_PORTABLE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

#define PENSTOCK_SIMD_NAMESPACE portable

namespace penstock::kernels::portable {

inline constexpr int kLanes = 16;
inline constexpr int kVectors = 1;                                               // that registers hold
inline constexpr decltype(nullptr) kPackBf16 = nullptr, kBf16Product = nullptr;  // no instructions for it
template <class Strip>
inline constexpr decltype(nullptr) kAmxProduct = nullptr;

struct F {
  float v[kLanes];
};
struct I {
  uint32_t v[kLanes];
};
struct M {
  bool v[kLanes];
};
struct D {
  double v[kLanes];
};

template <class To, class From, class Op>
inline To Map(const From& x, Op op) {
  To out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = op(x.v[k]);
  return out;
}
template <class To, class From, class Op>
inline To Map(const From& x, const From& y, Op op) {
  To out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = op(x.v[k], y.v[k]);
  return out;
}

inline F Set(float x) {
  F out;
  for (float& lane : out.v) lane = x;
  return out;
}
inline I SetI(uint32_t x) {
  I out;
  for (uint32_t& lane : out.v) lane = x;
  return out;
}
inline I Iota() {
  I out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = static_cast<uint32_t>(k);
  return out;
}

// The elements may stand at any address, hence memcpy.
template <bool kTail, class T>
inline void LoadArray(const void* p, size_t count, T (&out)[kLanes]) {
  if constexpr (kTail) {
    for (T& lane : out) lane = T{};
    __builtin_memcpy(out, p, count * sizeof(T));
  } else {
    __builtin_memcpy(out, p, sizeof(out));
  }
}
template <bool kTail, class T>
inline void StoreArray(void* p, const T (&in)[kLanes], size_t count) {
  __builtin_memcpy(p, in, kTail ? count * sizeof(T) : sizeof(in));
}

template <bool kTail>
inline F LoadF(const float* p, size_t count) {
  F out;
  LoadArray<kTail>(p, count, out.v);
  return out;
}
template <bool kTail>
inline void StoreF(float* p, const F& x, size_t count) {
  StoreArray<kTail>(p, x.v, count);
}
// 16 pairs of 16-bit numbers, the first of each in the low half.
inline I LoadPairs(const void* p) {
  I out;
  __builtin_memcpy(out.v, p, sizeof(out.v));
  return out;
}
template <bool kTail>
inline I LoadU16(const uint16_t* p, size_t count) {
  uint16_t raw[kLanes];
  LoadArray<kTail>(p, count, raw);
  I out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = raw[k];
  return out;
}
template <bool kTail>
inline I LoadS16(const int16_t* p, size_t count) {
  int16_t raw[kLanes];
  LoadArray<kTail>(p, count, raw);
  I out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = static_cast<uint32_t>(static_cast<int32_t>(raw[k]));
  return out;
}
template <bool kTail>
inline void Store16(void* p, const I& x, size_t count) {
  uint16_t raw[kLanes];
  for (int k = 0; k < kLanes; ++k) raw[k] = static_cast<uint16_t>(x.v[k]);
  StoreArray<kTail>(p, raw, count);
}
template <bool kTail>
inline F LoadHalf(const uint16_t* p, size_t count) {
  uint16_t raw[kLanes];
  LoadArray<kTail>(p, count, raw);
  F out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = Fp16ToFloat(raw[k]);
  return out;
}
template <bool kTail>
inline void StoreHalf(uint16_t* p, const F& x, size_t count) {
  uint16_t raw[kLanes];
  for (int k = 0; k < kLanes; ++k) raw[k] = FloatToFp16(x.v[k]);
  StoreArray<kTail>(p, raw, count);
}
template <bool kTail>
inline I LoadU8(const uint8_t* p, size_t count) {
  uint8_t raw[kLanes];
  LoadArray<kTail>(p, count, raw);
  I out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = raw[k];
  return out;
}
template <bool kTail>
inline void StoreU8(uint8_t* p, const I& x, size_t count) {
  uint8_t raw[kLanes];
  for (int k = 0; k < kLanes; ++k) raw[k] = static_cast<uint8_t>(x.v[k]);
  StoreArray<kTail>(p, raw, count);
}

inline F Add(const F& x, const F& y) {
  return Map<F>(x, y, [](float a, float b) { return a + b; });
}
inline F Sub(const F& x, const F& y) {
  return Map<F>(x, y, [](float a, float b) { return a - b; });
}
inline F Mul(const F& x, const F& y) {
  return Map<F>(x, y, [](float a, float b) { return a * b; });
}
inline F Div(const F& x, const F& y) {
  return Map<F>(x, y, [](float a, float b) { return a / b; });
}
inline F Sqrt(const F& x) {
  return Map<F>(x, [](float a) { return __builtin_sqrtf(a); });
}
inline F Fma(const F& x, const F& y, const F& z) {
  F out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = __builtin_fmaf(x.v[k], y.v[k], z.v[k]);
  return out;
}

// a / c, correctly rounded, for a >= 0 far from overflow and underflow (a root), infinity or NaN, and 0 < c
// <= 1 with inverse = 1 / c. The vector levels multiply and correct: q = a * inverse, then q + (a - q*c) *
// inverse with two fused operations (Markstein 1990), which frees the divider that otherwise bounds AdamW.
// That this is the very quotient is tested for every mantissa of a and many constants.
inline F DivByConstant(const F& a, const F& c, const F&) { return Div(a, c); }

inline I Bits(const F& x) {
  I out;
  __builtin_memcpy(&out, &x, sizeof(out));
  return out;
}
inline F FromBits(const I& x) {
  F out;
  __builtin_memcpy(&out, &x, sizeof(out));
  return out;
}
inline F ToFloat(const I& x) {
  return Map<F>(x, [](uint32_t a) { return static_cast<float>(static_cast<int32_t>(a)); });
}
// Towards zero; what int32 cannot hold (NaN too) becomes 0x80000000, as the vector instructions have it.
inline I Truncate(const F& x) {
  return Map<I>(x, [](float a) {
    return a >= -2147483648.0f && a < 2147483648.0f ? static_cast<uint32_t>(static_cast<int32_t>(a))
                                                    : 0x80000000u;
  });
}
inline I AddI(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a + b; });
}
inline I SubI(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a - b; });
}
inline I MulI(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a * b; });
}
inline I And(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a & b; });
}
inline I Or(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a | b; });
}
inline I Xor(const I& x, const I& y) {
  return Map<I>(x, y, [](uint32_t a, uint32_t b) { return a ^ b; });
}
template <int kBits>
inline I Shl(const I& x) {
  return Map<I>(x, [](uint32_t a) { return a << kBits; });
}
template <int kBits>
inline I Shr(const I& x) {
  return Map<I>(x, [](uint32_t a) { return a >> kBits; });
}
inline I MaxS(const I& x, const I& y) {
  return Map<I>(
      x, y, [](uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; });
}
inline I MinS(const I& x, const I& y) {
  return Map<I>(
      x, y, [](uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; });
}
inline M GreaterS(const I& x, const I& y) {
  return Map<M>(x, y,
                [](uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b); });
}
inline I Select(const M& m, const I& yes, const I& no) {
  I out;
  for (int k = 0; k < kLanes; ++k) out.v[k] = m.v[k] ? yes.v[k] : no.v[k];
  return out;
}
inline uint32_t ReduceMaxS(const I& x) {
  int32_t most = static_cast<int32_t>(x.v[0]);
  for (const uint32_t lane : x.v)
    most = static_cast<int32_t>(lane) > most ? static_cast<int32_t>(lane) : most;
  return static_cast<uint32_t>(most);
}

template <bool kTail>
inline F LoadBf16(const uint16_t* p, size_t count) {
  return FromBits(Shl<16>(LoadU16<kTail>(p, count)));
}
template <bool kTail>
inline void StoreBf16(uint16_t* p, const F& x, size_t count) {
  const I bits = Bits(x);
  uint16_t raw[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    const uint32_t b = bits.v[k];
    const bool nan = (b & 0x7FFFFFFFu) > 0x7F800000u;
    raw[k] = static_cast<uint16_t>(nan ? (b >> 16) | 0x40u : (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
  }
  StoreArray<kTail>(p, raw, count);
}
// Stores around the caches, aligned to their own 64 or 32 bytes, as those of StoreSplit with `stream`;
// StreamFence before another thread may look.
inline void StreamF(float* p, const F& x) { StoreF<false>(p, x, kLanes); }
inline void Stream16(void* p, const I& x) { Store16<false>(p, x, kLanes); }
inline void StreamBf16(uint16_t* p, const F& x) { StoreBf16<false>(p, x, kLanes); }
inline void StreamHalf(uint16_t* p, const F& x) { StoreHalf<false>(p, x, kLanes); }
inline void StreamFence() {}

template <bool kTail>
inline F LoadSplit(const uint16_t* master_high, const int16_t* master_low, size_t count) {
  return FromBits(AddI(Shl<16>(LoadU16<kTail>(master_high, count)), LoadS16<kTail>(master_low, count)));
}
template <bool kTail>
inline void StoreSplit(uint16_t* master_high, int16_t* master_low, const F& x, size_t count, bool = false) {
  const I bits = Bits(x);
  uint16_t high[kLanes], low[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    const uint32_t b = bits.v[k];
    const bool nan = (b & 0x7FFFFFFFu) > 0x7F800000u;
    high[k] = static_cast<uint16_t>(nan ? (b >> 16) | 0x40u : (b + 0x8000u) >> 16);
    low[k] = static_cast<uint16_t>(nan ? 0u : b);  // (bits - (high << 16)) mod 2^16
  }
  StoreArray<kTail>(master_high, high, count);
  StoreArray<kTail>(master_low, low, count);
}

// Asks for the cache line at an address, whether it is anyone's or not.
inline void Prefetch(uintptr_t) {}

// s[j] += s[j + 8], s[j] += s[j + 4], s[j] += s[j + 2], s[0] + s[1].
inline float SumOfLanes(F x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) x.v[j] += x.v[j + width];
  }
  return x.v[0];
}

inline D ZeroD() { return {}; }
// The square is exact in double, so that adding it rounds once, as a fused operation does.
inline void AddSquare(D* acc, const F& x) {
  for (int k = 0; k < kLanes; ++k) {
    const double value = x.v[k];
    acc->v[k] += value * value;
  }
}
inline void StoreD(double* p, const D& x) { __builtin_memcpy(p, &x, sizeof(x)); }

}  // namespace penstock::kernels::portable

#endif  // PENSTOCK_KERNELS_SIMD_VEC_PORTABLE_H_
