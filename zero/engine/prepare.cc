#include "zero/engine/prepare.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "tiering/plan/plan_layout.h"
#include "zero/compute/missed_updates.h"
#include "zero/config/json_difference.h"
#include "zero/engine/state_identity.h"
#include "zero/engine/store_layout.h"
#include "zero/memory/activation_spill.h"
#include "zero/memory/guarded.h"
#include "zero/memory/host_memory.h"
#include "zero/memory/sums_spill.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

// Measured within the budget, and within what is free. A budget that is too small for that is refused; how
// much would do is known if it can be found out in the memory that the machine has free. *beyond: it was, and
// the budget was not kept.
absl::StatusOr<Measured> MeasureWithin(Compute& compute, const EngineOptions& options, bool measures_time,
                                       bool* beyond) {
  const int64_t budget = options.memory.host_memory_budget_bytes;
  // What a killed process could not say.
  const int64_t free = std::max<int64_t>(1, FindHostMemory().free_bytes);  // 0 would be no bound
  const ComputeSetup setup = {options.device.get(), options.dtype, options.intra_op_threads};
  MeasureOptions measure;
  measure.trains = options.trains;
  measure.times = measures_time;
  measure.doing = options.hooks.preparing;
  // The tensors of a device with its own memory may be the host's too, and are no part of the host's budget.
  const bool counts = !options.device->has_own_memory() || !options.device->tensors_are_host();
  const auto within = [&](int64_t bytes) {
    measure.host_memory_budget_bytes = bytes;
    const TensorMemoryLimit limit(counts ? bytes : 0);
    return compute.Measure(setup, options.example, measure);
  };
  *beyond = false;
  absl::StatusOr<Measured> measured = within(budget > 0 ? std::min(budget, free) : free);
  if (!absl::IsResourceExhausted(measured.status())) return measured;
  const std::string why(measured.status().message());
  const std::string here = absl::StrCat(free, " bytes are free here");
  const char* const less = "; a smaller micro-batch or sequence takes less, and so do smaller blocks";
  if (budget == 0) return absl::ResourceExhaustedError(absl::StrCat(why, "; ", here, less));
  if (budget > free) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a host memory budget of ", budget, " bytes is more than there is: ", here, ", and ", why, less));
  }
  TensorMemory::Trim();
  TensorMemory::ResetPeak();
  // The rest of the process grows meanwhile, and so do others.
  if (const int64_t most = free / 4 * 3; most > budget) {
    *beyond = true;
    measure.times = false;  // for a refusal
    measured = within(most);
    if (!absl::IsResourceExhausted(measured.status())) return measured;
  }
  return absl::FailedPreconditionError(absl::StrCat("a host memory budget of ", budget,
                                                    " bytes is too small, and ", here,
                                                    ", too few to find out what would do: ", why, less));
}

// The steps of PrepareModel, in their order; each finds what those before it have left. Over several ranks
// all of them take the same steps, since some are exchanges.
class Preparation {
 public:
  Preparation(Compute& compute, const EngineOptions& options, const tiering::ModelGraph* known)
      : compute_(compute),
        options_(options),
        known_(known),
        on_nvme_(options.storage.offload == OffloadDevice::kNvme),
        in_place_(on_nvme_ && options.trains) {}

  absl::StatusOr<PreparedModel> Run() {
    RETURN_IF_ERROR(CheckOptions());
    RETURN_IF_ERROR(OpenDevice());
    RETURN_IF_ERROR(FindState());
    RETURN_IF_ERROR(Measure());
    RETURN_IF_ERROR(AgreeOnMemory());
    RETURN_IF_ERROR(Identify());
    RETURN_IF_ERROR(MeasureMachine());
    RETURN_IF_ERROR(MakePlan());
    RETURN_IF_ERROR(MeasureDisk());
    return std::move(prepared_);
  }

 private:
  void Doing(const std::string& what) const {
    if (options_.hooks.preparing) options_.hooks.preparing(what);
  }
  Comm* comm() const { return options_.comm.get(); }

  // What the caller says, as far as it is wrong whatever the model; and the plan's options that follow from
  // it.
  absl::Status CheckOptions() {
    prepared_.plan.format = FormatOf(options_);
    if (on_nvme_ && options_.storage.state_dirs.empty())
      return absl::InvalidArgumentError("state on NVMe needs a state directory");
    if (options_.resumes() && options_.storage.state_dirs.empty()) {
      return absl::FailedPreconditionError(
          "there is nothing to resume: state in memory is gone with its process, and no checkpoint was "
          "named");
    }
    if (options_.new_weights && (options_.trains || options_.resume.enabled || options_.world() > 1 ||
                                 !on_nvme_ || !options_.initial_values)) {
      return absl::InvalidArgumentError(
          "new weights that are only evaluated are the initial_values of one rank, on a drive, "
          "and nothing is resumed");
    }
    RETURN_IF_ERROR(CheckCalls());
    if (options_.frozen != nullptr && (!on_nvme_ || options_.world() > 1)) {
      return absl::InvalidArgumentError(
          "what is frozen is read from elsewhere where state is on a drive, of one rank");
    }
    if (options_.trains && options_.memory.saved_activations == tiering::SavedActivations::kDrive) {
      if (options_.device->has_own_memory()) {
        return absl::InvalidArgumentError(
            "penstock.saved_activations \"drive\": saved activations of a device that has its own memory "
            "wait in host memory: give \"host\", or leave it to the planner");
      }
      if (!on_nvme_) {
        return absl::InvalidArgumentError(
            "penstock.saved_activations \"drive\": state is in memory, and there is no drive: offload to "
            "nvme, or give \"memory\"");
      }
    }
    plan_options_.frozen_elsewhere = options_.frozen != nullptr;
    plan_options_.micro_batches = options_.micro_batches;
    plan_options_.calls = options_.calls_per_step;
    plan_options_.on_nvme = on_nvme_;
    plan_options_.trains = options_.trains;
    plan_options_.host_memory_budget_bytes = options_.memory.host_memory_budget_bytes;
    if (!on_nvme_ && plan_options_.host_memory_budget_bytes == 0)
      plan_options_.host_memory_to_spare_bytes = std::max<int64_t>(1, FindHostMemory().free_bytes / 2);
    plan_options_.tile_bytes = options_.memory.tile_bytes;
    plan_options_.bounds = options_.memory.bounds;
    plan_options_.saved_activations = options_.memory.saved_activations;
    plan_options_.device.saved_activations = options_.memory.saved_activations;
    plan_options_.update_order = options_.optimizer.order;
    // Where every step is copied from memory, none updates anything that the copy has not read.
    if (!on_nvme_ && options_.storage.checkpoints.every == 1)
      plan_options_.update_order = tiering::UpdateOrder::kInNextForward;
    plan_options_.prefer = options_.optimizer.prefer;
    // An update in backward is made again where a gradient that was assumed does not come, too.
    plan_options_.clips =
        options_.optimizer.clip > 0 ||
        (options_.trains && options_.optimizer.missing_gradients == MissingGradients::kSkip);
    plan_options_.tensor_norms = options_.trains && NeedsTensorNorms(options_.optimizer.algorithm);
    if (plan_options_.tensor_norms && options_.optimizer.states == kernels::StateType::k8Bit) {
      return absl::InvalidArgumentError(
          "LAMB's moments are fp32 or bf16: 8-bit ones of neighbouring parameters share a scale, and LAMB "
          "updates each parameter by itself");
    }
    if (plan_options_.tensor_norms && options_.optimizer.order == tiering::UpdateOrder::kInBackward) {
      return absl::InvalidArgumentError(
          "LAMB updates nothing in backward: it needs the norm of a whole parameter first; leave the order "
          "of updates to the planner");
    }
    const CheckpointSchedule& checkpoints = options_.storage.checkpoints;
    plan_options_.copies_checkpoints = options_.trains && (checkpoints.every > 0 || checkpoints.on_demand);
    return absl::OkStatus();
  }

  absl::Status CheckCalls() const {
    const int calls = options_.calls_per_step;
    if (calls < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("calls_per_step is ", calls, ": a step is made by one call or more"));
    }
    if (calls == 1) return absl::OkStatus();
    const char* const where = options_.world() > 1                ? "one rank"
                              : options_.device->has_own_memory() ? "the processor"
                                                                  : nullptr;
    if (where == nullptr) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("a step of ", calls, " calls is made on ", where,
                                                 " only: give all its micro-batches to one call "
                                                 "(EngineOptions::micro_batches)"));
  }

  // The budget of a device with its own memory. Its own way to the drive is opened first: that takes memory
  // which is not in the device's capacity then.
  absl::Status OpenDevice() {
    Device& device = *options_.device;
    if (!device.has_own_memory()) return absl::OkStatus();
    if (options_.storage.gds) device_storage_ = device.OpenStorage();
    if (options_.memory.device_memory_budget_bytes > device.capacity_bytes()) {
      return absl::FailedPreconditionError(absl::StrCat("a device memory budget of ",
                                                        options_.memory.device_memory_budget_bytes,
                                                        " bytes is more than the ", device.capacity_bytes(),
                                                        " bytes of the device (", device.Describe(), ")"));
    }
    plan_options_.device.has_own_memory = true;
    plan_options_.device.tensor_slack = device.tensor_slack();
    plan_options_.device.budget_bytes = options_.memory.device_memory_budget_bytes > 0
                                            ? options_.memory.device_memory_budget_bytes
                                            : device.capacity_bytes();
    return absl::OkStatus();
  }

  // State on a drive stays where it is; what is read into memory, or only evaluated, may be of any number of
  // ranks.
  absl::Status FindState() {
    EnginePlan& plan = prepared_.plan;
    if (options_.resumes()) {
      ASSIGN_OR_RETURN(plan.parts, FindShards(options_.storage.state_dirs));
      ASSIGN_OR_RETURN(std::vector<swap::Inspection> shards, InspectShards(plan.parts));
      const bool same = plan.parts.size() == static_cast<size_t>(options_.world());
      found_ = std::move(shards[same ? static_cast<size_t>(options_.rank()) : 0]);
      if (in_place_ && plan.parts.size() > 1) {
        return absl::FailedPreconditionError(absl::StrCat(options_.storage.state_dirs.front(),
                                                          " holds a run of ", plan.parts.size(),
                                                          " ranks, not of one"));
      }
    }
    const bool reads_others = options_.resumes() && !options_.trains;
    plan_options_.world = reads_others ? static_cast<int>(plan.parts.size()) : options_.world();
    // A step cannot be durable while the next is written over it.
    const bool one_version = options_.resumes() ? found_.shape.slots == 1 : options_.storage.versions == 1;
    plan_options_.commits_every_step =
        !on_nvme_ || !options_.trains || (options_.storage.durability == Durability::kStep && !one_version);
    return absl::OkStatus();
  }

  absl::Status Measure() {
    EnginePlan& plan = prepared_.plan;
    const bool measures_time = options_.measures_time && known_ == nullptr;
    ASSIGN_OR_RETURN(measured_, MeasureWithin(compute_, options_, measures_time, &beyond_budget_));
    if (measured_.graph.blocks.empty() || measured_.graph.stages.empty() ||
        measured_.layouts.size() != measured_.graph.blocks.size()) {
      return absl::InvalidArgumentError(
          "a model needs at least one block and one stage, and a layout for each block");
    }
    if (known_ != nullptr) measured_.graph = *known_;
    RETURN_IF_ERROR(CheckBuffers());
    RETURN_IF_ERROR(CheckNewWeights());
    plan.buffer_bytes = measured_.buffer_bytes;
    RETURN_IF_ERROR(MakeRoomForMissedUpdates());
    if (options_.initial_values || options_.resumes()) {
      // Nothing is built: its values come from elsewhere.
      for (tiering::BlockShape& block : measured_.graph.blocks) block.init_bytes = 0;
    }
    plan.graph = std::move(measured_.graph);
    for (const tiering::BlockIndex b : plan.graph.blocks.indices()) {
      tiering::BlockShape& block = plan.graph.blocks[b];
      if (options_.frozen != nullptr)
        block.elsewhere_bytes =
            options_.frozen->BytesOf(b, block.trains ? block.trained_from : block.elements);
    }
    plan.parameters = measured_.parameters;
    plan.compute_disturbed = measured_.disturbed && measures_time;
    prepared_.layouts = measured_.layouts;
    if (comm() != nullptr) RETURN_IF_ERROR(AgreeOnGraph(*comm(), &plan.graph));
    return absl::OkStatus();
  }

  // Counts of missed updates are part of each commit's record as well.
  absl::Status MakeRoomForMissedUpdates() {
    if (!options_.trains) return absl::OkStatus();
    const bool skips = options_.optimizer.missing_gradients == MissingGradients::kSkip;
    // Counts that a run has had stay its own, whatever it is told now.
    plan_options_.updates_within_scales = (skips || options_.resumes()) &&
                                          options_.optimizer.states == kernels::StateType::k8Bit &&
                                          ShareScales(measured_.layouts);
    if (!skips) return absl::OkStatus();
    int64_t& bytes = prepared_.plan.missed_bytes;
    bytes = MissedUpdates::MostBytes(TrainedParameters(measured_.layouts));
    // A state of an older version has no room of its own for them, and the common one is half empty.
    const auto room = static_cast<int64_t>(found_.shape.payload_capacity) - measured_.buffer_bytes -
                      static_cast<int64_t>(swap::kDefaultPayloadCapacity / 2);
    if (!options_.resumes() || !in_place_ || bytes <= room) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        options_.storage.state_dirs.front(), ": commits of this run have no room for the ", bytes,
        " bytes of what each parameter misses without a gradient: go on with missing_gradients "
        "\"zeros\", or load a checkpoint of the run into a new state directory"));
  }

  absl::Status CheckNewWeights() const {
    const auto trains = [](const tiering::BlockShape& block) { return block.trains; };
    if (!options_.new_weights ||
        std::none_of(measured_.graph.blocks.begin(), measured_.graph.blocks.end(), trains))
      return absl::OkStatus();
    return absl::InvalidArgumentError(
        "new weights that are only evaluated are those of a model whose parameters are all frozen");
  }

  // Buffers that change are part of each commit's record.
  absl::Status CheckBuffers() const {
    if (measured_.buffer_bytes == 0) return absl::OkStatus();
    if (options_.calls_per_step > 1) {
      return absl::UnimplementedError(
          "the model has buffers that training changes (BatchNorm's statistics), which a step of several "
          "calls "
          "that is given up would leave changed: give all its micro-batches to one call "
          "(EngineOptions::micro_batches)");
    }
    if (options_.world() > 1) {
      return absl::InvalidArgumentError(
          "the model has buffers that training changes (BatchNorm's statistics), which ranks would change "
          "each in its own way: train it with one rank, or use a layer without (LayerNorm, GroupNorm, "
          "BatchNorm with track_running_stats(false))");
    }
    constexpr auto kMost = static_cast<int64_t>(swap::kMaxPayloadBytes - swap::kDefaultPayloadCapacity);
    if (measured_.buffer_bytes <= kMost) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the buffers of the model that training changes take ", measured_.buffer_bytes,
                     " bytes of each commit, and there is room for ", kMost,
                     ": make parameters of what is large, or use layers without running statistics"));
  }

  // Budgets of host and devices, and how devices exchange, which takes some of theirs.
  absl::Status AgreeOnMemory() {
    tiering::DeviceOptions& device = plan_options_.device;
    if (options_.world() > 1) plan_options_.codes = options_.exchange;
    if (comm() != nullptr) {
      ASSIGN_OR_RETURN(plan_options_.host_memory_budget_bytes,
                       AgreeOnBudget(*comm(), options_.memory.host_memory_budget_bytes));
      if (device.has_own_memory) {
        // Where weights stay whole in host memory, they are gathered there, once a step. Connecting takes
        // memory.
        if (options_.memory.bounds.placement == tiering::Placement::kCuda) {
          prepared_.devices.how = "through host memory, where weights stay whole";
        } else {
          ASSIGN_OR_RETURN(prepared_.devices, ConnectDevices(options_.comm, *options_.device));
        }
        device.collectives = prepared_.devices.comm != nullptr;
        ASSIGN_OR_RETURN(
            device.budget_bytes,
            AgreeOnDeviceBudget(*comm(), *options_.device, options_.memory.device_memory_budget_bytes));
        prepared_.devices.budget_bytes = device.budget_bytes;
      }
    }
    ASSIGN_OR_RETURN(prepared_.storage, OpenDirectStorage(options_, std::move(device_storage_),
                                                          plan_options_.world > 1 && !device.collectives));
    device.gds = prepared_.storage.transfers != nullptr;
    return absl::OkStatus();
  }

  // What the state is made of, and that what is resumed is made of the same. Its tiles are taken over.
  absl::Status Identify() {
    EnginePlan& plan = prepared_.plan;
    nlohmann::json& ours = prepared_.identity;
    ours = IdentityOf(measured_.identity, options_, plan.format, plan.graph);
    if (!options_.resumes()) {
      plan_options_.precision = plan.format.precision();
      plan.state_bytes = StateBytes();
      return absl::OkStatus();
    }
    const nlohmann::json recorded = RecordedIdentity(found_, /*with_rank=*/in_place_);
    if (!in_place_) ours = WholeIdentity(ours.dump());
    if (!options_.trains) AdoptOptimizer(recorded, &plan.format, &ours);
    plan_options_.precision = plan.format.precision();
    RETURN_IF_ERROR(CheckFrozenParts(recorded, ours, options_.storage.state_dirs.front()));
    if (recorded != ours) {
      return absl::FailedPreconditionError(absl::StrCat(
          options_.storage.state_dirs.front(), " holds another run: ", JsonDifference(recorded, ours)));
    }
    if (options_.trains) NameRank(options_, &ours);
    if (plan.parts.size() == static_cast<size_t>(plan_options_.world) || in_place_) {
      ASSIGN_OR_RETURN(StoreTiles tiles, TilesOf(found_.shape, plan.graph, plan_options_.world,
                                                 plan_options_.precision, plan_options_.frozen_elsewhere));
      plan_options_.fixed_tiles = std::move(tiles.elements);
      plan_options_.frozen_apart = tiles.frozen_apart;
      plan_options_.blocks_alone = std::move(tiles.blocks_alone);
      RETURN_IF_ERROR(CheckTrainedHaveState());
    }
    plan.state_bytes = StateBytes();
    return absl::OkStatus();
  }

  // Of blocks that train.
  int64_t FrozenElements() const {
    int64_t elements = 0;
    for (const tiering::BlockShape& block : prepared_.plan.graph.blocks) elements += block.trained_from;
    return elements;
  }

  // Of blocks that have their weights alone.
  int64_t AloneElements() const {
    int64_t elements = 0;
    for (const tiering::BlockIndex b : prepared_.plan.graph.blocks.indices()) {
      const tiering::BlockShape& block = prepared_.plan.graph.blocks[b];
      if (plan_options_.keeps_block_alone(b, block.trains)) elements += block.elements;
    }
    return elements;
  }

  absl::Status CheckTrainedHaveState() const {
    if (!options_.trains) return absl::OkStatus();
    for (const tiering::BlockIndex b : prepared_.plan.graph.blocks.indices()) {
      const tiering::BlockShape& block = prepared_.plan.graph.blocks[b];
      if (!block.trains || plan_options_.blocks_alone[b] == 0) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("block ", block.name, " trains, and the run in ", options_.storage.state_dirs.front(),
                       " has no state for it: it was frozen when the run began"));
    }
    return absl::OkStatus();
  }

  // Of one version: all segments, and of what is frozen apart the weights.
  int64_t StateBytes() const {
    const int64_t apart = (plan_options_.keeps_frozen_apart() ? FrozenElements() : 0) + AloneElements();
    const tiering::Precision& precision = plan_options_.precision;
    if (plan_options_.frozen_elsewhere) {
      int64_t trained = 0;
      for (const tiering::BlockShape& block : prepared_.plan.graph.blocks)
        trained += block.trains ? block.elements - block.trained_from : 0;
      return precision.UnpaddedBytes(trained);
    }
    return precision.UnpaddedBytes(prepared_.plan.graph.elements() - apart) +
           precision.SegmentBytes(0, apart);
  }

  // What plans are compared on. A budget that is too small is refused before anything is measured on a drive.
  absl::Status MeasureMachine() {
    const bool measures =
        options_.hooks.machine && (comm() == nullptr || comm()->environment().local_rank == 0);
    if (options_.hooks.machine) {
      tiering::PlanOptions any = plan_options_;
      any.compares_policies = false;
      RETURN_IF_ERROR(tiering::MakePlan(prepared_.plan.graph, any).status());
      // One rank of each host: several would measure each other.
      if (measures) RETURN_IF_ERROR(AskForMachine());
    }
    if (comm() == nullptr) return absl::OkStatus();
    return AgreeOnMachine(*comm(), prepared_.devices, *options_.device,
                          plan_options_.host_memory_budget_bytes, measures, &plan_options_.machine,
                          &prepared_.plan.unlike_drives);
  }

  absl::Status AskForMachine() {
    Doing("measuring drive and processor");
    const int64_t budget = options_.memory.host_memory_budget_bytes;
    RETURN_IF_ERROR(Guarded("measuring the machine", [&] {
      const TensorMemoryLimit limit(budget);
      std::function<void()> compute = std::exchange(measured_.sample, nullptr);
      const bool has_room = budget == 0 || measured_.sample_bytes + budget / 4 <= budget;
      if (options_.device->has_own_memory() || !has_room) compute = nullptr;
      plan_options_.machine = options_.hooks.machine(prepared_.plan.state_bytes, compute);
    }));
    options_.device->TrimTensors();
    return absl::OkStatus();
  }

  absl::Status MakePlan() {
    EnginePlan& plan = prepared_.plan;
    Doing("planning");
    ASSIGN_OR_RETURN(plan.plan, tiering::MakePlan(plan.graph, plan_options_));
    if (beyond_budget_) {
      const int64_t least = std::max(plan.plan.least_host_memory_bytes, TensorMemory::Stats().peak_bytes);
      return absl::FailedPreconditionError(
          absl::StrCat("a host memory budget of ", options_.memory.host_memory_budget_bytes,
                       " bytes is too small: the least that works is ", least,
                       " bytes (measuring takes that much); a smaller micro-batch or sequence takes less"));
    }
    if (comm() != nullptr) RETURN_IF_ERROR(AgreeOnPlan(*comm(), plan.plan));
    plan.options = plan_options_;
    return absl::OkStatus();
  }

  // What the state directories will hold, and in how many versions.
  absl::Status MeasureDisk() {
    if (!on_nvme_) return absl::OkStatus();
    EnginePlan& plan = prepared_.plan;
    const std::string identity = prepared_.identity.dump();
    swap::StoreOptions store;
    store.directories = options_.storage.state_dirs;
    if (!options_.resumes())
      plan.stripes = ChooseStripes(options_.storage, options_.memory.host_memory_budget_bytes);
    store.weights = plan.stripes.weights;
    store.overwrite = options_.storage.overwrite;
    store.payload_capacity += static_cast<uint64_t>(plan.buffer_bytes + plan.missed_bytes);
    const swap::Layout layout = LayoutOf(plan.plan);
    store.slots = found_.shape.slots;
    if (!options_.resumes()) {
      ASSIGN_OR_RETURN(store.slots,
                       AgreeOnVersions(options_, store, layout, identity,
                                       ActivationSpill::BytesIn(options_.storage.state_dirs.size(),
                                                                plan.graph, plan.plan)));
    }
    plan.versions = static_cast<int>(store.slots);
    ASSIGN_OR_RETURN(std::vector<uint64_t> bytes, swap::BytesOnDisk(store, layout, identity));
    for (const uint64_t each : bytes) plan.disk_bytes += static_cast<int64_t>(each);
    plan.disk_bytes += plan.plan.input_scratch_bytes + static_cast<int64_t>(SumsSpill::Bytes(plan.plan));
    return absl::OkStatus();
  }

  Compute& compute_;
  const EngineOptions& options_;
  const tiering::ModelGraph* const known_;  // null: it is measured
  const bool on_nvme_;
  const bool in_place_;

  PreparedModel prepared_;
  tiering::PlanOptions plan_options_;
  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> device_storage_ =
      absl::FailedPreconditionError("not asked for");
  swap::Inspection found_;  // of what is resumed: this rank's shard, or the first
  Measured measured_;
  bool beyond_budget_ = false;  // measuring took more than it
};

}  // namespace

TileFormat FormatOf(const EngineOptions& options) {
  TileFormat format;
  format.weights = options.dtype;
  format.states = options.optimizer.states;
  format.moments = MomentsOf(options.optimizer.algorithm);
  return format;
}

absl::StatusOr<PreparedModel> PrepareModel(Compute& compute, const EngineOptions& options,
                                           const tiering::ModelGraph* known) {
  return Preparation(compute, options, known).Run();
}

}  // namespace penstock::zero
