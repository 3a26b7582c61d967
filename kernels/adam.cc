#include "kernels/adam.h"

#include <cmath>

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {

AdamStep MakeAdamStep(const AdamOptions& options, int64_t update, double grad_scale) {
  const double t = static_cast<double>(update);
  const double correction1 = options.bias_correction ? 1.0 - std::pow(options.beta1, t) : 1.0;
  const double correction2 = options.bias_correction ? 1.0 - std::pow(options.beta2, t) : 1.0;
  const bool decoupled = options.mode == AdamMode::kAdamW;
  AdamStep step = {};
  step.mode = options.mode;
  step.grad_scale = static_cast<float>(grad_scale);
  step.beta1 = static_cast<float>(options.beta1);
  step.one_minus_beta1 = static_cast<float>(1.0 - options.beta1);
  step.beta2 = static_cast<float>(options.beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  step.eps = static_cast<float>(options.eps);
  step.decay = decoupled ? static_cast<float>(1.0 - options.lr * options.weight_decay) : 1.0f;
  step.weight_decay = decoupled ? 0.0f : static_cast<float>(options.weight_decay);
  step.step_size = static_cast<float>(options.lr / correction1);
  step.sqrt_correction2 = static_cast<float>(std::sqrt(correction2));
  step.lr = static_cast<float>(options.lr);
  return step;
}

namespace {

void Run(UpdateFn kernel, const AdamStep& step, const UpdateChunk& all, size_t param_width, size_t grad_width,
         ThreadPool* pool) {
  ForPieces(all.n, pool, [&, kernel](size_t begin, size_t end) {
    UpdateChunk chunk = all;
    chunk.n = end - begin;
    chunk.param = static_cast<unsigned char*>(all.param) + begin * param_width;
    if (all.master_low != nullptr) chunk.master_low = all.master_low + begin;
    chunk.grad = static_cast<const unsigned char*>(all.grad) + begin * grad_width;
    chunk.m = static_cast<float*>(all.m) + begin;
    chunk.v = static_cast<float*>(all.v) + begin;
    kernel(&step, chunk);
  });
}

UpdateFn AdamKernel(ParamType param, DType grad) {
  return Kernels().update[kOptAdam][static_cast<size_t>(param)][static_cast<size_t>(grad)][0];
}

}  // namespace

void AdamWSplit(const AdamStep& step, uint16_t* master_high, int16_t* master_low, float* m, float* v,
                const uint16_t* grad_bf16, size_t n, ThreadPool* pool) {
  const UpdateChunk all = {.n = n,
                           .param = master_high,
                           .master_low = master_low,
                           .copy_out = nullptr,
                           .copy_is_fp16 = false,
                           .stream_copy = false,
                           .grad = grad_bf16,
                           .m = m,
                           .v = v,
                           .from = {},
                           .stream_param = false,
                           .stream_states = false,
                           .first_element = 0,
                           .seed = 0,
                           .squares = nullptr};
  Run(AdamKernel(ParamType::kSplit, DType::kBf16), step, all, 2, 2, pool);
}

void AdamWFp32(const AdamStep& step, float* p, float* m, float* v, const float* grad, size_t n,
               ThreadPool* pool) {
  const UpdateChunk all = {.n = n,
                           .param = p,
                           .master_low = nullptr,
                           .copy_out = nullptr,
                           .copy_is_fp16 = false,
                           .stream_copy = false,
                           .grad = grad,
                           .m = m,
                           .v = v,
                           .from = {},
                           .stream_param = false,
                           .stream_states = false,
                           .first_element = 0,
                           .seed = 0,
                           .squares = nullptr};
  Run(AdamKernel(ParamType::kFp32, DType::kFp32), step, all, 4, 4, pool);
}

}  // namespace penstock::kernels
