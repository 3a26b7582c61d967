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

inline constexpr int kVectors = 32;  // of 16 fp32, in registers

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
inline void StreamF(float* p, F x) { _mm512_stream_ps(p, x.v); }
inline void Stream16Raw(void* p, __m256i x) { _mm256_stream_si256(static_cast<__m256i*>(p), x); }
inline void StreamFence() { _mm_sfence(); }
// 16 pairs of 16-bit numbers, the first of each in the low half.
inline I LoadPairs(const void* p) { return {_mm512_loadu_si512(p)}; }
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
inline void Stream16(void* p, I x) { Stream16Raw(p, _mm512_cvtepi32_epi16(x.v)); }
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

inline F DivByConstant(F a, F c, F inverse) {
  const __m512 q = _mm512_mul_ps(a.v, inverse.v);
  const __m512 rest = _mm512_fnmadd_ps(q, c.v, a.v);
  const __mmask16 finite = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(__builtin_inff()), _CMP_NEQ_UQ);
  return {_mm512_mask3_fmadd_ps(rest, inverse.v, q, finite)};
}

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

// 16-bit parts are moved with word permutations: one instruction where widening or narrowing takes two or
// three.
inline __m512i LowWords() {  // word 2i of a register, in its lower half
  return _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22,
                          20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
}
inline __m512i HighWords() { return _mm512_add_epi16(LowWords(), _mm512_set1_epi16(1)); }
inline __m512i Interleave() {  // words i of the lower halves of two registers, side by side
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                          36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
}
inline __m256i Narrow(__m512i x, __m512i words) {
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(words, x));
}

template <bool kTail>
inline F LoadBf16(const uint16_t* p, size_t count) {
  const __m512i words = _mm512_zextsi256_si512(Load16Raw<kTail>(p, count));
  return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, Interleave(), words))};
}
inline __m256i RoundedBf16(F x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return Narrow(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), HighWords());
}
template <bool kTail>
inline void StoreBf16(uint16_t* p, F x, size_t count) {
  Store16Raw<kTail>(p, RoundedBf16(x), count);
}
inline void StreamBf16(uint16_t* p, F x) { Stream16Raw(p, RoundedBf16(x)); }
inline void StreamHalf(uint16_t* p, F x) {
  Stream16Raw(p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The master is (high << 16) + low with low signed: high - 1 in the upper half where low is negative.
template <bool kTail>
inline F LoadSplit(const uint16_t* master_high, const int16_t* master_low, size_t count) {
  const __m256i low = Load16Raw<kTail>(master_low, count);
  const __m256i high = _mm256_add_epi16(Load16Raw<kTail>(master_high, count), _mm256_srai_epi16(low, 15));
  return {_mm512_castsi512_ps(
      _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), Interleave(), _mm512_castsi256_si512(high)))};
}
template <bool kTail>
inline void StoreSplit(uint16_t* master_high, int16_t* master_low, F x, size_t count, bool stream = false) {
  const __m512i bits = _mm512_castps_si512(x.v);
  __m256i low = Narrow(bits, LowWords());
  __m256i high = _mm256_sub_epi16(Narrow(bits, HighWords()), _mm256_srai_epi16(low, 15));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  if (__builtin_expect(nan != 0, 0)) {
    low = _mm256_mask_mov_epi16(low, nan, _mm256_setzero_si256());
    high =
        _mm256_mask_mov_epi16(high, nan, _mm256_or_si256(Narrow(bits, HighWords()), _mm256_set1_epi16(0x40)));
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
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

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

}  // namespace penstock::kernels::avx512

#endif  // PENSTOCK_KERNELS_SIMD_VEC_AVX512_H_
