#include "zero/stage_runner.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/float16.h"
#include "zero/guarded.h"

namespace penstock::zero {
namespace {

size_t At(int index) { return static_cast<size_t>(index); }

}  // namespace

uint64_t MixSeed(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  // splitmix64's finalizer over each number in turn.
  uint64_t mixed = seed;
  for (const uint64_t value : {a, b, c}) {
    mixed += 0x9e3779b97f4a7c15 + value;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

StageRunner::StageRunner(const Model& model, std::vector<BlockModule*> modules, kernels::DType weights,
                         uint64_t seed)
    : model_(model),
      modules_(std::move(modules)),
      weights_(weights),
      seed_(seed),
      inputs_(model.stages.size()),
      addends_(model.blocks.size(), 0) {}

void StageRunner::Begin(int64_t step, std::vector<Batch> batches, double loss_scale) {
  step_ = step;
  loss_scale_ = loss_scale;
  batches_ = std::move(batches);
  for (auto& inputs : inputs_) inputs.assign(batches_.size(), torch::Tensor());
  flowing_.assign(batches_.size(), torch::Tensor());
  outputs_.assign(batches_.size(), torch::Tensor());
  losses_.assign(batches_.size(), 0);
  for (size_t m = 0; m < batches_.size(); ++m) inputs_[0][m] = batches_[m].inputs;
}

void StageRunner::SeedFor(int stage, int micro_batch) const {
  const uint64_t seed = MixSeed(seed_, static_cast<uint64_t>(step_), static_cast<uint64_t>(micro_batch),
                                static_cast<uint64_t>(stage));
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

absl::Status StageRunner::Forward(int stage, int position, int micro_batch, bool evaluates, void* run) {
  const StageSpec& spec = model_.stages[At(stage)];
  BlockModule& block = *modules_[At(spec.block)];
  return Guarded(absl::StrCat("forward of ", spec.name), [&] {
    torch::NoGradGuard no_grad;
    block.Attach(run, weights_);
    block.module().train(!evaluates);
    SeedFor(stage, micro_batch);
    torch::Tensor& input = inputs_[At(position)][At(micro_batch)];
    torch::Tensor output = spec.forward(block.module(), input, batches_[At(micro_batch)]).detach();
    block.Detach();
    if (evaluates) input = torch::Tensor();
    if (position + 1 < static_cast<int>(model_.stages.size())) {
      inputs_[At(position + 1)][At(micro_batch)] = std::move(output);
    } else {
      if (output.dim() == 0) losses_[At(micro_batch)] = output.item<double>();
      outputs_[At(micro_batch)] = std::move(output);
    }
  });
}

absl::Status StageRunner::Backward(int stage, int position, int micro_batch, void* run) {
  const StageSpec& spec = model_.stages[At(stage)];
  BlockModule& block = *modules_[At(spec.block)];
  return Guarded(absl::StrCat("backward of ", spec.name), [&] {
    const bool last = position + 1 == static_cast<int>(model_.stages.size());
    block.Attach(run, weights_);
    block.module().train();
    SeedFor(stage, micro_batch);
    {
      torch::AutoGradMode grad(true);
      torch::Tensor input = inputs_[At(position)][At(micro_batch)].detach();
      inputs_[At(position)][At(micro_batch)] = torch::Tensor();
      const bool flows_on = position > 0 && torch::isFloatingType(input.scalar_type());
      if (flows_on) input.set_requires_grad(true);
      torch::Tensor output = spec.forward(block.module(), input, batches_[At(micro_batch)]);
      torch::Tensor from_above = std::move(flowing_[At(micro_batch)]);
      flowing_[At(micro_batch)] = torch::Tensor();
      if (last) {
        TORCH_CHECK(output.dim() == 0, "the last stage must return a scalar loss, not ", output.sizes());
        losses_[At(micro_batch)] = output.item<double>();
        // The step's loss is the mean over its micro-batches.
        from_above = torch::full_like(output, loss_scale_ / static_cast<double>(batches_.size()));
      }
      if (output.requires_grad() && from_above.defined()) output.backward(from_above);
      if (flows_on) flowing_[At(micro_batch)] = input.grad();
    }
  });
}

absl::Status StageRunner::TakeGradient(int stage, const GradientPlace& place) {
  const StageSpec& spec = model_.stages[At(stage)];
  return Guarded(absl::StrCat("gradient of ", spec.name), [&] {
    AddGradient(spec.block, place);
    modules_[At(spec.block)]->Detach();
  });
}

torch::Tensor StageRunner::TakeInput(int position, int micro_batch) {
  return std::exchange(inputs_[At(position)][At(micro_batch)], torch::Tensor());
}

void StageRunner::PutInput(int position, int micro_batch, torch::Tensor input) {
  inputs_[At(position)][At(micro_batch)] = std::move(input);
}

void StageRunner::AddGradient(int block, const GradientPlace& place) {
  using kernels::DType;
  BlockModule& module = *modules_[At(block)];
  const RunLayout& layout = module.layout();
  const bool first = addends_[At(block)]++ == 0;
  const DType addends = weights_ == DType::kBf16 ? DType::kBf16 : DType::kFp32;  // of what backward leaves
  const DType waits = place.accumulator != nullptr ? DType::kFp32 : weights_;    // of what it goes to
  TORCH_CHECK(first || waits == DType::kFp32,
              "a second addend for a gradient that has no place to be summed");
  const size_t width = kernels::BytesPerElement(waits);
  char* to = place.accumulator != nullptr ? reinterpret_cast<char*>(place.accumulator)
                                          : static_cast<char*>(place.gradient);
  int64_t filled = 0;
  auto zero_to = [&](int64_t element) {
    std::memset(to + static_cast<size_t>(filled) * width, 0, static_cast<size_t>(element - filled) * width);
  };
  for (size_t i = 0; i < layout.parameters.size(); ++i) {
    const Parameter& parameter = layout.parameters[i];
    const torch::Tensor gradient = module.Gradient(i);
    if (!gradient.defined()) continue;  // zero_to covers it on the first addend
    TORCH_CHECK(gradient.scalar_type() == ComputeDtype(weights_) && gradient.numel() == parameter.elements,
                "gradient of ", parameter.name, " has type ", gradient.scalar_type(), " and ",
                gradient.numel(), " elements");
    if (first) zero_to(parameter.offset);
    char* place_of_parameter = to + static_cast<size_t>(parameter.offset) * width;
    const auto n = static_cast<size_t>(parameter.elements);
    if (first) {
      kernels::Convert(addends, gradient.data_ptr(), waits, place_of_parameter, n);
      filled = parameter.offset + parameter.elements;
    } else if (addends == DType::kFp32) {
      kernels::AccumulateFp32(gradient.data_ptr<float>(), reinterpret_cast<float*>(place_of_parameter), n);
    } else {
      kernels::AccumulateBf16(reinterpret_cast<const uint16_t*>(gradient.data_ptr()),
                              reinterpret_cast<float*>(place_of_parameter), n);
    }
  }
  if (first) zero_to(layout.elements);
}

double StageRunner::MeanLoss() const {
  return std::accumulate(losses_.begin(), losses_.end(), 0.0) / static_cast<double>(losses_.size());
}

}  // namespace penstock::zero
