#include "kernels/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace penstock::kernels {

void StreamCopy(const void* from, void* to, size_t bytes) {
  size_t done = 0;
#if defined(__x86_64__)
  constexpr size_t kVector = sizeof(__m128i);
  if (reinterpret_cast<uintptr_t>(to) % kVector == 0) {
    const auto* const in = static_cast<const char*>(from);
    auto* const out = static_cast<char*>(to);
    for (; done + kVector <= bytes; done += kVector) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + done)));
    }
  }
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
