// Weights to codes, and back to what products are computed in.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/launch.cuh"

namespace penstock::kernels::cuda {
namespace {

// As kernels/weight_code.h lays a row out: scales, then codes.
struct CodedRows {
  const uint8_t* memory;
  uint64_t row_bytes, columns, groups, group;
  int bits;
};

// Value i of a row without its scale.
__device__ __forceinline__ float CodeAt(const CodedRows& rows, const uint8_t* codes, uint64_t i) {
  if (rows.bits == 8) return static_cast<float>(static_cast<int>(codes[i]) - 128);
  const uint64_t half = kCodeBlock / 2, within = i % kCodeBlock;
  const int both = codes[i / kCodeBlock * half + within % half];
  return static_cast<float>((within < half ? both & 15 : both >> 4) - 8);
}

// Four values of one row a thread: they have one scale, since groups are multiples of four.
__global__ void __launch_bounds__(kThreads)
    DecodeKernel(CodedRows rows, uint64_t count, DType to, void* out, bool aligned) {
  const uint64_t fours = (rows.columns + kVector - 1) / kVector;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t item = uint64_t{blockIdx.x} * kThreads + threadIdx.x; item < count * fours; item += stride) {
    const uint64_t row = item / fours, first = item % fours * kVector;
    const uint8_t* const coded = rows.memory + row * rows.row_bytes;
    const uint8_t* const scale_at = coded + first / rows.group * 2;
    const float scale = FromBf16(static_cast<uint16_t>(scale_at[0] | scale_at[1] << 8));
    const int here = rows.columns - first < kVector ? static_cast<int>(rows.columns - first) : kVector;
    float x[kVector];
    for (int k = 0; k < kVector; ++k) {
      x[k] = k < here ? Mul(CodeAt(rows, coded + rows.groups * 2, first + static_cast<uint64_t>(k)), scale)
                      : 0.0f;
    }
    StoreAs(to, out, row * rows.columns + first, aligned && here == kVector, here, x);
  }
}

// A warp for each group of a row.
__global__ void __launch_bounds__(kThreads)
    EncodeKernel(DType from, const void* in, uint64_t columns, uint64_t groups, uint64_t group, int bits,
                 uint8_t* out) {
  const uint64_t warps = uint64_t{gridDim.x} * (kThreads / 32), lane = threadIdx.x % 32;
  const float most = bits == 8 ? 127.0f : 7.0f;
  const int zero = bits == 8 ? 128 : 8;
  for (uint64_t g = uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; g < groups; g += warps) {
    const uint64_t begin = g * group, end = columns - begin < group ? columns : begin + group;
    uint32_t largest = 0;
    for (uint64_t i = begin + lane; i < end; i += 32) {
      const uint32_t magnitude = Bits(LoadOne(from, in, i)) & 0x7FFFFFFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int width = 16; width > 0; width /= 2) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, largest, width);
      largest = other > largest ? other : largest;
    }
    const uint16_t scale = WeightScale(largest, most);
    const bool coded = scale != 0 && scale < 0x7F80;
    if (lane == 0) {
      out[2 * g] = static_cast<uint8_t>(scale);
      out[2 * g + 1] = static_cast<uint8_t>(scale >> 8);
    }
    uint8_t* const codes = out + 2 * groups + begin * static_cast<uint64_t>(bits) / 8;
    const uint64_t padded = (end - begin + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
    static_assert(kCodeBlock == 32);
    for (uint64_t i = lane; i < padded; i += kCodeBlock) {
      const bool there = coded && begin + i < end;
      const int code = zero + (there ? WeightNumber(LoadOne(from, in, begin + i), FromBf16(scale)) : 0);
      const int upper = __shfl_down_sync(0xFFFFFFFFu, code, 16);
      if (bits == 8) {
        codes[i] = static_cast<uint8_t>(code);
      } else if (lane < 16) {
        codes[i / 2 - lane / 2 + lane] = static_cast<uint8_t>(code | upper << 4);
      }
    }
  }
}

}  // namespace

int EncodeWeights(const WeightCode& code, DType from, const void* row, size_t columns, void* out,
                  Stream stream) {
  if (!code.valid()) return cudaErrorInvalidValue;
  if (columns == 0) return cudaSuccess;
  const uint64_t groups = (columns + code.group - 1) / code.group;
  return Enqueue(EncodeKernel, GridFor(groups * 32), kThreads, stream, from, row, uint64_t{columns}, groups,
                 uint64_t{code.group}, code.bits, static_cast<uint8_t*>(out));
}

int DecodeWeights(const WeightCode& code, const void* rows, size_t count, size_t columns, DType to, void* out,
                  Stream stream) {
  if (!code.valid()) return cudaErrorInvalidValue;
  if (count == 0 || columns == 0) return cudaSuccess;
  const CodedRows coded = {static_cast<const uint8_t*>(rows),
                           code.row_bytes(columns),
                           columns,
                           (columns + code.group - 1) / code.group,
                           code.group,
                           code.bits};
  const bool aligned = columns % kVector == 0 && Aligned(out, to == DType::kFp32 ? 16 : 8);
  const uint64_t items = uint64_t{count} * ((columns + kVector - 1) / kVector);
  return Enqueue(DecodeKernel, GridFor(items), kThreads, stream, coded, uint64_t{count}, to, out, aligned);
}

}  // namespace penstock::kernels::cuda
