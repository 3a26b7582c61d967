// Copies of what nobody reads soon: around the caches, so that its place in memory is not read before it is
// written, and nothing else leaves the caches for it.
#ifndef PENSTOCK_KERNELS_STREAM_COPY_H_
#define PENSTOCK_KERNELS_STREAM_COPY_H_

#include <cstddef>

namespace penstock::kernels {

// Copies `bytes` from `from` to `to`, which must not overlap. Any length, any alignment; where `to` is
// aligned to 16 bytes all but the last bytes go around the caches. Thread-safe, allocates nothing. Another
// thread may look at the copy after StreamCopyFence() in this one and what orders the two threads.
void StreamCopy(const void* from, void* to, size_t bytes);
// Once after a series of copies.
void StreamCopyFence();

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_STREAM_COPY_H_
