// Computes a model of torch::nn::Modules: forward without a graph, backward by recomputing from the saved
// input.
//
// A step keeps, for each stage and micro-batch, the stage's inputs. Backward walks the stages in reverse:
// attach the block's parameters, recompute with autograd, run backward from the gradients that came from
// above and from the stage's own losses, hand the gradients of the inputs further down. The bits are those of
// plain autograd over the whole model, in the same order of micro-batches.
//
// All of it on one thread (LibTorch's intra-op threads beside it). LibTorch's allocator is Penstock's from
// the first LibTorchCompute on (zero/compute/libtorch/tensor_allocator.h).
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/changing_buffers.h"
#include "zero/compute/libtorch/lowered_model.h"
#include "zero/compute/libtorch/measure.h"
#include "zero/compute/libtorch/model.h"
#include "zero/compute/libtorch/stage_values.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::zero {

class LibTorchCompute final : public Compute {
 public:
  explicit LibTorchCompute(Model model);

  absl::StatusOr<Measured> Measure(const ComputeSetup& setup, const Batch& example,
                                   const MeasureOptions& options) override;
  absl::StatusOr<std::unique_ptr<InitialReader>> Initial(tiering::BlockIndex block, uint64_t seed) override;

  absl::Status Begin(const PassInfo& pass, std::vector<Batch> batches) override;
  void ThreadBegins() override;
  absl::Status Forward(const StageUse& use, std::span<const Weights> weights) override;
  absl::Status Backward(const StageUse& use, std::span<const Weights> weights) override;
  absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                      tiering::BlockIndex block) override;
  void Release(const StageUse& use) override;

  absl::StatusOr<std::span<const TensorView>> SavedInputs(tiering::Position position,
                                                          int micro_batch) override;
  void DropInputs(tiering::Position position, int micro_batch) override;
  absl::StatusOr<std::span<const TensorView>> RestoreInputs(tiering::Position position,
                                                            int micro_batch) override;

  absl::StatusOr<nlohmann::json> Buffers() override;
  absl::Status RestoreBuffers(const nlohmann::json& buffers) override;

  absl::StatusOr<std::vector<double>> Losses() override;
  absl::StatusOr<std::vector<std::vector<HostTensor>>> Outputs() override;

  // What stages of the last pass added to the loss (StageCall::AddLoss), by name: its sum over the stages,
  // the mean over the micro-batches of this rank. Losses() has it as well. Between calls of the engine.
  absl::StatusOr<std::map<std::string, double>> InnerLosses();

 private:
  // What a stage keeps for its backward; while it is away, what it is like.
  struct Saved {
    Values values;
    Values buffers;  // those that change, as they were before it
    Flows flows;     // of the values
    std::vector<TensorView> views;
  };
  // Of one micro-batch, by position: a training step adds to it from the last to the first.
  using InnerLossesOf = std::map<tiering::Position, NamedLosses>;
  // What backward hands down: gradients of the inputs of the stage above, undefined where there are none, and
  // which were wanted.
  struct Flowing {
    Values gradients;
    Flows wanted;
  };
  // A further block of the stage that computes now, or did last.
  struct Borrowed {
    int of = -1;  // the stage, where its weights are here
    torch::Tensor weights;
    std::vector<std::vector<torch::Tensor>> gradients;  // [micro_batch][parameter]
  };
  Saved& saved(tiering::Position position, int micro_batch) {
    return saved_[position][static_cast<size_t>(micro_batch)];
  }
  void ForgetPass();
  const StageSpec& stage(const StageUse& use) const;
  const StageRole& role(const StageUse& use) const;
  BlockModule& module(const StageUse& use) const;  // of the stage's own block
  std::vector<BlockModule*> Computing(const StageUse& use) const;
  // All that the stage computes with: its own at `weights`, further ones where they were copied.
  void Attach(const StageUse& use, const Weights& weights);
  void Detach(const StageUse& use);
  StageCall CallOf(const StageUse& use) const;
  // Throws where the stage changes a buffer that is not known to change.
  Values RunStage(const StageUse& use, StageCall& call, const Values& inputs) const;
  // Of the parts before and after a stage with several blocks.
  void BorrowBlock(const StageUse& use, const Weights& weights);
  void TakeBorrowedGradients(const StageUse& use);
  void EndBorrowing(const StageUse& use);
  // Of those that it computes with, the buffers that change.
  Values CopyBuffers(const StageUse& use) const;
  void LendBuffers(const StageUse& use);
  void LendBuffers(const StageUse& use, const Values& values) const;
  // Of what the stage returns, where it is given inputs of these.
  Flows FlowsAfter(const StageUse& use, const Flows& inputs, const Values& outputs) const;
  void NoteLosses(const StageUse& use, const StageCall& call);
  void ComputeBackward(const StageUse& use);
  static void AddFromAbove(const Values& outputs, Flowing from_above, BackwardRoots* roots);
  TensorView DeviceView(const torch::Tensor& tensor) const;

  const LoweredModel lowered_;
  const Model& model_;
  ComputeSetup setup_;
  MeasuredModel measured_;
  ChangingBuffers buffers_;
  bool buffers_changed_ = false;  // by a pass whose step does not stand yet
  PassInfo pass_;
  std::vector<Batch> held_;  // whose memory batches_ may be views of
  std::vector<TensorBatch> batches_;
  tiering::PerPosition<std::vector<Saved>> saved_;  // [micro_batch]
  std::vector<Flowing> flowing_;                    // [micro_batch]
  std::vector<Values> outputs_;
  std::vector<torch::Tensor> losses_;
  std::vector<InnerLossesOf> inner_losses_;
  std::vector<Borrowed> borrowed_;
  std::vector<torch::Tensor> gradient_tensors_;  // of the backward just made: what gradients_ shows
  std::vector<Gradient> gradients_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_
