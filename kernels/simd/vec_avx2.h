// 16 lanes on AVX2 + FMA + F16C: two registers of eight. The same names as vec_portable.h, which see for the
// meaning. Included by exactly one source file; see vec_avx512.h on namespaces.
#ifndef PENSTOCK_KERNELS_SIMD_VEC_AVX2_H_
#define PENSTOCK_KERNELS_SIMD_VEC_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PENSTOCK_SIMD_NAMESPACE avx2

namespace penstock::kernels::avx2 {

inline constexpr int kVectors = 8;                                               // of 16 fp32, in registers
inline constexpr decltype(nullptr) kPackBf16 = nullptr, kBf16Product = nullptr;  // no instructions for it
template <class Strip>
inline constexpr decltype(nullptr) kAmxProduct = nullptr;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256i a, b;
};
struct D {
  __m256d a, b, c, d;
};

inline F Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I SetI(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
inline I Iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

template <bool kTail>
inline F LoadF(const float* p, size_t count) {
  if constexpr (kTail) {
    alignas(32) float buffer[16] = {};
    __builtin_memcpy(buffer, p, count * sizeof(float));
    return {_mm256_load_ps(buffer), _mm256_load_ps(buffer + 8)};
  }
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
template <bool kTail>
inline void StoreF(float* p, F x, size_t count) {
  if constexpr (kTail) {
    alignas(32) float buffer[16];
    _mm256_store_ps(buffer, x.a);
    _mm256_store_ps(buffer + 8, x.b);
    __builtin_memcpy(p, buffer, count * sizeof(float));
  } else {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
}
template <bool kTail>
inline __m256i Load16Raw(const void* p, size_t count) {
  if constexpr (kTail) {
    alignas(32) uint16_t buffer[16] = {};
    __builtin_memcpy(buffer, p, count * 2);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
  }
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
template <bool kTail>
inline void Store16Raw(void* p, __m256i x, size_t count) {
  if constexpr (kTail) {
    alignas(32) uint16_t buffer[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffer), x);
    __builtin_memcpy(p, buffer, count * 2);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x);
  }
}
inline void StreamF(float* p, F x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps(p + 8, x.b);
}
inline void Stream16Raw(void* p, __m256i x) { _mm256_stream_si256(static_cast<__m256i*>(p), x); }
inline void StreamFence() { _mm_sfence(); }
inline I LoadPairs(const void* p) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(p)),
          _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1)};
}
template <bool kTail>
inline I LoadU16(const uint16_t* p, size_t count) {
  const __m256i raw = Load16Raw<kTail>(p, count);
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(raw)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(raw, 1))};
}
template <bool kTail>
inline I LoadS16(const int16_t* p, size_t count) {
  const __m256i raw = Load16Raw<kTail>(p, count);
  return {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(raw)),
          _mm256_cvtepi16_epi32(_mm256_extracti128_si256(raw, 1))};
}
inline __m256i LowHalves(I x) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}
template <bool kTail>
inline void Store16(void* p, I x, size_t count) {
  Store16Raw<kTail>(p, LowHalves(x), count);
}
inline void Stream16(void* p, I x) { Stream16Raw(p, LowHalves(x)); }
template <bool kTail>
inline F LoadHalf(const uint16_t* p, size_t count) {
  const __m256i raw = Load16Raw<kTail>(p, count);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(raw)), _mm256_cvtph_ps(_mm256_extracti128_si256(raw, 1))};
}
inline __m256i RoundedHalf(F x) {
  const __m128i a = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT);
  const __m128i b = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}
template <bool kTail>
inline void StoreHalf(uint16_t* p, F x, size_t count) {
  Store16Raw<kTail>(p, RoundedHalf(x), count);
}
inline void StreamHalf(uint16_t* p, F x) { Stream16Raw(p, RoundedHalf(x)); }
template <bool kTail>
inline I LoadU8(const uint8_t* p, size_t count) {
  __m128i raw;
  if constexpr (kTail) {
    alignas(16) uint8_t buffer[16] = {};
    __builtin_memcpy(buffer, p, count);
    raw = _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
  } else {
    raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  return {_mm256_cvtepu8_epi32(raw), _mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8))};
}
template <bool kTail>
inline void StoreU8(uint8_t* p, I x, size_t count) {
  const __m256i low = _mm256_set1_epi32(0xFF);
  __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  packed = _mm256_permute4x64_epi64(packed, 0xD8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  if constexpr (kTail) {
    alignas(16) uint8_t buffer[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(buffer), bytes);
    __builtin_memcpy(p, buffer, count);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
}

inline F Add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F Sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F Mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F Div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F Sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F Fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }

inline __m256 DivByConstant(__m256 a, __m256 c, __m256 inverse) {
  const __m256 q = _mm256_mul_ps(a, inverse);
  const __m256 rest = _mm256_fnmadd_ps(q, c, a);
  const __m256 infinite = _mm256_cmp_ps(a, _mm256_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
  return _mm256_blendv_ps(_mm256_fmadd_ps(rest, inverse, q), q, infinite);
}
inline F DivByConstant(F a, F c, F inverse) {
  return {DivByConstant(a.a, c.a, inverse.a), DivByConstant(a.b, c.b, inverse.b)};
}

inline I Bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F FromBits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F ToFloat(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I Truncate(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
inline I AddI(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I SubI(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I MulI(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I And(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I Or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I Xor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int kBits>
inline I Shl(I x) {
  return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
}
template <int kBits>
inline I Shr(I x) {
  return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
}
inline I MaxS(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I MinS(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
inline M GreaterS(I x, I y) { return {_mm256_cmpgt_epi32(x.a, y.a), _mm256_cmpgt_epi32(x.b, y.b)}; }
inline I Select(M m, I yes, I no) {
  return {_mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b)};
}
inline uint32_t ReduceMaxS(I x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epi32(x.a, x.b));
  int32_t most = lanes[0];
  for (int k = 1; k < 8; ++k) most = lanes[k] > most ? lanes[k] : most;
  return static_cast<uint32_t>(most);
}

// The 16 words of a register as the upper (or lower) halves of 16 dwords. Unpacking works within halves of
// the register, hence the exchange of quarters first.
inline __m256i Spread(__m256i words) { return _mm256_permute4x64_epi64(words, 0xD8); }
// The low words of 16 dwords whose upper words are zero.
inline __m256i PackLow(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
}
inline __m256i UpperWords(__m256i a, __m256i b) {
  return PackLow(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}
inline __m256i LowerWords(__m256i a, __m256i b) {
  return PackLow(_mm256_blend_epi16(a, _mm256_setzero_si256(), 0xAA),
                 _mm256_blend_epi16(b, _mm256_setzero_si256(), 0xAA));
}
// All ones in words where x is a NaN.
inline __m256i NanWords(F x) {
  const __m256i a = _mm256_castps_si256(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q));
  const __m256i b = _mm256_castps_si256(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
}
inline bool AnyNan(F x) {
  return _mm256_movemask_ps(
             _mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
}

template <bool kTail>
inline F LoadBf16(const uint16_t* p, size_t count) {
  const __m256i words = Spread(Load16Raw<kTail>(p, count));
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words))};
}
inline __m256i RoundUpperWord(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
}
inline __m256i RoundedBf16(F x) {
  const __m256i a = _mm256_castps_si256(x.a), b = _mm256_castps_si256(x.b);
  const __m256i words = UpperWords(RoundUpperWord(a), RoundUpperWord(b));
  if (__builtin_expect(!AnyNan(x), 1)) return words;
  return _mm256_blendv_epi8(words, _mm256_or_si256(UpperWords(a, b), _mm256_set1_epi16(0x40)), NanWords(x));
}
template <bool kTail>
inline void StoreBf16(uint16_t* p, F x, size_t count) {
  Store16Raw<kTail>(p, RoundedBf16(x), count);
}
inline void StreamBf16(uint16_t* p, F x) { Stream16Raw(p, RoundedBf16(x)); }

// The master is (high << 16) + low with low signed: high - 1 in the upper half where low is negative.
template <bool kTail>
inline F LoadSplit(const uint16_t* master_high, const int16_t* master_low, size_t count) {
  const __m256i low = Load16Raw<kTail>(master_low, count);
  const __m256i high =
      Spread(_mm256_add_epi16(Load16Raw<kTail>(master_high, count), _mm256_srai_epi16(low, 15)));
  const __m256i spread = Spread(low);
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(spread, high)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(spread, high))};
}
template <bool kTail>
inline void StoreSplit(uint16_t* master_high, int16_t* master_low, F x, size_t count, bool stream = false) {
  const __m256i a = _mm256_castps_si256(x.a), b = _mm256_castps_si256(x.b);
  __m256i low = LowerWords(a, b);
  const __m256i cut = UpperWords(a, b);
  __m256i high = _mm256_sub_epi16(cut, _mm256_srai_epi16(low, 15));
  if (__builtin_expect(AnyNan(x), 0)) {
    const __m256i nan = NanWords(x);
    low = _mm256_andnot_si256(nan, low);
    high = _mm256_blendv_epi8(high, _mm256_or_si256(cut, _mm256_set1_epi16(0x40)), nan);
  }
  if (!kTail && stream) {
    Stream16Raw(master_high, high);
    Stream16Raw(master_low, low);
    return;
  }
  Store16Raw<kTail>(master_high, high, count);
  Store16Raw<kTail>(master_low, low, count);
}

inline void Prefetch(uintptr_t address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that may lie outside of any object
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

// s[j] += s[j + 8], s[j] += s[j + 4], s[j] += s[j + 2], s[0] + s[1].
inline float SumOfLanes(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline D ZeroD() {
  return {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
}
inline void AddSquare(D* acc, F x) {
  const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x.a));
  const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1));
  const __m256d c = _mm256_cvtps_pd(_mm256_castps256_ps128(x.b));
  const __m256d d = _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1));
  acc->a = _mm256_fmadd_pd(a, a, acc->a);
  acc->b = _mm256_fmadd_pd(b, b, acc->b);
  acc->c = _mm256_fmadd_pd(c, c, acc->c);
  acc->d = _mm256_fmadd_pd(d, d, acc->d);
}
inline void StoreD(double* p, const D& x) {
  _mm256_storeu_pd(p, x.a);
  _mm256_storeu_pd(p + 4, x.b);
  _mm256_storeu_pd(p + 8, x.c);
  _mm256_storeu_pd(p + 12, x.d);
}

}  // namespace penstock::kernels::avx2

#endif  // PENSTOCK_KERNELS_SIMD_VEC_AVX2_H_
