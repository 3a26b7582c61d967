#include "kernels/cache.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace penstock::kernels {

void EvictFromCaches(const void* data, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const auto* at = static_cast<const char*>(data);
  for (size_t i = 0; i < bytes; i += kLine) _mm_clflush(at + i);
  if (bytes > 0) _mm_clflush(at + bytes - 1);
  _mm_mfence();
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace penstock::kernels
