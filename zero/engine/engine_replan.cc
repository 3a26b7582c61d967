#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/engine.h"
#include "base/status_macros.h"
#include "tiering/plan/placement.h"
#include "tiering/simulate/simulate.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/prediction_check.h"
#include "zero/engine/store_layout.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

absl::Status Engine::Impl::CheckReplan() const {
  RETURN_IF_ERROR(broken_);
  if (!options_.trains)
    return absl::FailedPreconditionError("this engine only reads: another one is made for other batches");
  if (store() == nullptr) {
    return absl::FailedPreconditionError(
        "the state is in memory and would go with the plan: keep a checkpoint (Engine::Checkpoint), and make "
        "an engine that resumes from it");
  }
  if (calls_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step_ + 1, " has more calls to come: a plan is made between steps"));
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::Replan(Batch example) {
  RETURN_IF_ERROR(CheckReplan());
  return PlanAnew(std::move(example), nullptr);
}

absl::StatusOr<PlannedAgain> Engine::Impl::Replan(const ShownBySteps& shown) {
  RETURN_IF_ERROR(CheckReplan());
  RETURN_IF_ERROR(CanPlanAgain(options_.world(), options_.storage.offload));
  if (shown.graph.stages.size() != plan_.graph.stages.size())
    return absl::InvalidArgumentError("what was shown is of another model");
  const auto predicted = [&](const tiering::Plan& plan) -> absl::StatusOr<PlannedAgain> {
    PlannedAgain of;
    ASSIGN_OR_RETURN(of.prediction, tiering::Predict(shown.graph, plan, shown.machine));
    of.seconds = (1 - shown.deferred_share) * of.prediction.step_seconds +
                 shown.deferred_share * of.prediction.clipped_step_seconds;
    return of;
  };
  ASSIGN_OR_RETURN(PlannedAgain kept, predicted(plan_.plan));
  kept.kept_seconds = kept.seconds;
  kept.explained = std::abs(kept.seconds - shown.measured_seconds) < kUnexplained * shown.measured_seconds;
  if (!kept.explained) return kept;
  ASSIGN_OR_RETURN(const tiering::Plan other, PlanOf(shown));
  if (tiering::WhatMoves(plan_.plan, other).empty()) return kept;
  ASSIGN_OR_RETURN(const PlannedAgain moved, predicted(other));
  const double gain = kept.seconds - moved.seconds;
  const bool pays =
      !shown.steps_left.has_value() || gain * static_cast<double>(*shown.steps_left) > kept.seconds;
  if (gain < kWorthwhile * kept.seconds || !pays) return kept;
  const tiering::Plan before = plan_.plan;
  RETURN_IF_ERROR(PlanAnew(options_.example, &shown));
  ASSIGN_OR_RETURN(PlannedAgain now, predicted(plan_.plan));
  now.kept_seconds = kept.seconds;
  now.moved = tiering::WhatMoves(before, plan_.plan);
  return now;
}

absl::StatusOr<tiering::Plan> Engine::Impl::PlanOf(const ShownBySteps& shown) const {
  tiering::PlanOptions options = plan_.options;
  options.machine = shown.machine;
  ASSIGN_OR_RETURN(StoreTiles tiles, TilesOf(store()->shape(), plan_.graph, options.world, options.precision,
                                             options.frozen_elsewhere));
  options.fixed_tiles = std::move(tiles.elements);
  options.frozen_apart = tiles.frozen_apart;
  options.blocks_alone = std::move(tiles.blocks_alone);
  tiering::ModelGraph graph = shown.graph;
  for (tiering::BlockShape& block : graph.blocks) block.init_bytes = 0;  // as for a run that goes on
  return tiering::MakePlan(graph, options);
}

void Engine::Impl::PlanOn(const tiering::MachineModel& machine) {
  options_.hooks.machine = [machine](int64_t, const std::function<void()>&) { return machine; };
}

absl::Status Engine::Impl::PlanAnew(Batch example, const ShownBySteps* shown) {
  if (asked_ != nullptr) RETURN_IF_ERROR(FinishCheckpoint());
  RETURN_IF_ERROR(BroadcastError(CommitDescription()));
  const swap::CommitSeen last = {store()->uuid(), store()->committed_sequence()};
  earlier_ = {io_stats(),         copied(),  gds_read_bytes(),     input_bytes(),
              gathered(),         reduced(), peak_managed_bytes(), peak_pinned_bytes(),
              peak_device_bytes()};
  Close();
  if (last_result_.step != 0 && gradients_lost_.empty()) {
    gradients_lost_ =
        "the plan was made anew after the last step, and its gradients went with the one before";
  }
  options_.resume.enabled = true;
  options_.storage.overwrite = false;
  options_.storage.overwrites_only.reset();
  tiering::ModelGraph graph_before = plan_.graph;
  const tiering::MachineModel machine_before = plan_.options.machine;
  PlanOn(shown != nullptr ? shown->machine : machine_before);
  if (shown != nullptr) known_ = shown->graph;
  example = std::exchange(options_.example, Kept(std::move(example)));
  absl::Status status = Reopen(last, /*asks=*/true);
  known_.reset();
  if (status.ok()) return status;
  Close();
  if (options_.comm != nullptr) {
    held_.clear();
    return broken_ = BroadcastError(status);
  }
  options_.example = std::move(example);
  PlanOn(machine_before);
  known_ = std::move(graph_before);
  const absl::Status back = Reopen(last, /*asks=*/false);
  known_.reset();
  if (back.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat(status.message(), "; the engine goes on with the plan that it had"));
  }
  Close();
  held_.clear();
  return broken_ = absl::Status(
             back.code(), absl::StrCat(status.message(),
                                       "; and the plan before could not be made again: ", back.message()));
}

absl::Status Engine::Impl::Reopen(const swap::CommitSeen& last, bool asks) {
  RETURN_IF_ERROR(Prepare(asks));
  RETURN_IF_ERROR(GroupParameters());
  RETURN_IF_ERROR(MakeResources());
  if (swap::CommitSeen{store()->uuid(), store()->committed_sequence()} != last) {
    return absl::FailedPreconditionError(absl::StrCat(
        options_.storage.state_dirs.front(), ": another process has gone on with the run meanwhile"));
  }
  ASSIGN_OR_RETURN(const nlohmann::json payload, PayloadOf(store()->recovered()));
  RETURN_IF_ERROR(compute_->RestoreBuffers(payload.value("buffers", nlohmann::json())));
  RETURN_IF_ERROR(resources_->BoundDevice());
  if (saturating_bytes_.has_value()) set_saturating_bytes_in_flight(*saturating_bytes_);
  std::vector<int> order = std::move(stage_order_);
  MakeLanes();
  stage_order_ = std::move(order);
  builder_->SetOrder(stage_order_);
  return absl::OkStatus();
}

aio::EngineStats Engine::Impl::io_stats() const {
  if (resources_ == nullptr || resources_->io() == nullptr) return earlier_.io;
  aio::EngineStats stats = resources_->io()->stats();
  stats.Merge(earlier_.io);
  return stats;
}

Device::Traffic Engine::Impl::copied() const {
  if (resources_ == nullptr) return earlier_.copied;
  const Device::Traffic now = device().traffic(), before = resources_->traffic_before();
  return {earlier_.copied.h2d_bytes + now.h2d_bytes - before.h2d_bytes,
          earlier_.copied.d2h_bytes + now.d2h_bytes - before.d2h_bytes};
}

int64_t Engine::Impl::gds_read_bytes() const {
  return earlier_.gds_read_bytes + (lanes_ != nullptr ? lanes_->past_host_bytes() : 0);
}

tiering::ExchangedBytes Engine::Impl::gathered() const {
  return lanes_ != nullptr ? earlier_.gathered + lanes_->gathered() : earlier_.gathered;
}

tiering::ExchangedBytes Engine::Impl::reduced() const {
  return lanes_ != nullptr ? earlier_.reduced + lanes_->reduced() : earlier_.reduced;
}

InputBytes Engine::Impl::input_bytes() const {
  const InputBytes now = lanes_ != nullptr ? lanes_->input_bytes() : InputBytes();
  return {earlier_.inputs.written + now.written, earlier_.inputs.read + now.read};
}

int64_t Engine::Impl::peak_managed_bytes() const {
  if (resources_ == nullptr) return earlier_.peak_managed_bytes;
  const bool elsewhere =
      device().has_own_memory() && device().tensors_are_host();  // what the host's allocator counts
  return std::max(
      {earlier_.peak_managed_bytes, resources_->preparation_peak(),
       static_cast<int64_t>(resources_->arena().bytes()) + (elsewhere ? 0 : tensors_.Stats().peak_bytes)});
}

int64_t Engine::Impl::peak_pinned_bytes() const {
  if (resources_ == nullptr || !resources_->pinned()) return earlier_.peak_pinned_bytes;
  return std::max(earlier_.peak_pinned_bytes, static_cast<int64_t>(resources_->arena().bytes()));
}

int64_t Engine::Impl::pinned_for_device_bytes() const {
  const bool pinned = resources_ != nullptr && resources_->pinned_for_device();
  return pinned ? static_cast<int64_t>(resources_->arena().bytes()) : 0;
}

int64_t Engine::Impl::peak_device_bytes() const {
  if (resources_ == nullptr || !device().has_own_memory()) return earlier_.peak_device_bytes;
  const TensorScope scope(tensors_.pool());
  return std::max(earlier_.peak_device_bytes, plan_.plan.device.arena_bytes + device().tensors().peak_bytes);
}

void Engine::Impl::set_saturating_bytes_in_flight(uint64_t bytes) {
  saturating_bytes_ = bytes;
  aio::Engine* const io = resources_ != nullptr ? resources_->io() : nullptr;
  if (io == nullptr) return;
  io->set_saturating_bytes_in_flight(bytes);
  if (!options_.storage.io_depth_is_limit) io->RaiseCapsToSaturation();
}

}  // namespace penstock::zero
