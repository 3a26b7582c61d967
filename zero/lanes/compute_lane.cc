#include "zero/lanes/compute_lane.h"

#include <utility>

#include "zero/compute/seed.h"

namespace penstock::zero {
namespace {

using tiering::Op;
using tiering::OpKind;

}  // namespace

StageUse ComputeLane::UseOf(const Op& op) const {
  const int in_step = op.micro_batch + (op.evaluates ? 0 : first_micro_batch_);
  const auto number = static_cast<uint64_t>(in_step) * static_cast<uint64_t>(options_.world) +
                      static_cast<uint64_t>(options_.rank);
  return {.stage = op.stage,
          .position = op.position,
          .micro_batch = op.micro_batch,
          .last = op.position + 1 == tiering::Position(plan_.positions),
          .trains = !op.evaluates,
          .keeps_inputs = !op.evaluates && op.position >= op.first_trained,
          .passes_gradients = op.position > op.first_trained,
          .seed = MixSeed(options_.seed, static_cast<uint64_t>(op.step), number,
                          static_cast<uint64_t>(op.stage.value()))};
}

absl::Status ComputeLane::Run(const Op& op) {
  if (op.kind == OpKind::kRoundOnDevice) {
    return sums_.Round(op.block, plan_.blocks[op.block].trained_from, device_->place(op).accumulator,
                       device_->gradient(op.device_gradient_slot));
  }
  if (failed_) return Error();
  absl::Status status;
  if (op.kind == OpKind::kForward) {
    const Weights weights = WeightsOf(op);
    status = compute_->Forward(UseOf(op), {&weights, 1});
  } else {
    status = op.kind == OpKind::kBackward ? RunBackward(op) : RunAccumulate(op);
  }
  return status.ok() ? status : Fail(std::move(status));
}

// Of a block that is trained, kAccumulateGradient takes what it leaves.
absl::Status ComputeLane::RunBackward(const Op& op) {
  const Weights weights = WeightsOf(op);
  absl::Status status = compute_->Backward(UseOf(op), {&weights, 1});
  if (!status.ok() || !plan_.blocks[op.block].trains) compute_->Release(UseOf(op));
  return status;
}

absl::Status ComputeLane::RunAccumulate(const Op& op) {
  GradientPlace place;
  if (device_ != nullptr) {
    place = device_->place(op);
  } else if (op.accumulator_slot.valid() && plan_.accumulator_bytes(op.block) == 4) {
    place.accumulator = arena_view_.accumulator(op.accumulator_slot);
  } else if (op.accumulator_slot.valid()) {
    place.gradient = arena_view_.accumulator(op.accumulator_slot);  // one addend, on its way to other ranks
  } else {
    place.gradient = arena_view_.gradient(op.gradient_slot);
  }
  place.first = plan_.blocks[op.block].trained_from;
  const StageUse use = UseOf(op);
  const absl::StatusOr<std::span<const Gradient>> gradients = compute_->Gradients(use, op.block);
  absl::Status status = gradients.status();
  if (status.ok()) status = sums_.Add(op.block, *gradients, place);
  compute_->Release(use);
  return status;
}

absl::StatusOr<std::span<const TensorView>> ComputeLane::Inputs(const Op& op) {
  if (failed_) return Error();
  absl::StatusOr<std::span<const TensorView>> values =
      op.kind == OpKind::kReadInput ? compute_->RestoreInputs(op.position, op.micro_batch)
                                    : compute_->SavedInputs(op.position, op.micro_batch);
  if (!values.ok()) return Fail(values.status());
  return values;
}

void ComputeLane::ForgetFailure() {
  failed_ = false;
  const std::lock_guard<std::mutex> lock(error_mutex_);
  error_ = absl::OkStatus();
}

absl::Status ComputeLane::Fail(absl::Status status) {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  error_.Update(std::move(status));
  failed_ = true;
  return error_;
}

absl::Status ComputeLane::Error() {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

}  // namespace penstock::zero
