#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_lock.h"
#include "tiering/program/program.h"
#include "zero/engine/checkpointing.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {

using tiering::Op;
using tiering::OpKind;
using tiering::Pass;

absl::Status Engine::Impl::Decide(const Op& op) {
  if (abandoned_step_ != 0 && op.step >= abandoned_step_) return absl::OkStatus();
  if (op.kind == OpKind::kBatch && !op.evaluates) {
    if (decisions_.speculates(op.step)) {
      ForCheckpointing([&](Checkpointing& each) { each.BeforeUpdate(op.step); });
    }
    lanes_->set_assumption(decisions_.Assume(op.step, layouts_));
    return absl::OkStatus();
  }
  if (op.kind != OpKind::kNorm && op.kind != OpKind::kSummed) return absl::OkStatus();
  if (op.kind == OpKind::kNorm) ForCheckpointing([&](Checkpointing& each) { each.BeforeUpdate(op.step); });
  totals_ = lanes_->totals();
  if (!totals_.failure.ok()) return PassFailed(op, totals_.failure) ? absl::OkStatus() : totals_.failure;
  absl::StatusOr<nlohmann::json> buffers = compute_->Buffers();
  if (!buffers.ok()) return PassFailed(op, buffers.status()) ? absl::OkStatus() : buffers.status();
  if (op.kind == OpKind::kSummed) return absl::OkStatus();
  ASSIGN_OR_RETURN(UpdateDecision decision,
                   decisions_.Decide(op.step, totals_.squares, plan_.plan.speculative_share(),
                                     std::move(totals_.came), layouts_));
  decisions_.at(op.step).buffers = *std::move(buffers);
  lanes_->set_decision(decision);
  return absl::OkStatus();
}

std::string Engine::Impl::Payload(const StepOutcome::Decided* step) const {
  nlohmann::json payload = {{"run", run_}};
  decisions_.AddTo(&payload, step);
  const nlohmann::json& buffers = step != nullptr ? step->buffers : first_buffers_;
  if (!buffers.is_null()) payload["buffers"] = buffers;
  if (step != nullptr && options_.hooks.describe) payload["step"] = options_.hooks.describe(step->result);
  return payload.dump();
}

swap::CommitInfo Engine::Impl::DescribeCommit(int64_t step) {
  const StepOutcome::Decided& decided = decisions_.has(step) ? decisions_.at(step) : decisions_.applied();
  commit_payload_ = Payload(&decided);
  return {.step = static_cast<uint64_t>(step),
          .updates = static_cast<uint64_t>(decided.updates),
          .payload = commit_payload_};
}

absl::Status Engine::Impl::Applied(const Op& op) {
  const int64_t step = op.step;
  const bool lasts = store() == nullptr || op.durable;
  if (lasts) committed_step_ = step;
  if (decisions_.has(step)) {
    decisions_.Apply(step);
    if (options_.hooks.committed) {
      RETURN_IF_ERROR(options_.hooks.committed(decisions_.applied().result));
    }
  }
  if (!lasts) return absl::OkStatus();
  // What the last checkpoint still holds is written to from here on.
  if (!plan_.plan.commits_every_step) ForCheckpointing([](Checkpointing& each) { each.FinishTiles(); });
  if (checkpointing_ == nullptr || !checkpointing_->Due(step)) return absl::OkStatus();
  if (asked_ != nullptr) asked_->checkpointing->FinishTiles();  // a store holds one commit at a time
  if (store() != nullptr) return checkpointing_->BeginOfStore(*store(), plan_.plan.commits_every_step);
  if (decisions_.has(step + 1)) {
    return absl::InternalError(absl::StrCat("the norm of step ", step + 1, " is known before step ", step,
                                            " is over: no checkpoint of it can be written"));
  }
  return BeginOfMemory(step);
}

absl::Status Engine::Impl::CommitAgain(const std::string& payload) const {
  return store()->CommitNow(
      {.step = store()->committed_step(), .updates = store()->committed_updates(), .payload = payload});
}

absl::Status Engine::Impl::CommitAgainWhereItDiffers(const std::string& payload) const {
  bool differs = payload != store()->committed_payload();
  if (options_.comm != nullptr) {
    ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                     AllNumbers(*options_.comm, "the description", differs ? 1 : 0));
    differs = std::find(all.begin(), all.end(), 1) != all.end();
  }
  return differs ? OfAll(CommitAgain(payload)) : absl::OkStatus();
}

absl::Status Engine::Impl::Flush() {
  RETURN_IF_ERROR(broken_);
  RETURN_IF_ERROR(AbandonAhead());
  if (builder_->has_pending_update()) {
    executor_->Append(builder_->Append(Pass::kFlush));
  }
  AppendPersist();
  absl::Status status = executor_->RunUntilIdle();
  AddUsage(executor_->TakeUsage());
  if (status.ok()) status = checkpoint_status_;
  if (status.ok() && checkpointing_ != nullptr) status = checkpointing_->Finish();
  return status;
}

absl::StatusOr<std::string> Engine::Impl::Keep() {
  RETURN_IF_ERROR(Flush());
  if (!options_.storage.checkpoints.at_end || store() != nullptr || last_result_.step == 0)
    return std::string();
  if (checkpointing_->kept_step() != step_) {
    absl::Status status = BeginOfMemory(step_);
    if (status.ok()) status = checkpointing_->Finish();
    if (status.ok()) status = checkpointing_->last_status();
    RETURN_IF_ERROR(status);
  }
  RETURN_IF_ERROR(checkpointing_->RemoveReplaced());
  return checkpointing_->kept_path();
}

absl::Status Engine::Impl::CommitDescription() {
  RETURN_IF_ERROR(Flush());
  // Before the first step there is none that this process has made: what a new run begins with stands.
  if (store() == nullptr || last_result_.step == 0 || last_result_.step != step_ || !options_.hooks.describe)
    return absl::OkStatus();
  return CommitAgainWhereItDiffers(Payload(&decisions_.applied()));
}

absl::Status Engine::Impl::CommitDescription(nlohmann::json description) {
  RETURN_IF_ERROR(Flush());
  // What only reads has nothing to say, and others may read it as well.
  if (store() == nullptr || (!options_.trains && options_.resumes())) return absl::OkStatus();
  ASSIGN_OR_RETURN(nlohmann::json payload,
                   ParseJsonObject(store()->committed_payload(), "the last commit's payload"));
  payload["step"] = std::move(description);
  return CommitAgainWhereItDiffers(payload.dump());
}

absl::StatusOr<std::string> Engine::Impl::BeginCheckpoint(CheckpointRequest request) {
  if (!options_.trains) return absl::FailedPreconditionError("this engine only reads");
  RETURN_IF_ERROR(BroadcastError(CommitDescription()));
  if (store() == nullptr && last_result_.step == 0) {
    return absl::FailedPreconditionError(
        "no step has been made since the run was opened: what it was opened from is the checkpoint");
  }
  auto asked = std::make_unique<AskedCheckpoint>();
  const std::string& parent = request.parent;
  const bool named = request.naming.has_value() && !request.naming->name.empty();
  asked->path = absl::StrCat(
      parent, "/", named ? request.naming->name : swap::CheckpointName(static_cast<uint64_t>(step_)));
  asked->lock = options_.storage.checkpoints.lock;
  absl::Status mine;
  if (options_.rank() == 0 && (asked->lock == nullptr || parent != options_.storage.checkpoints.parent)) {
    auto taken = swap::CheckpointLock::Take(parent);
    mine = taken.status();
    if (taken.ok()) asked->lock = *std::move(taken);
  }
  // What is wrong with the directory is known to all, and ends nobody.
  RETURN_IF_ERROR(OfAll(mine));
  std::span<std::byte> tile = resources_->tile_memory();
  if (store() == nullptr || tile.size() < store()->geometry().largest_slot_bytes()) {
    aio::ArenaOptions of_tile;
    of_tile.lock = false;
    of_tile.bytes = store() != nullptr ? store()->geometry().largest_slot_bytes() : 1;
    absl::StatusOr<std::unique_ptr<aio::Arena>> made = aio::Arena::Create(of_tile);
    mine = made.status();
    if (made.ok()) {
      asked->tile = *std::move(made);
      tile = {asked->tile->data(), of_tile.bytes};
    }
  }
  RETURN_IF_ERROR(OfAll(mine));
  // Rank 0 cleans up there, before anybody writes.
  asked->checkpointing =
      std::make_unique<Checkpointing>(CheckpointSchedule{.parent = parent, .lock = asked->lock}, tile,
                                      options_.comm.get(), options_.hooks.checkpointed, &checkpoint_totals_);
  if (last_asked_step_ > 0) asked->checkpointing->set_next_in(step_ - last_asked_step_);
  if (request.naming.has_value()) asked->checkpointing->set_naming(*std::move(request.naming));
  RETURN_IF_ERROR(OfAll(asked->checkpointing->CleanUp()));
  if (options_.comm != nullptr) {
    RETURN_IF_ERROR(AgreeOnDirectory(*options_.comm, parent));
    if (!checkpoint_uuid_.has_value()) {
      ASSIGN_OR_RETURN(checkpoint_uuid_, AgreeOnUuid(*options_.comm));
    }
    ASSIGN_OR_RETURN(const swap::Uuid series, AgreeOnUuid(*options_.comm));
    asked->checkpointing->set_series(series);
  }
  RETURN_IF_ERROR(BroadcastError(BeginAsked(asked.get())));
  asked_ = std::move(asked);
  last_asked_step_ = step_;
  return asked_->path;
}

absl::Status Engine::Impl::BeginAsked(AskedCheckpoint* asked) {
  if (store() != nullptr) return asked->checkpointing->BeginOfStore(*store(), plan_.plan.commits_every_step);
  aio::Engine* io = resources_->io();
  if (io == nullptr) {
    ASSIGN_OR_RETURN(asked->io, aio::Engine::Create({}));
    io = asked->io.get();
  }
  return asked->checkpointing->BeginOfMemory(*io, SourceOf(step_));
}

absl::Status Engine::Impl::FinishCheckpoint() {
  (void)asked_->checkpointing->Finish();  // which ends the training where it has to, unlike this one
  const std::unique_ptr<AskedCheckpoint> asked = std::move(asked_);
  // Rank 0 gives it its name after the others are done.
  return OfAll(asked->checkpointing->last_status());
}

CheckpointTotals Engine::Impl::checkpoint_totals() const {
  CheckpointTotals totals = checkpoint_totals_;
  totals.seconds += checkpoint_seconds();
  return totals;
}

double Engine::Impl::checkpoint_seconds() const {
  double seconds = 0;
  ForCheckpointing([&](const Checkpointing& each) { seconds += each.under_way().value_or(0); });
  return seconds;
}

absl::Status Engine::Impl::BeginOfMemory(int64_t step) {
  return checkpointing_->BeginOfMemory(*resources_->io(), SourceOf(step));
}

swap::CheckpointSource Engine::Impl::SourceOf(int64_t step) {
  const StepOutcome::Decided& applied = decisions_.applied();
  commit_payload_ = Payload(&applied);
  swap::CheckpointSource source = SourceOfMemory(plan_.plan, arena_view(), DeviceStateOrNull(),
                                                 identity_.dump(), step, applied.updates, commit_payload_);
  source.uuid = checkpoint_uuid_;
  return source;
}

}  // namespace penstock::zero
