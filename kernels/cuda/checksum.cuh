// Steps of the checksum (kernels/checksum.h: XXH3 with 64 bits), for device code and for the host, where a
// test holds them against the library. The algorithm: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md,
// "XXH3 algorithm (for long inputs)".
//
// Eight lanes of 64 bits. A block of 1024 bytes adds to each lane a sum that does not depend on what the lane
// held (BlockSum), and then changes it in a way that does (Scramble): sums of many blocks are made at once,
// and only a few operations for each block follow one another.
#ifndef PENSTOCK_KERNELS_CUDA_CHECKSUM_CUH_
#define PENSTOCK_KERNELS_CUDA_CHECKSUM_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/checksum.h"

#define PENSTOCK_CHECKSUM_HD __host__ __device__ __forceinline__

namespace penstock::kernels::cuda {

inline constexpr int kChecksumLanes = 8;
inline constexpr uint64_t kStripeBytes = 64;
inline constexpr uint64_t kChecksumBlockBytes = 1024;
inline constexpr int kStripesPerBlock = 16;
inline constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                          kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                          kPrime64_5 = 0x27D4EB2F165667C5u;

PENSTOCK_CHECKSUM_HD uint64_t LaneStart(int lane) {
  switch (lane) {
    case 0:
      return kPrime32_3;
    case 1:
      return kPrime64_1;
    case 2:
      return kPrime64_2;
    case 3:
      return kPrime64_3;
    case 4:
      return kPrime64_4;
    case 5:
      return kPrime32_2;
    case 6:
      return kPrime64_5;
    default:
      return kPrime32_1;
  }
}

// What a lane gets of a stripe: `own` and `other` are the lane's 8 bytes and those of its neighbour (lane ^
// 1).
PENSTOCK_CHECKSUM_HD uint64_t StripeTerm(uint64_t own, uint64_t other, uint64_t key) {
  const uint64_t mixed = own ^ key;
  return other + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
}

PENSTOCK_CHECKSUM_HD uint64_t Scramble(uint64_t lane, uint64_t key) {
  return (lane ^ (lane >> 47) ^ key) * kPrime32_1;
}

PENSTOCK_CHECKSUM_HD uint64_t FoldedProduct(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return (a * b) ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

PENSTOCK_CHECKSUM_HD uint64_t FinishChecksum(const uint64_t* lanes, uint64_t bytes,
                                             const ChecksumKeys& keys) {
  uint64_t hash = bytes * kPrime64_1;
  for (int i = 0; i < kChecksumLanes; i += 2) {
    hash += FoldedProduct(lanes[i] ^ keys.merge[i], lanes[i + 1] ^ keys.merge[i + 1]);
  }
  hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_CHECKSUM_CUH_
