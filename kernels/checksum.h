// Checksums at memory speed: XXH3 with 64 bits (the xxHash library's, in its widest vector form that the
// machine runs). The value depends on the bytes and the seed alone, never on the SIMD level or on how the
// bytes were cut. It finds damage; it is no protection against someone who forges it.
#ifndef PENSTOCK_KERNELS_CHECKSUM_H_
#define PENSTOCK_KERNELS_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace penstock::kernels {

// XXH3_64bits_withSeed(data, bytes, seed). `data` may be null if bytes is 0. Thread-safe.
uint64_t Checksum(const void* data, size_t bytes, uint64_t seed = 0);

// The same value over bytes that come in pieces: Update any number of times, then Digest (which changes
// nothing, so more may follow). Copyable: a copy goes on from where the original stood. One thread at a time.
class Checksummer {
 public:
  explicit Checksummer(uint64_t seed = 0) { Reset(seed); }
  void Reset(uint64_t seed = 0);
  void Update(const void* data, size_t bytes);
  uint64_t Digest() const;

 private:
  alignas(64) unsigned char state_[640];  // an XXH3_state_t
};

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_CHECKSUM_H_
