// The checksum of bytes in device memory, by one block of threads: groups of eight make the sums of 32 blocks
// of the algorithm at once, and eight threads take them in in order while the others go on.
#include <cuda_runtime.h>

#include "kernels/cuda/checksum.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/launch.cuh"

namespace penstock::kernels::cuda {
namespace {

constexpr int kGroups = 32;
constexpr int kChecksumThreads = kGroups * kChecksumLanes;

__global__ void __launch_bounds__(kChecksumThreads)
    ChecksumKernel(const uint64_t* in, uint64_t bytes, const __grid_constant__ ChecksumKeys keys,
                   uint64_t* out) {
  __shared__ uint64_t sums[2][kGroups][kChecksumLanes];
  __shared__ uint64_t lanes[kChecksumLanes];
  const int lane = static_cast<int>(threadIdx.x) % kChecksumLanes;
  const int group = static_cast<int>(threadIdx.x) / kChecksumLanes;
  const uint64_t blocks = (bytes - 1) / kChecksumBlockBytes;
  constexpr uint64_t kBlockWords = kChecksumBlockBytes / 8;
  uint64_t held = LaneStart(lane);  // of the first eight threads
  int turn = 0;
  for (uint64_t base = 0; base < blocks; base += kGroups, turn ^= 1) {
    const bool there = base + static_cast<uint64_t>(group) < blocks;
    const uint64_t* const block = in + (base + static_cast<uint64_t>(group)) * kBlockWords;
    uint64_t own[kStripesPerBlock];
    for (int s = 0; s < kStripesPerBlock; ++s) own[s] = there ? block[s * kChecksumLanes + lane] : 0;
    uint64_t sum = 0;
    for (int s = 0; s < kStripesPerBlock; ++s) {
      sum += StripeTerm(own[s], __shfl_xor_sync(0xFFFFFFFFu, own[s], 1), keys.words[s + lane]);
    }
    sums[turn][group][lane] = sum;
    // Once a turn is enough: nobody writes to these sums again before the turn after the next one.
    __syncthreads();
    if (group != 0) continue;
    const uint64_t count = blocks - base < kGroups ? blocks - base : kGroups;
    for (uint64_t b = 0; b < count; ++b) {
      held = Scramble(held + sums[turn][b][lane], keys.words[kStripesPerBlock + lane]);
    }
  }
  if (group != 0) return;
  // The last, partial block, and the last 64 bytes once more with keys of their own.
  constexpr unsigned kFirstEight = 0xFFu;
  const uint64_t stripes = (bytes - 1 - blocks * kChecksumBlockBytes) / kStripeBytes;
  for (uint64_t s = 0; s < stripes; ++s) {
    const uint64_t own = in[blocks * kBlockWords + s * kChecksumLanes + static_cast<uint64_t>(lane)];
    held +=
        StripeTerm(own, __shfl_xor_sync(kFirstEight, own, 1), keys.words[s + static_cast<uint64_t>(lane)]);
  }
  const uint64_t own = in[bytes / 8 - kChecksumLanes + static_cast<uint64_t>(lane)];
  held += StripeTerm(own, __shfl_xor_sync(kFirstEight, own, 1), keys.last[lane]);
  lanes[lane] = held;
  __syncwarp(kFirstEight);
  if (lane == 0) *out = FinishChecksum(lanes, bytes, keys);
}

}  // namespace

int Checksum(const void* in, size_t bytes, uint64_t seed, uint64_t* out, Stream stream) {
  if (bytes < kLeastChecksumBytes || bytes % 8 != 0 || reinterpret_cast<uintptr_t>(in) % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  return Enqueue(ChecksumKernel, 1, kChecksumThreads, stream, static_cast<const uint64_t*>(in), bytes,
                 MakeChecksumKeys(seed), out);
}

}  // namespace penstock::kernels::cuda
