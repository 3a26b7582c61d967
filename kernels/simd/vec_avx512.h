// 16 lanes on AVX-512 F/BW/DQ/VL. The same names as vec_avx2.h and vec_portable.h, which see for the meaning.
// Included by exactly one source file; everything has its own namespace, so that no inline function compiled
// for this instruction set can be picked by the linker for another.
#ifndef PENSTOCK_KERNELS_SIMD_VEC_AVX512_H_
#define PENSTOCK_KERNELS_SIMD_VEC_AVX512_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PENSTOCK_SIMD_NAMESPACE avx512

namespace penstock::kernels::avx512 {

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};
struct D {
  __m512d lo, hi;
};

inline __mmask16 TailMask(size_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

inline F Set(float x) { return {_mm512_set1_ps(x)}; }
inline I SetI(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline I Iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

template <bool kTail>
inline F LoadF(const float* p, size_t count) {
  if constexpr (kTail) return {_mm512_maskz_loadu_ps(TailMask(count), p)};
  return {_mm512_loadu_ps(p)};
}
template <bool kTail>
inline void StoreF(float* p, F x, size_t count) {
  if constexpr (kTail) {
    _mm512_mask_storeu_ps(p, TailMask(count), x.v);
  } else {
    _mm512_storeu_ps(p, x.v);
  }
}
template <bool kTail>
inline __m256i Load16Raw(const void* p, size_t count) {
  if constexpr (kTail) return _mm256_maskz_loadu_epi16(TailMask(count), p);
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
template <bool kTail>
inline void Store16Raw(void* p, __m256i x, size_t count) {
  if constexpr (kTail) {
    _mm256_mask_storeu_epi16(p, TailMask(count), x);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x);
  }
}
template <bool kTail>
inline I LoadU16(const uint16_t* p, size_t count) {
  return {_mm512_cvtepu16_epi32(Load16Raw<kTail>(p, count))};
}
template <bool kTail>
inline I LoadS16(const int16_t* p, size_t count) {
  return {_mm512_cvtepi16_epi32(Load16Raw<kTail>(p, count))};
}
template <bool kTail>
inline void Store16(void* p, I x, size_t count) {
  Store16Raw<kTail>(p, _mm512_cvtepi32_epi16(x.v), count);
}
template <bool kTail>
inline F LoadHalf(const uint16_t* p, size_t count) {
  return {_mm512_cvtph_ps(Load16Raw<kTail>(p, count))};
}
template <bool kTail>
inline void StoreHalf(uint16_t* p, F x, size_t count) {
  Store16Raw<kTail>(p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), count);
}
template <bool kTail>
inline I LoadU8(const uint8_t* p, size_t count) {
  if constexpr (kTail) return {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(TailMask(count), p))};
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
template <bool kTail>
inline void StoreU8(uint8_t* p, I x, size_t count) {
  const __m128i bytes = _mm512_cvtepi32_epi8(x.v);
  if constexpr (kTail) {
    _mm_mask_storeu_epi8(p, TailMask(count), bytes);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
}

inline F Add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F Sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F Mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F Div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F Sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
inline F Fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline I Bits(F a) { return {_mm512_castps_si512(a.v)}; }
inline F FromBits(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline F ToFloat(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I Truncate(F a) { return {_mm512_cvttps_epi32(a.v)}; }
inline I AddI(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I SubI(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I MulI(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I And(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I Or(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I Xor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int kBits>
inline I Shl(I a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline I Shr(I a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
inline I MaxS(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I MinS(I a, I b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline M GreaterS(I a, I b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
inline I Select(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
inline uint32_t ReduceMaxS(I a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a.v)); }

inline D ZeroD() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void AddSquare(D* acc, F x) {
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
  acc->lo = _mm512_fmadd_pd(lo, lo, acc->lo);
  acc->hi = _mm512_fmadd_pd(hi, hi, acc->hi);
}
inline void StoreD(double* p, const D& x) {
  _mm512_storeu_pd(p, x.lo);
  _mm512_storeu_pd(p + 8, x.hi);
}

inline void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace penstock::kernels::avx512

#endif  // PENSTOCK_KERNELS_SIMD_VEC_AVX512_H_
