// What the launchers share: grid sizes, and tensors from their descriptions. Internal to kernels/cuda.
#ifndef PENSTOCK_KERNELS_CUDA_LAUNCH_CUH_
#define PENSTOCK_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/access.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace penstock::kernels::cuda {

inline constexpr int kThreads = 256;

// Blocks for `items` threads in a grid-stride loop: enough to fill any device, few enough for the grid's
// limits.
inline unsigned GridFor(uint64_t items) {
  return static_cast<unsigned>(std::clamp<uint64_t>((items + kThreads - 1) / kThreads, 1, 1u << 16));
}

// Every kernel is enqueued here. The code is that of this launch, whatever an earlier call has left behind;
// and a later query of the last error does not get this one again.
template <class... Params, class... Args>
int Enqueue(void (*kernel)(Params...), unsigned blocks, int threads, Stream stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

inline bool Aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline Tensor MakeTensor(const UpdateArrays& a) {
  Tensor t = {};
  t.param = a.param;
  t.master_low = a.master_low;
  t.copy_out = a.param_type == ParamType::kFp32 ? a.copy_out : nullptr;
  t.grad = a.grad;
  t.m = a.m;
  t.v = a.v;
  t.m_scales = a.m_scales;
  t.v_scales = a.v_scales;
  t.n = a.n;
  t.first_element = a.first_element;
  t.key = DrawKey(a.seed);
  t.param_type = a.param_type;
  t.grad_type = a.grad_type;
  t.copy_type = a.copy_type;
  t.state_type = a.state_type;
  const size_t param = a.param_type == ParamType::kFp32 ? 16 : 8;
  const size_t grad = a.grad_type == DType::kFp32 ? 16 : 8;
  const size_t state = a.state_type == StateType::kFp32 ? 16 : a.state_type == StateType::kBf16 ? 8 : 4;
  t.vector = Aligned(a.param, param) && Aligned(a.master_low, 8) && Aligned(a.copy_out, 8) &&
             Aligned(a.grad, grad) && Aligned(a.m, state) && Aligned(a.v, state);
  return t;
}

// The gradient's factor, or false if the update is to be skipped.
__device__ __forceinline__ bool ReadControl(const DeviceControl& control, float* scale) {
  if (control.skip != nullptr && *control.skip != 0) return false;
  if (control.grad_scale != nullptr) *scale = Mul(*control.grad_scale, *scale);
  return true;
}

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_LAUNCH_CUH_
