// What an Engine is made with, in groups: what it trains on top, then memory, storage, the optimizer, what is
// resumed, and hooks. Every member says what it is, its unit and its default.
#ifndef PENSTOCK_ZERO_ENGINE_ENGINE_OPTIONS_H_
#define PENSTOCK_ZERO_ENGINE_ENGINE_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "kernels/float16.h"
#include "swap/checkpoint.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "zero/compute/device.h"
#include "zero/compute/frozen_source.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/parameter_groups.h"
#include "zero/compute/tile_format.h"
#include "zero/config/loss_scale.h"
#include "zero/config/lr_schedule.h"
#include "zero/config/modes.h"
#include "zero/lanes/stuck_operation.h"
#include "zero/memory/values.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

struct EnginePlan;  // zero/engine/engine.h
struct StepResult;

// How much memory the engine may take, and how it is divided.
struct MemoryOptions {
  // Of arena and tensors together. Default 0: no bound.
  int64_t host_memory_budget_bytes = 0;
  // Of the device, where it has memory of its own. Default 0: all that it has.
  int64_t device_memory_budget_bytes = 0;
  // Of a tile's weights; a tile is what is read, updated and written as one. Default 0: the planner's choice.
  int64_t tile_bytes = 0;
  // Limits of the planner's choice, as DeepSpeed's keys set them. Default: none.
  tiering::PlanBounds bounds;
  // Where the inputs that stages keep for backward wait for it. Default: the planner's choice.
  tiering::SavedActivations saved_activations = tiering::SavedActivations::kAuto;
};

// Which commits are kept as checkpoints of their own, while training goes on (zero/engine/checkpointing.h).
struct CheckpointSchedule {
  // The directory of all checkpoints.
  std::string parent;
  // Steps between two of them. Default 0: none is kept on the way.
  int64_t every = 0;
  // How many of the newest are kept. Default 0: all.
  int64_t keep = 0;
  // State in memory: Engine::Keep makes one of the last step. A place that cannot hold it is refused by
  // Create. Default: no.
  bool at_end = false;
  // Engine::BeginCheckpoint will be called: the plan has room for the tile that its copy takes. Default: it
  // takes one beyond the budget.
  bool on_demand = false;
  // With StorageOptions::overwrite: removed only as long as no others are in `parent`. Default: those that
  // are there when Create is called.
  std::optional<std::vector<swap::CheckpointSeen>> replaces = std::nullopt;
  // That `parent` is this run's (swap/checkpoint_lock.h), taken before the caller looked at its contents. Of
  // several ranks, rank 0 has it for all. Default: Create takes it.
  std::shared_ptr<swap::CheckpointLock> lock = nullptr;
  bool any() const { return every > 0 || at_end; }
};

// Where state lives, and what a restart finds of it.
struct StorageOptions {
  // Where masters and optimizer states are: on drives, in host memory, or beside the weights. Default:
  // drives.
  OffloadDevice offload = OffloadDevice::kNvme;
  // One directory for each drive; this rank's own. Needed with kNvme, and for what is resumed.
  std::vector<std::string> state_dirs;
  // The share of each in a new run's bytes, relative to the others'. Default: in proportion to the measured
  // speed of their drives (zero/engine/stripes.h).
  std::vector<double> state_dir_weights;
  // Without weights: whether drives are measured. false: equal shares. Default: yes.
  bool measures_drives = true;
  // What stands in state_dirs and the checkpoints in checkpoints.parent may be replaced. Default: refused.
  bool overwrite = false;
  // Of this rank's state_dirs: overwritten only as long as these are the newest commits there. Default: those
  // that are there when Create is called.
  std::optional<std::vector<swap::CommitSeen>> overwrites_only;
  // What a commit survives: the death of the process (the default), or power loss.
  swap::Sync sync = swap::Sync::kProcess;
  // Which steps a restart finds: each one (the default), or with kCheckpoint those that were kept as a
  // checkpoint or with which the run was flushed; tiles that stay in host memory are written for those only.
  Durability durability = Durability::kStep;
  // Versions of everything in state_dirs, of a new run. 1: half the space, and durability is kCheckpoint: a
  // run that is killed between two such steps leaves nothing to resume but its checkpoints. Default 0: two,
  // or three where checkpoints are copied and there is room.
  int versions = 0;
  CheckpointSchedule checkpoints;
  // Weights may come from the drive to the device past host memory, where both can (GPUDirect Storage).
  // Default: no.
  bool gds = false;
  // The I/O engine's. Its arenas, device_transfers, saturating_bytes_in_flight and log are set by the engine.
  aio::EngineOptions io;
  // The bytes in flight that `io` says are a limit: set_saturating_bytes_in_flight does not raise them.
  // Default: they are where it begins.
  bool io_depth_is_limit = false;
};

// How gradients become new weights.
struct UpdateOptions {
  // Adam, AdamW, Adagrad, Lion, SGD or LAMB with their parameters; lr comes from the schedule, if there is
  // one. LAMB reads its state twice a step, and the processor makes its updates. Default: Adam's of
  // DeepSpeed.
  OptimizerOptions algorithm;
  // What its states are kept as: fp32 (the default), bf16, or 8 bit by blocks (kernels/optimizer.h).
  kernels::StateType states = kernels::StateType::kFp32;
  // With fp16 weights: the loss is multiplied before backward, gradients are divided in the update. Of a new
  // run; a resumed one has its own. Default: DeepSpeed's, dynamic from 65,536. Scale 1 with other types.
  LossScaleOptions loss_scale = {.dynamic = true, .initial_scale = 65536};
  // What becomes of a parameter that no gradient of a step came to, on any rank, in any micro-batch. kSkip:
  // torch.optim's meaning, it stays as it is, and so does its count of updates (a commit keeps
  // what it has missed); kZeros: it is updated as by zeros. The ranks' must be the same, and a resumed run
  // may have another than before. Default: zeros.
  MissingGradients missing_gradients = MissingGradients::kZeros;
  // Bound of the global gradient norm. Default 1; 0: none.
  double clip = 1.0;
  // The learning rate by step, of a new run; a resumed one has its own. Default: the algorithm's lr
  // throughout.
  std::optional<LrSchedule> schedule;
  // Parameters that go by other rates than the rest, by their names (zero/compute/parameter_groups.h), of a
  // new run; a resumed one has its own. Rates that are given with a step (StepOptions::groups) come first.
  // Default: none do.
  std::vector<ParameterGroup> groups;
  // Of a resumed run, in the place of its own from here on. Default: its own.
  std::optional<LrSchedule> new_schedule;
  std::optional<std::vector<ParameterGroup>> new_groups;
  std::optional<LossScaleOptions> new_loss_scale;
  // Whether tiles are updated in backward or in the next forward. Default: the planner's choice.
  tiering::UpdateOrder order = tiering::UpdateOrder::kAuto;
  // Whether a clipped step may read more to be shorter. Default: it moves no more than another.
  tiering::Prefer prefer = tiering::Prefer::kWear;
  // Threads that update tiles. Default 1.
  int workers = 1;
};

// What is gone on with, and what a later process finds again.
struct ResumeOptions {
  // Continues the run in state_dirs; without a drive of its own, the checkpoint or run that they hold, which
  // may be of any number of ranks. So may what is only evaluated. Default: a new run.
  bool enabled = false;
  // What the caller wants to find again; the first commit keeps it. A resumed run keeps its first.
  nlohmann::json run = nlohmann::json::object();
  // Keys of it that a resumed run has anew from here on: what its user changed, and with another number of
  // ranks what each of them does. The next commit keeps them.
  nlohmann::json run_changes = nlohmann::json::object();
};

// What the engine asks its caller, and what it tells. All are optional, and run on the caller's thread unless
// they say otherwise.
struct EngineHooks {
  // The machine that plans are compared on; asked once, when the model's sizes are known and the budget is
  // known to hold the least that works. Without it, MachineModel's assumptions. `compute` is a sample of the
  // model's compute on the caller's thread, for measuring it beside other work; null where nothing is trained
  // or a device with its own memory computes.
  std::function<tiering::MachineModel(int64_t state_bytes, const std::function<void()>& compute)> machine;
  // What preparing a run, or a plan, is at just now, for people: it takes seconds.
  std::function<void(const std::string& what)> preparing;
  // The plan stands and nothing has been made yet: an error ends the creation.
  std::function<absl::Status(const EnginePlan&)> planned;
  // What the caller says of a step, kept in its commit; asked once, when the step is about to be committed.
  std::function<nlohmann::json(const StepResult&)> describe;
  // The step is on the drive; without one, and between checkpoints with Durability::kCheckpoint, applied.
  std::function<absl::Status(const StepResult&)> committed;
  // A checkpoint stands under `path`, or why there is none.
  std::function<void(int64_t step, const std::string& path, const absl::Status& status)> checkpointed;
  // Every finished operation, for traces.
  tiering::Executor::Observer observer;
  // Every wait of the compute lane, with its cause.
  tiering::Executor::StallObserver stall_observer;
  // Asked towards the end of every step: whether the caller wants to stop. All ranks hear of it with the same
  // step. Over several ranks it is asked on other threads as well, now and then while this rank waits for
  // others: it then waits for them no longer than for one that is silent.
  std::function<bool()> stops;
  // An operation is stuck, or hopeless, as `watch` says; one that was stuck has ended. The former are
  // reported on threads of their own, one for each, while the caller's waits for the operation.
  std::function<void(const StuckOperation&)> stuck;
  // Lines for people: what was chosen and why, fallbacks.
  std::function<void(const std::string&)> log;
  // Called between completions while a step runs, at most every 50 ms or so: for live progress.
  std::function<void(tiering::Stall waiting_for)> tick;
};

struct EngineOptions {
  // Of weights and gradients. Default: bf16.
  kernels::DType dtype = kernels::DType::kBf16;
  // Micro-batches of one call of Step, which go through the model together: gradient accumulation. Default 1.
  int micro_batches = 1;
  // Calls of Step that make one step, all but the last with StepOptions::update false. A loss's gradient is
  // divided by the micro-batches of all these calls. Between calls fp32 sums wait: with state in memory
  // there, with state on a drive in a file without a name, which costs 8 bytes a trained parameter and call.
  // One call with all micro-batches costs none of that. Default 1.
  int calls_per_step = 1;
  // One micro-batch of the run's shapes; only shapes and types matter.
  Batch example;
  // false: Evaluate only (sampling, evaluation of a finished run). Default: trains.
  bool trains = true;
  // With trains false: state_dirs get initial_values of a model that is all frozen, the weights and nothing
  // else, of one rank, which are evaluated only. Default: they hold a run.
  bool new_weights = false;
  // Of initial values and dropout. Default 1.
  uint64_t seed = 1;
  // Initial values of elements [first, first + elements) of a block's flat parameters
  // (zero/compute/flat_layout.h), as fp32 masters, padding 0; each one is asked for once, or, where a run
  // is replaced, once before that too. Default: the Compute's (zero/compute/compute.h).
  std::function<absl::Status(int block, int64_t first, int64_t elements, float* to)> initial_values;
  // Where what is frozen is read from, and kept nowhere else: state on a drive, one rank. A
  // run that has one goes on with one. Default: none, it is part of the state.
  std::shared_ptr<FrozenSource> frozen;
  // What computes. Default: the processor.
  std::shared_ptr<Device> device = HostDevice();
  // Threads of one operation on the processor; the number changes the bits of some sums. Default 1.
  int intra_op_threads = 1;
  // false: a plan's stages are measured for their memory only, which is faster; enough to ask what fits.
  bool measures_time = true;
  // The other ranks. Everything here that names a place is this rank's own; all else is the same on all
  // ranks. Default: there are none.
  std::shared_ptr<Comm> comm;
  // What the ranks hand each other in fewer bits: weights in 8, gradients in 4, with the
  // errors that tiering/plan/exchange_codes.h says. Losses then depend on the number of ranks. Default:
  // neither.
  tiering::ExchangeCodes exchange;

  MemoryOptions memory;
  StorageOptions storage;
  UpdateOptions optimizer;
  ResumeOptions resume;
  // Which operations are reported as stuck. Default: none.
  WatchOptions watch;
  EngineHooks hooks;

  int rank() const { return comm != nullptr ? comm->rank() : 0; }
  int world() const { return comm != nullptr ? comm->world() : 1; }
  // There is state to go on from: of a run that trains on, or that is only evaluated.
  bool resumes() const { return resume.enabled || (!trains && !new_weights); }
};

// The types that the options ask for.
TileFormat FormatOf(const EngineOptions& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_ENGINE_OPTIONS_H_
