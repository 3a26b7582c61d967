#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/launch.cuh"

namespace penstock::kernels::cuda {
namespace {

// Tensors of one launch travel in its parameters (4 KiB at most): no table in device memory, so nothing to
// allocate, copy or wait for.
constexpr int kMostTensors = 32;
constexpr uint64_t kChunk =
    16384;  // elements a thread block handles: a multiple of kStateBlock and of a pass

struct Batch {
  Tensor tensors[kMostTensors];
  uint32_t first_chunk[kMostTensors + 1];  // chunks of tensor i: first_chunk[i] ... first_chunk[i + 1]
  int count;
};
static_assert(sizeof(Batch) + 128 <= 4096, "kernel parameters are limited to 4 KiB");

// The tensor with its types as constants: the branches on them go when what takes it is compiled in its
// place, so that a thread's loads stand together before what it computes of them.
template <ParamType kParam, DType kGrad, StateType kState>
__device__ __forceinline__ Tensor Known(const Tensor& t) {
  Tensor known = t;
  known.param_type = kParam;
  known.grad_type = kGrad;
  known.state_type = kState;
  return known;
}
__device__ __forceinline__ bool Is(const Tensor& t, ParamType param, DType grad, StateType state) {
  return t.param_type == param && t.grad_type == grad && t.state_type == state;
}

// States fp32 or bf16: each thread four elements at a time.
template <class Opt>
__device__ __forceinline__ void UpdateDirect(const Tensor& t, const Opt& opt, float scale, uint64_t begin,
                                             uint64_t end) {
  for (uint64_t i = begin + threadIdx.x * uint64_t{kVector}; i < end; i += uint64_t{kThreads} * kVector) {
    const int count = end - i < kVector ? static_cast<int>(end - i) : kVector;
    const bool vector = t.vector && count == kVector;
    float p[kVector], g[kVector], m[kVector] = {}, v[kVector] = {};
    LoadAs(t.grad_type, t.grad, i, vector, count, g);
    LoadParam(t, i, vector, count, p);
    const bool has_m = Opt::kM && t.m != nullptr;
    if (has_m) LoadState(t, t.m, i, vector, count, m);
    if (Opt::kV) LoadState(t, t.v, i, vector, count, v);
    for (int k = 0; k < kVector; ++k) opt(scale, &p[k], g[k], &m[k], &v[k]);
    StoreParam(t, i, vector, count, p);
    if (has_m) StoreState(t, t.m, false, i, vector, count, m);
    if (Opt::kV) StoreState(t, t.v, true, i, vector, count, v);
  }
}

__device__ __forceinline__ uint32_t WarpMax(uint32_t x) {
  for (int width = 16; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, width);
    x = other > x ? other : x;
  }
  return x;
}

// One 8-bit state of a warp's block of kStateBlock elements: lane k holds elements 4 k ... 4 k + 3 of both
// halves.
template <int kCode>
__device__ void StoreBlock8(const Tensor& t, uint8_t* codes, float* scales, uint64_t block, uint64_t at,
                            int count, const float (&x)[2 * kVector]) {
  uint32_t largest = 0;
  for (int k = 0; k < 2 * kVector; ++k) {
    const uint32_t magnitude = Bits(x[k]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = ScaleOf(WarpMax(largest));
  for (int k = 0; k < count; ++k) {
    const uint32_t draw = Draw(t.key, t.first_element + at + static_cast<uint64_t>(k));
    codes[at + static_cast<uint64_t>(k)] =
        Encode8<kCode>(x[k], scale, kCode == 0 ? draw & 0xFFFFu : draw >> 16);
  }
  __syncwarp();  // every lane has read the scale that was there: shuffles alone order no memory
  if (threadIdx.x % 32 == 0) scales[block] = scale;
}

// 8-bit states: a warp for each block of kStateBlock elements, eight neighbouring elements a lane.
template <class Opt>
__device__ void Update8Bit(const Tensor& t, const Opt& opt, float scale, uint64_t begin, uint64_t end) {
  static_assert(kStateBlock == 32 * 2 * kVector);
  constexpr int kLane = 2 * kVector;
  auto* const m_codes = static_cast<uint8_t*>(t.m);
  auto* const v_codes = static_cast<uint8_t*>(t.v);
  const bool has_m = Opt::kM && t.m != nullptr;
  for (uint64_t start = begin + threadIdx.x / 32 * kStateBlock; start < end;
       start += kThreads / 32 * kStateBlock) {
    const uint64_t block = start / kStateBlock;
    const uint64_t at = start + threadIdx.x % 32 * kLane;
    const int count = at >= end ? 0 : end - at < kLane ? static_cast<int>(end - at) : kLane;
    float m[kLane] = {}, v[kLane] = {};
    for (int k = 0; k < count; ++k) {
      if (has_m) m[k] = Decode8<0>(m_codes[at + static_cast<uint64_t>(k)], t.m_scales[block]);
      if (Opt::kV) v[k] = Decode8<1>(v_codes[at + static_cast<uint64_t>(k)], t.v_scales[block]);
    }
    for (int half = 0; half < 2; ++half) {
      const uint64_t i = at + static_cast<uint64_t>(half * kVector);
      const int left = count - half * kVector;
      if (left <= 0) break;
      const int here = left < kVector ? left : kVector;
      const bool vector = t.vector && here == kVector;
      float p[kVector], g[kVector];
      LoadAs(t.grad_type, t.grad, i, vector, here, g);
      LoadParam(t, i, vector, here, p);
      for (int k = 0; k < here; ++k) opt(scale, &p[k], g[k], &m[half * kVector + k], &v[half * kVector + k]);
      StoreParam(t, i, vector, here, p);
    }
    if (has_m) StoreBlock8<0>(t, m_codes, t.m_scales, block, at, count, m);
    if (Opt::kV) StoreBlock8<1>(t, v_codes, t.v_scales, block, at, count, v);
  }
}

template <class Opt>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const __grid_constant__ Batch batch, Opt opt, DeviceControl control) {
  float scale = opt.s.grad_scale;
  if (!ReadControl(control, &scale)) return;
  int index = 0;
  while (index + 1 < batch.count && blockIdx.x >= batch.first_chunk[index + 1]) ++index;
  const Tensor& t = batch.tensors[index];
  const uint64_t begin = uint64_t{blockIdx.x - batch.first_chunk[index]} * kChunk;
  const uint64_t end = begin + kChunk < t.n ? begin + kChunk : t.n;
  if (t.state_type == StateType::k8Bit) {
    Update8Bit(t, opt, scale, begin, end);
  } else if (Is(t, ParamType::kSplit, DType::kBf16, StateType::kFp32)) {
    UpdateDirect(Known<ParamType::kSplit, DType::kBf16, StateType::kFp32>(t), opt, scale, begin, end);
  } else if (Is(t, ParamType::kFp32, DType::kFp32, StateType::kFp32)) {
    UpdateDirect(Known<ParamType::kFp32, DType::kFp32, StateType::kFp32>(t), opt, scale, begin, end);
  } else {
    UpdateDirect(t, opt, scale, begin, end);
  }
}

template <class Opt>
int Launch(const typename Opt::Step& step, const UpdateArrays* tensors, size_t count,
           const DeviceControl& control, Stream stream) {
  constexpr uint32_t kMostChunks = 1u << 30;
  Batch batch = {};
  const auto flush = [&] {
    if (batch.count == 0) return static_cast<int>(cudaSuccess);
    const uint32_t chunks = batch.first_chunk[batch.count];
    const int error = Enqueue(UpdateKernel<Opt>, chunks, kThreads, stream, batch, Opt{step}, control);
    batch = {};
    return error;
  };
  for (size_t i = 0; i < count; ++i) {
    const uint64_t chunks = (tensors[i].n + kChunk - 1) / kChunk;
    if (chunks == 0) continue;
    if (chunks >= kMostChunks) return cudaErrorInvalidValue;  // 2^44 elements: no such memory
    if (batch.count == kMostTensors || batch.first_chunk[batch.count] + chunks > kMostChunks) {
      const int error = flush();
      if (error != cudaSuccess) return error;
    }
    batch.tensors[batch.count] = MakeTensor(tensors[i]);
    batch.first_chunk[batch.count + 1] = batch.first_chunk[batch.count] + static_cast<uint32_t>(chunks);
    ++batch.count;
  }
  return flush();
}

}  // namespace

int ApplyUpdates(const AdamStep& step, const UpdateArrays* tensors, size_t count,
                 const DeviceControl& control, Stream stream) {
  return Launch<AdamElement>(step, tensors, count, control, stream);
}
int ApplyUpdates(const AdagradStep& step, const UpdateArrays* tensors, size_t count,
                 const DeviceControl& control, Stream stream) {
  return Launch<AdagradElement>(step, tensors, count, control, stream);
}
int ApplyUpdates(const LionStep& step, const UpdateArrays* tensors, size_t count,
                 const DeviceControl& control, Stream stream) {
  return Launch<LionElement>(step, tensors, count, control, stream);
}

namespace {
// Without momentum there is no state: what the caller passed as m stays as it is.
constexpr size_t kSgdBatch = kMostTensors;
}  // namespace

int ApplyUpdates(const SgdStep& step, const UpdateArrays* tensors, size_t count, const DeviceControl& control,
                 Stream stream) {
  if (step.momentum != 0.0f) return Launch<SgdElement>(step, tensors, count, control, stream);
  UpdateArrays stateless[kSgdBatch];
  for (size_t begin = 0; begin < count; begin += kSgdBatch) {
    const size_t here = std::min(count - begin, kSgdBatch);
    for (size_t i = 0; i < here; ++i) {
      stateless[i] = tensors[begin + i];
      stateless[i].m = nullptr;
      stateless[i].state_type = StateType::kFp32;
    }
    const int error = Launch<SgdElement>(step, stateless, here, control, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace penstock::kernels::cuda
