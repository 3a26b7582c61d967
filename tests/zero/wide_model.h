// A model that takes what torch::nn models take: batches of named tensors, lists from stage to stage, a value
// that all layers use, losses of layers. Whole in memory too, with LibTorch's own autograd over all of it.
#ifndef PENSTOCK_TESTS_ZERO_WIDE_MODEL_H_
#define PENSTOCK_TESTS_ZERO_WIDE_MODEL_H_

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/libtorch/model.h"
#include "zero/compute/libtorch/stage_values.h"
#include "zero/compute/seed.h"

namespace penstock::zero::testing_support {

struct WideShape {
  int64_t layers = 3, width = 32, words = 64, rows = 4, length = 8;
  bool inner_losses = false;
  bool statistics = false;  // layers keep some
};

struct WideEmbeddingImpl : torch::nn::Module {
  explicit WideEmbeddingImpl(const WideShape& shape) {
    words = register_module("words", torch::nn::Embedding(shape.words, shape.width));
    places = register_parameter("places", torch::randn({shape.length, shape.width}));
  }
  torch::nn::Embedding words{nullptr};
  torch::Tensor places;
};

// Two experts, and a router that says how much of each.
struct WideLayerImpl : torch::nn::Module {
  explicit WideLayerImpl(const WideShape& shape) {
    const auto linear = [&] { return torch::nn::Linear(shape.width, shape.width); };
    first = register_module("first", linear());
    second = register_module("second", linear());
    router = register_module("router", torch::nn::Linear(shape.width, 2));
    if (!shape.statistics) return;
    norm = register_module("norm", torch::nn::BatchNorm1d(shape.width));
    average = register_buffer("average", torch::randn({shape.width}));
    constant = register_buffer("constant", torch::full({shape.width}, 0.5));
  }
  // Computes with the average so far, which the next one changes.
  torch::Tensor Normed(const torch::Tensor& x) {
    const torch::Tensor before = average.clone();
    if (is_training()) {
      torch::NoGradGuard no_grad;
      average.mul_(0.9).add_(x.flatten(0, 1).mean(0), 0.1);
    }
    return norm(x.flatten(0, 1)).view(x.sizes()) + constant * before;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, router{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor average, constant;
};

// Takes and returns {what was computed so far, the places that every layer adds, which words count}.
inline Values WideLayer(StageCall& call, const Values& inputs, bool inner_loss) {
  auto& layer = call.module<WideLayerImpl>();
  torch::Tensor x = (inputs[0] + inputs[1]) * inputs[2].unsqueeze(-1);
  if (layer.average.defined()) x = layer.Normed(x);
  const torch::Tensor share = torch::softmax(layer.router(x), -1);
  if (inner_loss) {
    call.AddLoss("balance", 0.1 * share.flatten(0, 1).mean(0).square().sum());
    call.AddLoss("size", 0.01 * x.square().mean());
  }
  const torch::Tensor mixed = share.select(-1, 0).unsqueeze(-1) * torch::gelu(layer.first(x)) +
                              share.select(-1, 1).unsqueeze(-1) * torch::tanh(layer.second(x));
  return {inputs[0] + torch::dropout(mixed, 0.1, layer.is_training()), inputs[1], inputs[2]};
}

inline Model MakeWideModel(const WideShape& shape) {
  Model model;
  model.identity = {{"model", "wide"}, {"layers", shape.layers}, {"width", shape.width}};
  const int embedding = model.AddBlock("embedding", "embedding",
                                       [shape] { return std::make_shared<WideEmbeddingImpl>(shape); });
  model.AddStage("embed", embedding, [](StageCall& call, const Values&) -> Values {
    auto& module = call.module<WideEmbeddingImpl>();
    return {module.words(call.batch()["input_ids"]), module.places, call.batch()["attention_mask"]};
  });
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    const int layer =
        model.AddBlock(name, "layer", [shape] { return std::make_shared<WideLayerImpl>(shape); });
    model.AddStage(name, layer, [loss = shape.inner_losses](StageCall& call, const Values& inputs) {
      return WideLayer(call, inputs, loss);
    });
  }
  const int head = model.AddBlock(
      "head", "head", [shape] { return std::make_shared<torch::nn::LinearImpl>(shape.width, shape.words); });
  model.AddStage("loss", head, [](StageCall& call, const Values& inputs) -> Values {
    const torch::Tensor logits = call.module<torch::nn::LinearImpl>().forward(inputs[0] + inputs[1]);
    return {torch::cross_entropy_loss(logits.flatten(0, 1), call.batch()["labels"].flatten())};
  });
  return model;
}

inline TensorBatch MakeWideBatch(const WideShape& shape, int64_t step, int micro_batch) {
  torch::manual_seed(MixSeed(11, static_cast<uint64_t>(step), static_cast<uint64_t>(micro_batch)));
  const std::vector<int64_t> sizes = {shape.rows, shape.length};
  TensorBatch batch;
  const torch::Tensor ids = torch::randint(shape.words, sizes, torch::kInt64);
  torch::Tensor mask = torch::ones(sizes, torch::kInt32);
  mask.narrow(1, shape.length - 2, 2).bernoulli_(0.5);
  batch.named = {{"input_ids", ids}, {"attention_mask", mask}, {"labels", (ids * 5 + 3) % shape.words}};
  return batch;
}

// Any model of such stages in one piece, initialised as the engine initialises it.
struct WholeModel {
  Model model;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::map<std::string, double> inner_losses;  // of the last Backward
  // The engine's numbers of the stages, by which they draw; empty: those of the model.
  std::vector<uint64_t> seed_stages;

  WholeModel(Model made, uint64_t seed) : model(std::move(made)) {
    for (size_t b = 0; b < model.blocks.size(); ++b) {
      torch::manual_seed(MixSeed(seed, 0x696e6974, b));
      modules.push_back(BuildWhole(model.blocks[b]));
    }
  }
  std::vector<torch::nn::Module*> ModulesOf(const StageSpec& stage) const {
    std::vector<torch::nn::Module*> of = {modules[static_cast<size_t>(stage.block)].get()};
    for (const int block : stage.more_blocks) of.push_back(modules[static_cast<size_t>(block)].get());
    return of;
  }
  // The loss of one micro-batch, of which all losses are part.
  torch::Tensor Loss(const TensorBatch& batch, uint64_t seed, int64_t step, int micro_batch, double* loss) {
    Values values = InputsOf(batch);
    NamedLosses inner;
    for (size_t s = 0; s < model.stages.size(); ++s) {
      const uint64_t number = seed_stages.empty() ? s : seed_stages[s];
      torch::manual_seed(
          MixSeed(seed, static_cast<uint64_t>(step), static_cast<uint64_t>(micro_batch), number));
      StageCall call(ModulesOf(model.stages[s]), batch);
      values = ComputeStage(model.stages[s], call, values);
      inner.insert(inner.end(), call.losses().begin(), call.losses().end());
    }
    torch::Tensor sum = LossOf(values);
    *loss = sum.item<double>();
    for (const auto& [name, value] : inner) {
      sum = sum + value;
      *loss += value.item<double>();
      inner_losses[name] += value.item<double>();
    }
    return sum;
  }
  // Leaves the mean gradient in the parameters; returns the mean loss.
  double Backward(const std::vector<TensorBatch>& batches, uint64_t seed, int64_t step) {
    const auto count = static_cast<double>(batches.size());
    inner_losses.clear();
    double mean = 0;
    for (auto& module : modules) module->zero_grad();
    for (size_t m = 0; m < batches.size(); ++m) {
      double loss = 0;
      (Loss(batches[m], seed, step, static_cast<int>(m), &loss) * (1 / count)).backward();
      mean += loss;
    }
    for (auto& [name, loss] : inner_losses) loss /= count;
    return mean / count;
  }
};

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_WIDE_MODEL_H_
