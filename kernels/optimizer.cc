#include "kernels/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

size_t Index(ParamType type) { return static_cast<size_t>(type); }
size_t Index(DType type) { return static_cast<size_t>(type); }
size_t ParamWidth(ParamType type) { return type == ParamType::kFp32 ? 4 : 2; }

// Elements from which a copy-out is stored past the caches: 2 MiB of it, with 24 MiB of master and states.
constexpr size_t kStreamFrom = size_t{1} << 20;

void* At(void* p, size_t bytes) { return p == nullptr ? nullptr : static_cast<unsigned char*>(p) + bytes; }
const void* At(const void* p, size_t bytes) {
  return p == nullptr ? nullptr : static_cast<const unsigned char*>(p) + bytes;
}

bool IsAligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// The kernel arguments for elements [begin, begin + n) with states as stored (fp32 or bf16).
UpdateChunk ChunkAt(const UpdateArrays& a, size_t begin, size_t n) {
  UpdateChunk c = {};
  c.n = n;
  c.param = At(a.param, begin * ParamWidth(a.param_type));
  c.master_low = a.master_low == nullptr ? nullptr : a.master_low + begin;
  c.copy_out = a.copy_out == nullptr ? nullptr : a.copy_out + begin;
  c.copy_is_fp16 = a.copy_type == DType::kFp16;
  // A large copy would leave the caches before anyone reads it: stored past them, it is not read in first.
  c.stream_copy =
      c.copy_out != nullptr && (a.n >= kStreamFrom || a.from.param != nullptr) && IsAligned(c.copy_out, 32);
  c.grad = At(a.grad, begin * BytesPerElement(a.grad_type));
  const size_t state_width = StateBytes(a.state_type, 1);
  c.m = At(a.m, begin * state_width);
  c.v = At(a.v, begin * state_width);
  if (a.from.param != nullptr) {
    c.from = {.param = At(a.from.param, begin * ParamWidth(a.param_type)),
              .master_low = a.from.master_low == nullptr ? nullptr : a.from.master_low + begin,
              .m = At(a.from.m, begin * state_width),
              .v = At(a.from.v, begin * state_width)};
    const auto streams = [](const void* to, size_t width) {
      return to == nullptr || IsAligned(to, 16 * width);
    };
    c.stream_param = streams(c.param, ParamWidth(a.param_type)) && streams(c.master_low, 2);
    c.stream_states =
        a.state_type != StateType::k8Bit && streams(c.m, state_width) && streams(c.v, state_width);
  }
  c.first_element = a.first_element + begin;
  c.seed = a.seed;
  return c;
}

// One block of 8-bit states as fp32 in the first-level cache, for as long as a kernel works on it.
class DecodedStates {
 public:
  DecodedStates(const KernelTable& kernels, const UpdateArrays& arrays, size_t begin, UpdateChunk* chunk)
      : kernels_(kernels), chunk_(*chunk), block_(begin / kStateBlock), arrays_(arrays) {
    if (chunk_.m != nullptr) {
      Decode(0, chunk_.m, chunk_.from.m, arrays.m_scales, arrays.from.m_scales, m_);
      chunk->from.m = chunk->m = m_;
    }
    if (chunk_.v != nullptr) {
      Decode(1, chunk_.v, chunk_.from.v, arrays.v_scales, arrays.from.v_scales, v_);
      chunk->from.v = chunk->v = v_;
    }
  }
  void Encode() {
    const Rounding rounding = {
        .stochastic = true, .seed = chunk_.seed, .first_element = chunk_.first_element};
    if (chunk_.m != nullptr) {
      arrays_.m_scales[block_] = kernels_.encode8[0](m_, static_cast<uint8_t*>(chunk_.m), chunk_.n, rounding);
    }
    if (chunk_.v != nullptr) {
      arrays_.v_scales[block_] = kernels_.encode8[1](v_, static_cast<uint8_t*>(chunk_.v), chunk_.n, rounding);
    }
  }

 private:
  void Decode(size_t code, const void* own, const void* from, const float* own_scales,
              const float* from_scales, float* out) const {
    const bool in_place = chunk_.from.param == nullptr;
    kernels_.decode8[code](static_cast<const uint8_t*>(in_place ? own : from),
                           (in_place ? own_scales : from_scales)[block_], out, chunk_.n);
  }

  const KernelTable& kernels_;
  const UpdateChunk chunk_;  // as stored
  const size_t block_;
  const UpdateArrays& arrays_;
  alignas(64) float m_[kStateBlock];
  alignas(64) float v_[kStateBlock];
};

// body(chunk) for [begin, end), with the states as fp32 or bf16; 8-bit states block by block.
// `writes`: the body changes the states.
template <class Body>
void WithStates(const UpdateArrays& arrays, size_t begin, size_t end, bool writes, const Body& body) {
  if (arrays.state_type != StateType::k8Bit) {
    body(ChunkAt(arrays, begin, end - begin));
    return;
  }
  const KernelTable& kernels = Kernels();
  for (size_t i = begin; i < end; i += kStateBlock) {
    UpdateChunk chunk = ChunkAt(arrays, i, std::min(kStateBlock, end - i));
    DecodedStates states(kernels, arrays, i, &chunk);
    body(chunk);
    if (writes) states.Encode();
  }
}

// At the end of a piece: what it wrote may have gone around the caches.
void FenceStreams(const UpdateArrays& arrays) {
  if (arrays.copy_out != nullptr || arrays.from.param != nullptr) Kernels().stream_fence();
}

size_t DirectState(StateType type) { return type == StateType::kBf16 ? 1 : 0; }

// Runs piece(begin, end) over all elements; with `squares`, block by block, so that the gradient that the sum
// has just read is still in the cache for the update.
template <class Piece>
void RunPieces(const UpdateArrays& arrays, SumOfSquares* squares, ThreadPool* pool, const Piece& piece) {
  if (squares == nullptr) {
    ForPieces(arrays.n, pool, piece);
    return;
  }
  const auto kernel = Kernels().block_squares[Index(arrays.grad_type)];
  const size_t width = BytesPerElement(arrays.grad_type);
  std::mutex mutex;
  ForPieces(arrays.n, pool, [&](size_t begin, size_t end) {
    SumOfSquares sum;
    for (size_t i = begin; i < end; i += kReduceBlock) {
      const size_t stop = std::min(end, i + kReduceBlock);
      sum.Add(kernel(static_cast<const unsigned char*>(arrays.grad) + i * width, stop - i));
      piece(i, stop);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    squares->Merge(sum);
  });
}

void Apply(Optimizer optimizer, const void* step, const UpdateArrays& given, SumOfSquares* squares,
           ThreadPool* pool) {
  UpdateArrays arrays = given;
  // A state that the optimizer does not have stays as it is, even if the caller passed one.
  if (optimizer == kOptAdagrad) arrays.m = nullptr;
  if (optimizer == kOptLion || optimizer == kOptSgd) arrays.v = nullptr;
  const UpdateFn kernel = Kernels().update[optimizer][Index(arrays.param_type)][Index(arrays.grad_type)]
                                          [DirectState(arrays.state_type)];
  if (squares == nullptr || arrays.state_type == StateType::k8Bit) {
    RunPieces(arrays, squares, pool, [&, kernel](size_t begin, size_t end) {
      WithStates(arrays, begin, end, true, [&](const UpdateChunk& chunk) { kernel(step, chunk); });
      FenceStreams(arrays);
    });
    return;
  }
  // The kernel sums up the gradient that it reads anyway, a reduction block at a time.
  std::mutex mutex;
  ForPieces(arrays.n, pool, [&, kernel](size_t begin, size_t end) {
    SumOfSquares sum;
    for (size_t i = begin; i < end; i += kReduceBlock) {
      UpdateChunk chunk = ChunkAt(arrays, i, std::min(kReduceBlock, end - i));
      double partial = 0.0;
      chunk.squares = &partial;
      kernel(step, chunk);
      sum.Add(partial);
    }
    FenceStreams(arrays);
    const std::lock_guard<std::mutex> lock(mutex);
    squares->Merge(sum);
  });
}

}  // namespace

void ApplyUpdate(const AdamStep& step, const UpdateArrays& arrays, SumOfSquares* squares, ThreadPool* pool) {
  Apply(kOptAdam, &step, arrays, squares, pool);
}

AdagradStep MakeAdagradStep(const AdagradOptions& options, int64_t update, double grad_scale) {
  AdagradStep step = {};
  step.grad_scale = static_cast<float>(grad_scale);
  step.step_size =
      static_cast<float>(options.lr / (1.0 + static_cast<double>(update - 1) * options.lr_decay));
  step.eps = static_cast<float>(options.eps);
  step.weight_decay = static_cast<float>(options.weight_decay);
  return step;
}

void ApplyUpdate(const AdagradStep& step, const UpdateArrays& arrays, SumOfSquares* squares,
                 ThreadPool* pool) {
  Apply(kOptAdagrad, &step, arrays, squares, pool);
}

LionStep MakeLionStep(const LionOptions& options, double grad_scale) {
  LionStep step = {};
  step.grad_scale = static_cast<float>(grad_scale);
  step.lr = static_cast<float>(options.lr);
  step.beta1 = static_cast<float>(options.beta1);
  step.one_minus_beta1 = static_cast<float>(1.0 - options.beta1);
  step.beta2 = static_cast<float>(options.beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  step.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
  return step;
}

void ApplyUpdate(const LionStep& step, const UpdateArrays& arrays, SumOfSquares* squares, ThreadPool* pool) {
  Apply(kOptLion, &step, arrays, squares, pool);
}

SgdStep MakeSgdStep(const SgdOptions& options, int64_t update, double grad_scale) {
  SgdStep step = {};
  step.grad_scale = static_cast<float>(grad_scale);
  step.lr = static_cast<float>(options.lr);
  step.momentum = static_cast<float>(options.momentum);
  step.one_minus_dampening = update == 1 ? 1.0f : static_cast<float>(1.0 - options.dampening);
  step.weight_decay = static_cast<float>(options.weight_decay);
  step.nesterov = options.nesterov;
  return step;
}

void ApplyUpdate(const SgdStep& step, const UpdateArrays& arrays, SumOfSquares* squares, ThreadPool* pool) {
  if (step.momentum != 0.0f) {
    Apply(kOptSgd, &step, arrays, squares, pool);
    return;
  }
  UpdateArrays stateless = arrays;  // whatever the caller passed as m stays as it is
  stateless.m = nullptr;
  stateless.state_type = StateType::kFp32;
  Apply(kOptSgd, &step, stateless, squares, pool);
}

LambStep MakeLambStep(const LambOptions& options, int64_t update, double grad_scale) {
  AdamOptions adam = options.adam;
  adam.mode = AdamMode::kAdamW;
  LambStep step = {};
  const double power = std::pow(adam.beta1, static_cast<double>(update));
  if (options.corrects_rate && adam.bias_correction) {
    adam.lr *= std::sqrt(1.0 - std::pow(adam.beta2, static_cast<double>(update))) / (1.0 - power);
    adam.bias_correction = false;
  }
  step.adam = MakeAdamStep(adam, update, grad_scale);
  step.inverse_correction1 = adam.bias_correction ? static_cast<float>(1.0 / (1.0 - power)) : 1.0f;
  step.weight_decay = static_cast<float>(adam.weight_decay);
  step.least_trust = options.least_trust;
  step.most_trust = options.most_trust;
  return step;
}

double LambTrust(const LambStep& step, const LambNorms& norms) {
  const double param = std::sqrt(norms.param.Value());
  const double update = std::sqrt(norms.update.Value());
  if (!std::isfinite(param) || !std::isfinite(update)) return std::numeric_limits<double>::quiet_NaN();
  if (param == 0.0 || update == 0.0) return 1.0;
  return std::clamp(param / update, step.least_trust, step.most_trust);
}

void LambMoments(const LambStep& step, const UpdateArrays& arrays, LambNorms* norms, SumOfSquares* squares,
                 ThreadPool* pool) {
  const KernelTable& kernels = Kernels();
  const size_t state = DirectState(arrays.state_type);
  const LambMomentsFn moments = kernels.lamb_moments[Index(arrays.grad_type)][state];
  const LambDirectionFn direction = kernels.lamb_direction[Index(arrays.param_type)][state];
  std::mutex mutex;
  RunPieces(arrays, squares, pool, [&](size_t piece_begin, size_t piece_end) {
    alignas(64) float u[kReduceBlock];
    alignas(64) float p[kReduceBlock];
    LambNorms sums;
    for (size_t begin = piece_begin; begin < piece_end; begin += kReduceBlock) {
      const size_t end = std::min(piece_end, begin + kReduceBlock);
      WithStates(arrays, begin, end, true, [&](const UpdateChunk& chunk) { moments(step, chunk); });
      // Once more over what was just stored: the second half of the step will see exactly these moments.
      size_t done = 0;
      WithStates(arrays, begin, end, false, [&](const UpdateChunk& chunk) {
        direction(step, chunk, u + done, p + done);
        done += chunk.n;
      });
      sums.update.Add(kernels.block_squares[0](u, end - begin));
      sums.param.Add(kernels.block_squares[0](p, end - begin));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    norms->param.Merge(sums.param);
    norms->update.Merge(sums.update);
  });
}

void LambApply(const LambStep& step, double trust, const UpdateArrays& arrays, ThreadPool* pool) {
  const LambApplyFn kernel = Kernels().lamb_apply[Index(arrays.param_type)][DirectState(arrays.state_type)];
  const float rate = static_cast<float>(static_cast<double>(step.adam.lr) * trust);
  ForPieces(arrays.n, pool, [&, kernel](size_t begin, size_t end) {
    WithStates(arrays, begin, end, false, [&](const UpdateChunk& chunk) { kernel(step, rate, chunk); });
    FenceStreams(arrays);
  });
}

}  // namespace penstock::kernels
