// Reads and writes of four elements at a time in any stored type. The types are the same for a whole tensor,
// so that the branches on them never diverge; memory is what bounds these kernels.
#ifndef PENSTOCK_KERNELS_CUDA_ACCESS_CUH_
#define PENSTOCK_KERNELS_CUDA_ACCESS_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace penstock::kernels::cuda {

inline constexpr int kVector = 4;  // elements a thread handles at once

// `count` < kVector, or an array that is not aligned: one by one.
__device__ __forceinline__ void Load4(const float* p, bool vector, int count, float (&x)[kVector]) {
  if (vector) {
    const float4 all = *reinterpret_cast<const float4*>(p);
    x[0] = all.x;
    x[1] = all.y;
    x[2] = all.z;
    x[3] = all.w;
  } else {
    for (int k = 0; k < kVector; ++k) x[k] = k < count ? p[k] : 0.0f;
  }
}
__device__ __forceinline__ void Store4(float* p, bool vector, int count, const float (&x)[kVector]) {
  if (vector) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    for (int k = 0; k < kVector; ++k) {
      if (k < count) p[k] = x[k];
    }
  }
}
__device__ __forceinline__ void Load4(const uint16_t* p, bool vector, int count, uint16_t (&x)[kVector]) {
  if (vector) {
    const ushort4 all = *reinterpret_cast<const ushort4*>(p);
    x[0] = all.x;
    x[1] = all.y;
    x[2] = all.z;
    x[3] = all.w;
  } else {
    for (int k = 0; k < kVector; ++k) x[k] = k < count ? p[k] : uint16_t{0};
  }
}
__device__ __forceinline__ void Store4(uint16_t* p, bool vector, int count, const uint16_t (&x)[kVector]) {
  if (vector) {
    *reinterpret_cast<ushort4*>(p) = make_ushort4(x[0], x[1], x[2], x[3]);
  } else {
    for (int k = 0; k < kVector; ++k) {
      if (k < count) p[k] = x[k];
    }
  }
}

__device__ __forceinline__ float LoadOne(DType type, const void* in, uint64_t i) {
  if (type == DType::kFp32) return static_cast<const float*>(in)[i];
  const uint16_t raw = static_cast<const uint16_t*>(in)[i];
  return type == DType::kBf16 ? FromBf16(raw) : FromFp16(raw);
}

__device__ __forceinline__ void LoadAs(DType type, const void* p, uint64_t i, bool vector, int count,
                                       float (&x)[kVector]) {
  if (type == DType::kFp32) {
    Load4(static_cast<const float*>(p) + i, vector, count, x);
    return;
  }
  uint16_t raw[kVector];
  Load4(static_cast<const uint16_t*>(p) + i, vector, count, raw);
  for (int k = 0; k < kVector; ++k) x[k] = type == DType::kBf16 ? FromBf16(raw[k]) : FromFp16(raw[k]);
}
__device__ __forceinline__ void StoreAs(DType type, void* p, uint64_t i, bool vector, int count,
                                        const float (&x)[kVector]) {
  if (type == DType::kFp32) {
    Store4(static_cast<float*>(p) + i, vector, count, x);
    return;
  }
  uint16_t raw[kVector];
  for (int k = 0; k < kVector; ++k) raw[k] = type == DType::kBf16 ? ToBf16(x[k]) : ToFp16(x[k]);
  Store4(static_cast<uint16_t*>(p) + i, vector, count, raw);
}

__device__ __forceinline__ void LoadSplit(const void* master_high, const int16_t* master_low, uint64_t i,
                                          bool vector, int count, float (&x)[kVector]) {
  uint16_t high[kVector], low[kVector];
  Load4(static_cast<const uint16_t*>(master_high) + i, vector, count, high);
  Load4(reinterpret_cast<const uint16_t*>(master_low) + i, vector, count, low);
  for (int k = 0; k < kVector; ++k) x[k] = Join(high[k], static_cast<int16_t>(low[k]));
}
__device__ __forceinline__ void StoreSplit(void* master_high, int16_t* master_low, uint64_t i, bool vector,
                                           int count, const float (&x)[kVector]) {
  uint16_t high[kVector], low[kVector];
  for (int k = 0; k < kVector; ++k) {
    int16_t rest;
    Split(x[k], &high[k], &rest);
    low[k] = static_cast<uint16_t>(rest);
  }
  Store4(static_cast<uint16_t*>(master_high) + i, vector, count, high);
  Store4(reinterpret_cast<uint16_t*>(master_low) + i, vector, count, low);
}

// A tensor as the kernels see it.
struct Tensor {
  void* param;
  int16_t* master_low;
  uint16_t* copy_out;
  const void* grad;
  void* m;
  void* v;
  float* m_scales;
  float* v_scales;
  uint64_t n;
  uint64_t first_element;
  uint32_t key;  // of the random bits
  ParamType param_type;
  DType grad_type;
  DType copy_type;
  StateType state_type;
  bool vector;  // every array is aligned to its four elements
};

__device__ __forceinline__ void LoadParam(const Tensor& t, uint64_t i, bool vector, int count,
                                          float (&p)[kVector]) {
  if (t.param_type == ParamType::kSplit) {
    LoadSplit(t.param, t.master_low, i, vector, count, p);
  } else {
    const DType type = t.param_type == ParamType::kFp32   ? DType::kFp32
                       : t.param_type == ParamType::kBf16 ? DType::kBf16
                                                          : DType::kFp16;
    LoadAs(type, t.param, i, vector, count, p);
  }
}
__device__ __forceinline__ void StoreParam(const Tensor& t, uint64_t i, bool vector, int count,
                                           const float (&p)[kVector]) {
  if (t.param_type == ParamType::kSplit) {
    StoreSplit(t.param, t.master_low, i, vector, count, p);
    return;
  }
  const DType type = t.param_type == ParamType::kFp32   ? DType::kFp32
                     : t.param_type == ParamType::kBf16 ? DType::kBf16
                                                        : DType::kFp16;
  StoreAs(type, t.param, i, vector, count, p);
  if (t.copy_out != nullptr) StoreAs(t.copy_type, t.copy_out, i, vector, count, p);
}
__device__ __forceinline__ void LoadState(const Tensor& t, const void* state, uint64_t i, bool vector,
                                          int count, float (&x)[kVector]) {
  LoadAs(t.state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16, state, i, vector, count, x);
}
// First moments round to nearest, second ones stochastically.
__device__ __forceinline__ void StoreState(const Tensor& t, void* state, bool second, uint64_t i, bool vector,
                                           int count, const float (&x)[kVector]) {
  if (t.state_type == StateType::kFp32 || !second) {
    StoreAs(t.state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16, state, i, vector, count, x);
    return;
  }
  uint16_t raw[kVector];
  for (int k = 0; k < kVector; ++k) {
    raw[k] = ToBf16Stochastic(x[k], Draw(t.key, t.first_element + i + static_cast<uint64_t>(k)) >> 16);
  }
  Store4(static_cast<uint16_t*>(state) + i, vector, count, raw);
}

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_ACCESS_CUH_
