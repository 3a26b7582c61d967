// The engine: trains a Model whose state lives where a plan puts it, and never loses a committed step.
//
//   EngineOptions options;
//   options.offload = OffloadDevice::kNvme;  options.state_dirs = {"/nvme/run"};
//   options.host_memory_bytes = 1 << 30;     options.example = one_micro_batch;
//   absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(model, options);
//   while ((*engine)->step() < steps) {
//     absl::StatusOr<StepResult> result = (*engine)->Step({micro_batch, ...}, Next::kTrain);
//   }
//   absl::Status done = (*engine)->Flush();
//
// Step(t) applies what is left of the update of step t-1 to each block as its forward first needs it, commits
// step t-1 when the last of its tiles is on the drive, computes forward and backward of step t, and returns
// loss and norm. Where the plan says so, part of the update of step t is made in its backward already
// (tiering/program/program.h). What is left of the last update is applied by Flush (or by an evaluation,
// which is a forward too). So a step is committed, and reported through EngineOptions::committed, during the
// step after it.
//
// With fp16 weights the loss scale follows each step's outcome: a step whose gradients overflow updates
// nothing, and is committed like any other. kOutOfRange: they overflow at the smallest scale.
//
// The bits of every loss are the same for every offload mode, budget, tile size, backend and number of update
// workers; they depend on the model, the data, the seed, the number of intra-op threads and LibTorch's choice
// of kernels.
//
// Over several ranks (EngineOptions::comm) each process has an engine of its own, and all of them are given
// the same calls in the same order: each trains on its own micro-batches and keeps its part of the state, and
// loss, norm and commits are those of all. A step is committed when every rank has committed it, and a run
// goes on from the newest commit of which that is true. Evaluate is given the same batches everywhere. An
// error of one rank ends the others' next call as well.
//
// Threads: everything is called from one thread, on which the callbacks run as well. The counting allocator
// and the limit on LibTorch's tensors are the process's: one engine that trains at a time. Errors:
// kFailedPrecondition (budget too small, run locked, directory in use), kInvalidArgument (the caller's
// numbers), kDataLoss, kResourceExhausted, ... After an error of Step, Evaluate or Flush the engine is done
// for: the last commit stands, and a new engine resumes from it.
#ifndef PENSTOCK_ZERO_ENGINE_ENGINE_H_
#define PENSTOCK_ZERO_ENGINE_ENGINE_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "swap/checkpoint_lock.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "zero/compute/device.h"
#include "zero/compute/model.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/tile_format.h"
#include "zero/config/config.h"
#include "zero/config/loss_scale.h"
#include "zero/config/lr_schedule.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {

struct StepResult {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;  // global, before clipping
  double lr = 0;         // of this step's update
  double loss_scale = 1;
  bool skipped = false;  // a gradient was not finite
  bool stops = false;    // EngineOptions::stops was true, on this rank or another
  // Share of the tiles whose update was made in backward, and whether it then had to be made again.
  double in_backward = 0;
  bool replayed = false;
  // Of the time from the end of the step before, or of an evaluation after it, to the end of this one.
  double seconds = 0;
  double stall_io_seconds = 0;    // compute had nothing to do but wait for the drive
  double compute_seconds = 0;     // forward and backward
  double optimizer_seconds = 0;   // update workers, summed
  double evaluation_seconds = 0;  // not in `seconds`: of evaluations since the step before
  // With what an evaluation since the step before moved for that step's updates, without what it read for
  // itself.
  int64_t nvme_read_bytes = 0;
  int64_t nvme_write_bytes = 0;
};

// What a new run will need, before anything is made.
struct EnginePlan {
  tiering::ModelGraph graph;
  tiering::Plan plan;
  TileFormat format;
  int64_t parameters = 0;
  int64_t disk_bytes = 0;          // of the state directories, all versions
  int versions = 0;                // of everything, that these hold
  int64_t state_bytes = 0;         // one version
  bool compute_disturbed = false;  // compute was measured beside other work (MeasuredModel::disturbed)
  ShardDirectories parts;          // of what is resumed or evaluated: by rank
  // What it was planned under: for those who ask what another machine or budget would do.
  tiering::PlanOptions options;
};

// Which commits are kept as checkpoints of their own, while training goes on (zero/engine/checkpointing.h).
struct CheckpointSchedule {
  std::string parent;  // the directory of all checkpoints
  int64_t every = 0;   // steps; 0: none is kept on the way
  int64_t keep = 0;    // the newest so many; 0: all
  // State in memory: Engine::Keep makes one of the last step. A place that cannot hold it is refused by
  // Create.
  bool at_end = false;
  // That `parent` is this run's (swap/checkpoint_lock.h), taken before the caller looked at what is there;
  // null: Create takes it. Of several ranks, rank 0 has it for all.
  std::shared_ptr<swap::CheckpointLock> lock = nullptr;
  bool any() const { return every > 0 || at_end; }
};

struct EngineOptions {
  OffloadDevice offload = OffloadDevice::kNvme;
  torch::Dtype dtype = torch::kBFloat16;  // of weights and gradients: or kFloat32, kHalf
  int micro_batches = 1;                  // gradient accumulation
  Batch example;                          // one micro-batch of the run's shapes; only shapes and types matter
  bool trains = true;                     // false: Evaluate only (sampling, evaluation of a finished run)

  OptimizerOptions optimizer;  // lr comes from the schedule
  // Compact states: bf16 or block-wise 8 bit (kernels/optimizer.h).
  kernels::StateType optimizer_states = kernels::StateType::kFp32;
  // With kHalf: the loss is multiplied before backward, gradients are divided in the update; DeepSpeed's
  // defaults. Of a new run; a resumed one has its own. Scale 1 with other types.
  LossScaleOptions loss_scale = {.dynamic = true, .initial_scale = 65536};
  double clip = 1.0;  // bound of the global gradient norm; 0: none
  std::optional<LrSchedule>
      schedule;  // of a new run; a resumed one has its own. Empty: the optimizer's lr throughout
  // Of a resumed run, in the place of its own from here on.
  std::optional<LrSchedule> new_schedule;
  std::optional<LossScaleOptions> new_loss_scale;
  uint64_t seed = 1;
  // Initial values of elements [first, first + elements) of a block's run (zero/compute/block.h), as fp32
  // masters, padding 0; each tile is asked for once. Empty: those that the blocks' factories make.
  std::function<absl::Status(int block, int64_t first, int64_t elements, float* to)> initial_values;

  int64_t host_memory_bytes = 0;                  // 0: no bound
  std::shared_ptr<Device> device = HostDevice();  // what computes
  int64_t device_memory_bytes = 0;                // of a device apart; 0: all that it has
  // Weights may come from the drive to the device past host memory, where both can (GPUDirect Storage).
  bool gds = false;
  std::vector<std::string> state_dirs;
  swap::Sync sync = swap::Sync::kProcess;
  // kCheckpoint: a restart finds the last step that was kept as a checkpoint, or with which the run was
  // flushed. Tiles that stay in host memory are written for those steps only.
  Durability durability = Durability::kStep;
  // Of everything in state_dirs, of a new run. 0: two, or three where checkpoints are copied and there is
  // room. 1: half the space, and durability is kCheckpoint: a run that is killed between two such steps
  // leaves nothing to resume but its checkpoints.
  int versions = 0;
  int64_t tile_bytes = 0;  // 0: the planner's choice
  tiering::UpdateOrder update_order = tiering::UpdateOrder::kAuto;
  tiering::PlanBounds bounds;
  aio::EngineOptions io;           // arenas, device_transfers, knee and log are set here
  bool io_depth_is_limit = false;  // its bytes in flight: set_saturating_bytes_in_flight does not raise them
  int intra_op_threads = 1;
  int update_workers = 1;

  // Continues the run in state_dirs; without a drive of its own, the checkpoint or run that they hold, which
  // may be of any number of ranks. So may what is only evaluated.
  bool resume = false;
  bool overwrite = false;  // what stands in state_dirs, and the checkpoints in checkpoints.parent
  CheckpointSchedule checkpoints;
  // What the caller wants to find again on resume; the first commit keeps it. A resumed run keeps its first.
  nlohmann::json run = nlohmann::json::object();
  // Keys of it that a resumed run has anew from here on: what its user changed, and with another number of
  // ranks what each of them does. The next commit keeps them.
  nlohmann::json run_changes = nlohmann::json::object();
  // The machine that plans are compared on; asked once, when the model's sizes are known and the budget is
  // known to hold the least that works. Without it, MachineModel's assumptions. `compute` is a sample of the
  // model's compute on the caller's thread, for measuring it beside other work; null where nothing is trained
  // or a device apart computes.
  std::function<tiering::MachineModel(int64_t state_bytes, const std::function<void()>& compute)> machine;
  // What preparing a run, or a plan, is at just now, for people: it takes seconds.
  std::function<void(const std::string& what)> preparing;
  // false: a plan's stages are measured for their memory only, which is faster; for whoever asks what fits.
  bool measures_time = true;
  // The plan stands and nothing has been made yet: an error ends the creation.
  std::function<absl::Status(const EnginePlan&)> planned;
  // The caller's words about a step, kept in its commit; asked once, when the step is about to be committed.
  std::function<nlohmann::json(const StepResult&)> describe;
  // The step is on the drive; without one, and between checkpoints with Durability::kCheckpoint, applied.
  std::function<absl::Status(const StepResult&)> committed;
  // A checkpoint stands under `path`, or why there is none.
  std::function<void(int64_t step, const std::string& path, const absl::Status& status)> checkpointed;
  // Every finished operation, for traces.
  tiering::Executor::Observer observer;
  // Every wait of the compute lane, with its cause.
  tiering::Executor::StallObserver stall_observer;
  // The other ranks; null: there are none. state_dirs are this rank's own, and so is everything else here
  // that names a place; all else is the same on all ranks.
  std::shared_ptr<Comm> comm;
  int rank() const { return comm != nullptr ? comm->rank() : 0; }
  int world() const { return comm != nullptr ? comm->world() : 1; }
  // There is state to go on from: of a run that trains on, or that is only evaluated.
  bool resumes() const { return resume || !trains; }
  // Asked towards the end of every step: whether the caller wants to stop. All ranks hear of it with the same
  // step. Over several ranks it is asked on other threads as well, now and then while this rank waits for
  // others: it then waits for them no longer than for one that is silent.
  std::function<bool()> stops;
  // Lines for people: what was chosen and why, fallbacks.
  std::function<void(const std::string&)> log;
  // Called between completions while a step runs, at most every 50 ms or so: for live progress.
  std::function<void(tiering::Stall waiting_for)> tick;
};

// The types that the options ask for; kInvalidArgument: weights of a type that is not served.
absl::StatusOr<TileFormat> FormatOf(const EngineOptions& options);

enum class Next : uint8_t { kUnknown, kTrain };

class Engine {
 public:
  // Measures and plans only. With options.resume the tiles are those of the run that is there. Neither this
  // nor Create takes more than the budget, unless it is going to be refused: to say what would do, as much is
  // measured as the machine has free.
  static absl::StatusOr<EnginePlan> MakePlan(const Model& model, const EngineOptions& options);

  static absl::StatusOr<std::unique_ptr<Engine>> Create(Model model, EngineOptions options);
  // Stops without a commit: what was not committed is as if it had never been.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // One training step over options.micro_batches micro-batches. kTrain lets the reads of the step after it
  // start now.
  absl::StatusOr<StepResult> Step(std::vector<Batch> batches, Next next = Next::kUnknown);
  // The stages run in this order from the next step on: a permutation of the model's, which keeps its last
  // one, since that gives the loss. Reads that were made ahead for another order are dropped, which costs
  // their time and no more. Over several ranks all of them make this call, with the same order.
  // kInvalidArgument: not such a permutation, or not that of the other ranks.
  absl::Status SetOrder(std::vector<int> stages);
  // Mean loss over the batches, in evaluation mode, with every update applied.
  absl::StatusOr<double> Evaluate(const std::vector<Batch>& batches);
  // The loss of each of them. The bits of one depend on its own batch alone.
  absl::StatusOr<std::vector<double>> EvaluateEach(const std::vector<Batch>& batches);
  // How many batches of this shape an evaluation passes through the model at once: each such group reads the
  // model once.
  int64_t EvaluatesAtOnce(const Batch& batch) const;
  // Outputs of the last stage, for models whose last stage is no loss.
  absl::StatusOr<std::vector<torch::Tensor>> Infer(const std::vector<Batch>& batches);
  // One parameter's fp32 master, moment or gradient, wherever it lives, by the name of its block, a dot and
  // its name there; what DeepSpeed's safe_get_* and safe_set_* do. Between steps; every update is applied
  // first, and a step that was announced starts over. A written value is committed when WriteState returns,
  // as part of the step that was the last. The gradient is that of the last step of this process, before
  // clipping. kNotFound: no such parameter; kInvalidArgument: another shape; kFailedPrecondition: no such
  // state. Over several ranks all of them make these calls, with the same value, and all are given the whole
  // of what they read; a value that was written is committed on all of them or on none.
  std::vector<std::string> ParameterNames() const;
  absl::StatusOr<torch::Tensor> ReadState(std::string_view parameter, StateKind kind);
  absl::Status WriteState(std::string_view parameter, StateKind kind, const torch::Tensor& value);
  // Applies and commits what is pending, and waits for the checkpoint that is being written.
  absl::Status Flush();
  // Flush, and with CheckpointSchedule::at_end a checkpoint of the last step, unless this process made no
  // step or it was kept already. Without it the step is lost with the process: any reason why there is none
  // is an error. Returns its path; empty where none is needed.
  absl::StatusOr<std::string> Keep();

  int64_t step() const;            // last step that Step has finished, or that the resumed run had committed
  int64_t committed_step() const;  // that a restart would find
  std::optional<int64_t> resumed_from() const;
  const nlohmann::json& run() const;               // EngineOptions::run of the run's creation
  const nlohmann::json& last_description() const;  // of the last commit at resume; null if none
  const EnginePlan& plan() const;
  tiering::Stall waiting_for() const;
  aio::EngineStats io_stats() const;  // empty without a drive
  std::string io_backend() const;
  std::string arena_pages() const;
  int64_t peak_managed_bytes() const;  // arena and tensors
  int64_t peak_pinned_bytes() const;
  const Device& device() const;
  Device::Traffic copied() const;     // to and from the device since the engine was made
  bool gds() const;                   // weights that only the device needs go past host memory
  int64_t gds_read_bytes() const;     // did, since the engine was made; part of what was read
  int64_t peak_device_bytes() const;  // slots and tensors; 0 where the host computes
  // The fewest bytes in flight that saturate a drive. Twice as much in each direction may then be in flight,
  // up to 64 MiB, so that handing over in batches never drains it.
  void set_saturating_bytes_in_flight(uint64_t bytes);
  // Union of the time in which forward, backward or update ran, and what the compute lane waited for, since
  // the start.
  const tiering::Usage& usage() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_ENGINE_H_
