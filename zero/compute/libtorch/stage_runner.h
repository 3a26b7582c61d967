// Computes stages over LibTorch modules: forward without a graph, backward by recomputing from the saved
// input.
//
// A step keeps one tensor per stage and micro-batch, the stage's input. Backward walks the stages in reverse:
// attach the block's parameters, recompute with autograd, run backward from the gradient that came from
// above, hand the gradient of the input further down. The bits are those of plain autograd over the whole
// model, in the same order of micro-batches.
//
// All of it on one thread (LibTorch's intra-op threads beside it). Gradients leave as they are summed:
// straight to their place where there is one addend, else into fp32 sums that are rounded once
// (kernels/float16.h).
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_RUNNER_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_RUNNER_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/device.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

// Where a backward pass leaves a block's gradient. Exactly one is set.
struct GradientPlace {
  void* gradient = nullptr;      // the run's elements in the type of the weights: one addend, or fp32 sums
  float* accumulator = nullptr;  // the run's elements in fp32
};

class StageRunner {
 public:
  // `modules[b]` serves block b (blocks of one kind share one). `model`, the modules and the device outlive
  // the runner. Micro-batch m of `rank` is one of all that the `world` ranks have together, number m * world
  // + rank: its loss counts as one of so many, and its seeds are those of that number.
  StageRunner(const Model& model, std::vector<BlockModule*> modules, kernels::DType weights, uint64_t seed,
              Device& device = *HostDevice(), int rank = 0, int world = 1);

  // The micro-batches of the next pass, from host memory. `step` seeds the generators; backward starts from
  // the loss times `loss_scale`. Not while a pass computes.
  absl::Status Begin(int64_t step, std::vector<Batch> batches, double loss_scale = 1);

  // One stage of one micro-batch with the block's weights at `run`, in the device's memory as all that
  // follow. `position` is the stage's place in the order of the pass, by default its own number.
  absl::Status Forward(int stage, int position, int micro_batch, bool evaluates, void* run);
  absl::Status Backward(int stage, int position, int micro_batch, void* run);
  // Moves the gradient of the backward just made, or adds it, to its place; nothing computes in between.
  absl::Status TakeGradient(int stage, const GradientPlace& place);
  // Rounds a block's sums, on the device, to the type of the weights; the next backward starts new ones.
  absl::Status RoundGradient(int block, const float* sums, void* gradient);
  // The input kept at a position leaves memory, or is back. Not while that position computes.
  torch::Tensor TakeInput(int position, int micro_batch);
  void PutInput(int position, int micro_batch, torch::Tensor input);
  // Block b's gradient has been taken over: its next backward starts a new sum.
  void Taken(int block) { addends_[static_cast<size_t>(block)] = 0; }

  // Of the micro-batches of the pass that has finished; waits for the device.
  std::vector<double> losses() const;
  // Outputs of the last stage of a forward-only pass, by micro-batch, in host memory.
  absl::StatusOr<std::vector<torch::Tensor>> Outputs() const;

 private:
  void SeedFor(int stage, int micro_batch) const;
  void AddGradient(int block, const GradientPlace& place);

  const Model& model_;
  const std::vector<BlockModule*> modules_;
  const kernels::DType weights_;
  const uint64_t seed_;
  Device& device_;
  const int rank_, world_;
  int64_t step_ = 0;
  double loss_scale_ = 1;
  std::vector<Batch> batches_;
  std::vector<std::vector<torch::Tensor>> inputs_;  // [position][micro_batch]
  std::vector<torch::Tensor> flowing_;              // [micro_batch] gradient of the input of the stage above
  std::vector<torch::Tensor> outputs_;
  std::vector<torch::Tensor> losses_;
  std::vector<int> addends_;  // [block] added to its gradient so far
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_STAGE_RUNNER_H_
