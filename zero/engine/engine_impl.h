// What Engine holds and does, for the files that make it. Each has one idea:
//   engine.cc             the facade, and what ranks agree on and hear of each other
//   engine_open.cc        a run is made or resumed, and closed
//   engine_step.cc        steps, the order of the stages, a step that is given up
//   engine_evaluate.cc    forward passes alone
//   engine_commit.cc      what a step decides, its commit, checkpoints
//   engine_parameters.cc  one parameter's state, read and written
//   engine_replan.cc      another plan for the same run, and what is counted over all of them
#ifndef PENSTOCK_ZERO_ENGINE_ENGINE_IMPL_H_
#define PENSTOCK_ZERO_ENGINE_ENGINE_IMPL_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "swap/checkpoint_lock.h"
#include "swap/store.h"
#include "tiering/program/executor.h"
#include "tiering/program/program.h"
#include "zero/compute/gradient_sums.h"
#include "zero/engine/checkpointing.h"
#include "zero/engine/engine.h"
#include "zero/engine/parameter_access.h"
#include "zero/engine/prepare.h"
#include "zero/engine/run_resources.h"
#include "zero/engine/step_outcome.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/lanes/watchdog.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

class Engine::Impl {
 public:
  Impl(std::shared_ptr<Compute> compute, EngineOptions options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Engine's calls: engine.h says what they do.
  absl::Status Create();
  absl::StatusOr<StepResult> Step(std::vector<Batch> batches, const StepOptions& step);
  absl::Status SetOrder(std::vector<int> stages);
  absl::StatusOr<double> Evaluate(const std::vector<Batch>& batches);
  absl::StatusOr<std::vector<double>> EvaluateEach(const std::vector<Batch>& batches);
  int64_t EvaluatesAtOnce(const Batch& batch) const;
  absl::StatusOr<std::vector<std::vector<HostTensor>>> Infer(const std::vector<Batch>& batches);
  std::vector<std::string> ParameterNames() const { return ParameterAccess::NamesOf(plan_.graph, layouts_); }
  absl::Status ReadState(std::string_view parameter, StateKind kind, const ParameterAccess::Place& place);
  absl::Status ReadRanges(const std::function<absl::Status(const ReadRange&)>& use);
  absl::Status WriteState(std::string_view parameter, StateKind kind, const TensorView& value);
  absl::Status Flush();
  absl::StatusOr<std::string> Keep();
  absl::Status CommitDescription();
  absl::Status CommitDescription(nlohmann::json description);
  absl::StatusOr<std::string> BeginCheckpoint(CheckpointRequest request);
  absl::Status FinishCheckpoint();
  bool has_begun_checkpoint() const { return asked_ != nullptr; }
  bool checkpoint_ended() const { return asked_ != nullptr && asked_->checkpointing->ended(); }
  CheckpointTotals checkpoint_totals() const;
  double checkpoint_seconds() const;  // of those that are being copied, so far
  absl::Status Replan(Batch example);
  absl::StatusOr<PlannedAgain> Replan(const ShownBySteps& shown);
  aio::EngineStats io_stats() const;
  Device::Traffic copied() const;
  int64_t gds_read_bytes() const;
  tiering::ExchangedBytes gathered() const;
  tiering::ExchangedBytes reduced() const;
  InputBytes input_bytes() const;
  int64_t peak_managed_bytes() const;
  int64_t peak_pinned_bytes() const;
  int64_t pinned_for_device_bytes() const;
  int64_t peak_device_bytes() const;
  void set_saturating_bytes_in_flight(uint64_t bytes);
  const Device& device() const { return *options_.device; }

  // Tells the other ranks what this one does next.
  void Enter(const std::string& call) const;
  // The other ranks hear of an error: they would wait for this one.
  absl::Status BroadcastError(absl::Status status) const;
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
  GradientSums::Layouts layouts_;
  int64_t step_ = 0;
  int64_t committed_step_ = 0;
  std::optional<int64_t> resumed_from_;
  nlohmann::json run_;
  nlohmann::json last_description_;
  tiering::Usage usage_;
  std::unique_ptr<tiering::Executor> executor_;
  std::unique_ptr<RunResources> resources_;
  DeviceExchange devices_;
  // A written value, or a step that failed, is there in part; or there is no plan any more: of executor_,
  // resources_ and lanes_ there are none then.
  absl::Status broken_;

 private:
  ArenaView& arena_view() const { return resources_->arena_view(); }
  swap::Store* store() const { return resources_ != nullptr ? resources_->store() : nullptr; }
  const DeviceState* DeviceStateOrNull() const {
    return resources_->device_lanes() != nullptr ? &resources_->device_lanes()->state() : nullptr;
  }
  void Log(const std::string& line) const {
    if (options_.hooks.log) options_.hooks.log(line);
  }

  // Ranks (engine.cc).
  // kInvalidArgument: another rank has another.
  absl::Status AgreeOn(const char* what, const std::string& mine) const;
  // The same on all ranks: OK where everybody's is.
  absl::Status OfAll(const absl::Status& mine) const;
  // A disk that is full in the middle of it all: how much is missing, and what stands.
  absl::Status WithRoom(absl::Status status) const;

  // A run is made or resumed, and closed (engine_open.cc).
  // Measures and plans. `asks`: EngineHooks::planned.
  absl::Status Prepare(bool asks);
  // What the plan says is there; the run of held_ is opened.
  absl::Status MakeResources();
  absl::Status ReadInitialValues();
  absl::Status GroupParameters();
  absl::Status MakeCheckpointing();
  absl::Status Initialize();
  absl::Status Restore();
  // Of the commit that the run goes on from; the log says what was healed.
  absl::StatusOr<nlohmann::json> PayloadOf(const swap::Recovered& recovered) const;
  absl::Status DamagedPayload(const swap::Recovered& recovered, absl::string_view what) const;
  // All that the plan has. The run stays locked, in held_.
  void Close();
  // What programs run on.
  void MakeLanes();
  void WatchLanes();
  // "read weights of block 3 (layer.2), tile 1, step 17".
  std::string NameOf(const tiering::Op& op) const;
  // Nothing is pending, and nothing on a drive is taken to be in memory.
  void MakeBuilder(tiering::OpId first_id);

  // Steps (engine_step.cc).
  // Rates that an optimizer may have, for all groups of the model.
  absl::Status CheckRates(const std::vector<GroupRates>& groups) const;
  // The step's loss is the mean over its micro-batches, of all ranks.
  double LossGradient() const;
  // What a call took.
  void Account(StepResult* of_call);
  void AddUsage(const tiering::Usage& usage);
  // Ranks that go through their stages in different orders would wait for each other's blocks for ever.
  absl::Status AgreeOnOrder(const std::vector<int>& stages) const;
  // The next call, after `calls` of its step.
  void AppendTraining(bool update, int calls);
  // The step whose updates are applied becomes one that a restart finds; nothing where every step is.
  void AppendPersist();
  void AppendPersistIfDue();
  // The step that was announced does not come: what it already reads and updates is finished, the rest is
  // nothing.
  absl::Status AbandonAhead();
  // The Compute failed. Over several ranks the others would wait for this one: it is everybody's error.
  bool PassFailed(const tiering::Op& op, const absl::Status& why);
  // The step that failed becomes as if it had never begun: what belongs to the step before is applied and
  // committed, what was made of this one is forgotten. Returns why it failed.
  absl::Status GiveUpStep();
  void Observe(tiering::OpId id, const tiering::Op& op, double start, double end);

  // Forward passes alone (engine_evaluate.cc). `take`: what a pass of some of the batches gave.
  absl::Status ForwardAll(const std::vector<Batch>& batches, absl::FunctionRef<absl::Status()> take);
  // Input elements of a forward-only pass.
  int64_t EvaluationRoom() const;

  // Decisions, commits and checkpoints (engine_commit.cc).
  absl::Status Decide(const tiering::Op& op);
  // Of a commit of `step`; null: of the run's beginning.
  std::string Payload(const StepOutcome::Decided* step) const;
  swap::CommitInfo DescribeCommit(int64_t step);
  // A step's updates are applied, and where `op` is durable, on the drive. Where not every step is, a durable
  // one follows for the same step.
  absl::Status Applied(const tiering::Op& op);
  // The last step once more, with what was written or is said of it since.
  absl::Status CommitAgain(const std::string& payload) const;
  // Where the last commit says something else, on this rank or another: all make the same commits, or a
  // resumed run would not know which belong together.
  absl::Status CommitAgainWhereItDiffers(const std::string& payload) const;
  // A checkpoint that was asked for, from its beginning until somebody hears how it ended.
  struct AskedCheckpoint {
    std::shared_ptr<swap::CheckpointLock> lock;
    std::unique_ptr<aio::Arena> tile;  // null: the plan has room for it
    std::unique_ptr<aio::Engine> io;   // null: the run's moves it
    std::unique_ptr<Checkpointing> checkpointing;
    std::string path;
  };
  absl::Status BeginAsked(AskedCheckpoint* asked);
  // Those that are due, and one that was asked for.
  void ForCheckpointing(absl::FunctionRef<void(Checkpointing&)> what) const {
    if (checkpointing_ != nullptr) what(*checkpointing_);
    if (asked_ != nullptr) what(*asked_->checkpointing);
  }
  // A checkpoint of `step`, whose updates were the last to be applied.
  absl::Status BeginOfMemory(int64_t step);
  swap::CheckpointSource SourceOf(int64_t step);

  ParameterAccess Access() const;  // engine_parameters.cc
  absl::Status ReadRangesOfAll(ParameterAccess& access,
                               const std::function<absl::Status(const ReadRange&)>& use);

  // Another plan (engine_replan.cc).
  // kFailedPrecondition: there cannot be one just now.
  absl::Status CheckReplan() const;
  // The plan that would be made of what is shown, beside the store that is there.
  absl::StatusOr<tiering::Plan> PlanOf(const ShownBySteps& shown) const;
  // `shown`: in the place of what is measured of the example and of the machine that there was; null:
  // neither.
  absl::Status PlanAnew(Batch example, const ShownBySteps* shown);
  // Plans are compared on this machine from here on; nobody is asked for one.
  void PlanOn(const tiering::MachineModel& machine);
  // Of the run that Close has left, at that commit.
  absl::Status Reopen(const swap::CommitSeen& last, bool asks);
  // What was counted under the plans before.
  struct Counted {
    aio::EngineStats io;
    Device::Traffic copied;
    int64_t gds_read_bytes = 0;
    InputBytes inputs;
    tiering::ExchangedBytes gathered, reduced;
    int64_t peak_managed_bytes = 0, peak_pinned_bytes = 0, peak_device_bytes = 0;
  };
  Counted earlier_;
  std::optional<uint64_t> saturating_bytes_;  // as the caller has said it
  swap::HeldFiles held_;                      // between two plans
  std::optional<tiering::ModelGraph> known_;  // of the next plan; empty: it is measured

  nlohmann::json identity_;
  std::unique_ptr<HardwareLanes> lanes_;
  std::unique_ptr<WatchedLanes> watched_;  // null: nothing is watched
  std::unique_ptr<tiering::ProgramBuilder> builder_;
  std::vector<int> stage_order_;
  bool told_of_misses_ = false;
  std::unique_ptr<Checkpointing> checkpointing_;  // null: none are kept
  std::optional<swap::Uuid> checkpoint_uuid_;  // by which the parts of all ranks know each other, of memory
  std::unique_ptr<AskedCheckpoint> asked_;     // null: nobody has
  int64_t last_asked_step_ = 0;                // of this process; 0: nobody has asked
  CheckpointTotals checkpoint_totals_;
  absl::Status checkpoint_status_;
  int64_t operations_ = 1;  // of a training pass
  int64_t gates_ = 0;
  tiering::OpId ahead_norm_ = -1;  // of a training pass that was appended and whose batch has not come
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
  StepTotals totals_;                 // of the step whose norm was the last to be known
  absl::Status pass_failure_;         // of the Compute, in the pass that is under way
  absl::string_view gradients_lost_;  // of the last step: why; empty: they are there
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_ENGINE_IMPL_H_
