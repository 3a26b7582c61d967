// What bounds a pass over memory: loops that move an optimizer's streams and compute nothing.
#ifndef PENSTOCK_BENCH_KERNELS_STREAMS_H_
#define PENSTOCK_BENCH_KERNELS_STREAMS_H_

#include <cstddef>
#include <cstdint>

namespace penstock::bench {

// The streams of an update: the first `written` arrays are read and written in place, the others are read;
// `out`, where there is one, is 2 bytes wide and only written (always past the caches: it would be read in
// first otherwise).
struct StreamSet {
  static constexpr int kMost = 5;
  int arrays = 0;
  int written = 0;
  unsigned char* data[kMost] = {};
  size_t width[kMost] = {};  // 2 or 4 bytes
  unsigned char* out = nullptr;
  size_t BytesPerElement() const {
    size_t bytes = out != nullptr ? 2 : 0;
    for (int i = 0; i < arrays; ++i) bytes += width[i] * (i < written ? 2 : 1);
    return bytes;
  }
};

// Moves elements [begin, end), multiples of 64, of 64-byte aligned arrays with the widest loads and stores
// that the machine has; every value is loaded into a register and stored from it, unchanged. `non_temporal`:
// with stores that go around the caches.
void MoveStreams(const StreamSet& set, bool non_temporal, size_t begin, size_t end);

}  // namespace penstock::bench

#endif  // PENSTOCK_BENCH_KERNELS_STREAMS_H_
