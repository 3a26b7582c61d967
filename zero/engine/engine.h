// The engine: trains a model whose state lives where a plan puts it, and never loses a committed step.
//
//   EngineOptions options;
//   options.storage.state_dirs = {"/nvme/run"};
//   options.memory.host_memory_budget_bytes = 1 << 30;
//   options.example = one_micro_batch;
//   absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(compute, options);
//   while ((*engine)->step() < steps) {
//     absl::StatusOr<StepResult> result = (*engine)->Step({micro_batch, ...}, Next::kTrain);
//   }
//   absl::Status done = (*engine)->Flush();
//
// What computes the model is a Compute (zero/compute/compute.h); for torch::nn::Modules CreateEngine makes
// both (zero/compute/libtorch/create_engine.h).
//
// Step(t) applies what is left of the update of step t-1 to each block as its forward first needs it, commits
// step t-1 when the last of its tiles is on the drive, computes forward and backward of step t, and returns
// loss and norm. Where the plan says so, part of the update of step t is made in its backward already
// (tiering/program/program.h). What is left of the last update is applied by Flush (or by an evaluation,
// which is a forward too). So a step is committed, and reported through EngineHooks::committed, during the
// step after it.
//
// With fp16 weights the loss scale follows each step's outcome: a step whose gradients overflow updates
// nothing, and is committed like any other. kOutOfRange: they overflow at the smallest scale.
//
// The bits of every loss are the same for every offload mode, budget, tile size, backend and number of update
// workers; they depend on the model, the data, the seed, the number of intra-op threads and the Compute's
// choice of kernels.
//
// Over several ranks (EngineOptions::comm) each process has an engine of its own, and all of them are given
// the same calls in the same order: each trains on its own micro-batches and keeps its part of the state, and
// loss, norm and commits are those of all. A step is committed when every rank has committed it, and a run
// goes on from the newest commit of which that is true. Evaluate is given the same batches everywhere. An
// error of one rank ends the others' next call as well.
//
// Threads: everything is called from one thread (but see ReadRanges), on which the callbacks run as well.
// Engines in one process, each called from its own thread, do not meet: memory, limits, directories and
// options are each one's. They share the processors, and with LibTorch its number of threads. A forked child
// makes an engine of its own: calls of its parent's are kFailedPrecondition there, and to destroy that one
// does nothing. No signal is handled and no allocator replaced here. Errors: kFailedPrecondition (budget too
// small, run locked, directory in use), kInvalidArgument (the caller's numbers), kDataLoss,
// kResourceExhausted, ... An error of the Compute ends the step or the evaluation and no more, with one rank:
// the engine is as it was before the call, and the step may be made again. After any other error of Step,
// Evaluate or Flush the engine is done for: the last commit stands, and a new engine resumes from it.
// usable() tells which it was.
#ifndef PENSTOCK_ZERO_ENGINE_ENGINE_H_
#define PENSTOCK_ZERO_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "base/process_mark.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "tiering/simulate/simulate.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/missed_updates.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/engine_options.h"
#include "zero/engine/stripes.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {

struct StepResult {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;  // global, before clipping
  double lr = 0;         // of this step's update; of the first group
  double loss_scale = 1;
  bool skipped = false;  // a gradient was not finite
  bool stops = false;    // EngineHooks::stops was true, on this rank or another
  // false: a call that only summed (StepOptions::update); `step` is the one that it is part of, `loss` that
  // of its own micro-batches.
  bool updated = true;
  // Share of the tiles whose update was made in backward, and whether it then had to be made again.
  double speculative_share = 0;
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
  int64_t buffer_bytes = 0;        // of the model's buffers that change, in each commit
  int64_t missed_bytes = 0;        // the most that counts of missed updates take there (MissedUpdates)
  bool compute_disturbed = false;  // compute was measured beside other work (MeasuredModel::disturbed)
  ShardDirectories parts;          // of what is resumed or evaluated: by rank
  Stripes stripes;                 // of a new run's state directories
  std::string unlike_drives;       // a line where hosts have drives of unlike speed; else empty
  // What it was planned under: for those who ask what another machine or budget would do.
  tiering::PlanOptions options;
};

enum class Next : uint8_t { kUnknown, kTrain };

// What a run's own steps have shown of the model and the machine that its plan was made for
// (tiering/simulate/run_prediction.h), and what another plan is held against.
struct ShownBySteps {
  tiering::ModelGraph graph;  // the plan's, with the times of these steps
  tiering::MachineModel machine;
  double measured_seconds = 0;        // of these steps, in the mean
  double deferred_share = 0;          // of them: all their updates waited for the next forward
  std::optional<int64_t> steps_left;  // of the run; empty: not known
};

// What came of Engine::Replan by steps.
struct PlannedAgain {
  // A step by what the steps showed: as the plan was, and with the plan that the engine goes on with.
  double kept_seconds = 0;
  double seconds = 0;
  bool explained = true;           // what was shown predicts the steps that showed it
  tiering::Prediction prediction;  // of the plan that the engine goes on with
  std::vector<std::string> moved;  // what has another place (tiering/plan/placement.h); empty: nothing has
};

// Of an engine's checkpoints, all that this process wrote.
struct CheckpointTotals {
  int64_t written = 0;
  double seconds = 0;         // from the beginning of each to its end, written or not
  double waited_seconds = 0;  // of these, training stood still
};

// What a step is made with.
struct StepOptions {
  StepOptions(Next ahead = Next::kUnknown) : next(ahead) {}  // NOLINT(google-explicit-constructor)

  // kTrain lets the reads of the step after it start now.
  Next next;
  // false: the call's gradients are added to those of its step's calls before, and wait for more
  // (EngineOptions::calls_per_step). A step may be ended earlier than with its last call.
  bool update = true;
  // What its updates go by: for each group of parameters (ParameterSpec::group), or one for all. Groups
  // without parameters may follow. Default: the schedule.
  std::vector<GroupRates> groups;
};

class Engine {
 public:
  // Measures and plans only. With options.resume.enabled the tiles are those of the run that is there.
  // Neither this nor Create takes more than the budget, unless it is going to be refused: to say what would
  // do, as much is measured as the machine has free.
  static absl::StatusOr<EnginePlan> MakePlan(Compute& compute, const EngineOptions& options);

  // kInvalidArgument: the model breaks a rule of its Compute.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(std::shared_ptr<Compute> compute,
                                                        EngineOptions options);
  // Stops without a commit: what was not committed is as if it had never been.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // One training step, or call of one, over EngineOptions::micro_batches micro-batches. Losses and updates of
  // a step of several calls have the bits of one call with all micro-batches, where each block has one use.
  // After an error of a call its step begins again, with its first call; so it does in a resumed run.
  // kInvalidArgument: other numbers of micro-batches, too few groups, more calls without update than a step
  // has, or rates that no optimizer has.
  absl::StatusOr<StepResult> Step(std::vector<Batch> batches, const StepOptions& options = {});
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
  // What the last stage returns, for models whose last stage is no loss: for each batch its values.
  absl::StatusOr<std::vector<std::vector<HostTensor>>> Infer(const std::vector<Batch>& batches);
  // One parameter's master, moment or gradient, wherever it lives, by the name of its block, a dot and
  // its name there; what DeepSpeed's safe_get_* and safe_set_* do. In fp32, of the
  // parameter's shape, in host memory. Between steps; every update is applied
  // first, and a step that was announced starts over. A written value is committed when WriteState returns,
  // as part of the step that was the last. The gradient is that of the last step of this process, before
  // clipping. kNotFound: no such parameter; kInvalidArgument: another shape or type; kFailedPrecondition: no
  // such state; WriteState of an engine that only evaluates and goes on with a run, which others may read.
  // Over several ranks all of them make these calls, with the same value, and all are given the whole of
  // what they read; a value that was written is committed on all of them or on none.
  std::vector<std::string> ParameterNames() const;
  absl::StatusOr<HostTensor> ReadState(std::string_view parameter, StateKind kind);
  // The same into the caller's memory, of the parameter's elements (kInvalidArgument: of another number). Of
  // the engine's it takes a tile's.
  absl::Status ReadState(std::string_view parameter, StateKind kind, std::span<float> to);
  absl::Status WriteState(std::string_view parameter, StateKind kind, const TensorView& value);
  // All of it, range by range: elements [first, first + elements) of a block's run (zero/compute/
  // flat_layout.h), as fp32 masters and both moments, for as long as `use` runs. Best in ascending order.
  // Memory: a tile's. The range may be read on another thread, one call at a time, while `use` waits. Over
  // several ranks each of them calls it; `use` runs on rank 0, which gets all of a range, and its status is
  // returned on all. What is read there is held in memory on all.
  using ReadRange = std::function<absl::Status(int block, int64_t first, int64_t elements, float* master,
                                               float* m, float* v)>;
  absl::Status ReadRanges(const std::function<absl::Status(const ReadRange&)>& use);
  // Applies and commits what is pending, and waits for the checkpoint that is being written.
  absl::Status Flush();
  // Flush, and with CheckpointSchedule::at_end a checkpoint of the last step, unless this process made no
  // step or it was kept already. Without it the step is lost with the process: any reason why there is none
  // is an error. Returns its path; empty where none is needed.
  absl::StatusOr<std::string> Keep();
  // Flush, and what EngineHooks::describe says of the last step just now is committed with it, where that is
  // something else than when it was committed. Nothing where this process made no step.
  absl::Status CommitDescription();
  // Flush, and `description` in the place of what the last commit says, whichever process made it: where a
  // run was resumed, or made, and no step since. Without a drive nothing.
  absl::Status CommitDescription(nlohmann::json description);
  // Flush and CommitDescription, and begins a checkpoint of the last step: a thread copies the commit while
  // the steps that follow are made, which wait where they would change what is not copied yet
  // (zero/engine/checkpointing.h). What it says is what the commit said when this was called. Returns the
  // path that it has once it is whole. There is one at a time: one that is being copied is waited for, and
  // its error returned in the place of a new one. Memory: with CheckpointSchedule::on_demand in the plan,
  // else one tile beyond the budget. kFailedPrecondition: another run has the directory, or nothing was
  // committed yet.
  struct CheckpointRequest {
    std::string parent;                            // the directory of all checkpoints
    std::optional<swap::CheckpointNaming> naming;  // default: `latest` is a note for people
  };
  absl::StatusOr<std::string> BeginCheckpoint(CheckpointRequest request);
  // Blocks until the checkpoint that BeginCheckpoint began has ended, copied at the drive's speed, and
  // returns how; OK where there is none. An error left nothing of it behind, and did not touch the run:
  // kAlreadyExists: one of this step is there; kResourceExhausted: no space; kDataLoss: damage in the run.
  absl::Status FinishCheckpoint();
  // One was begun, and FinishCheckpoint, which all ranks call, would not wait for this rank.
  bool checkpoint_ended() const;
  // Both: it is whole when this returns.
  absl::StatusOr<std::string> Checkpoint(const std::string& parent);
  // Of all checkpoints of this process, with that which is being copied.
  CheckpointTotals checkpoint_totals() const;
  bool copies_checkpoint() const;  // just now

  // Another plan for the same run, where batches become larger or smaller: from here on the engine is as one
  // that was created for this example and has resumed, and so are its bits. Step, rates, order of the stages,
  // description and what is counted go on; gradients of the last step are gone, and its time is no step's.
  // What is pending is committed first, as by CommitDescription. Then all memory is given back, the model is
  // measured and planned, and state comes from its drive again, whose speed is not measured anew; no other
  // process gets at the run meanwhile. A checkpoint that was begun is waited for, and its error returned.
  // EngineHooks::planned is asked. Between steps: one that was announced
  // starts over. kFailedPrecondition: the budget is too small, and says the least that works; the state is
  // not on a drive; this engine only reads; or calls of a step are still to come. With one rank the engine
  // then goes on as it was; where even that fails, usable() says why, and the last commit stands. Over
  // several ranks all of them make this call, with examples of one shape, and a plan that is refused ends
  // them all.
  absl::Status Replan(Batch example);
  // The same for a plan whose assumptions the run's steps have shown to be wrong: for the same example, with
  // its memory as it was measured, and times and machine as they were shown. With one rank. The plan stays,
  // and nothing is done, where what was shown predicts the steps that showed it kUnexplained off or more; and
  // where the plan that is made of it has everything where it was, or shortens a step by less than
  // kWorthwhile, or all steps that are left by less than one step. After kFailedPrecondition, and where
  // EngineHooks::planned refuses, the engine goes on as it was.
  absl::StatusOr<PlannedAgain> Replan(const ShownBySteps& shown);
  static constexpr double kUnexplained = 0.25, kWorthwhile = 0.05;  // of a step

  // OK: a call may follow, also after an error. Else why the engine is done for.
  absl::Status usable() const;
  int64_t step() const;            // last step that Step has finished, or that the resumed run had committed
  int64_t committed_step() const;  // that a restart would find
  int64_t updates() const;         // of the optimizer: steps without those that were skipped
  // What each parameter that trains has missed of them, block by block in the order of layouts().
  const MissedUpdates& missed_updates() const;
  const GradientSums::Layouts& layouts() const;
  const LossScaler& loss_scaler() const;
  std::optional<int64_t> resumed_from() const;
  const nlohmann::json& run() const;               // ResumeOptions::run of the run's creation
  const nlohmann::json& last_description() const;  // of the last commit at resume; null if none
  const EnginePlan& plan() const;
  tiering::Stall waiting_for() const;
  aio::EngineStats io_stats() const;  // empty without a drive; over all plans that there were
  std::string io_backend() const;
  std::string arena_pages() const;
  // The memory that weights, gradients and transfers lie in, until Replan or the end. For code
  // that computes elsewhere, to pin it: its contents are the engine's.
  std::span<std::byte> arena() const;
  // Keeps that memory mapped, and locked, while it is held, beyond Replan and the engine's end too: for who
  // has given views of it to others. What it contains then is nobody's. Null without memory.
  std::shared_ptr<const void> HoldArena() const;
  int64_t peak_managed_bytes() const;  // arena and tensors
  int64_t peak_pinned_bytes() const;
  // Of the arena that there is; 0: a device with memory of its own does not pin it, and copies take longer.
  int64_t pinned_for_device_bytes() const;
  const Device& device() const;
  Device::Traffic copied() const;  // to and from the device since the engine was made
  bool gds() const;                // weights that only the device needs go past host memory
  int64_t gds_read_bytes() const;  // did, since the engine was made; part of what was read
  // Received from other ranks since the engine was made: of weights, and of gradients.
  tiering::ExchangedBytes gathered() const;
  tiering::ExchangedBytes reduced() const;
  InputBytes input_bytes() const;     // of saved activations, since the engine was made
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
  const ProcessMark made_in_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_ENGINE_H_
