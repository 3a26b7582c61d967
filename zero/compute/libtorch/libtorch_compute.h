// Computes a model of torch::nn::Modules: forward without a graph, backward by recomputing from the saved
// input.
//
// A step keeps one tensor per stage and micro-batch, the stage's input. Backward walks the stages in reverse:
// attach the block's parameters, recompute with autograd, run backward from the gradient that came from
// above, hand the gradient of the input further down. The bits are those of plain autograd over the whole
// model, in the same order of micro-batches.
//
// All of it on one thread (LibTorch's intra-op threads beside it). LibTorch's allocator is Penstock's from
// the first LibTorchCompute on (zero/compute/libtorch/tensor_allocator.h).
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/measure.h"
#include "zero/compute/libtorch/model.h"
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

  absl::StatusOr<std::vector<double>> Losses() override;
  absl::StatusOr<std::vector<std::vector<HostTensor>>> Outputs() override;

 private:
  // What a stage keeps for its backward; while it is away, what it is like.
  struct Saved {
    torch::Tensor tensor;
    TensorView view;
  };
  Saved& saved(tiering::Position position, int micro_batch) {
    return saved_[position][static_cast<size_t>(micro_batch)];
  }
  const StageSpec& stage(const StageUse& use) const;
  BlockModule& module(const StageUse& use) const;
  TensorView DeviceView(const torch::Tensor& tensor) const;

  const Model model_;
  ComputeSetup setup_;
  MeasuredModel measured_;
  PassInfo pass_;
  std::vector<Batch> held_;  // whose memory batches_ may be views of
  std::vector<TensorBatch> batches_;
  tiering::PerPosition<std::vector<Saved>> saved_;  // [micro_batch]
  std::vector<torch::Tensor> flowing_;              // [micro_batch] gradient of the input of the stage above
  std::vector<torch::Tensor> outputs_;
  std::vector<torch::Tensor> losses_;
  std::vector<torch::Tensor> gradient_tensors_;  // of the backward just made: what gradients_ shows
  std::vector<Gradient> gradients_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_LIBTORCH_COMPUTE_H_
