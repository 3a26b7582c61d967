// Casts, sums, masters and 8-bit values; and what a device is there.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/launch.cuh"

namespace penstock::kernels::cuda {
namespace {

// body(i, count) for every four elements.
template <class Body>
__device__ __forceinline__ void ForFours(uint64_t n, const Body& body) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads * kVector;
  for (uint64_t i = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < n; i += stride) {
    body(i, n - i < kVector ? static_cast<int>(n - i) : kVector);
  }
}

__global__ void __launch_bounds__(kThreads)
    ConvertKernel(DType from, const void* in, DType to, void* out, uint64_t n, bool aligned) {
  ForFours(n, [=](uint64_t i, int count) {
    const bool vector = aligned && count == kVector;
    if (from == to && from != DType::kFp32) {  // the bits as they are, a signalling NaN's too
      uint16_t raw[kVector];
      Load4(static_cast<const uint16_t*>(in) + i, vector, count, raw);
      Store4(static_cast<uint16_t*>(out) + i, vector, count, raw);
      return;
    }
    float x[kVector];
    LoadAs(from, in, i, vector, count, x);
    StoreAs(to, out, i, vector, count, x);
  });
}

__global__ void __launch_bounds__(kThreads)
    AccumulateKernel(DType type, const void* in, float* acc, uint64_t n, bool aligned) {
  ForFours(n, [=](uint64_t i, int count) {
    const bool vector = aligned && count == kVector;
    float x[kVector], sum[kVector];
    LoadAs(type, in, i, vector, count, x);
    Load4(acc + i, vector, count, sum);
    for (int k = 0; k < kVector; ++k) sum[k] = Add(sum[k], x[k]);
    Store4(acc + i, vector, count, sum);
  });
}

__global__ void __launch_bounds__(kThreads)
    SplitKernel(const float* master, uint16_t* master_high, int16_t* master_low, uint64_t n, bool aligned) {
  ForFours(n, [=](uint64_t i, int count) {
    const bool vector = aligned && count == kVector;
    float x[kVector];
    Load4(master + i, vector, count, x);
    StoreSplit(master_high, master_low, i, vector, count, x);
  });
}

__global__ void __launch_bounds__(kThreads) JoinKernel(const uint16_t* master_high, const int16_t* master_low,
                                                       float* master, uint64_t n, bool aligned) {
  ForFours(n, [=](uint64_t i, int count) {
    const bool vector = aligned && count == kVector;
    float x[kVector];
    LoadSplit(master_high, master_low, i, vector, count, x);
    Store4(master + i, vector, count, x);
  });
}

// A warp for each block of kStateBlock elements, its lanes side by side.
template <int kCode>
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const float* in, uint8_t* codes, float* scales, uint64_t n, bool stochastic, uint32_t key,
                   uint64_t first_element) {
  constexpr int kEach = static_cast<int>(kStateBlock) / 32;
  const uint64_t blocks = (n + kStateBlock - 1) / kStateBlock;
  const uint64_t warps = uint64_t{gridDim.x} * (kThreads / 32);
  for (uint64_t block = uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; block < blocks;
       block += warps) {
    float x[kEach];
    uint32_t largest = 0;
    for (int k = 0; k < kEach; ++k) {
      const uint64_t i = block * kStateBlock + static_cast<uint64_t>(k) * 32 + threadIdx.x % 32;
      x[k] = i < n ? in[i] : 0.0f;
      const uint32_t magnitude = Bits(x[k]) & 0x7FFFFFFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int width = 16; width > 0; width /= 2) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, largest, width);
      largest = other > largest ? other : largest;
    }
    const float scale = ScaleOf(largest);
    for (int k = 0; k < kEach; ++k) {
      const uint64_t i = block * kStateBlock + static_cast<uint64_t>(k) * 32 + threadIdx.x % 32;
      const uint32_t random = Draw(key, first_element + i);
      const uint32_t draw = !stochastic ? 0x8000u : kCode == 0 ? random & 0xFFFFu : random >> 16;
      if (i < n) codes[i] = Encode8<kCode>(x[k], scale, draw);
    }
    if (threadIdx.x % 32 == 0) scales[block] = scale;
  }
}

template <int kCode>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(const uint8_t* codes, const float* scales, float* out, uint64_t n) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    out[i] = Decode8<kCode>(codes[i], scales[i / kStateBlock]);
  }
}

bool AlignedAs(DType type, const void* p) { return Aligned(p, type == DType::kFp32 ? 16 : 8); }

}  // namespace

bool DeviceAvailable(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    *why = error != cudaSuccess ? "no CUDA device: " + ErrorText(error) : "no CUDA device";
    return false;
  }
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if (major < 8) {
    *why = "the CUDA device has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
           ", these kernels need 8.0";
    return false;
  }
  return true;
}

std::string ErrorText(int error) {
  return std::string(cudaGetErrorString(static_cast<cudaError_t>(error))) + " (" + std::to_string(error) +
         ")";
}

int Convert(DType from, const void* in, DType to, void* out, size_t n, Stream stream) {
  if (n == 0) return cudaSuccess;
  const bool aligned = AlignedAs(from, in) && AlignedAs(to, out);
  return Enqueue(ConvertKernel, GridFor(n / kVector + 1), kThreads, stream, from, in, to, out, n, aligned);
}

int Accumulate(DType type, const void* in, float* acc, size_t n, Stream stream) {
  if (n == 0) return cudaSuccess;
  const bool aligned = AlignedAs(type, in) && Aligned(acc, 16);
  return Enqueue(AccumulateKernel, GridFor(n / kVector + 1), kThreads, stream, type, in, acc, n, aligned);
}

int SplitMaster(const float* master, uint16_t* master_high, int16_t* master_low, size_t n, Stream stream) {
  if (n == 0) return cudaSuccess;
  const bool aligned = Aligned(master, 16) && Aligned(master_high, 8) && Aligned(master_low, 8);
  return Enqueue(SplitKernel, GridFor(n / kVector + 1), kThreads, stream, master, master_high, master_low, n,
                 aligned);
}

int JoinMaster(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n,
               Stream stream) {
  if (n == 0) return cudaSuccess;
  const bool aligned = Aligned(master, 16) && Aligned(master_high, 8) && Aligned(master_low, 8);
  return Enqueue(JoinKernel, GridFor(n / kVector + 1), kThreads, stream, master_high, master_low, master, n,
                 aligned);
}

int Quantize8(Code8 code, const float* in, uint8_t* codes, float* scales, size_t n, const Rounding& rounding,
              Stream stream) {
  if (n == 0) return cudaSuccess;
  const unsigned grid = GridFor((n + kStateBlock - 1) / kStateBlock * 32);
  const uint32_t key = DrawKey(rounding.seed);
  return Enqueue(code == Code8::kSigned ? QuantizeKernel<0> : QuantizeKernel<1>, grid, kThreads, stream, in,
                 codes, scales, n, rounding.stochastic, key, rounding.first_element);
}

int Dequantize8(Code8 code, const uint8_t* codes, const float* scales, float* out, size_t n, Stream stream) {
  if (n == 0) return cudaSuccess;
  return Enqueue(code == Code8::kSigned ? DequantizeKernel<0> : DequantizeKernel<1>, GridFor(n), kThreads,
                 stream, codes, scales, out, n);
}

}  // namespace penstock::kernels::cuda
