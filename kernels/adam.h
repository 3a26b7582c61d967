// AdamW and Adam in one pass over memory, to the formulas and the order of operations of LibTorch 1.13's
// torch::optim::AdamW and torch::optim::Adam.
//
// Per element, every operation rounded to fp32 once, fma(a, b, c) = a*b + c with one rounding:
//   g = grad * grad_scale
//   AdamW:  p = p * (1 - lr*wd)              Adam (L2):  g = fma(p, wd, g)
//   m = fma(g, 1 - beta1, m * beta1)
//   v = fma(g * (1 - beta2), g, v * beta2)
//   d = sqrt(v) / sqrt(1 - beta2^t) + eps
//   p = p + (-(lr / (1 - beta1^t)) * m) / d
// The constants are computed in double and rounded to fp32 once. The portable, AVX2 and AVX-512 code give the
// same bits (NaN payloads apart), for every cut of a run and every thread count; they follow the
// order in which ATen's vector code works, so results equal LibTorch's bit for bit where ATen uses FMA
// (tests/kernels/torch_adam_test.cc).
//
// Functions are pure: they touch the arrays given and nothing else, allocate nothing, and are thread-safe.
// Any n, any alignment. The arrays of one call must not overlap. With non-finite gradients the arrays take
// the non-finite results; check first (kernels/reduce.h), or keep the old version of the tile. Other types of
// parameter, gradient and state, other optimizers, copy-out and statistics in the same pass:
// kernels/optimizer.h.
#ifndef PENSTOCK_KERNELS_ADAM_H_
#define PENSTOCK_KERNELS_ADAM_H_

#include <cstddef>
#include <cstdint>

namespace penstock::kernels {

class ThreadPool;

enum class AdamMode : uint8_t {
  kAdamW,  // decoupled weight decay
  kAdam,   // weight decay added to the gradient (L2)
};

// What a user sets; LibTorch's defaults but for weight_decay (AdamW there has 0.01, Adam 0).
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  AdamMode mode = AdamMode::kAdamW;
  bool bias_correction = true;  // false: both corrections are 1
};

// The constants of one update. Make it with MakeAdamStep, once per update of a parameter.
struct AdamStep {
  AdamMode mode;
  float grad_scale;  // multiplied into every gradient: 1 / loss scale x clip factor
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float decay;             // AdamW: 1 - lr * weight_decay; Adam: 1
  float weight_decay;      // Adam: weight_decay; AdamW: 0
  float step_size;         // lr / (1 - beta1^t)
  float sqrt_correction2;  // sqrt(1 - beta2^t)
  float lr;
};

// `update` is the number of updates that this parameter has had once this one is applied: 1 for the first.
AdamStep MakeAdamStep(const AdamOptions& options, int64_t update, double grad_scale = 1.0);

// bf16 parameters with split masters (kernels/split_master.h), fp32 moments, bf16 gradients.
// Moves 14 bytes in and 12 out per element.
void AdamWSplit(const AdamStep& step, uint16_t* master_high, int16_t* master_low, float* m, float* v,
                const uint16_t* grad_bf16, size_t n, ThreadPool* pool = nullptr);

// fp32 parameters, moments and gradients. 16 bytes in and 12 out per element.
void AdamWFp32(const AdamStep& step, float* p, float* m, float* v, const float* grad, size_t n,
               ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_ADAM_H_
