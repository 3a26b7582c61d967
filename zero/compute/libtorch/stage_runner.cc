#include "zero/compute/libtorch/stage_runner.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "kernels/float16.h"
#include "zero/compute/seed.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {

StageRunner::StageRunner(const Model& model, std::vector<BlockModule*> modules, kernels::DType weights,
                         uint64_t seed, Device& device, int rank, int world)
    : model_(model),
      modules_(std::move(modules)),
      weights_(weights),
      seed_(seed),
      device_(device),
      rank_(rank),
      world_(world),
      inputs_(model.stages.size()),
      addends_(model.blocks.size(), 0) {}

absl::Status StageRunner::Begin(int64_t step, std::vector<Batch> batches, double loss_scale) {
  step_ = step;
  loss_scale_ = loss_scale;
  batches_ = std::move(batches);
  absl::Status status = Guarded("batches", [&] {
    for (Batch& batch : batches_) {
      batch = {device_.ToDevice(batch.inputs), device_.ToDevice(batch.targets)};
    }
  });
  for (auto& inputs : inputs_) inputs.assign(batches_.size(), torch::Tensor());
  flowing_.assign(batches_.size(), torch::Tensor());
  outputs_.assign(batches_.size(), torch::Tensor());
  losses_.assign(batches_.size(), torch::Tensor());
  for (size_t m = 0; m < batches_.size(); ++m) inputs_[0][m] = batches_[m].inputs;
  return status;
}

void StageRunner::SeedFor(int stage, int micro_batch) const {
  const uint64_t seed =
      MixSeed(seed_, static_cast<uint64_t>(step_), static_cast<uint64_t>(micro_batch * world_ + rank_),
              static_cast<uint64_t>(stage));
  device_.Seed(seed);
}

absl::Status StageRunner::Forward(int stage, int position, int micro_batch, bool evaluates, void* run) {
  const StageSpec& spec = model_.stages[At(stage)];
  BlockModule& block = *modules_[At(spec.block)];
  return Guarded(absl::StrCat("forward of ", spec.name), [&] {
    torch::NoGradGuard no_grad;
    block.Attach(run, weights_, device_);
    block.module().train(!evaluates);
    SeedFor(stage, micro_batch);
    torch::Tensor& input = inputs_[At(position)][At(micro_batch)];
    // In one piece: it may have to be copied as it is, and comes back so, and everywhere the next stage is to
    // compute with the same.
    torch::Tensor output =
        spec.forward(block.module(), input, batches_[At(micro_batch)]).detach().contiguous();
    block.Detach();
    if (evaluates) input = torch::Tensor();
    if (position + 1 < static_cast<int>(model_.stages.size())) {
      inputs_[At(position + 1)][At(micro_batch)] = std::move(output);
    } else {
      if (output.dim() == 0) losses_[At(micro_batch)] = output;
      outputs_[At(micro_batch)] = std::move(output);
    }
  });
}

absl::Status StageRunner::Backward(int stage, int position, int micro_batch, void* run) {
  const StageSpec& spec = model_.stages[At(stage)];
  BlockModule& block = *modules_[At(spec.block)];
  return Guarded(absl::StrCat("backward of ", spec.name), [&] {
    const bool last = position + 1 == static_cast<int>(model_.stages.size());
    block.Attach(run, weights_, device_);
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
        losses_[At(micro_batch)] = output.detach();  // fetched when the pass is over: nobody waits for it
        // The step's loss is the mean over its micro-batches, of all ranks.
        const size_t all = batches_.size() * At(world_);
        from_above = torch::full_like(output, loss_scale_ / static_cast<double>(all));
      }
      if (output.requires_grad() && from_above.defined()) output.backward(from_above);
      if (flows_on) flowing_[At(micro_batch)] = input.grad();
    }
    if (!block.layout().Trains()) block.Detach();  // else TakeGradient does
  });
}

absl::Status StageRunner::TakeGradient(int stage, const GradientPlace& place) {
  const StageSpec& spec = model_.stages[At(stage)];
  return Guarded(absl::StrCat("gradient of ", spec.name), [&] {
    AddGradient(spec.block, place);
    modules_[At(spec.block)]->Detach();
  });
}

absl::Status StageRunner::RoundGradient(int block, const float* sums, void* gradient) {
  return Guarded(absl::StrCat("gradient of ", model_.blocks[At(block)].name), [&] {
    const auto n = static_cast<size_t>(modules_[At(block)]->layout().elements);
    device_.Convert(kernels::DType::kFp32, sums, weights_, gradient, n);
    Taken(block);
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
  const FlatLayout& layout = module.layout();
  const bool first = addends_[At(block)]++ == 0;
  const torch::Dtype computes = device_.compute_dtype(weights_);
  const DType addends = computes == torch::kFloat32 ? DType::kFp32 : weights_;  // of what backward leaves
  const DType waits = place.accumulator != nullptr ? DType::kFp32 : weights_;   // of what it goes to
  TORCH_CHECK(first || waits == DType::kFp32,
              "a second addend for a gradient that has no place to be summed");
  const size_t width = kernels::BytesPerElement(waits);
  char* to = place.accumulator != nullptr ? reinterpret_cast<char*>(place.accumulator)
                                          : static_cast<char*>(place.gradient);
  int64_t filled = 0;
  auto zero_to = [&](int64_t element) {
    if (element > filled) {
      device_.Zero(to + static_cast<size_t>(filled) * width, static_cast<size_t>(element - filled) * width);
    }
  };
  for (size_t i = 0; i < layout.parameters.size(); ++i) {
    const Parameter& parameter = layout.parameters[i];
    const torch::Tensor gradient = module.Gradient(i);
    if (!gradient.defined()) continue;  // zero_to covers it on the first addend
    TORCH_CHECK(gradient.scalar_type() == computes && gradient.numel() == parameter.elements, "gradient of ",
                parameter.name, " has type ", gradient.scalar_type(), " and ", gradient.numel(), " elements");
    if (first) zero_to(parameter.offset);
    char* place_of_parameter = to + static_cast<size_t>(parameter.offset) * width;
    const auto n = static_cast<size_t>(parameter.elements);
    if (first) {
      device_.Convert(addends, gradient.data_ptr(), waits, place_of_parameter, n);
      filled = parameter.offset + parameter.elements;
    } else {
      device_.Accumulate(addends, gradient.data_ptr(), reinterpret_cast<float*>(place_of_parameter), n);
    }
  }
  if (first) zero_to(layout.elements);
}

std::vector<double> StageRunner::losses() const {
  std::vector<double> losses;
  for (const torch::Tensor& loss : losses_) losses.push_back(loss.defined() ? loss.item<double>() : 0);
  return losses;
}

absl::StatusOr<std::vector<torch::Tensor>> StageRunner::Outputs() const {
  std::vector<torch::Tensor> outputs;
  absl::Status status = Guarded("outputs", [&] {
    for (const torch::Tensor& output : outputs_) outputs.push_back(device_.ToHost(output));
  });
  if (!status.ok()) return status;
  return outputs;
}

}  // namespace penstock::zero
