// Sums of squares by the definition in kernels/reduce.h, gradients' norms from them, and LAMB, which is built
// on both.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/launch.cuh"

namespace penstock::kernels::cuda {
namespace {

static_assert(PartialSums(kReduceBlock) == 1 && PartialSums(kReduceBlock + 1) == 2);
constexpr int kLanes = 16;  // of the definition: sixteen threads walk through a reduction block together
constexpr int kUnroll = 8;  // loads in flight a thread

// The sixteen lanes' sums, combined in the definition's order; the result is in lane 0.
__device__ __forceinline__ double CombineLanes(double sum) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    sum += __shfl_down_sync(0xFFFFFFFFu, sum, width, kLanes);
  return sum;
}

// Adds the square of value(i) for this lane's elements of [begin, end). A lane's element that is not there
// counts as zero, which changes no bit of a sum of squares.
template <class Value>
__device__ __forceinline__ double LaneSquares(uint64_t begin, uint64_t end, const Value& value) {
  double sum = 0;
  for (uint64_t i = begin + threadIdx.x % kLanes; i < end; i += kLanes * kUnroll) {
    float x[kUnroll];
    for (int k = 0; k < kUnroll; ++k) {
      const uint64_t at = i + static_cast<uint64_t>(k) * kLanes;
      x[k] = at < end ? value(at) : 0.0f;
    }
    for (int k = 0; k < kUnroll; ++k) {
      sum = __fma_rn(static_cast<double>(x[k]), static_cast<double>(x[k]), sum);
    }
  }
  return sum;
}

// All threads of a warp take part in every turn, so that the shuffles are whole.
template <class Body>
__device__ __forceinline__ void ForReductionBlocks(uint64_t n, const Body& body) {
  const uint64_t blocks = (n + kReduceBlock - 1) / kReduceBlock;
  const uint64_t groups = uint64_t{gridDim.x} * (kThreads / kLanes);
  const uint64_t group = uint64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const uint64_t turns = (blocks + groups - 1) / groups;
  for (uint64_t turn = 0; turn < turns; ++turn) {
    const uint64_t block = turn * groups + group;
    const uint64_t begin = block < blocks ? block * kReduceBlock : n;
    const uint64_t end = begin + kReduceBlock < n ? begin + kReduceBlock : n;
    body(block, begin, end, block < blocks && threadIdx.x % kLanes == 0);
  }
}

constexpr int kEight = 8;  // 16-bit elements that a lane loads at once
constexpr int kLoads = 4;  // such loads in flight a thread
constexpr int kStaged = kLanes * kEight * kLoads;
static_assert(kReduceBlock % kStaged == 0);

// The same of a whole reduction block of 16-bit elements, which begins at a multiple of 16 bytes: each lane
// loads eight neighbours at a time and finds its own elements in `staged`, of its sixteen lanes. Called by
// whole warps; where `takes` is false the result is none.
template <DType kType>
__device__ __forceinline__ double StagedSquares(const uint16_t* in, bool takes,
                                                uint4 (&staged)[kLanes * kLoads]) {
  const unsigned lane = threadIdx.x % kLanes;
  const auto* const elements = reinterpret_cast<const uint16_t*>(staged);
  double sum = 0;
  for (uint64_t at = 0; at < kReduceBlock; at += kStaged) {
    uint4 raw[kLoads] = {};
    for (int k = 0; k < kLoads; ++k) {
      if (takes) raw[k] = reinterpret_cast<const uint4*>(in + at)[k * kLanes + lane];
    }
    for (int k = 0; k < kLoads; ++k) staged[k * kLanes + lane] = raw[k];
    __syncwarp();
    for (int k = 0; k < kEight * kLoads; ++k) {
      const uint16_t one = elements[k * kLanes + lane];
      const auto x = static_cast<double>(kType == DType::kBf16 ? FromBf16(one) : FromFp16(one));
      sum = __fma_rn(x, x, sum);
    }
    __syncwarp();  // before the next ones take their places
  }
  return sum;
}

using Staged = uint4[kLanes * kLoads];

// `aligned`: of 16-bit elements, `in` is a multiple of 16 bytes. `staged`: of this thread's sixteen lanes.
template <DType kType>
__device__ __forceinline__ void Squares(const void* in, uint64_t n, bool aligned, Staged& staged,
                                        double* partials) {
  ForReductionBlocks(n, [&](uint64_t block, uint64_t begin, uint64_t end, bool writes) {
    double sum = 0;
    const bool whole = kType != DType::kFp32 && aligned && end - begin == kReduceBlock;
    if constexpr (kType != DType::kFp32) {
      sum = StagedSquares<kType>(static_cast<const uint16_t*>(in) + begin, whole, staged);
    }
    if (!whole) sum = LaneSquares(begin, end, [=](uint64_t i) { return LoadOne(kType, in, i); });
    sum = CombineLanes(sum);
    if (writes) partials[block] = sum;
  });
}

__global__ void __launch_bounds__(kThreads)
    SquaresKernel(DType type, const void* in, uint64_t n, double* partials) {
  __shared__ Staged of_all[kThreads / kLanes];
  Staged& staged = of_all[threadIdx.x / kLanes];
  const bool aligned = reinterpret_cast<uintptr_t>(in) % 16 == 0;
  if (type == DType::kBf16) return Squares<DType::kBf16>(in, n, aligned, staged, partials);
  if (type == DType::kFp16) return Squares<DType::kFp16>(in, n, aligned, staged, partials);
  Squares<DType::kFp32>(in, n, aligned, staged, partials);
}

// The sum of `count` doubles by one block of threads in a fixed order, for thread 0.
__device__ double BlockSum(const double* values, uint64_t count, double* shared) {
  double sum = 0;
  for (uint64_t i = threadIdx.x; i < count; i += kThreads) sum += values[i];
  shared[threadIdx.x] = sum;
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
  }
  __syncthreads();
  return shared[0];
}

__global__ void __launch_bounds__(kThreads)
    ClipKernel(const double* partials, uint64_t count, float inverse_loss_scale, float clip,
               float* grad_scale, int* skip, float* norm) {
  __shared__ double shared[kThreads];
  const double sum = BlockSum(partials, count, shared);
  if (threadIdx.x != 0) return;
  const double length = sqrt(sum) * static_cast<double>(inverse_loss_scale);
  const bool finite = isfinite(sum);
  double factor = 1.0;
  if (clip > 0.0f && finite) factor = fmin(1.0, static_cast<double>(clip) / (length + 1e-6));
  *grad_scale = static_cast<float>(static_cast<double>(inverse_loss_scale) * factor);
  *skip = finite ? 0 : 1;
  if (norm != nullptr) *norm = static_cast<float>(length);
}

unsigned GridForReduction(uint64_t n) { return GridFor((n + kReduceBlock - 1) / kReduceBlock * kLanes); }

__global__ void __launch_bounds__(kThreads)
    LambMomentsKernel(const __grid_constant__ LambStep step, const __grid_constant__ Tensor t,
                      DeviceControl control) {
  float scale = step.adam.grad_scale;
  if (!ReadControl(control, &scale)) return;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads * kVector;
  for (uint64_t i = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < t.n; i += stride) {
    const int count = t.n - i < kVector ? static_cast<int>(t.n - i) : kVector;
    const bool vector = t.vector && count == kVector;
    float g[kVector], m[kVector], v[kVector];
    LoadAs(t.grad_type, t.grad, i, vector, count, g);
    LoadState(t, t.m, i, vector, count, m);
    LoadState(t, t.v, i, vector, count, v);
    for (int k = 0; k < kVector; ++k) AdamElement::Moments(step.adam, Mul(g[k], scale), &m[k], &v[k]);
    StoreState(t, t.m, false, i, vector, count, m);
    StoreState(t, t.v, true, i, vector, count, v);
  }
}

__device__ __forceinline__ float ParamOne(const Tensor& t, uint64_t i) {
  float p[kVector];
  LoadParam(t, i, false, 1, p);
  return p[0];
}
__device__ __forceinline__ float DirectionOne(const LambStep& step, const Tensor& t, uint64_t i) {
  const DType state = t.state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16;
  return LambDirection(step, ParamOne(t, i), LoadOne(state, t.m, i), LoadOne(state, t.v, i));
}

__global__ void __launch_bounds__(kThreads)
    LambPartialsKernel(const __grid_constant__ LambStep step, const __grid_constant__ Tensor t,
                       double* params, double* updates) {
  ForReductionBlocks(t.n, [&](uint64_t block, uint64_t begin, uint64_t end, bool writes) {
    const double p = CombineLanes(LaneSquares(begin, end, [&](uint64_t i) { return ParamOne(t, i); }));
    const double u =
        CombineLanes(LaneSquares(begin, end, [&](uint64_t i) { return DirectionOne(step, t, i); }));
    if (!writes) return;
    params[block] = p;
    updates[block] = u;
  });
}

__global__ void __launch_bounds__(kThreads)
    LambTrustKernel(const double* params, const double* updates, uint64_t count, double least, double most,
                    float* trust) {
  __shared__ double shared[kThreads];
  const double p = sqrt(BlockSum(params, count, shared));
  __syncthreads();
  const double u = sqrt(BlockSum(updates, count, shared));
  if (threadIdx.x != 0) return;
  if (!isfinite(p) || !isfinite(u)) {
    *trust = FromBits(0x7FC00000u);  // fmin and fmax would make a number of it
  } else {
    *trust = p == 0.0 || u == 0.0 ? 1.0f : static_cast<float>(fmin(fmax(p / u, least), most));
  }
}

__global__ void __launch_bounds__(kThreads)
    LambApplyKernel(const __grid_constant__ LambStep step, const float* trust,
                    const __grid_constant__ Tensor t, DeviceControl control) {
  float unused = 1.0f;
  if (!ReadControl(control, &unused)) return;
  const float rate = static_cast<float>(static_cast<double>(step.adam.lr) * static_cast<double>(*trust));
  const uint64_t stride = uint64_t{gridDim.x} * kThreads * kVector;
  for (uint64_t i = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < t.n; i += stride) {
    const int count = t.n - i < kVector ? static_cast<int>(t.n - i) : kVector;
    const bool vector = t.vector && count == kVector;
    float p[kVector], m[kVector], v[kVector];
    LoadParam(t, i, vector, count, p);
    LoadState(t, t.m, i, vector, count, m);
    LoadState(t, t.v, i, vector, count, v);
    for (int k = 0; k < kVector; ++k) p[k] = Fma(LambDirection(step, p[k], m[k], v[k]), -rate, p[k]);
    StoreParam(t, i, vector, count, p);
  }
}

}  // namespace

int SquarePartials(DType type, const void* in, size_t n, double* partials, Stream stream) {
  if (n == 0) return cudaSuccess;
  return Enqueue(SquaresKernel, GridForReduction(n), kThreads, stream, type, in, n, partials);
}

int ClipFactor(const double* partials, size_t count, float inverse_loss_scale, float clip, float* grad_scale,
               int* skip, float* norm, Stream stream) {
  return Enqueue(ClipKernel, 1, kThreads, stream, partials, count, inverse_loss_scale, clip, grad_scale, skip,
                 norm);
}

int LambMoments(const LambStep& step, const UpdateArrays& tensor, const DeviceControl& control,
                Stream stream) {
  if (tensor.state_type == StateType::k8Bit) return cudaErrorInvalidValue;
  if (tensor.n == 0) return cudaSuccess;
  return Enqueue(LambMomentsKernel, GridFor(tensor.n / kVector + 1), kThreads, stream, step,
                 MakeTensor(tensor), control);
}

int LambPartials(const LambStep& step, const UpdateArrays& tensor, double* param_partials,
                 double* update_partials, Stream stream) {
  if (tensor.state_type == StateType::k8Bit) return cudaErrorInvalidValue;
  if (tensor.n == 0) return cudaSuccess;
  return Enqueue(LambPartialsKernel, GridForReduction(tensor.n), kThreads, stream, step, MakeTensor(tensor),
                 param_partials, update_partials);
}

int LambTrusts(const LambStep& step, const double* param_partials, const double* update_partials,
               size_t count, float* trust, Stream stream) {
  return Enqueue(LambTrustKernel, 1, kThreads, stream, param_partials, update_partials, count,
                 step.least_trust, step.most_trust, trust);
}

int LambApply(const LambStep& step, const float* trust, const UpdateArrays& tensor,
              const DeviceControl& control, Stream stream) {
  if (tensor.state_type == StateType::k8Bit) return cudaErrorInvalidValue;
  if (tensor.n == 0) return cudaSuccess;
  return Enqueue(LambApplyKernel, GridFor(tensor.n / kVector + 1), kThreads, stream, step, trust,
                 MakeTensor(tensor), control);
}

}  // namespace penstock::kernels::cuda
