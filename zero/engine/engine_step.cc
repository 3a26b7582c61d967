#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "tiering/program/program.h"
#include "zero/engine/engine_impl.h"

namespace penstock::zero {
namespace {

double MeanOf(const std::vector<double>& losses) {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

}  // namespace

using tiering::Op;
using tiering::OpId;
using tiering::Pass;

absl::Status Engine::Impl::CheckRates(const std::vector<GroupRates>& groups) const {
  auto needed = static_cast<int>(decisions_.named_groups().size()) + 1;
  for (const auto& layout : layouts_) needed = std::max(needed, layout->groups());
  if (groups.size() > 1 && static_cast<int>(groups.size()) < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("rates of ", groups.size(), " groups given, the model's parameters are in ", needed));
  }
  for (const GroupRates& group : groups) {
    const double decay = group.weight_decay.value_or(0);
    if (std::isfinite(group.rates.lr) && group.rates.lr >= 0 && std::isfinite(decay) && decay >= 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("a group's learning rate of ", group.rates.lr,
                                                   " and weight decay of ", decay,
                                                   ": both must be numbers of 0 or more"));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Engine::Impl::Step(std::vector<Batch> batches, const StepOptions& step) {
  RETURN_IF_ERROR(broken_);
  PENSTOCK_CHECK(pass_failure_.ok(), "a failure of a pass that is over");
  if (!options_.trains)
    return absl::FailedPreconditionError("this engine was made for evaluation, not for training");
  if (static_cast<int>(batches.size()) != options_.micro_batches) {
    return absl::InvalidArgumentError(
        absl::StrCat(batches.size(), " micro-batches given, ", options_.micro_batches, " planned for"));
  }
  if (!step.update && calls_ + 1 >= options_.calls_per_step) {
    return absl::InvalidArgumentError(absl::StrCat("call ", calls_ + 1, " of a step of ",
                                                   options_.calls_per_step,
                                                   " must update: EngineOptions::calls_per_step says how "
                                                   "many calls make one"));
  }
  RETURN_IF_ERROR(CheckRates(step.groups));
  decisions_.SetRates(step.groups);
  if (ahead_norm_ >= 0 && ahead_updates_ != step.update) RETURN_IF_ERROR(AbandonAhead());
  if (ahead_norm_ < 0) AppendTraining(step.update, calls_);
  const OpId norm = std::exchange(ahead_norm_, -1);
  const int first = calls_ * options_.micro_batches;
  lanes_->set_first_micro_batch(first);
  absl::Status begun = compute_->Begin(
      {.step = step_ + 1, .first_micro_batch = first, .loss_gradient = LossGradient()}, std::move(batches));
  if (!begun.ok()) {
    ahead_norm_ = norm;  // the pass still waits for a batch: Flush ends it, and commits the step before
    return begun;
  }
  const int calls_then = step.update ? 0 : calls_ + 1;
  if (step.next == Next::kTrain) AppendTraining(calls_then + 1 >= options_.calls_per_step, calls_then);
  executor_->OpenGate(++gates_);
  RETURN_IF_ERROR(executor_->RunUntil(norm));
  if (!pass_failure_.ok()) return GiveUpStep();
  calls_ = calls_then;
  losses_.insert(losses_.end(), totals_.losses.begin(), totals_.losses.end());
  if (!step.update) {
    StepResult summed;
    summed.step = step_ + 1;
    summed.updated = false;
    summed.loss = MeanOf(totals_.losses);
    Account(&summed);
    RETURN_IF_ERROR(checkpoint_status_);
    return summed;
  }
  ++step_;
  StepResult& result = decisions_.at(step_).result;
  if (ahead_norm_ < 0 && !decisions_.last_is_replayed()) builder_->AssumptionHeld();
  result.loss = MeanOf(std::exchange(losses_, {}));
  Account(&result);
  last_result_ = result;
  gradients_lost_ = {};
  // The step was made, and its commit may still follow, with its loss.
  RETURN_IF_ERROR(checkpoint_status_);
  return result;
}

double Engine::Impl::LossGradient() const {
  return decisions_.loss_scale() / (options_.micro_batches * options_.calls_per_step * options_.world());
}

void Engine::Impl::Account(StepResult* of_call) {
  StepResult& result = *of_call;
  result.stops = totals_.stops;
  const double now = lanes_->Now();
  result.seconds = now - std::exchange(last_end_, now);
  result.evaluation_seconds = std::exchange(evaluation_seconds_, 0);
  const tiering::Usage usage = executor_->TakeUsage();
  AddUsage(usage);
  auto of = [](const auto& values, auto index) { return values[static_cast<size_t>(index)]; };
  result.stall_io_seconds = of(usage.stall_seconds, tiering::Stall::kRead) +
                            of(usage.stall_seconds, tiering::Stall::kWrite) +
                            of(usage.stall_seconds, tiering::Stall::kCommit);
  result.compute_seconds = of(usage.busy_seconds, tiering::Lane::kCompute);
  result.optimizer_seconds = of(usage.busy_seconds, tiering::Lane::kUpdate);
  result.nvme_read_bytes = of(usage.bytes, tiering::Lane::kRead) + std::exchange(owed_read_bytes_, 0);
  result.nvme_write_bytes = of(usage.bytes, tiering::Lane::kWrite) + std::exchange(owed_write_bytes_, 0);
  const InputBytes not_moved = lanes_->TakeInputsNotMoved();
  result.nvme_read_bytes -= not_moved.read;
  result.nvme_write_bytes -= not_moved.written;
}

void Engine::Impl::AddUsage(const tiering::Usage& usage) {
  usage_.compute_union_seconds += usage.compute_union_seconds;
  for (size_t i = 0; i < usage.busy_seconds.size(); ++i) {
    usage_.busy_seconds[i] += usage.busy_seconds[i];
    usage_.bytes[i] += usage.bytes[i];
    usage_.operations[i] += usage.operations[i];
  }
  for (size_t i = 0; i < usage.stall_seconds.size(); ++i) usage_.stall_seconds[i] += usage.stall_seconds[i];
}

absl::Status Engine::Impl::SetOrder(std::vector<int> stages) {
  RETURN_IF_ERROR(broken_);
  RETURN_IF_ERROR(executor_->status());
  RETURN_IF_ERROR(AgreeOnOrder(stages));
  std::vector<int> sorted = stages;
  std::sort(sorted.begin(), sorted.end());
  const auto count = static_cast<int>(plan_.graph.stages.size());
  bool valid = static_cast<int>(stages.size()) == count && stages.back() == count - 1;
  for (int s = 0; valid && s < count; ++s) valid = sorted[static_cast<size_t>(s)] == s;
  if (!valid) {
    return absl::InvalidArgumentError(absl::StrCat("an order of stages is a permutation of 0 to ", count - 1,
                                                   " that ends with the last, not [",
                                                   absl::StrJoin(stages, ", "), "]"));
  }
  if (stages == stage_order_) return absl::OkStatus();
  if (ahead_norm_ >= 0 && !std::exchange(told_of_misses_, true)) {
    Log("the order of the stages changed after the next step was announced: what was read ahead is "
        "dropped");
  }
  RETURN_IF_ERROR(AbandonAhead());
  stage_order_ = std::move(stages);
  builder_->SetOrder(stage_order_);
  return absl::OkStatus();
}

absl::Status Engine::Impl::AgreeOnOrder(const std::vector<int>& stages) const {
  absl::Status agreed = AgreeOn("order of stages", absl::StrCat("[", absl::StrJoin(stages, ", "), "]"));
  if (!absl::IsInvalidArgument(agreed)) return agreed;
  return absl::InvalidArgumentError(absl::StrCat(agreed.message(), "; the order stays as it was"));
}

void Engine::Impl::AppendTraining(bool update, int calls) {
  // What a checkpoint copies from memory stands until the norm.
  const bool copies =
      store() == nullptr &&
      (asked_ != nullptr || (checkpointing_ != nullptr && checkpointing_->Due(builder_->next_step() - 1)));
  const bool speculative_update = update && !copies && decisions_.ChoosesToSpeculate(plan_.plan);
  std::vector<Op> ops = builder_->Append(update ? Pass::kTrain : Pass::kSum, 0, speculative_update,
                                         /*continues=*/calls > 0);
  operations_ = static_cast<int64_t>(ops.size());
  executor_->Append(std::move(ops));
  ahead_norm_ = builder_->next_id() - 1;  // a training pass ends with its norm
  ahead_step_ = builder_->next_step() - (update ? 1 : 0);
  ahead_updates_ = update;
  if (speculative_update) decisions_.Speculate(ahead_step_);
  AppendPersistIfDue();
}

void Engine::Impl::AppendPersist() { executor_->Append(builder_->Append(Pass::kPersist)); }

void Engine::Impl::AppendPersistIfDue() {
  const int64_t step = builder_->unsaved_step();
  if (step != 0 && checkpointing_ != nullptr && checkpointing_->Due(step)) AppendPersist();
}

absl::Status Engine::Impl::AbandonAhead() {
  if (ahead_norm_ < 0) return absl::OkStatus();
  abandoned_step_ = ahead_step_;
  decisions_.Abandon(ahead_step_);
  lanes_->Abandon(abandoned_step_);
  executor_->OpenGate(++gates_);
  absl::Status status = executor_->RunUntil(std::exchange(ahead_norm_, -1));
  // The next builder takes everything from the drive.
  AppendPersist();
  if (status.ok()) status = executor_->RunUntilIdle();
  lanes_->Abandon(abandoned_step_ = 0);
  RETURN_IF_ERROR(status);
  MakeBuilder(builder_->next_id());
  return absl::OkStatus();
}

bool Engine::Impl::PassFailed(const Op& op, const absl::Status& why) {
  if (options_.comm != nullptr) return false;
  pass_failure_.Update(why);
  if (!op.evaluates) abandoned_step_ = op.step;
  lanes_->FailPass(op);
  return true;
}

absl::Status Engine::Impl::GiveUpStep() {
  absl::Status why = std::exchange(pass_failure_, absl::OkStatus());
  absl::Status status;
  decisions_.Abandon(step_ + 1);
  if (ahead_norm_ >= 0) {
    decisions_.Abandon(ahead_step_);
    executor_->OpenGate(++gates_);
    status = executor_->RunUntil(std::exchange(ahead_norm_, -1));
  }
  if (status.ok()) status = executor_->RunUntilIdle();
  pass_failure_ = absl::OkStatus();  // of what had begun behind it
  abandoned_step_ = 0;
  lanes_->ForgetFailedPass();
  lanes_->ForgetSums();
  calls_ = 0;
  losses_.clear();
  AddUsage(executor_->TakeUsage());
  if (status.ok() && store() != nullptr) {
    if (static_cast<int64_t>(store()->committed_step()) != step_) {
      builder_->SetBackUnsavedStep(step_);
      AppendPersist();
      status = executor_->RunUntilIdle();
    } else {
      status = store()->DropAllWritten();  // updates in backward, of the step that failed
    }
  }
  if (!status.ok()) {
    broken_ =
        absl::Status(status.code(),
                     absl::StrCat(why.message(), "; and the step could not be given up: ", status.message()));
    return broken_;
  }
  gradients_lost_ = "the last step failed, and its gradients are gone with it";
  MakeBuilder(builder_->next_id());
  return why;
}

void Engine::Impl::Observe(OpId id, const Op& op, double start, double end) {
  if (options_.hooks.observer) options_.hooks.observer(id, op, start, end);
  if (checkpointing_ != nullptr) checkpoint_status_.Update(checkpointing_->Advance(operations_));
  if (asked_ != nullptr) (void)asked_->checkpointing->Advance(operations_);  // FinishCheckpoint has its error
  if (!options_.hooks.tick || end - last_tick_ < 0.05) return;
  last_tick_ = end;
  options_.hooks.tick(executor_->waiting_for());
}

}  // namespace penstock::zero
