// What the kernels and their tests use of CUDA's language and runtime, for fibers.h.
#ifndef PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_RUNTIME_H_
#define PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_RUNTIME_H_

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "tests/kernels/fibers/fibers.h"

// The names are CUDA's. NOLINTBEGIN(bugprone-reserved-identifier)

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(threads)
// One block at a time: its variables are those of the program, in a place that is known.
#define __shared__ static __attribute__((section("penstock_shared")))

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

// One operation, rounded once: this is compiled without contraction.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
}

namespace penstock::fibers {

inline Site Of(const std::source_location& where) { return {where.file_name(), where.line()}; }
template <class T>
T ShuffleFrom(unsigned mask, T value, unsigned source, const std::source_location& where) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = Shuffle(mask, bits, source, Of(where));
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned Lane() { return threadIdx.x % 32; }

}  // namespace penstock::fibers

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  penstock::fibers::Barrier(penstock::fibers::Of(where));
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu,
                       std::source_location where = std::source_location::current()) {
  penstock::fibers::SyncWarp(mask, penstock::fibers::Of(where));
}
// Beyond the end of a segment of `width` lanes a lane gets its own value back.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  std::source_location where = std::source_location::current()) {
  const unsigned own = penstock::fibers::Lane(), segment = static_cast<unsigned>(width);
  const unsigned source = own ^ static_cast<unsigned>(lane_mask);
  return penstock::fibers::ShuffleFrom(mask, value, source / segment > own / segment ? own : source, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   std::source_location where = std::source_location::current()) {
  const unsigned own = penstock::fibers::Lane(), segment = static_cast<unsigned>(width);
  const unsigned source = own + delta;
  return penstock::fibers::ShuffleFrom(mask, value, source / segment != own / segment ? own : source, where);
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
using cudaStream_t = struct CUstream_st*;
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess              ? "no error"
         : error == cudaErrorLaunchFailure ? "the launch failed"
                                           : "an error";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 8 : 0;
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = penstock::fibers::Allocate(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  return penstock::fibers::Free(memory) ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (bytes == 0) return cudaSuccess;
  if ((to_device && !penstock::fibers::Owns(to, bytes)) ||
      (from_device && !penstock::fibers::Owns(from, bytes))) {
    return cudaErrorInvalidValue;
  }
  std::memcpy(to, from, bytes);
  if (to_device) penstock::fibers::NoteWritten(to, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  if (!penstock::fibers::Owns(to, bytes)) return cudaErrorInvalidValue;
  std::memset(to, value, bytes);
  penstock::fibers::NoteWritten(to, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// Over when it returns.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  if (config->gridDim.y != 1 || config->gridDim.z != 1 || config->blockDim.y != 1 ||
      config->blockDim.z != 1 || config->dynamicSmemBytes != 0) {
    return cudaErrorInvalidValue;
  }
  struct Launch {
    void (*kernel)(Params...);
    std::tuple<std::remove_const_t<Params>...> params;
  } launch = {kernel, {std::forward<Args>(args)...}};
  const bool done = penstock::fibers::RunThreads(
      config->gridDim.x, config->blockDim.x, (sizeof(Params) + ... + 0),
      [](void* context) {
        auto* const self = static_cast<Launch*>(context);
        std::apply(self->kernel, self->params);
      },
      &launch);
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}

// NOLINTEND(bugprone-reserved-identifier)

#endif  // PENSTOCK_TESTS_KERNELS_FIBERS_CUDA_RUNTIME_H_
