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

// For those who compute it elsewhere (kernels/cuda/checksum.cuh), of inputs longer than 240 bytes: XXH3's
// secret as the seed makes it, in the 64-bit words that are used. Numbers of bytes are offsets in the secret.
struct ChecksumKeys {
  uint64_t words[24];  // 0, 8, ...
  uint64_t last[8];    // 121, 129, ...: for the last 64 bytes
  uint64_t merge[8];   // 11, 19, ...: for the end
};
ChecksumKeys MakeChecksumKeys(uint64_t seed);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_CHECKSUM_H_
