// Annotations of rings for ThreadSanitizer: liburing maps and unmaps their memory by system calls of its
// own, which the sanitizer does not see. A ring that is mapped where another thread's was would look like
// memory that both use at once. The kernel orders the two; these calls say so. Without the sanitizer they are
// nothing.
#ifndef PENSTOCK_AIO_RING_MEMORY_H_
#define PENSTOCK_AIO_RING_MEMORY_H_

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace penstock::aio {

#ifdef __SANITIZE_THREAD__
inline char ring_memory_order = 0;
inline void AfterRingMapped() { __tsan_acquire(&ring_memory_order); }
inline void BeforeRingUnmapped() { __tsan_release(&ring_memory_order); }
#else
inline void AfterRingMapped() {}
inline void BeforeRingUnmapped() {}
#endif

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_RING_MEMORY_H_
