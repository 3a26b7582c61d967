#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "aio/engine.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "tiering/program/program.h"
#include "zero/compute/missed_updates.h"
#include "zero/engine/checkpointing.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/initialize.h"
#include "zero/engine/prepare.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/run_resources.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/lanes/watchdog.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

using tiering::Op;
using tiering::OpId;

Engine::Impl::Impl(std::shared_ptr<Compute> compute, EngineOptions options)
    : compute_(std::move(compute)), options_(std::move(options)), decisions_(options_) {
  options_.example = Kept(std::move(options_.example));  // for a Replan that comes to nothing
}

Engine::Impl::~Impl() {
  const TensorScope scope(tensors_.pool());
  if (executor_ != nullptr && executor_->in_flight() > 0 && options_.comm != nullptr) {
    // Closed in the middle of a step: what waits for the other ranks would wait for ever.
    options_.comm->Abort(absl::CancelledError("the engine was closed in the middle of a step"));
  }
  Close();
  held_.clear();
  compute_.reset();
  if (options_.comm != nullptr) options_.comm->WatchStops(nullptr);
}

void Engine::Impl::Close() {
  if (executor_ != nullptr) executor_->Quiesce();
  checkpointing_.reset();
  asked_.reset();
  watched_.reset();
  lanes_.reset();
  executor_.reset();
  if (resources_ != nullptr && resources_->store() != nullptr) held_ = resources_->CloseStore();
  resources_.reset();
}

absl::Status Engine::Impl::Create() {
  if (options_.comm != nullptr) options_.comm->WatchStops(options_.hooks.stops);
  CheckpointSchedule& checkpoints = options_.storage.checkpoints;
  const bool overwrites = options_.trains && options_.storage.overwrite && !options_.resumes();
  const bool replaces = overwrites && checkpoints.any() && options_.rank() == 0;
  // What is replaced is what is there now, and nothing that another run makes while this one measures and
  // waits.
  if (overwrites && !options_.storage.overwrites_only.has_value())
    options_.storage.overwrites_only = swap::SeeCommits(options_.storage.state_dirs);
  if (replaces && !checkpoints.replaces.has_value()) {
    ASSIGN_OR_RETURN(checkpoints.replaces, swap::SeeCheckpoints(checkpoints.parent));
  }
  if (options_.trains && checkpoints.any() && options_.rank() == 0 && checkpoints.lock == nullptr) {
    ASSIGN_OR_RETURN(checkpoints.lock, swap::CheckpointLock::Take(checkpoints.parent));
  }
  // Before anything is replaced: a refusal changes nothing.
  std::optional<swap::ReplacedCheckpoints> replaced;
  if (replaces) {
    ASSIGN_OR_RETURN(replaced, swap::ReplacedCheckpoints::Lock(checkpoints.parent, *checkpoints.replaces));
  }
  RETURN_IF_ERROR(Prepare(/*asks=*/true));
  if (!options_.resumes()) RETURN_IF_ERROR(GroupParameters());  // before any file is there
  if (overwrites && !options_.storage.overwrites_only->empty()) RETURN_IF_ERROR(ReadInitialValues());
  RETURN_IF_ERROR(MakeResources());
  if (plan_.format.weights == kernels::DType::kFp16) {
    RETURN_IF_ERROR(decisions_.ScaleLoss());
  }
  if (options_.resumes()) {
    RETURN_IF_ERROR(Restore());
    RETURN_IF_ERROR(GroupParameters());
    if (checkpointing_ != nullptr) RETURN_IF_ERROR(checkpointing_->KeepNewest());
    if (checkpointing_ != nullptr && store() != nullptr) {
      RETURN_IF_ERROR(checkpointing_->MakeUpFor(*store(), plan_.plan.commits_every_step));
    }
  } else {
    RETURN_IF_ERROR(Initialize());
    // A run on a drive is durable from its first commit on. One in memory is with its first checkpoint, which
    // takes their place.
    if (replaced.has_value() && store() != nullptr) {
      RETURN_IF_ERROR(replaced->Remove());
    }
  }
  RETURN_IF_ERROR(resources_->BoundDevice());
  MakeLanes();
  return absl::OkStatus();
}

absl::Status Engine::Impl::MakeResources() {
  ASSIGN_OR_RETURN(resources_, RunResources::Create(plan_, options_, identity_.dump(), held_));
  return options_.trains && options_.storage.checkpoints.any() ? MakeCheckpointing() : absl::OkStatus();
}

// All of them, for their errors alone: the run that they replace is as it was until then. (Ranks meet before
// any replaces its part.)
absl::Status Engine::Impl::ReadInitialValues() {
  if (!options_.initial_values) return absl::OkStatus();
  constexpr int64_t kPiece = int64_t{1} << 18;
  ASSIGN_OR_RETURN(const HostBuffer values, HostBuffer::Of(kPiece * static_cast<int64_t>(sizeof(float)),
                                                           "memory for reading initial values"));
  for (const tiering::BlockIndex number : plan_.plan.blocks.indices()) {
    const tiering::BlockPlan& block = plan_.plan.blocks[number];
    for (const tiering::TileIndex t : block.tiles.indices()) {
      if (!block.in_store(t)) continue;
      const int64_t from = options_.rank() * block.elements + block.tiles[t].offset;
      const int64_t end = std::min(layouts_[number]->elements, from + block.tiles[t].elements);
      for (int64_t first = from; first < end; first += kPiece) {
        RETURN_IF_ERROR(options_.initial_values(number.value(), first, std::min(kPiece, end - first),
                                                reinterpret_cast<float*>(values.data())));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::Prepare(bool asks) {
  TensorMemory::Trim();
  TensorMemory::SetLimit(0);
  TensorMemory::ResetPeak();
  devices_ = DeviceExchange();  // of a plan before
  options_.storage.io.device_transfers.reset();
  ASSIGN_OR_RETURN(PreparedModel prepared,
                   PrepareModel(*compute_, options_, known_.has_value() ? &*known_ : nullptr));
  plan_ = std::move(prepared.plan);
  layouts_ = std::move(prepared.layouts);
  identity_ = std::move(prepared.identity);
  devices_ = std::move(prepared.devices);
  if (!devices_.how.empty()) Log(absl::StrCat("weights and gradients go ", devices_.how));
  if (!prepared.storage.how.empty()) Log(prepared.storage.how);
  options_.storage.io.device_transfers = std::move(prepared.storage.transfers);
  if (asks && options_.hooks.planned) {
    RETURN_IF_ERROR(options_.hooks.planned(plan_));
  }
  if (options_.trains && options_.storage.checkpoints.at_end && !plan_.plan.on_nvme) {
    RETURN_IF_ERROR(CheckPlace(options_.storage.checkpoints.parent, plan_.state_bytes, options_.rank()));
  }
  return absl::OkStatus();
}

void Engine::Impl::MakeLanes() {
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
  lane_options.tells_what_came = options_.optimizer.missing_gradients == MissingGradients::kSkip;
  lane_options.network_memory = resources_->network_memory();
  LaneHooks hooks;
  hooks.decide = [this](const Op& op) { return Decide(op); };
  hooks.describe_commit = [this](const Op& op) { return DescribeCommit(op.step); };
  hooks.committed = [this](const Op& op) { return Applied(op); };
  hooks.failed = [this](const Op& op, const absl::Status& why) { return PassFailed(op, why); };
  lanes_ = std::make_unique<HardwareLanes>(plan_.plan, arena_view(), layouts_, compute_.get(),
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
  gates_ = 0;
  MakeBuilder(/*first_id=*/0);
  last_end_ = lanes_->Now();
}

absl::Status Engine::Impl::GroupParameters() {
  const std::vector<ParameterGroup>& groups = decisions_.named_groups();
  RETURN_IF_ERROR(AgreeOn("list of groups of parameters", ToJson(groups).dump()));
  if (groups.empty() || !options_.trains) return absl::OkStatus();
  ASSIGN_OR_RETURN(layouts_, LayoutsWithGroups(plan_.graph, layouts_, groups, plan_.format.states));
  return absl::OkStatus();
}

absl::Status Engine::Impl::MakeCheckpointing() {
  if (options_.storage.checkpoints.lock != nullptr) {
    // It was taken before all that was measured.
    RETURN_IF_ERROR(options_.storage.checkpoints.lock->Check());
  }
  CheckpointSchedule schedule = options_.storage.checkpoints;
  // A run on a drive replaces them itself, by its first commit.
  if (plan_.plan.on_nvme || options_.resumes()) schedule.replaces.reset();
  checkpointing_ =
      std::make_unique<Checkpointing>(std::move(schedule), resources_->tile_memory(), options_.comm.get(),
                                      options_.hooks.checkpointed, &checkpoint_totals_);
  if (options_.resumes() || !options_.storage.overwrite) {
    RETURN_IF_ERROR(checkpointing_->CleanUp());
  }
  if (options_.comm != nullptr) {
    // Nobody writes there before rank 0 has cleaned up.
    RETURN_IF_ERROR(AgreeOnDirectory(*options_.comm, options_.storage.checkpoints.parent));
    ASSIGN_OR_RETURN(checkpoint_uuid_, AgreeOnUuid(*options_.comm));
    ASSIGN_OR_RETURN(const swap::Uuid series, AgreeOnUuid(*options_.comm));
    checkpointing_->set_series(series);
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::Initialize() {
  run_ = options_.resume.run;
  absl::Status status = InitializeState(*compute_, options_, plan_, arena_view(), DeviceStateOrNull(),
                                        layouts_, store(), [this](const std::string& line) { Log(line); });
  RETURN_IF_ERROR(status);
  ASSIGN_OR_RETURN(first_buffers_, compute_->Buffers());
  if (store() == nullptr) return status;
  const std::string payload = Payload(nullptr);
  return store()->CommitNow({.step = 0, .updates = 0, .payload = payload});
}

absl::Status Engine::Impl::Restore() {
  swap::Recovered loaded;
  if (store() == nullptr) {
    ASSIGN_OR_RETURN(swap::Recovered from,
                     LoadIntoMemory(*resources_->io(), plan_.parts, plan_.graph, plan_.plan, arena_view(),
                                    DeviceStateOrNull(), options_.rank()));
    loaded = std::move(from);
  }
  const swap::Recovered& recovered = store() != nullptr ? store()->recovered() : loaded;
  ASSIGN_OR_RETURN(const nlohmann::json payload, PayloadOf(recovered));
  run_ = payload["run"];
  run_.update(options_.resume.run_changes);
  last_description_ = payload.value("step", nlohmann::json());
  const absl::Status restored =
      decisions_.Restore(payload, static_cast<int64_t>(recovered.updates), TrainedParameters(layouts_));
  if (!restored.ok()) return DamagedPayload(recovered, restored.message());
  RETURN_IF_ERROR(compute_->RestoreBuffers(payload.value("buffers", nlohmann::json())));
  step_ = static_cast<int64_t>(recovered.step);
  committed_step_ = step_;
  resumed_from_ = step_;
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::json> Engine::Impl::PayloadOf(const swap::Recovered& recovered) const {
  for (const std::string& line : recovered.damage) Log(absl::StrCat("healed: ", line));
  for (const std::string& line : recovered.cut_short) Log(absl::StrCat("cut short: ", line));
  absl::StatusOr<nlohmann::json> payload = ParseJsonObject(recovered.payload, "");
  if (!payload.ok()) return DamagedPayload(recovered, absl::StrCat("payload: ", payload.status().message()));
  if (!payload->contains("run") || !(*payload)["run"].is_object())
    return DamagedPayload(recovered, "payload");
  return payload;
}

absl::Status Engine::Impl::DamagedPayload(const swap::Recovered& recovered, absl::string_view what) const {
  return absl::DataLossError(absl::StrCat("the commit record of step ", recovered.step, " in ",
                                          options_.storage.state_dirs.front(), " has no valid ", what));
}

void Engine::Impl::MakeBuilder(OpId first_id) {
  builder_ = std::make_unique<tiering::ProgramBuilder>(plan_.graph, plan_.plan, step_ + 1, first_id);
  builder_->SetOrder(stage_order_);
}

void Engine::Impl::WatchLanes() {
  if (!options_.watch.any() || !options_.hooks.stuck) return;
  Watchdog::Sources sources;
  sources.what = [this](const Op& op) { return NameOf(op); };
  sources.where = [this](const Op& op) { return lanes_->PlaceOf(op); };
  if (aio::Engine* const io = resources_->io(); io != nullptr)
    sources.drive_bytes = [io] { return io->moved_bytes(); };
  watched_ =
      std::make_unique<WatchedLanes>(lanes_.get(), options_.watch, std::move(sources), options_.hooks.stuck);
}

std::string Engine::Impl::NameOf(const Op& op) const {
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

}  // namespace penstock::zero
