// A model as the engine sees it: blocks that are built one at a time, and stages that use them.
//
//   Model model;
//   const int embedding =
//       model.AddBlock("embedding", "embedding", [&] { return std::make_shared<Embedding>(config); });
//   model.AddStage("embed", embedding,
//                  [](torch::nn::Module& m, const torch::Tensor&, const TensorBatch& batch) {
//                    return m.as<Embedding>()->Embed(batch.inputs);
//                  });
//   for (int i = 0; i < layers; ++i) {
//     const std::string name = "layer." + std::to_string(i);
//     const int layer = model.AddBlock(name, "layer", [&] { return std::make_shared<Layer>(config); });
//     model.AddStage(name, layer, Apply<Layer>);
//   }
//   model.AddStage("loss", embedding, ...);   // the last stage returns the loss of its micro-batch, a scalar
//
// Any torch::nn::Module is a block as it is: no hooks, no rewriting. Its parameters exist only while it
// computes; they live in the store, in the order of named_parameters(). Backward recomputes a stage from its
// saved input, so a stage's function must give the same output for the same input, parameters and random seed
// (dropout does: the generator is seeded by step, micro-batch and stage), and must leave its input as it is.
// Buffers are not stored: they must be constants that the factory makes again. What breaks these rules where
// a block is measured is refused (kInvalidArgument) with the way out: an input changed in place, a buffer
// that changes (BatchNorm's statistics), two parameters in one memory. One tensor registered under two names
// of a block is one parameter, by its first name. Parameters with requires_grad = false are kept and never
// updated.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_MODEL_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_MODEL_H_

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "zero/compute/libtorch/tensors.h"

namespace penstock::zero {

using StageFunction = std::function<torch::Tensor(torch::nn::Module& module, const torch::Tensor& input,
                                                  const TensorBatch& batch)>;

// What a parameter begins with: numbers distributed uniformly within a bound above 0, or normally, or where
// the deviation is 0, the mean everywhere.
struct InitialValues {
  double mean = 0;
  double deviation = 0;
  double bound = 0;
};

struct BlockSpec {
  std::string name;
  // Blocks of one non-empty kind have the same parameter shapes and compute the same function of them: one of
  // them is measured for all, and one module object serves all.
  std::string kind;
  // Makes the module with its initial values, in fp32 on the CPU. Called with the generator seeded for this
  // block. The whole of it must fit into the budget at once, unless `initial` says what its values are.
  std::function<std::shared_ptr<torch::nn::Module>()> build;
  // What the parameters begin with, in the order of named_parameters(), each drawn after the one before;
  // empty: what `build` gives them. Where it is given, only their shapes count in what `build` makes
  // (zero/compute/libtorch/initial_values.h: WithoutMemory), and a block of any size begins in the memory of
  // a tile.
  std::vector<InitialValues> initial;
};

struct StageSpec {
  std::string name;
  int block = 0;
  StageFunction forward;
};

struct Model {
  nlohmann::json identity;  // what a resumed run must agree on: architecture and sizes
  std::vector<BlockSpec> blocks;
  std::vector<StageSpec> stages;

  int AddBlock(std::string name, std::string kind, std::function<std::shared_ptr<torch::nn::Module>()> build,
               std::vector<InitialValues> initial = {}) {
    blocks.push_back({std::move(name), std::move(kind), std::move(build), std::move(initial)});
    return static_cast<int>(blocks.size()) - 1;
  }
  void AddStage(std::string name, int block, StageFunction forward) {
    stages.push_back({std::move(name), block, std::move(forward)});
  }
};

// The stage function of a module whose forward takes and returns one tensor.
template <typename Module>
torch::Tensor Apply(torch::nn::Module& module, const torch::Tensor& input, const TensorBatch&) {
  return module.as<Module>()->forward(input);
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_MODEL_H_
