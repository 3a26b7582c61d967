#include <cuda_runtime.h>

#include <cstdint>

#include "tests/kernels/fibers/defects.h"

namespace penstock::fibers {
namespace {

constexpr int kPiece = 64;
constexpr unsigned kAll = 0xFFFFFFFFu;

__global__ void __launch_bounds__(kPiece)
    ReverseKernel(Defect defect, const float* in, float* out, size_t n) {
  __shared__ float piece[kPiece];
  __shared__ float others[32];
  const unsigned t = threadIdx.x;
  const size_t first = size_t{blockIdx.x} * kPiece, at = first + t;
  if (defect == Defect::kLeavesBeforeBarrier && t == 5) return;
  if (defect == Defect::kReadsBeforeTheStart && at == 0) --in;
  float x = in[defect == Defect::kReadsPastTheEnd && at + 1 == n ? at + 1 : at];
  for (int turn = 0; turn < 2; ++turn) {
    if (defect != Defect::kReadsUnwrittenShared || t != 7) piece[t] = x;
    if (defect == Defect::kTwoBarriers) {
      if (t < 32)
        __syncthreads();
      else
        __syncthreads();
    } else if (defect != Defect::kNoBarrier) {
      __syncthreads();
    }
    x = turn == 0 ? piece[t ^ 1] : piece[kPiece - 1 - t];
    if (defect != Defect::kNoBarrierAtTurn) __syncthreads();
  }
  if (defect == Defect::kHalfABarrier && t < 32) __syncthreads();
  // The neighbour's, which is the own one's: the first turn has exchanged them.
  if (defect == Defect::kLeavesBeforeShuffle && t == 40) return;
  if (defect == Defect::kHalfAShuffle) {
    if (t % 32 < 16) x = __shfl_xor_sync(kAll, x, 1);
  } else if (defect == Defect::kForeignMask) {
    x = __shfl_xor_sync(0x0000FFFFu, x, 1);
  } else if (defect == Defect::kForeignSource) {
    if (t % 32 < 8) x = __shfl_xor_sync(0xFFu, x, 8);
  } else {
    x = __shfl_xor_sync(kAll, x, 1);
  }
  if (t < 32) {
    others[t] = x;
    if (defect == Defect::kShuffleForOrder) {
      (void)__shfl_xor_sync(kAll, x, 1);
    } else {
      __syncwarp();
    }
    x = __shfl_xor_sync(kAll, others[t ^ 1], 1);
  }
  if (defect == Defect::kMisaligned) {
    if (t == 0) *reinterpret_cast<float4*>(out + 1) = make_float4(x, x, x, x);
    return;
  }
  out[defect == Defect::kWritesPastTheEnd && at + 1 == n ? at + 1 : at] = x;
  if (defect == Defect::kBlocksRace) out[0] = x;
  if (defect == Defect::kReaderRaces && (blockIdx.x == 0 ? t == 0 : out[kPiece - 1] > 1e30f)) out[at] = 0;
}

}  // namespace

int Reverse(Defect defect, const float* in, float* out, size_t n) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(n / kPiece));
  config.blockDim = dim3(kPiece);
  return cudaLaunchKernelEx(&config, ReverseKernel, defect, in, out, n);
}

}  // namespace penstock::fibers
