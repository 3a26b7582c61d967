#include "zero/engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/io_error.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tiering/program/program.h"
#include "zero/engine/checkpointing.h"
#include "zero/engine/initialize.h"
#include "zero/engine/parameter_access.h"
#include "zero/engine/prepare.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/run_resources.h"
#include "zero/engine/step_outcome.h"
#include "zero/lanes/device_lanes.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/lanes/watchdog.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

// Of a step that all ranks make alike: with other rates on one of them each would update its part otherwise.
std::string RatesText(const std::vector<GroupRates>& groups) {
  if (groups.empty()) return "";
  std::string all;
  for (const GroupRates& group : groups) {
    const auto number = [&all](const std::optional<double>& value) {
      absl::StrAppend(&all, value.has_value() ? absl::StrFormat("%.17g ", *value) : "- ");
    };
    number(group.rates.lr);
    number(group.rates.beta1);
    number(group.rates.beta2);
    number(group.weight_decay);
  }
  return absl::StrFormat(" (learning rate %.10g, all rates %08x)", groups.front().rates.lr,
                         static_cast<uint32_t>(kernels::Checksum(all.data(), all.size())));
}

}  // namespace

using tiering::Op;
using tiering::OpId;
using tiering::OpKind;
using tiering::Pass;

class Engine::Impl {
 public:
  Impl(std::shared_ptr<Compute> compute, EngineOptions options)
      : compute_(std::move(compute)), options_(std::move(options)), decisions_(options_) {}

  ~Impl() {
    const TensorScope scope(tensors_.pool());
    if (executor_ != nullptr && executor_->in_flight() > 0 && options_.comm != nullptr) {
      // Closed in the middle of a step: what waits for the other ranks would wait for ever.
      options_.comm->Abort(absl::CancelledError("the engine was closed in the middle of a step"));
    }
    if (executor_ != nullptr) executor_->Quiesce();
    checkpointing_.reset();
    watched_.reset();
    lanes_.reset();
    executor_.reset();
    resources_.reset();
    compute_.reset();
    if (options_.comm != nullptr) options_.comm->WatchStops(nullptr);
  }

  // The other ranks are told what this one does next.
  void Enter(const std::string& call) const {
    if (options_.comm != nullptr) options_.comm->Enter(call);
  }

  absl::Status Create() {
    if (options_.comm != nullptr) options_.comm->WatchStops(options_.hooks.stops);
    CheckpointSchedule& checkpoints = options_.storage.checkpoints;
    if (options_.trains && checkpoints.any() && options_.rank() == 0 && checkpoints.lock == nullptr) {
      ASSIGN_OR_RETURN(checkpoints.lock, swap::CheckpointLock::Take(checkpoints.parent));
    }
    TensorMemory::Trim();
    TensorMemory::SetLimit(0);
    TensorMemory::ResetPeak();
    ASSIGN_OR_RETURN(PreparedModel prepared, PrepareModel(*compute_, options_));
    plan_ = std::move(prepared.plan);
    layouts_ = std::move(prepared.layouts);
    identity_ = std::move(prepared.identity);
    devices_ = std::move(prepared.devices);
    if (!devices_.how.empty()) Log(absl::StrCat("weights and gradients go ", devices_.how));
    if (!prepared.storage.how.empty()) Log(prepared.storage.how);
    options_.storage.io.device_transfers = std::move(prepared.storage.transfers);
    if (options_.hooks.planned) {
      RETURN_IF_ERROR(options_.hooks.planned(plan_));
    }
    if (options_.trains && options_.storage.checkpoints.at_end && !plan_.plan.on_nvme) {
      RETURN_IF_ERROR(CheckPlace(options_.storage.checkpoints.parent, plan_.state_bytes, options_.rank()));
    }

    if (!options_.resumes()) RETURN_IF_ERROR(GroupParameters());  // before any file is there
    ASSIGN_OR_RETURN(std::unique_ptr<RunResources> resources,
                     RunResources::Create(plan_, options_, identity_.dump()));
    resources_ = std::move(resources);
    if (options_.trains && options_.storage.checkpoints.any()) {
      RETURN_IF_ERROR(MakeCheckpointing());
    }
    if (plan_.format.weights == kernels::DType::kFp16) {
      RETURN_IF_ERROR(decisions_.ScaleLoss());
    }
    if (options_.resumes()) {
      RETURN_IF_ERROR(Restore());
      RETURN_IF_ERROR(GroupParameters());
      if (checkpointing_ != nullptr && store() != nullptr) {
        RETURN_IF_ERROR(checkpointing_->MakeUpFor(*store(), plan_.plan.commits_every_step));
      }
    } else if (absl::Status status = Initialize(); !status.ok()) {
      return status;
    }
    RETURN_IF_ERROR(resources_->BoundDevice());
    HardwareLanes::Options lane_options;
    lane_options.update_workers = options_.optimizer.workers;
    lane_options.format = plan_.format;
    lane_options.seed = options_.seed;
    lane_options.rank = options_.rank();
    lane_options.world = options_.world();
    lane_options.frozen = options_.frozen.get();
    lane_options.comm = options_.comm.get();
    lane_options.devices = devices_.comm.get();
    lane_options.parts = resources_->others();
    lane_options.sums = resources_->sums();
    lane_options.stops = options_.hooks.stops;
    lane_options.network_memory = resources_->network_memory();
    LaneHooks hooks;
    hooks.decide = [this](const Op& op) { return Decide(op); };
    hooks.describe_commit = [this](const Op& op) { return DescribeCommit(op.step); };
    hooks.committed = [this](const Op& op) { return Applied(op); };
    hooks.failed = [this](const Op& op, const absl::Status& why) { return PassFailed(op, why); };
    lanes_ = std::make_unique<HardwareLanes>(plan_.plan, residency(), layouts_, compute_.get(),
                                             options_.device.get(), store(), resources_->inputs(),
                                             resources_->device_lanes(), lane_options, std::move(hooks));
    WatchLanes();
    executor_ = std::make_unique<tiering::Executor>(
        watched_ != nullptr ? static_cast<tiering::Lanes*>(watched_.get()) : lanes_.get());
    executor_->set_observer(
        [this](OpId id, const Op& op, double start, double end) { Observe(id, op, start, end); });
    executor_->set_stall_observer(options_.hooks.stall_observer);
    stage_order_.resize(plan_.graph.stages.size());
    std::iota(stage_order_.begin(), stage_order_.end(), 0);
    MakeBuilder(/*first_id=*/0);
    last_end_ = lanes_->Now();
    return absl::OkStatus();
  }

  absl::Status GroupParameters() {
    const std::vector<ParameterGroup>& groups = decisions_.named_groups();
    RETURN_IF_ERROR(AgreeOn("list of groups of parameters", ToJson(groups).dump()));
    if (groups.empty() || !options_.trains) return absl::OkStatus();
    ASSIGN_OR_RETURN(layouts_, LayoutsWithGroups(plan_.graph, layouts_, groups, plan_.format.states));
    return absl::OkStatus();
  }

  // Rates that an optimizer may have, for all groups of the model.
  absl::Status CheckRates(const std::vector<GroupRates>& groups) const {
    auto needed = static_cast<int>(decisions_.named_groups().size()) + 1;
    for (const auto& layout : layouts_) needed = std::max(needed, layout->groups());
    if (groups.size() > 1 && static_cast<int>(groups.size()) != needed) {
      return absl::InvalidArgumentError(absl::StrCat("rates of ", groups.size(),
                                                     " groups given, the model's "
                                                     "parameters are in ",
                                                     needed));
    }
    for (const GroupRates& group : groups) {
      const double decay = group.weight_decay.value_or(0);
      if (std::isfinite(group.rates.lr) && group.rates.lr >= 0 && std::isfinite(decay) && decay >= 0)
        continue;
      return absl::InvalidArgumentError(absl::StrCat("a group's learning rate of ", group.rates.lr,
                                                     " and weight decay of ", decay,
                                                     ": both must be numbers of 0 or more"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> Step(std::vector<Batch> batches, const StepOptions& step) {
    if (!broken_.ok()) return broken_;
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
    if (!checkpoint_status_.ok()) return checkpoint_status_;
    calls_ = calls_then;
    losses_.insert(losses_.end(), totals_.losses.begin(), totals_.losses.end());
    if (!step.update) {
      StepResult summed;
      summed.step = step_ + 1;
      summed.updated = false;
      summed.loss = MeanOf(totals_.losses);
      Account(&summed);
      return summed;
    }
    ++step_;
    StepResult& result = decisions_.at(step_).result;
    if (ahead_norm_ < 0 && !decisions_.last_is_replayed()) builder_->AssumptionHeld();
    result.loss = MeanOf(std::exchange(losses_, {}));
    Account(&result);
    last_result_ = result;
    gradients_lost_ = false;
    return result;
  }

  static double MeanOf(const std::vector<double>& losses) {
    return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
  }

  // What a call took.
  void Account(StepResult* of_call) {
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
  }

  absl::Status SetOrder(std::vector<int> stages) {
    if (!broken_.ok()) return broken_;
    if (!executor_->status().ok()) return executor_->status();
    RETURN_IF_ERROR(AgreeOnOrder(stages));
    std::vector<int> sorted = stages;
    std::sort(sorted.begin(), sorted.end());
    const auto count = static_cast<int>(plan_.graph.stages.size());
    bool valid = static_cast<int>(stages.size()) == count && stages.back() == count - 1;
    for (int s = 0; valid && s < count; ++s) valid = sorted[static_cast<size_t>(s)] == s;
    if (!valid) {
      return absl::InvalidArgumentError(absl::StrCat("an order of stages is a permutation of 0 to ",
                                                     count - 1, " that ends with the last, not [",
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

  // Ranks that go through their stages in different orders would wait for each other's blocks for ever.
  absl::Status AgreeOnOrder(const std::vector<int>& stages) const {
    const absl::Status agreed =
        AgreeOn("order of stages", absl::StrCat("[", absl::StrJoin(stages, ", "), "]"));
    if (!absl::IsInvalidArgument(agreed)) return agreed;
    return absl::InvalidArgumentError(absl::StrCat(agreed.message(), "; the order stays as it was"));
  }

  // kInvalidArgument: another rank has another.
  absl::Status AgreeOn(const char* what, const std::string& mine) const {
    if (options_.comm == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(std::vector<std::string> all, options_.comm->AllTexts(Channel::kSetup, {what}, mine));
    for (size_t k = 1; k < all.size(); ++k) {
      if (all[k] == all.front()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("all ranks need one ", what, ": rank 0 has ", all.front(), ", ",
                       RankName(static_cast<int>(k), options_.world()), " ", all[k]));
    }
    return absl::OkStatus();
  }

  int64_t gds_read_bytes() const { return lanes_->past_host_bytes(); }

  std::vector<std::string> ParameterNames() const { return Access().Names(); }

  absl::StatusOr<HostTensor> ReadState(std::string_view parameter, StateKind kind) {
    if (resources_->others() != nullptr) return OnePartOnly();
    RETURN_IF_ERROR(BroadcastError(Flush()));
    if (kind != StateKind::kGradient) return Access().Read(parameter, kind);
    if (calls_ > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", step_ + 1, " has more calls to come: its gradients are not final"));
    }
    if (gradients_lost_) {
      return absl::FailedPreconditionError("the last step failed, and its gradients are gone with it");
    }
    if (last_result_.step == 0) {
      return absl::FailedPreconditionError("no step has been made since the run was opened: no gradient yet");
    }
    return Access().ReadGradient(parameter, last_result_.loss_scale, last_result_.in_backward > 0,
                                 [this](tiering::BlockIndex block, tiering::TileIndex tile) {
                                   return lanes_->gradient_checksum(block, tile);
                                 });
  }

  absl::Status WriteState(std::string_view parameter, StateKind kind, const TensorView& value) {
    if (!options_.trains) return absl::FailedPreconditionError("this engine only reads");
    absl::Status status = BroadcastError(Flush());
    if (!status.ok()) return status;
    bool begun = false;
    status = Access().Write(parameter, kind, value, [&] {
      begun = true;
      const bool over_the_only_one = store() != nullptr && plan_.versions == 1;
      return over_the_only_one ? store()->OverwriteNow() : absl::OkStatus();
    });
    if (!begun) return status;
    // What the builder believes to be in memory, or on a device, is of the version before.
    MakeBuilder(builder_->next_id());
    const auto commit = [this] { return CommitAgain(std::string(store()->committed_payload())); };
    if (status.ok()) {
      if (store() == nullptr) return status;
      status = commit();
      // Nobody writes over the version before until all have this one.
      if (options_.comm != nullptr) status = AgreeOnStatus(*options_.comm, Channel::kSetup, status);
      return BroadcastError(status);
    }
    absl::Status undone = absl::UnimplementedError("it is in memory alone");
    if (store() != nullptr) undone = store()->DropAllWritten();
    if (undone.ok() && store()->overwriting()) undone = commit();  // nothing was, after all
    if (undone.ok()) return status;
    // Part of the value may be there: nobody may train on that.
    broken_ = BroadcastError(absl::Status(
        status.code(), absl::StrCat(status.message(), "; what was written of ", std::string(parameter),
                                    " cannot be taken back: ", undone.message())));
    return broken_;
  }

  absl::StatusOr<std::vector<double>> EvaluateEach(const std::vector<Batch>& batches) {
    std::vector<double> losses;
    RETURN_IF_ERROR(ForwardAll(batches, [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const std::vector<double> group, compute_->Losses());
      losses.insert(losses.end(), group.begin(), group.end());
      return absl::OkStatus();
    }));
    return losses;
  }

  absl::StatusOr<double> Evaluate(const std::vector<Batch>& batches) {
    ASSIGN_OR_RETURN(std::vector<double> losses, EvaluateEach(batches));
    // One by one: how many of them pass at once depends on the budget, and the sum must not.
    return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
  }

  // In the memory that was planned for batches like the example: more of smaller ones.
  int64_t EvaluatesAtOnce(const Batch& batch) const {
    return std::max<int64_t>(1, EvaluationRoom() / std::max<int64_t>(1, batch.elements()));
  }

  absl::StatusOr<std::vector<std::vector<HostTensor>>> Infer(const std::vector<Batch>& batches) {
    std::vector<std::vector<HostTensor>> outputs;
    RETURN_IF_ERROR(ForwardAll(batches, [&]() -> absl::Status {
      ASSIGN_OR_RETURN(std::vector<std::vector<HostTensor>> group, compute_->Outputs());
      std::move(group.begin(), group.end(), std::back_inserter(outputs));
      return absl::OkStatus();
    }));
    return outputs;
  }

  absl::Status Flush() {
    if (!broken_.ok()) return broken_;
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

  absl::StatusOr<std::string> Keep() {
    RETURN_IF_ERROR(Flush());
    if (!options_.storage.checkpoints.at_end || store() != nullptr || last_result_.step == 0)
      return std::string();
    if (checkpointing_->kept_step() == step_) return checkpointing_->kept_path();
    absl::Status status = BeginOfMemory(step_);
    if (status.ok()) status = checkpointing_->Finish();
    if (status.ok()) status = checkpointing_->last_status();
    if (!status.ok()) return status;
    return checkpointing_->kept_path();
  }

  absl::Status CommitDescription() {
    RETURN_IF_ERROR(Flush());
    if (store() == nullptr || last_result_.step != step_ || !options_.hooks.describe) return absl::OkStatus();
    return CommitAgainWhereItDiffers(Payload(&decisions_.applied()));
  }

  absl::Status CommitDescription(nlohmann::json description) {
    RETURN_IF_ERROR(Flush());
    if (store() == nullptr) return absl::OkStatus();
    nlohmann::json payload = nlohmann::json::parse(store()->committed_payload());
    payload["step"] = std::move(description);
    return CommitAgainWhereItDiffers(payload.dump());
  }

  absl::StatusOr<std::string> Checkpoint(const std::string& parent) {
    if (!options_.trains) return absl::FailedPreconditionError("this engine only reads");
    RETURN_IF_ERROR(BroadcastError(CommitDescription()));
    if (store() == nullptr && last_result_.step == 0) {
      return absl::FailedPreconditionError(
          "no step has been made since the run was opened: what it was opened from is the checkpoint");
    }
    std::shared_ptr<swap::CheckpointLock> lock = options_.storage.checkpoints.lock;
    absl::Status mine;
    if (options_.rank() == 0 && (lock == nullptr || parent != options_.storage.checkpoints.parent)) {
      auto taken = swap::CheckpointLock::Take(parent);
      if (taken.ok()) lock = *std::move(taken);
      mine = taken.status();
    }
    // What is wrong with the directory is known to all, and ends nobody.
    RETURN_IF_ERROR(OfAll(mine));
    aio::ArenaOptions of_tile;
    of_tile.lock = false;
    of_tile.bytes = store() != nullptr ? store()->geometry().largest_slot_bytes() : 1;
    absl::StatusOr<std::unique_ptr<aio::Arena>> tile = aio::Arena::Create(of_tile);
    RETURN_IF_ERROR(OfAll(tile.status()));
    // Rank 0 cleans up there, before anybody writes.
    Checkpointing once({.parent = parent, .lock = lock}, {(*tile)->data(), of_tile.bytes},
                       options_.comm.get(), options_.hooks.checkpointed);
    if (options_.comm != nullptr) {
      RETURN_IF_ERROR(AgreeOnDirectory(*options_.comm, parent));
      if (!checkpoint_uuid_.has_value()) {
        ASSIGN_OR_RETURN(checkpoint_uuid_, AgreeOnUuid(*options_.comm));
      }
    }
    std::unique_ptr<aio::Engine> own_io;
    RETURN_IF_ERROR(BroadcastError(BeginOnce(&once, &own_io)));
    RETURN_IF_ERROR(BroadcastError(once.Finish()));
    // Rank 0 gives it its name after the others are done.
    RETURN_IF_ERROR(OfAll(once.last_status()));
    return once.kept_path();
  }

  const Device& device() const { return *options_.device; }
  // A disk that is full in the middle of it all: how much is missing, and what stands.
  absl::Status WithRoom(absl::Status status) const {
    const auto told_of = [&](const std::string& text) { return absl::StrContains(status.message(), text); };
    const std::vector<std::string>& own = options_.storage.state_dirs;  // and not another rank's
    if (store() == nullptr || !told_of(aio::ErrnoText(ENOSPC)) ||
        std::none_of(own.begin(), own.end(), told_of))
      return status;
    const std::string room = swap::RoomText(own);
    return absl::Status(
        status.code(),
        absl::StrCat(status.message(), room.empty() ? "" : "; ", room, "; ",
                     plan_.versions == 1 ? std::string("with room, --resume goes on from a checkpoint")
                                         : absl::StrCat("with room, --resume goes on from step ",
                                                        store()->committed_step())));
  }
  // The other ranks hear of an error: they would wait for this one.
  absl::Status BroadcastError(absl::Status status) const {
    status = WithRoom(std::move(status));
    if (!status.ok() && options_.comm != nullptr) options_.comm->Abort(status);
    return status;
  }
  template <typename T>
  absl::StatusOr<T> BroadcastError(absl::StatusOr<T> result) const {
    if (result.ok()) return result;
    return BroadcastError(result.status());
  }

  TensorAccount tensors_;  // the Compute's, and what is measured
  std::shared_ptr<Compute> compute_;
  EngineOptions options_;
  StepOutcome decisions_;
  EnginePlan plan_;
  int64_t step_ = 0;
  int64_t committed_step_ = 0;
  std::optional<int64_t> resumed_from_;
  nlohmann::json run_;
  nlohmann::json last_description_;
  tiering::Usage usage_;
  std::unique_ptr<tiering::Executor> executor_;
  std::unique_ptr<RunResources> resources_;
  DeviceExchange devices_;
  absl::Status broken_;  // a written value, or a step that failed, is there in part

 private:
  // The same on all ranks: OK where everybody's is.
  absl::Status OfAll(const absl::Status& mine) const {
    return options_.comm == nullptr ? mine : AgreeOnStatus(*options_.comm, Channel::kSetup, mine);
  }
  // Where the last commit says something else, on this rank or another: all make the same commits, or a
  // resumed run would not know which belong together.
  absl::Status CommitAgainWhereItDiffers(const std::string& payload) const {
    bool differs = payload != store()->committed_payload();
    if (options_.comm != nullptr) {
      ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                       AllNumbers(*options_.comm, "the description", differs ? 1 : 0));
      differs = std::find(all.begin(), all.end(), 1) != all.end();
    }
    return differs ? OfAll(CommitAgain(payload)) : absl::OkStatus();
  }
  // A checkpoint of the last step, by itself. `own_io`: what moves it where the engine has no drive.
  absl::Status BeginOnce(Checkpointing* once, std::unique_ptr<aio::Engine>* own_io) {
    if (store() != nullptr) return once->BeginOfStore(*store(), plan_.plan.commits_every_step);
    aio::Engine* io = resources_->io();
    if (io == nullptr) {
      ASSIGN_OR_RETURN(*own_io, aio::Engine::Create({}));
      io = own_io->get();
    }
    return once->BeginOfMemory(*io, SourceOf(step_));
  }
  ArenaView& residency() const { return resources_->residency(); }
  swap::Store* store() const { return resources_ != nullptr ? resources_->store() : nullptr; }

  // The step's loss is the mean over its micro-batches, of all ranks.
  double LossGradient() const {
    return decisions_.loss_scale() / (options_.micro_batches * options_.calls_per_step * options_.world());
  }

  // The last step once more, with what was written or is said of it since.
  absl::Status CommitAgain(const std::string& payload) const {
    return store()->CommitNow(
        {.step = store()->committed_step(), .updates = store()->committed_updates(), .payload = payload});
  }

  absl::Status MakeCheckpointing() {
    if (options_.storage.checkpoints.lock != nullptr) {
      // It was taken before all that was measured.
      RETURN_IF_ERROR(options_.storage.checkpoints.lock->Check());
    }
    if (!options_.resumes() && options_.storage.overwrite && options_.rank() == 0) {
      RETURN_IF_ERROR(swap::RemoveCheckpoints(options_.storage.checkpoints.parent));
    }
    checkpointing_ = std::make_unique<Checkpointing>(options_.storage.checkpoints, resources_->tile_memory(),
                                                     options_.comm.get(), options_.hooks.checkpointed);
    if (options_.comm != nullptr) {
      // Nobody writes there before rank 0 has cleaned up.
      RETURN_IF_ERROR(AgreeOnDirectory(*options_.comm, options_.storage.checkpoints.parent));
      ASSIGN_OR_RETURN(checkpoint_uuid_, AgreeOnUuid(*options_.comm));
    }
    return absl::OkStatus();
  }

  // Input elements of a forward-only pass.
  int64_t EvaluationRoom() const {
    return std::max(1, plan_.plan.evaluate_micro_batches) * options_.example.elements();
  }

  static absl::Status OnePartOnly() {
    return absl::FailedPreconditionError(
        "this process has one rank's part of what several have kept: read it with as many, or export it");
  }

  absl::Status Initialize() {
    run_ = options_.resume.run;
    absl::Status status = InitializeState(*compute_, options_, plan_, residency(), DeviceStateOrNull(),
                                          layouts_, store(), [this](const std::string& line) { Log(line); });
    if (!status.ok()) return status;
    ASSIGN_OR_RETURN(first_buffers_, compute_->Buffers());
    if (store() == nullptr) return status;
    const std::string payload = Payload(nullptr);
    return store()->CommitNow({.step = 0, .updates = 0, .payload = payload});
  }

  absl::Status Restore() {
    swap::Recovered loaded;
    if (store() == nullptr) {
      ASSIGN_OR_RETURN(swap::Recovered from,
                       LoadIntoMemory(*resources_->io(), plan_.parts, plan_.graph, plan_.plan, residency(),
                                      DeviceStateOrNull(), options_.rank()));
      loaded = std::move(from);
    }
    const swap::Recovered& recovered = store() != nullptr ? store()->recovered() : loaded;
    for (const std::string& line : recovered.damage) Log(absl::StrCat("healed: ", line));
    for (const std::string& line : recovered.cut_short) Log(absl::StrCat("cut short: ", line));
    const nlohmann::json payload =
        nlohmann::json::parse(recovered.payload, nullptr, /*allow_exceptions=*/false);
    const auto damaged = [&](absl::string_view what) {
      return absl::DataLossError(absl::StrCat("the commit record of step ", recovered.step, " in ",
                                              options_.storage.state_dirs.front(), " has no valid ", what));
    };
    if (!payload.is_object() || !payload.contains("run") || !payload["run"].is_object())
      return damaged("payload");
    run_ = payload["run"];
    run_.update(options_.resume.run_changes);
    last_description_ = payload.value("step", nlohmann::json());
    const absl::Status restored = decisions_.Restore(payload, static_cast<int64_t>(recovered.updates));
    if (!restored.ok()) return damaged(restored.message());
    RETURN_IF_ERROR(compute_->RestoreBuffers(payload.value("buffers", nlohmann::json())));
    step_ = static_cast<int64_t>(recovered.step);
    committed_step_ = step_;
    resumed_from_ = step_;
    return absl::OkStatus();
  }

  // Of a commit of `step`; null: of the run's beginning.
  std::string Payload(const StepOutcome::Decided* step) const {
    nlohmann::json payload = {{"run", run_}};
    decisions_.AddTo(&payload, step);
    const nlohmann::json& buffers = step != nullptr ? step->buffers : first_buffers_;
    if (!buffers.is_null()) payload["buffers"] = buffers;
    if (step != nullptr && options_.hooks.describe) payload["step"] = options_.hooks.describe(step->result);
    return payload.dump();
  }

  // The next call, after so many of its step.
  void AppendTraining(bool update, int calls) {
    const bool in_backward = update && decisions_.ChoosesInBackward(plan_.plan);
    std::vector<Op> ops = builder_->Append(update ? Pass::kTrain : Pass::kSum, 0, in_backward,
                                           /*continues=*/calls > 0);
    operations_ = static_cast<int64_t>(ops.size());
    executor_->Append(std::move(ops));
    ahead_norm_ = builder_->next_id() - 1;  // a training pass ends with its norm
    ahead_step_ = builder_->next_step() - (update ? 1 : 0);
    ahead_updates_ = update;
    if (in_backward) decisions_.InBackward(ahead_step_);
    AppendPersistIfDue();
  }

  // The step whose updates are applied becomes one that a restart finds; nothing where every step is.
  void AppendPersist() { executor_->Append(builder_->Append(Pass::kPersist)); }
  void AppendPersistIfDue() {
    const int64_t step = builder_->unsaved_step();
    if (step != 0 && checkpointing_ != nullptr && checkpointing_->Due(step)) AppendPersist();
  }

  // Nothing is pending, and nothing on a drive is taken to be in memory.
  void MakeBuilder(OpId first_id) {
    builder_ = std::make_unique<tiering::ProgramBuilder>(plan_.graph, plan_.plan, step_ + 1, first_id);
    builder_->SetOrder(stage_order_);
  }

  ParameterAccess Access() const {
    return {plan_.graph,          layouts_, plan_.plan,          plan_.format,
            residency(),          store(),  DeviceStateOrNull(), options_.comm.get(),
            options_.frozen.get()};
  }
  const DeviceState* DeviceStateOrNull() const {
    return resources_->device_lanes() != nullptr ? &resources_->device_lanes()->state() : nullptr;
  }

  // The step that was announced does not come: what it already reads and updates is finished, the rest is
  // nothing.
  absl::Status AbandonAhead() {
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
    if (!status.ok()) return status;
    MakeBuilder(builder_->next_id());
    return absl::OkStatus();
  }

  // The Compute failed. Over several ranks the others would wait for this one: it is everybody's error.
  bool PassFailed(const Op& op, const absl::Status& why) {
    if (options_.comm != nullptr) return false;
    pass_failure_.Update(why);
    if (!op.evaluates) abandoned_step_ = op.step;
    lanes_->FailPass(op);
    return true;
  }

  // The step that failed becomes as if it had never begun: what belongs to the step before is applied and
  // committed, what was made of this one is forgotten. Returns why it failed.
  absl::Status GiveUpStep() {
    const absl::Status why = std::exchange(pass_failure_, absl::OkStatus());
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
      broken_ = absl::Status(
          status.code(),
          absl::StrCat(why.message(), "; and the step could not be given up: ", status.message()));
      return broken_;
    }
    gradients_lost_ = true;
    MakeBuilder(builder_->next_id());
    return why;
  }

  template <typename Take>
  absl::Status ForwardAll(const std::vector<Batch>& batches, Take&& take) {
    if (!broken_.ok()) return broken_;
    if (batches.empty()) return absl::InvalidArgumentError("nothing to evaluate: no batches given");
    RETURN_IF_ERROR(AbandonAhead());
    const auto tokens = [&](size_t i) { return batches[i].elements(); };
    int64_t own_bytes = 0;
    size_t n = 0;
    for (size_t from = 0; from < batches.size(); from += n) {
      int64_t taken = tokens(from);
      for (n = 1; from + n < batches.size() && taken + tokens(from + n) <= EvaluationRoom(); ++n)
        taken += tokens(from + n);
      RETURN_IF_ERROR(compute_->Begin({.step = step_, .trains = false, .loss_gradient = LossGradient()},
                                      {batches.begin() + static_cast<std::ptrdiff_t>(from),
                                       batches.begin() + static_cast<std::ptrdiff_t>(from + n)}));
      std::vector<Op> ops = builder_->Append(Pass::kEvaluate, static_cast<int>(n));
      for (const Op& op : ops) {
        if (op.lane == tiering::Lane::kRead && op.step == builder_->next_step()) own_bytes += op.bytes;
      }
      executor_->Append(std::move(ops));
      AppendPersistIfDue();
      executor_->OpenGate(++gates_);
      RETURN_IF_ERROR(executor_->RunUntilIdle());
      if (!pass_failure_.ok()) {
        lanes_->ForgetFailedPass();
        AddUsage(executor_->TakeUsage());
        return std::exchange(pass_failure_, absl::OkStatus());
      }
      RETURN_IF_ERROR(take());
    }
    const tiering::Usage usage = executor_->TakeUsage();
    AddUsage(usage);
    // The last step's updates were made on the way: theirs are the next step's to tell.
    owed_read_bytes_ += usage.bytes[static_cast<size_t>(tiering::Lane::kRead)] - own_bytes;
    owed_write_bytes_ += usage.bytes[static_cast<size_t>(tiering::Lane::kWrite)];
    const double now = lanes_->Now();
    evaluation_seconds_ += now - std::exchange(last_end_, now);
    return absl::OkStatus();
  }

  absl::Status Decide(const Op& op) {
    if (abandoned_step_ != 0 && op.step >= abandoned_step_) return absl::OkStatus();
    if (op.kind == OpKind::kBatch && !op.evaluates) {
      if (checkpointing_ != nullptr && decisions_.is_in_backward(op.step))
        checkpointing_->BeforeUpdate(op.step);
      lanes_->set_assumption(decisions_.Assume(op.step));
      return absl::OkStatus();
    }
    if (op.kind != OpKind::kNorm && op.kind != OpKind::kSummed) return absl::OkStatus();
    if (op.kind == OpKind::kNorm && checkpointing_ != nullptr) checkpointing_->BeforeUpdate(op.step);
    totals_ = lanes_->totals();
    if (!totals_.failure.ok()) return PassFailed(op, totals_.failure) ? absl::OkStatus() : totals_.failure;
    absl::StatusOr<nlohmann::json> buffers = compute_->Buffers();
    if (!buffers.ok()) return PassFailed(op, buffers.status()) ? absl::OkStatus() : buffers.status();
    if (op.kind == OpKind::kSummed) return absl::OkStatus();
    ASSIGN_OR_RETURN(UpdateDecision decision,
                     decisions_.Decide(op.step, totals_.squares, plan_.plan.in_backward_share()));
    decisions_.at(op.step).buffers = *std::move(buffers);
    lanes_->set_decision(decision);
    return absl::OkStatus();
  }

  swap::CommitInfo DescribeCommit(int64_t step) {
    const StepOutcome::Decided& decided = decisions_.has(step) ? decisions_.at(step) : decisions_.applied();
    commit_payload_ = Payload(&decided);
    return {.step = static_cast<uint64_t>(step),
            .updates = static_cast<uint64_t>(decided.updates),
            .payload = commit_payload_};
  }

  // A step's updates are applied, and where `op` is durable, on the drive. Where not every step is, a durable
  // one follows for the same step.
  absl::Status Applied(const Op& op) {
    const int64_t step = op.step;
    const bool lasts = store() == nullptr || op.durable;
    if (lasts) committed_step_ = step;
    if (decisions_.has(step)) {
      decisions_.Apply(step);
      if (options_.hooks.committed) {
        RETURN_IF_ERROR(options_.hooks.committed(decisions_.applied().result));
      }
    }
    if (!lasts || checkpointing_ == nullptr) return absl::OkStatus();
    // What the last checkpoint still holds is written to from here on.
    if (!plan_.plan.commits_every_step) checkpointing_->FinishTiles();
    if (!checkpointing_->Due(step)) return absl::OkStatus();
    if (store() != nullptr) return checkpointing_->BeginOfStore(*store(), plan_.plan.commits_every_step);
    if (decisions_.has(step + 1)) {
      return absl::InternalError(absl::StrCat("the norm of step ", step + 1, " is known before step ", step,
                                              " is over: no checkpoint of it can be written"));
    }
    return BeginOfMemory(step);
  }

  // A checkpoint of `step`, whose updates were the last to be applied.
  absl::Status BeginOfMemory(int64_t step) {
    return checkpointing_->BeginOfMemory(*resources_->io(), SourceOf(step));
  }
  swap::CheckpointSource SourceOf(int64_t step) {
    const StepOutcome::Decided& applied = decisions_.applied();
    commit_payload_ = Payload(&applied);
    swap::CheckpointSource source = SourceOfMemory(plan_.plan, residency(), DeviceStateOrNull(),
                                                   identity_.dump(), step, applied.updates, commit_payload_);
    source.uuid = checkpoint_uuid_;
    return source;
  }

  void Observe(OpId id, const Op& op, double start, double end) {
    if (options_.hooks.observer) options_.hooks.observer(id, op, start, end);
    if (checkpointing_ != nullptr) checkpoint_status_.Update(checkpointing_->Advance(operations_));
    if (!options_.hooks.tick || end - last_tick_ < 0.05) return;
    last_tick_ = end;
    options_.hooks.tick(executor_->waiting_for());
  }

  void WatchLanes() {
    if (!options_.watch.any() || !options_.hooks.stuck) return;
    Watchdog::Sources sources;
    sources.what = [this](const Op& op) { return NameOf(op); };
    sources.where = [this](const Op& op) { return lanes_->PlaceOf(op); };
    if (aio::Engine* const io = resources_->io(); io != nullptr)
      sources.drive_bytes = [io] { return io->moved_bytes(); };
    watched_ = std::make_unique<WatchedLanes>(lanes_.get(), options_.watch, std::move(sources),
                                              options_.hooks.stuck);
  }
  // "read weights of block 3 (layer.2), tile 1, step 17".
  std::string NameOf(const Op& op) const {
    std::string name(tiering::OpKindName(op.kind));
    if (op.block.valid()) {
      absl::StrAppend(&name, " of block ", op.block.value(), " (", plan_.graph.blocks[op.block].name, ")");
    }
    if (op.tile.valid()) absl::StrAppend(&name, ", tile ", op.tile.value());
    if (op.micro_batch >= 0) absl::StrAppend(&name, ", micro-batch ", op.micro_batch);
    absl::StrAppend(&name, op.evaluates ? ", in an evaluation after step " : ", step ",
                    op.evaluates ? op.step - 1 : op.step);
    return name;
  }

  void AddUsage(const tiering::Usage& usage) {
    usage_.compute_union_seconds += usage.compute_union_seconds;
    for (size_t i = 0; i < usage.busy_seconds.size(); ++i) {
      usage_.busy_seconds[i] += usage.busy_seconds[i];
      usage_.bytes[i] += usage.bytes[i];
      usage_.operations[i] += usage.operations[i];
    }
    for (size_t i = 0; i < usage.stall_seconds.size(); ++i) usage_.stall_seconds[i] += usage.stall_seconds[i];
  }

  void Log(const std::string& line) const {
    if (options_.hooks.log) options_.hooks.log(line);
  }

  nlohmann::json identity_;
  GradientSums::Layouts layouts_;
  std::unique_ptr<HardwareLanes> lanes_;
  std::unique_ptr<WatchedLanes> watched_;  // null: nobody is told what is stuck
  std::unique_ptr<tiering::ProgramBuilder> builder_;
  std::vector<int> stage_order_;
  bool told_of_misses_ = false;
  std::unique_ptr<Checkpointing> checkpointing_;  // null: none are kept
  std::optional<swap::Uuid> checkpoint_uuid_;  // by which the parts of all ranks know each other, of memory
  absl::Status checkpoint_status_;
  int64_t operations_ = 1;  // of a training pass
  int64_t gates_ = 0;
  OpId ahead_norm_ = -1;  // of a training pass that was appended and whose batch has not come
  int64_t ahead_step_ = 0;
  bool ahead_updates_ = true;   // it is its step's last call
  int calls_ = 0;               // of the step under way that were made,
  std::vector<double> losses_;  // and their losses
  int64_t abandoned_step_ = 0;  // while it is run through
  std::string commit_payload_;
  nlohmann::json first_buffers_;  // of a new run
  StepResult last_result_;        // of this process; step 0: none
  double last_end_ = 0;           // of a step or an evaluation
  // Since the last step.
  double evaluation_seconds_ = 0;
  int64_t owed_read_bytes_ = 0, owed_write_bytes_ = 0;
  double last_tick_ = 0;
  StepTotals totals_;            // of the step whose norm was the last to be known
  absl::Status pass_failure_;    // of the Compute, in the pass that is under way
  bool gradients_lost_ = false;  // the last step failed
};

absl::StatusOr<EnginePlan> Engine::MakePlan(Compute& compute, const EngineOptions& options) {
  ASSIGN_OR_RETURN(PreparedModel prepared, PrepareModel(compute, options));
  return std::move(prepared.plan);
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(std::shared_ptr<Compute> compute,
                                                       EngineOptions options) {
  auto impl = std::make_unique<Impl>(std::move(compute), std::move(options));
  const TensorScope scope(impl->tensors_.pool());
  if (absl::Status status = impl->Create(); !status.ok()) return impl->BroadcastError(std::move(status));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() {
  if (!made_in_.here()) (void)impl_.release();  // threads, files and locks are the parent's
}

absl::StatusOr<StepResult> Engine::Step(std::vector<Batch> batches, StepOptions options) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("step ", impl_->step_ + 1, RatesText(options.groups)));
  return impl_->BroadcastError(impl_->Step(std::move(batches), options));
}
absl::Status Engine::SetOrder(std::vector<int> stages) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter("an order of stages");
  return impl_->SetOrder(std::move(stages));
}
absl::StatusOr<double> Engine::Evaluate(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an evaluation of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Evaluate(batches));
}
absl::StatusOr<std::vector<double>> Engine::EvaluateEach(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an evaluation of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->EvaluateEach(batches));
}
int64_t Engine::EvaluatesAtOnce(const Batch& batch) const { return impl_->EvaluatesAtOnce(batch); }
absl::StatusOr<std::vector<std::vector<HostTensor>>> Engine::Infer(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an inference of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Infer(batches));
}
std::vector<std::string> Engine::ParameterNames() const { return impl_->ParameterNames(); }
absl::StatusOr<HostTensor> Engine::ReadState(std::string_view parameter, StateKind kind) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("reading ", std::string(parameter), " (", std::string(StateKindName(kind)), ")"));
  return impl_->ReadState(parameter, kind);
}
absl::Status Engine::WriteState(std::string_view parameter, StateKind kind, const TensorView& value) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("writing ", std::string(parameter), " (", std::string(StateKindName(kind)), ")"));
  return impl_->WriteState(parameter, kind, value);
}
absl::Status Engine::Flush() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("a flush after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Flush());
}
absl::Status Engine::CommitDescription() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("describing step ", impl_->step_));
  return impl_->BroadcastError(impl_->CommitDescription());
}

absl::Status Engine::CommitDescription(nlohmann::json description) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("describing step ", impl_->step_));
  return impl_->BroadcastError(impl_->CommitDescription(std::move(description)));
}

absl::StatusOr<std::string> Engine::Checkpoint(const std::string& parent) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("a checkpoint of step ", impl_->step_));
  return impl_->Checkpoint(parent);
}

absl::StatusOr<std::string> Engine::Keep() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("keeping step ", impl_->step_));
  return impl_->BroadcastError(impl_->Keep());
}
absl::Status Engine::usable() const {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  return impl_->broken_.ok() ? impl_->executor_->status() : impl_->broken_;
}
int64_t Engine::step() const { return impl_->step_; }
int64_t Engine::committed_step() const { return impl_->committed_step_; }
std::optional<int64_t> Engine::resumed_from() const { return impl_->resumed_from_; }
const nlohmann::json& Engine::run() const { return impl_->run_; }
const nlohmann::json& Engine::last_description() const { return impl_->last_description_; }
const EnginePlan& Engine::plan() const { return impl_->plan_; }
tiering::Stall Engine::waiting_for() const { return impl_->executor_->waiting_for(); }
const tiering::Usage& Engine::usage() const { return impl_->usage_; }
aio::EngineStats Engine::io_stats() const {
  return impl_->resources_->io() ? impl_->resources_->io()->stats() : aio::EngineStats();
}
std::string Engine::io_backend() const {
  return impl_->resources_->io() ? impl_->resources_->io()->backend_name() : "none";
}
std::string Engine::arena_pages() const {
  return std::string(aio::PageKindName(impl_->resources_->arena().page_kind()));
}
int64_t Engine::peak_managed_bytes() const {
  const Device& device = impl_->device();
  const bool elsewhere =
      device.has_own_memory() && device.tensors_are_host();  // what the host's allocator counts
  return std::max(impl_->resources_->preparation_peak(),
                  static_cast<int64_t>(impl_->resources_->arena().bytes()) +
                      (elsewhere ? 0 : impl_->tensors_.Stats().peak_bytes));
}
const Device& Engine::device() const { return impl_->device(); }
Device::Traffic Engine::copied() const {
  const Device::Traffic now = impl_->device().traffic(), before = impl_->resources_->traffic_before();
  return {now.h2d_bytes - before.h2d_bytes, now.d2h_bytes - before.d2h_bytes};
}
bool Engine::gds() const { return impl_->plan_.plan.device.gds; }
int64_t Engine::gds_read_bytes() const { return impl_->gds_read_bytes(); }
int64_t Engine::peak_device_bytes() const {
  if (!impl_->device().has_own_memory()) return 0;
  const TensorScope scope(impl_->tensors_.pool());
  return impl_->plan_.plan.device.arena_bytes + impl_->device().tensors().peak_bytes;
}
int64_t Engine::peak_pinned_bytes() const {
  return impl_->resources_->pinned() ? static_cast<int64_t>(impl_->resources_->arena().bytes()) : 0;
}
void Engine::set_saturating_bytes_in_flight(uint64_t bytes) {
  aio::Engine* io = impl_->resources_->io();
  if (io == nullptr) return;
  io->set_saturating_bytes_in_flight(bytes);
  if (!impl_->options_.storage.io_depth_is_limit) io->RaiseCapsToSaturation();
}

}  // namespace penstock::zero
