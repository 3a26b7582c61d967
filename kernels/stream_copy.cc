#include "kernels/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace penstock::kernels {

void StreamCopy(const void* from, void* to, size_t bytes, const void* soon) {
  size_t done = 0;
#if defined(__x86_64__)
  constexpr size_t kVector = sizeof(__m128i), kLine = 64;
  if (reinterpret_cast<uintptr_t>(to) % kVector == 0) {
    const auto* const in = static_cast<const char*>(from);
    auto* const out = static_cast<char*>(to);
    const auto vector = [&] {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + done)));
      done += kVector;
    };
    while (done + kLine <= bytes) {
      if (soon != nullptr) _mm_prefetch(static_cast<const char*>(soon) + done, _MM_HINT_T1);
      for (size_t i = 0; i < kLine / kVector; ++i) vector();
    }
    while (done + kVector <= bytes) vector();
  }
#else
  (void)soon;
#endif
  if (done < bytes)
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, bytes - done);
}

void StreamCopyFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace penstock::kernels
