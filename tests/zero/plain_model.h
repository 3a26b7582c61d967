// A model whole in memory, with LibTorch's own autograd: what the engine is held against.
#ifndef PENSTOCK_TESTS_ZERO_PLAIN_MODEL_H_
#define PENSTOCK_TESTS_ZERO_PLAIN_MODEL_H_

#include <memory>
#include <vector>

#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "tests/zero/training.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/seed.h"

namespace penstock::zero::testing_support {

// Initialised as the engine initialises it.
struct PlainModel {
  Model model;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::vector<torch::Tensor> parameters;

  explicit PlainModel(const RunOptions& run) : model(models::MakeGpt(run.model)) {
    for (size_t b = 0; b < model.blocks.size(); ++b) {
      torch::manual_seed(MixSeed(run.seed, 0x696e6974, b));
      modules.push_back(BuildWhole(model.blocks[b]));
      for (torch::Tensor& parameter : modules.back()->parameters()) parameters.push_back(parameter);
    }
  }
  // Leaves the mean gradient, times `scale`, in the parameters; returns the mean loss.
  double Backward(const RunOptions& run, int64_t step, double scale) {
    for (torch::Tensor& parameter : parameters) parameter.mutable_grad() = torch::Tensor();
    double loss_sum = 0;
    for (int m = 0; m < run.micro_batches; ++m) {
      const TensorBatch batch = MakeBatch(run, step, m);
      torch::Tensor x = batch.inputs;
      for (size_t s = 0; s < model.stages.size(); ++s) {
        torch::manual_seed(MixSeed(run.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(m), s));
        const StageSpec& stage = model.stages[s];
        x = stage.forward(*modules[static_cast<size_t>(stage.block)], x, batch);
      }
      loss_sum += x.item<double>();
      (x * (scale / run.micro_batches)).backward();
    }
    return loss_sum / run.micro_batches;
  }
};

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_PLAIN_MODEL_H_
