// A network of dense layers, computed with loops over arrays: the smallest whole Compute to copy from.
//
// Layer i maps a row x of `width` numbers to tanh(W x + b). A layer is a block with the parameters "weight"
// [width, width] and "bias" [width], and one stage. The last stage returns the loss, the mean of the squared
// differences from the batch's "targets"; both "inputs" and "targets" are [rows, width] in fp32.
//
// It computes on the processor with fp32 weights and refuses the rest. All memory that grows with the model
// or the batch comes from HostBuffer, so that it counts in the engine's budget, and Measure says how much
// there will be.
#ifndef PENSTOCK_EXAMPLES_PLAIN_MODEL_PLAIN_COMPUTE_H_
#define PENSTOCK_EXAMPLES_PLAIN_MODEL_PLAIN_COMPUTE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/compute.h"
#include "zero/memory/values.h"

namespace plain {

struct Shape {
  int layers = 4;
  int64_t width = 256;
};

class PlainCompute : public penstock::zero::Compute {
 public:
  explicit PlainCompute(const Shape& shape);

  absl::StatusOr<penstock::zero::Measured> Measure(const penstock::zero::ComputeSetup& setup,
                                                   const penstock::zero::Batch& example,
                                                   const penstock::zero::MeasureOptions& options) override;
  absl::StatusOr<std::unique_ptr<penstock::zero::InitialReader>> Initial(penstock::tiering::BlockIndex block,
                                                                         uint64_t seed) override;
  absl::Status Begin(const penstock::zero::PassInfo& pass,
                     std::vector<penstock::zero::Batch> batches) override;
  absl::Status Forward(const penstock::zero::StageUse& use,
                       std::span<const penstock::zero::Weights> weights) override;
  absl::Status Backward(const penstock::zero::StageUse& use,
                        std::span<const penstock::zero::Weights> weights) override;
  absl::StatusOr<std::span<const penstock::zero::Gradient>> Gradients(
      const penstock::zero::StageUse& use, penstock::tiering::BlockIndex block) override;
  void Release(const penstock::zero::StageUse& use) override;
  absl::StatusOr<std::span<const penstock::zero::TensorView>> SavedInputs(
      penstock::tiering::Position position, int micro_batch) override;
  void DropInputs(penstock::tiering::Position position, int micro_batch) override;
  absl::StatusOr<std::span<const penstock::zero::TensorView>> RestoreInputs(
      penstock::tiering::Position position, int micro_batch) override;
  absl::StatusOr<std::vector<double>> Losses() override { return losses_; }
  absl::StatusOr<std::vector<std::vector<penstock::zero::HostTensor>>> Outputs() override;

 private:
  // The rows that a stage was given, kept for its backward. Position 0 has the batch's own.
  struct Saved {
    penstock::zero::HostBuffer memory;
    penstock::zero::TensorView view;
  };
  struct MicroBatch {
    penstock::zero::Batch batch;
    const float* targets = nullptr;
    int64_t rows = 0;
    std::vector<Saved> saved;               // by position
    penstock::zero::HostBuffer from_above;  // gradient of the rows that the stage above was given
  };
  const float* Input(const MicroBatch& batch, const penstock::zero::StageUse& use) const;

  const Shape shape_;
  const std::shared_ptr<const penstock::zero::FlatLayout> layout_;
  penstock::zero::PassInfo pass_;
  std::vector<MicroBatch> micro_batches_;
  std::vector<double> losses_;
  penstock::zero::HostBuffer weight_gradient_, bias_gradient_;  // of the backward just made
  std::vector<penstock::zero::Gradient> gradients_;
};

}  // namespace plain

#endif  // PENSTOCK_EXAMPLES_PLAIN_MODEL_PLAIN_COMPUTE_H_
