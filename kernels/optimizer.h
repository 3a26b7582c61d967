// Optimizer updates of any supported combination of types in one pass over memory: gradient cast, unscaling
// and clip factor, update, rounding of parameter and states, 16-bit copy-out, and (where asked for) the
// gradient's sum of squares and finite check.
//
//   optimizer   AdamW, Adam (L2), Adagrad, Lion, SGD with momentum; LAMB in two calls (it needs two norms)
//   parameter   fp32, fp32 split into bf16 and remainder, or bf16 / fp16 alone (rounded at each update)
//   gradient    fp32, bf16, fp16
//   states      fp32, bf16, block-wise 8 bit (kernels/quantize.h)
//   copy-out    of fp32 parameters, to bf16 or fp16
//
// Common to all: arithmetic in fp32 on values converted exactly from what is stored; g = grad * grad_scale
// first; fma(a, b, c) = a*b + c rounded once; every other operation rounded once; the constants of a step
// computed in double and rounded to fp32 once. Results are the same to the bit for every SIMD level (NaN
// payloads apart), every thread count, and every cut of a run of elements into pieces: at any
// element with fp32 and bf16 states, at multiples of kStateBlock with 8-bit states, at multiples of
// kReduceBlock where statistics are taken.
//
// Functions allocate nothing, touch only the arrays given and are thread-safe. Any n, any alignment; arrays
// must not overlap. Non-finite gradients give non-finite results: check first, or keep the tile's old
// version.
#ifndef PENSTOCK_KERNELS_OPTIMIZER_H_
#define PENSTOCK_KERNELS_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>

#include "kernels/adam.h"
#include "kernels/float16.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"

namespace penstock::kernels {

class ThreadPool;

enum class ParamType : uint8_t {
  kFp32,   // `param` is float*
  kSplit,  // `param` is the bf16 part (uint16_t*), `master_low` the remainder: kernels/split_master.h
  kBf16,   // `param` is uint16_t*, no master: rounded to nearest even at each update
  kFp16,
};

enum class StateType : uint8_t {
  kFp32,
  // First moments (m) rounded to nearest even; second moments (v, Adagrad's sum) rounded stochastically,
  // because with beta2 = 0.999 a nearest bf16 would never decay.
  kBf16,
  // One byte an element and one fp32 scale for kStateBlock elements, both moments rounded stochastically.
  k8Bit,
};

// Bytes a state of n elements takes, without and with its scales.
constexpr size_t StateBytes(StateType type, size_t n) {
  return type == StateType::kFp32 ? 4 * n : type == StateType::kBf16 ? 2 * n : n;
}
constexpr size_t StateScales(StateType type, size_t n) {
  return type == StateType::k8Bit ? (n + kStateBlock - 1) / kStateBlock : 0;
}

// Where an update that is not in place reads the parameter and its states; these keep their values. As the
// members of UpdateArrays of the same names.
struct UpdateSource {
  const void* param = nullptr;
  const int16_t* master_low = nullptr;
  const void* m = nullptr;
  const void* v = nullptr;
  const float* m_scales = nullptr;
  const float* v_scales = nullptr;
};

// The arrays of one update: n elements of one parameter run (or of a tile of it). The caller owns everything.
struct UpdateArrays {
  size_t n = 0;

  ParamType param_type = ParamType::kFp32;
  void* param = nullptr;
  int16_t* master_low = nullptr;  // kSplit only

  // Where the new parameter goes as well, rounded to nearest even; null: nowhere. Only with ParamType::kFp32.
  uint16_t* copy_out = nullptr;
  DType copy_type = DType::kBf16;  // kBf16 or kFp16

  DType grad_type = DType::kFp32;
  const void* grad = nullptr;

  // States. Adam, LAMB: both. Lion, SGD: m alone (SGD without momentum: none). Adagrad: v alone. All-zero
  // bytes are the initial state in every type.
  StateType state_type = StateType::kFp32;
  void* m = nullptr;
  void* v = nullptr;
  float* m_scales = nullptr;  // k8Bit only: StateScales(type, n) of them
  float* v_scales = nullptr;

  // With `from.param` not null the update reads all values there, and what it writes here goes around the
  // caches where the alignment allows it (64 bytes): the same results, for the memory traffic of an update in
  // place. Not with LAMB.
  UpdateSource from;

  // What stochastic rounding draws from: the position of the first element in its run, so that the cut does
  // not matter, and a number that differs from update to update (the update count does).
  uint64_t first_element = 0;
  uint64_t seed = 0;
};

// AdamW and Adam: formulas in kernels/adam.h. `squares`, in this and all below: where not null, the squares
// of the gradient as stored (before grad_scale) are added to it in the same pass.
void ApplyUpdate(const AdamStep& step, const UpdateArrays& arrays, SumOfSquares* squares = nullptr,
                 ThreadPool* pool = nullptr);

// Adagrad, as torch::optim::Adagrad:
//   g = fma(p, wd, g);  v = fma(g, g, v);  p = p + (-clr * g) / (sqrt(v) + eps);  clr = lr / (1 + (t-1) *
//   lr_decay)
struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double eps = 1e-10;
  double weight_decay = 0.0;
};
struct AdagradStep {
  float grad_scale;
  float step_size;  // clr
  float eps;
  float weight_decay;
};
AdagradStep MakeAdagradStep(const AdagradOptions& options, int64_t update, double grad_scale = 1.0);
void ApplyUpdate(const AdagradStep& step, const UpdateArrays& arrays, SumOfSquares* squares = nullptr,
                 ThreadPool* pool = nullptr);

// Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2):
//   c = fma(g, 1 - beta1, m * beta1);  p = fma(-lr, sign(c), p * (1 - lr*wd));  m = fma(g, 1 - beta2, m *
//   beta2)
// sign(+-0) = 0; a NaN stays a NaN.
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
};
struct LionStep {
  float grad_scale;
  float lr;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float decay;  // 1 - lr * weight_decay
};
LionStep MakeLionStep(const LionOptions& options, double grad_scale = 1.0);
void ApplyUpdate(const LionStep& step, const UpdateArrays& arrays, SumOfSquares* squares = nullptr,
                 ThreadPool* pool = nullptr);

// SGD with momentum, as torch::optim::SGD:
//   g = fma(p, wd, g);  m = fma(g, 1 - dampening, m * momentum), in the first update m = g;
//   d = m, with Nesterov d = fma(m, momentum, g), without momentum d = g;  p = fma(d, -lr, p)
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;  // 0: no state
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};
struct SgdStep {
  float grad_scale;
  float lr;
  float momentum;
  float one_minus_dampening;  // 1 in the first update
  float weight_decay;
  bool nesterov;
};
SgdStep MakeSgdStep(const SgdOptions& options, int64_t update, double grad_scale = 1.0);
void ApplyUpdate(const SgdStep& step, const UpdateArrays& arrays, SumOfSquares* squares = nullptr,
                 ThreadPool* pool = nullptr);

// LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), with Adam's constants:
//   m, v as in Adam;  u = fma(p, wd, (m / (1 - beta1^t)) / (sqrt(v) / sqrt(1 - beta2^t) + eps))
//   p = fma(u, -(lr * trust), p),  trust = |p| / |u| clamped to [least_trust, most_trust], or 1 if either
//   norm is 0. A norm that is NaN makes it NaN, as in apex and DeepSpeed, whose comparisons all fail then; an
//   infinite one does so here too: a tensor that is lost must show it, not go on with a small step
// The norms are of a whole parameter tensor, so a step is two calls for each of its pieces: LambMoments
// updates m and v and adds the squares of p and u (computed from m and v as they are stored, after rounding)
// to the norms; LambApply computes u again from the stored m and v, and updates p.
struct LambOptions {
  AdamOptions adam;  // mode and weight decay: the decay is always part of u
  double least_trust = 0.01;
  double most_trust = 10.0;
  // DeepSpeed's FusedLamb: the bias correction is a factor of the rate, lr * sqrt(1 - beta2^t) / (1 -
  // beta1^t), and u is of the moments as they are. false: the paper's, as above.
  bool corrects_rate = false;
};
struct LambStep {
  AdamStep adam;
  float inverse_correction1;  // 1 / (1 - beta1^t)
  float weight_decay;
  double least_trust, most_trust;
};
struct LambNorms {
  SumOfSquares param;
  SumOfSquares update;
};
LambStep MakeLambStep(const LambOptions& options, int64_t update, double grad_scale = 1.0);
double LambTrust(const LambStep& step, const LambNorms& norms);
void LambMoments(const LambStep& step, const UpdateArrays& arrays, LambNorms* norms,
                 SumOfSquares* squares = nullptr, ThreadPool* pool = nullptr);
// Reads no gradient.
void LambApply(const LambStep& step, double trust, const UpdateArrays& arrays, ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_OPTIMIZER_H_
