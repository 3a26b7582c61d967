// What goes from stage to stage of a model of torch::nn::Modules. Everything here throws as LibTorch does.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_VALUES_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_VALUES_H_

#include <cstdint>
#include <vector>

#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

// Of each value: whether backward hands a gradient of it to the stage below.
using Flows = std::vector<char>;

// What the first stage takes.
Values InputsOf(const TensorBatch& batch);

// The stage's function on its inputs, whichever of the two it has.
Values ComputeStage(const StageSpec& stage, StageCall& call, const Values& inputs);

// As they are kept for the next stage: without a graph, each in one piece, since it may have to be copied as
// it is, and in memory of its own: a parameter's or a buffer's is only lent to the block. One of `inputs`
// stays it.
Values KeptValues(const Values& outputs, const Values& inputs, const std::vector<BlockModule*>& blocks);

// The inputs as backward computes with them: `flows` says which want a gradient.
Values LeavesOf(const Values& inputs, const Flows& flows);

// Where backward starts.
struct BackwardRoots {
  std::vector<torch::Tensor> values, gradients;
  void Add(const torch::Tensor& value, torch::Tensor gradient);  // nothing where no gradient leads anywhere
  void Add(const NamedLosses& losses, double loss_gradient);
  void Run() const;
};

// `output` as the loss of its micro-batch.
const torch::Tensor& LossOf(const Values& outputs);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_VALUES_H_
