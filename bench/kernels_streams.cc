#include "bench/kernels_streams.h"

#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock::bench {
namespace {

// The sets of streams that matter, each as one loop with everything known at compile time, so that
// nothing but loads and stores is left. 4-byte arrays advance one register for two of 2-byte arrays.
//   Four:  p, m, v written, g read; all 4 bytes wide
//   Split: m, v written (4 bytes), master_high, master_low written and g read (2 bytes)
//   Mixed: p, m, v written (4 bytes), g read (2 bytes), a 2-byte copy written only
#if defined(__x86_64__)
// Keeps a value in a register without computing anything with it.
#define PENSTOCK_KEEP(x) asm volatile("" : "+v"(x))

__attribute__((target("avx512f"))) inline void Put(void* p, __m512i x, bool non_temporal) {
  if (non_temporal) {
    _mm512_stream_si512(static_cast<__m512i*>(p), x);
  } else {
    _mm512_store_si512(p, x);
  }
}

template <bool kNonTemporal>
__attribute__((target("avx512f"))) void FourAvx512(const StreamSet& set, size_t begin, size_t end) {
  unsigned char *const p = set.data[0], *const m = set.data[1], *const v = set.data[2],
                       *const g = set.data[3];
  for (size_t i = 4 * begin; i < 4 * end; i += 64) {
    __m512i a = _mm512_load_si512(p + i), b = _mm512_load_si512(m + i), c = _mm512_load_si512(v + i),
            d = _mm512_load_si512(g + i);
    PENSTOCK_KEEP(a);
    PENSTOCK_KEEP(b);
    PENSTOCK_KEEP(c);
    PENSTOCK_KEEP(d);
    Put(p + i, a, kNonTemporal);
    Put(m + i, b, kNonTemporal);
    Put(v + i, c, kNonTemporal);
  }
  if (kNonTemporal) _mm_sfence();
}

template <bool kNonTemporal>
__attribute__((target("avx512f"))) void SplitAvx512(const StreamSet& set, size_t begin, size_t end) {
  unsigned char *const m = set.data[0], *const v = set.data[1], *const master_high = set.data[2],
                       *const master_low = set.data[3], *const g = set.data[4];
  for (size_t i = 2 * begin; i < 2 * end; i += 64) {
    __m512i a = _mm512_load_si512(m + 2 * i), b = _mm512_load_si512(m + 2 * i + 64),
            c = _mm512_load_si512(v + 2 * i), d = _mm512_load_si512(v + 2 * i + 64),
            e = _mm512_load_si512(master_high + i), f = _mm512_load_si512(master_low + i),
            h = _mm512_load_si512(g + i);
    PENSTOCK_KEEP(a);
    PENSTOCK_KEEP(b);
    PENSTOCK_KEEP(c);
    PENSTOCK_KEEP(d);
    PENSTOCK_KEEP(e);
    PENSTOCK_KEEP(f);
    PENSTOCK_KEEP(h);
    Put(m + 2 * i, a, kNonTemporal);
    Put(m + 2 * i + 64, b, kNonTemporal);
    Put(v + 2 * i, c, kNonTemporal);
    Put(v + 2 * i + 64, d, kNonTemporal);
    Put(master_high + i, e, kNonTemporal);
    Put(master_low + i, f, kNonTemporal);
  }
  if (kNonTemporal) _mm_sfence();
}

template <bool kNonTemporal>
__attribute__((target("avx512f"))) void MixedAvx512(const StreamSet& set, size_t begin, size_t end) {
  unsigned char *const p = set.data[0], *const m = set.data[1], *const v = set.data[2],
                       *const g = set.data[3], *const out = set.out;
  for (size_t i = 2 * begin; i < 2 * end; i += 64) {
    for (unsigned char* const array : {p, m, v}) {
      __m512i a = _mm512_load_si512(array + 2 * i), b = _mm512_load_si512(array + 2 * i + 64);
      PENSTOCK_KEEP(a);
      PENSTOCK_KEEP(b);
      Put(array + 2 * i, a, kNonTemporal);
      Put(array + 2 * i + 64, b, kNonTemporal);
    }
    __m512i c = _mm512_load_si512(g + i);
    PENSTOCK_KEEP(c);
    Put(out + i, c, true);
  }
  _mm_sfence();
}

__attribute__((target("avx2"))) inline void Put(void* p, __m256i x, bool non_temporal) {
  if (non_temporal) {
    _mm256_stream_si256(static_cast<__m256i*>(p), x);
  } else {
    _mm256_store_si256(static_cast<__m256i*>(p), x);
  }
}

// Any set, a cache line of each array's elements at a time.
template <bool kNonTemporal>
__attribute__((target("avx2"))) void AnyAvx2(const StreamSet& set, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += 64) {
    for (int k = 0; k < set.arrays; ++k) {
      for (size_t at = i * set.width[k]; at < (i + 64) * set.width[k]; at += 32) {
        __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(set.data[k] + at));
        PENSTOCK_KEEP(x);
        if (k < set.written) Put(set.data[k] + at, x, kNonTemporal);
        if (k == set.arrays - 1 && set.out != nullptr) Put(set.out + at, x, true);
      }
    }
  }
  _mm_sfence();
}
#undef PENSTOCK_KEEP
#endif

void AnyPortable(const StreamSet& set, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += 64) {
    for (int k = 0; k < set.arrays; ++k) {
      for (size_t at = i * set.width[k]; at < (i + 64) * set.width[k]; at += 8) {
        uint64_t x;
        std::memcpy(&x, set.data[k] + at, 8);
        asm volatile("" : "+r"(x));
        if (k < set.written) std::memcpy(set.data[k] + at, &x, 8);
        if (k == set.arrays - 1 && set.out != nullptr) std::memcpy(set.out + at, &x, 8);
      }
    }
  }
}

}  // namespace

void MoveStreams(const StreamSet& set, bool non_temporal, size_t begin, size_t end) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    if (set.out != nullptr) {
      return non_temporal ? MixedAvx512<true>(set, begin, end) : MixedAvx512<false>(set, begin, end);
    }
    if (set.arrays == 4) {
      return non_temporal ? FourAvx512<true>(set, begin, end) : FourAvx512<false>(set, begin, end);
    }
    return non_temporal ? SplitAvx512<true>(set, begin, end) : SplitAvx512<false>(set, begin, end);
  }
  if (__builtin_cpu_supports("avx2")) {
    return non_temporal ? AnyAvx2<true>(set, begin, end) : AnyAvx2<false>(set, begin, end);
  }
#endif
  static_cast<void>(non_temporal);
  AnyPortable(set, begin, end);
}

}  // namespace penstock::bench
