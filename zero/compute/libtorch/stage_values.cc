#include "zero/compute/libtorch/stage_values.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

namespace penstock::zero {
namespace {

bool IsOneOf(const Values& inputs, const torch::Tensor& tensor) {
  return std::any_of(inputs.begin(), inputs.end(), [&](const torch::Tensor& input) {
    return input.data_ptr() == tensor.data_ptr() && input.sizes() == tensor.sizes() &&
           input.scalar_type() == tensor.scalar_type();
  });
}

bool IsLent(const std::vector<BlockModule*>& blocks, const torch::Tensor& tensor) {
  const auto shares = [&](const torch::Tensor& lent) { return tensor.is_alias_of(lent); };
  return std::any_of(blocks.begin(), blocks.end(), [&](const BlockModule* block) {
    return std::any_of(block->parameters().begin(), block->parameters().end(), shares) ||
           std::any_of(block->buffers().begin(), block->buffers().end(), shares);
  });
}

}  // namespace

Values InputsOf(const TensorBatch& batch) { return batch.inputs.defined() ? Values{batch.inputs} : Values(); }

Values ComputeStage(const StageSpec& stage, StageCall& call, const Values& inputs) {
  Values outputs;
  if (stage.compute) {
    outputs = stage.compute(call, inputs);
  } else {
    TORCH_CHECK(inputs.size() <= 1, "it takes one tensor, and is given ", inputs.size(),
                ": a function of lists (ValuesFunction) takes them all");
    outputs = {
        stage.forward(call.any_module(), inputs.empty() ? torch::Tensor() : inputs.front(), call.batch())};
  }
  for (size_t i = 0; i < outputs.size(); ++i)
    TORCH_CHECK(outputs[i].defined(), "value ", i, " of what it returned is undefined");
  return outputs;
}

Values KeptValues(const Values& outputs, const Values& inputs, const std::vector<BlockModule*>& blocks) {
  Values kept;
  for (const torch::Tensor& output : outputs) {
    torch::Tensor value = output.detach().contiguous();
    const bool of_its_own = value.storage().nbytes() <= value.nbytes() && !IsLent(blocks, value);
    if (!of_its_own && !IsOneOf(inputs, value)) value = value.clone();
    kept.push_back(std::move(value));
  }
  return kept;
}

Values LeavesOf(const Values& inputs, const Flows& flows) {
  Values leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].detach());
    if (flows[i] != 0) leaves.back().set_requires_grad(true);
  }
  return leaves;
}

void BackwardRoots::Add(const torch::Tensor& value, torch::Tensor gradient) {
  if (!value.requires_grad() || !gradient.defined()) return;
  values.push_back(value);
  gradients.push_back(std::move(gradient));
}

void BackwardRoots::Add(const NamedLosses& losses, double loss_gradient) {
  for (const auto& [name, loss] : losses) Add(loss, torch::full_like(loss, loss_gradient));
}

void BackwardRoots::Run() const {
  if (!values.empty()) torch::autograd::backward(values, gradients);
}

const torch::Tensor& LossOf(const Values& outputs) {
  TORCH_CHECK(!outputs.empty(), "the last stage must return the loss, and returned nothing");
  TORCH_CHECK(outputs.front().dim() == 0, "the last stage must return a scalar loss, not ",
              outputs.front().sizes());
  return outputs.front();
}

}  // namespace penstock::zero
