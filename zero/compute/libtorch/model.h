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
//
// Buffers that training changes (BatchNorm's statistics) are found where a block is measured. Each block has
// its own; they are committed with the step and restored, and an evaluation reads them: one rank, and at most
// some MiB in all, since each commit has them whole. They keep their type and shape, and change in place. All
// other buffers are constants that the factory makes again.
//
// What breaks these rules where a block is measured is refused (kInvalidArgument) with the way out: an input
// changed in place, two parameters in one memory. One tensor registered under two names of a block is one
// parameter, by its first name. Parameters with requires_grad = false are kept and never updated.
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

using Values = std::vector<torch::Tensor>;
using NamedLosses = std::vector<std::pair<std::string, torch::Tensor>>;

// One computation of a stage, as a function of lists sees it.
class StageCall {
 public:
  // Of the stage's blocks in their order; all of it outlives the call.
  StageCall(std::vector<torch::nn::Module*> modules, const TensorBatch& batch)
      : modules_(std::move(modules)), batch_(batch) {}

  // Of the stage's first block, or of another one.
  template <typename Module>
  Module& module(size_t block = 0) const {
    TORCH_CHECK(block < modules_.size(), "the stage has ", modules_.size(), " blocks, none of number ",
                block);
    auto* const module = modules_[block]->as<Module>();
    TORCH_CHECK(module != nullptr, "the stage's block ", block,
                " is of another class than its function takes");
    return *module;
  }
  torch::nn::Module& any_module() const { return *modules_.front(); }
  const TensorBatch& batch() const { return batch_; }
  // Adds a scalar to the loss of the micro-batch, with its gradient: a router's balance, a head in the
  // middle. StepResult::loss has it; LibTorchCompute::InnerLosses shows it apart.
  void AddLoss(std::string name, torch::Tensor loss) {
    TORCH_CHECK(loss.defined() && loss.dim() == 0, "the inner loss ", name, " must be a scalar");
    losses_.emplace_back(std::move(name), std::move(loss));
  }
  const NamedLosses& losses() const { return losses_; }

 private:
  const std::vector<torch::nn::Module*> modules_;
  const TensorBatch& batch_;
  NamedLosses losses_;
};

// A stage that takes what the stage before it returns, as a list, and returns such a list. Of the first stage
// the inputs are the batch's `inputs` where it has any; of the last one the first value is the loss. A value
// may be one of the inputs, untouched, for a later stage: it is kept once, and goes to the drive with each
// stage that keeps it. Integers, and what no trained parameter leads to, have no gradient.
using ValuesFunction = std::function<Values(StageCall& call, const Values& inputs)>;

// What a parameter begins with: numbers distributed uniformly within a bound above 0, or normally, or where
// the deviation is 0, the mean everywhere.
struct InitialValues {
  double mean = 0;
  double deviation = 0;
  double bound = 0;
};

struct BlockSpec {
  std::string name;
  // Blocks of one non-empty kind have the same parameter shapes, and their stages take as much time and
  // memory: one of them is measured for all. One module object serves all, unless `own_module`.
  std::string kind;
  // Makes the module with its initial values, in fp32 on the CPU. Called with the generator seeded for this
  // block. The whole of it must fit into the budget at once, unless `initial` says what its values are.
  std::function<std::shared_ptr<torch::nn::Module>()> build;
  // What the parameters begin with, in the order of named_parameters(), each drawn after the one before;
  // empty: what `build` gives them. Where it is given, only their shapes count in what `build` makes
  // (zero/compute/libtorch/initial_values.h: WithoutMemory), and a block of any size begins in the memory of
  // a tile.
  std::vector<InitialValues> initial;
  // Its module differs from the others of its kind in what is no parameter: a number of its layer, a constant
  // buffer, the width of a window.
  bool own_module = false;
};

struct StageSpec {
  std::string name;
  int block = 0;
  StageFunction forward;   // of one tensor
  ValuesFunction compute;  // of lists, in its place
  // Further blocks that it computes with (StageCall::module(1), ...): a small one beside a large one, one
  // that stages share. The engine uses one block at a time, so each of them is a stage of the engine's before
  // and after this one (EnginePlan::graph, Engine::SetOrder), and while this one computes there is a copy of
  // its weights. Its gradient is that of any other block.
  std::vector<int> more_blocks;
};

struct Model {
  nlohmann::json identity;  // what a resumed run must agree on: architecture and sizes
  std::vector<BlockSpec> blocks;
  std::vector<StageSpec> stages;

  int AddBlock(std::string name, std::string kind, std::function<std::shared_ptr<torch::nn::Module>()> build,
               std::vector<InitialValues> initial = {}) {
    blocks.push_back(
        {std::move(name), std::move(kind), std::move(build), std::move(initial), /*own_module=*/false});
    return static_cast<int>(blocks.size()) - 1;
  }
  void AddStage(std::string name, int block, StageFunction forward) {
    stages.push_back({std::move(name), block, std::move(forward), nullptr, {}});
  }
  void AddStage(std::string name, int block, ValuesFunction compute) {
    stages.push_back({std::move(name), block, nullptr, std::move(compute), {}});
  }
  // With several blocks, of which the first should be the largest.
  void AddStage(std::string name, const std::vector<int>& all_blocks, ValuesFunction compute) {
    TORCH_CHECK(!all_blocks.empty(), "stage ", name, " has no block");
    AddStage(std::move(name), all_blocks.front(), std::move(compute));
    stages.back().more_blocks.assign(all_blocks.begin() + 1, all_blocks.end());
  }
};

// The stage function of a module whose forward takes and returns one tensor.
template <typename Module>
torch::Tensor Apply(torch::nn::Module& module, const torch::Tensor& input, const TensorBatch&) {
  return module.as<Module>()->forward(input);
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_MODEL_H_
