// What the compute lane asks of a Compute: forward, backward, gradients to where the plan has them, and the
// values of positions that go to the drive and come back.
//
// Threads: Run on the compute thread; Fail and Inputs also on the executor's, which everything else is for.
#ifndef PENSTOCK_ZERO_LANES_COMPUTE_LANE_H_
#define PENSTOCK_ZERO_LANES_COMPUTE_LANE_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/gradient_sums.h"
#include "zero/lanes/device_lanes.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

class ComputeLane {
 public:
  struct Options {
    kernels::DType weights = kernels::DType::kBf16;
    uint64_t seed = 1;  // of StageUse::seed
    int rank = 0, world = 1;
    kernels::ThreadPool* pool = nullptr;  // GradientSums'
  };

  // `lanes` is null where the host computes; `device` is what computes. Everything passed in outlives this.
  ComputeLane(const tiering::Plan& plan, const ArenaView& arena_view, const GradientSums::Layouts& layouts,
              Compute* compute, Device& device, DeviceLanes* lanes, const Options& options)
      : plan_(plan),
        arena_view_(arena_view),
        compute_(compute),
        sums_(layouts, options.weights, device, options.pool),
        device_(lanes),
        options_(options) {}

  // kForward, kBackward, kAccumulateGradient: after the first error of a pass the Compute is asked nothing
  // any more, and that error is what all of them end with. kRoundOnDevice.
  absl::Status Run(const tiering::Op& op);
  // What kWriteInput takes of the operation's position, or kReadInput gives back. Errors as of Run.
  absl::StatusOr<std::span<const TensorView>> Inputs(const tiering::Op& op);
  // The pass that failed is over.
  void ForgetFailure();
  // Of the micro-batches of the call that comes, in their step. Set while nothing computes.
  void set_first_micro_batch(int number) { first_micro_batch_ = number; }
  // The block's gradient has been taken over.
  void SumsTaken(tiering::BlockIndex block) { sums_.Taken(block); }
  // Which gradients of the step have come (GradientSums).
  std::vector<uint8_t> Came() const { return sums_.Came(); }
  void ForgetCame() { sums_.ForgetCame(); }

 private:
  absl::Status RunBackward(const tiering::Op& op);
  absl::Status RunAccumulate(const tiering::Op& op);
  absl::Status Fail(absl::Status status);  // returns the first error
  absl::Status Error();
  // What a stage computes with, where it computes.
  Weights WeightsOf(const tiering::Op& op) const {
    void* const run =
        device_ != nullptr ? device_->weights(op.device_weight_slot) : arena_view_.weights(op.weight_slot);
    return {op.block, static_cast<std::byte*>(run)};
  }
  StageUse UseOf(const tiering::Op& op) const;

  const tiering::Plan& plan_;
  const ArenaView& arena_view_;
  Compute* const compute_;
  GradientSums sums_;
  DeviceLanes* const device_;
  const Options options_;
  int first_micro_batch_ = 0;
  // The Compute has failed: of this pass it is asked nothing any more. Set by the thread that heard of it
  // first, since the next operation may be queued behind the one that failed.
  std::atomic<bool> failed_{false};
  absl::Status error_;  // the first: who finds the flag may report before who set it
  std::mutex error_mutex_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_COMPUTE_LANE_H_
