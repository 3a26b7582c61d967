// The training engine, for Python: a model that its owner drives (zero/engine/driven_engine.h). Weights go
// out by address, gradients come in by address; what computes is Python's alone.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "deepspeed_checkpoint.h"
#include "engine_options.h"
#include "errors.h"
#include "gil.h"
#include "kernels/float16.h"
#include "owned.h"
#include "ranks.h"
#include "run/settings.h"
#include "run/watch/written_count.h"
#include "run_watch.h"
#include "settings.h"
#include "swap/inspect.h"
#include "tiering/plan/byte_size.h"
#include "tools/pages/planned_model.h"
#include "zero/compute/tile_format.h"
#include "zero/config/json_field.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/restore.h"
#include "zero/lanes/stuck_operation.h"
#include "zero/memory/host_memory.h"
#include "zero/ranks/agree.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

using zero::DrivenCompute;
using zero::DrivenEngine;

zero::ElementType ElementTypeOf(const std::string& name) {
  for (const zero::ElementType type :
       {zero::ElementType::kFp32, zero::ElementType::kBf16, zero::ElementType::kFp16}) {
    if (zero::NameOf(type) == name) return type;
  }
  throw nb::value_error(("no element type of gradients: " + name).c_str());
}

// Out of turn, or of no use any more: no fault of a file.
[[noreturn]] void RaiseEngine(const absl::Status& status, const Place& place = {}) {
  switch (status.code()) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnknown:
      if (aio::ErrnoOf(status) == 0) throw std::runtime_error(MessageOf(status));
      [[fallthrough]];
    default:
      Raise(status, place);
  }
}
void CheckEngine(const absl::Status& status, const Place& place = {}) {
  if (!status.ok()) RaiseEngine(status, place);
}
template <class T>
T ValueOfEngine(absl::StatusOr<T> value, const Place& place = {}) {
  if (!value.ok()) RaiseEngine(value.status(), place);
  return *std::move(value);
}

zero::StateKind StateKindOf(const std::string& name) {
  if (name == "parameter") return zero::StateKind::kParameter;
  if (name == "first moment") return zero::StateKind::kFirstMoment;
  if (name == "second moment") return zero::StateKind::kSecondMoment;
  if (name == "gradient") return zero::StateKind::kGradient;
  throw nb::value_error(("no kind of state: " + name).c_str());
}

// What the options say of the model.
void Join(GivenModel* model, GivenOptions* given) {
  model->measured.graph.input_gradients = given->input_gradients;
  model->measured.graph.fixed_tensor_bytes += given->resident_bytes;
  tiering::ModelGraph& graph = model->measured.graph;
  if (given->engine.device->has_own_memory()) {
    for (tiering::StageShape& stage : graph.stages)
      stage.forward_peak_bytes = stage.backward_peak_bytes = given->step_tensor_bytes;
  } else {
    // They are torch's as long as they are in memory. Without a drive they stay there, whatever the budget.
    graph.inputs_beside = true;
    const bool stay = !given->engine.trains || given->engine.storage.offload != zero::OffloadDevice::kNvme ||
                      given->engine.memory.saved_activations == zero::SavedActivations::kMemory ||
                      given->computes_elsewhere;
    for (tiering::StageShape& stage : graph.stages) {
      if (stay) stage.input_bytes = stage.input_scratch_bytes = 0;
    }
  }
  given->engine.initial_values = std::move(model->initial_values);
}

// Where the weights of frozen parameters lie elsewhere. Returns a line for people, or none.
absl::StatusOr<std::string> TakeBase(const GivenModel& model, GivenOptions* given) {
  if (!given->base.given) return std::string();
  return TakeBase(given->base, model.measured, &given->engine);
}

// One version of a new run's state, of all ranks.
int64_t StateBytes(const tiering::ModelGraph& graph, const zero::EngineOptions& options) {
  int64_t bytes = 0;
  const tiering::Precision precision = zero::FormatOf(options).precision();
  for (const tiering::BlockShape& block : graph.blocks) {
    const int64_t frozen = block.trains ? block.trained_from : block.elements;
    if (options.frozen == nullptr) bytes += precision.SegmentBytes(0, frozen);
    bytes += precision.UnpaddedBytes(block.elements - frozen);
  }
  return bytes;
}

// The plan of an engine with these blocks, stages and options, whose values are not looked at.
class PyPlan {
 public:
  PyPlan(const std::vector<GivenBlock>& blocks, const std::vector<GivenStage>& stages,
         const PySettings& settings, const std::string& options, int compute_threads, bool probes_drive,
         const std::vector<std::string>& sources)
      : planned_(Make(blocks, stages, settings, options, compute_threads, probes_drive, sources)) {}

  std::string Json(bool asks_what_if) {
    const GilReleased released;
    return planned_.Json(asks_what_if).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  std::string Text() {
    const GilReleased released;
    return planned_.Text();
  }
  std::string Html(const std::string& title) {
    absl::StatusOr<std::string> page;
    {
      const GilReleased released;
      page = planned_.Html(title);
    }
    return ValueOrRaise(std::move(page));
  }

 private:
  static tools::PlannedModel Make(const std::vector<GivenBlock>& blocks,
                                  const std::vector<GivenStage>& stages, const PySettings& settings,
                                  const std::string& options, int compute_threads, bool probes_drive,
                                  const std::vector<std::string>& sources) {
    GivenModel model = ValueOrRaise(MakeModel(blocks, stages));
    GivenOptions given = ValueOfEngine(MakeOptions(settings.resolved(), options, nullptr));
    Join(&model, &given);
    absl::StatusOr<tools::PlannedModel> planned;
    {
      const GilReleased released;
      const absl::Status base = TakeBase(model, &given).status();
      if (base.ok()) {
        planned = tools::PlannedModel::Make(std::move(model.measured), std::move(given.engine),
                                            compute_threads, probes_drive, sources);
      } else {
        planned = base;
      }
    }
    return ValueOfEngine(std::move(planned));
  }

  tools::PlannedModel planned_;
};

class PyTrainingEngine {
 public:
  PyTrainingEngine(const std::vector<GivenBlock>& blocks, const std::vector<GivenStage>& stages,
                   const PySettings& settings, const std::string& options, const PyRanks* ranks,
                   run::WrittenCount* written)
      : ranks_(ranks != nullptr ? ranks->held() : nullptr),
        heard_(std::make_shared<Heard>()),
        watch_(std::make_shared<RunWatch>()) {
    GivenModel model = ValueOrRaise(MakeModel(blocks, stages));
    for (const auto& layout : model.measured.layouts) layouts_.push_back(layout);
    GivenOptions given = ValueOfEngine(MakeOptions(settings.resolved(), options, comm()));
    Join(&model, &given);
    if (comm() != nullptr) {
      absl::Status alike;
      {
        const GilReleased released;
        alike = zero::AgreeOnOptions(
            *comm(), {{"the model's blocks, their order and groups", model.measured.identity}});
      }
      CheckEngine(alike);
    }
    model_ = model.measured.identity;
    zero::EngineOptions& made = given.engine;
    absl::StatusOr<std::string> base;
    {
      const GilReleased released;
      base = TakeBase(model, &given);
    }
    if (const std::string line = ValueOfEngine(std::move(base)); !line.empty()) heard_->Line(line);
    made.hooks.log = [heard = heard_](const std::string& line) { heard->Line(line); };
    made.hooks.stuck = [heard = heard_, watch = made.watch, rank = made.rank(),
                        alone = made.world() == 1](const zero::StuckOperation& operation) {
      heard->Stuck(operation, watch, alone ? "" : absl::StrCat("rank ", rank, ": "));
    };
    made.hooks.describe = [heard = heard_](const zero::StepResult& result) {
      return heard->Description(result.step);
    };
    if (written != nullptr && !made.resume.enabled) {
      // A kill before the first commit leaves no other count.
      absl::Status saved;
      {
        const GilReleased released;
        saved = written->Save(zero::JsonField<std::string>(made.resume.run, "run_id").value_or(""),
                              written->before() + StateBytes(model.measured.graph, made));
      }
      RaiseUnlessOk(saved);
    }
    const std::string& from = given.imported.path.empty() ? given.restore_from : given.imported.path;
    if (!from.empty()) {
      absl::Status restored;
      {
        const GilReleased released;
        restored = MakeRun(given, model.measured);
        if (comm() != nullptr) {  // or the others would wait
          if (!restored.ok()) comm()->Abort(restored);
          restored.Update(comm()->failure());
        }
      }
      CheckEngine(restored, {.path = from});
      made.resume.enabled = true;
    }
    watch_->Attach(&given);
    const int drivers = made.micro_batches;
    const std::string directory = made.storage.state_dirs.empty() ? "" : made.storage.state_dirs.front();
    absl::StatusOr<std::unique_ptr<DrivenEngine>> engine;
    {
      const GilReleased released;
      engine = DrivenEngine::Create(std::move(model.measured), std::move(made), drivers);
    }
    engine_ = MakeOwned(ValueOfEngine(std::move(engine), {.path = directory}));
    Call([this](zero::Engine& of) {
      device_ = of.device().ordinal();
      on_device_ = of.device().has_own_memory();
      return absl::OkStatus();
    });
    engine_->get().compute().set_interrupted([] {
      const GilHeld held;
      return PyErr_CheckSignals() != 0;
    });
    Call([&](zero::Engine& of) {
      const std::string line =
          watch_->Planned(of, zero::JsonField<std::string>(of.run(), "run_id").value_or(""));
      if (!line.empty()) heard_->Line(line);
      return absl::OkStatus();
    });
  }

  // rates: of each group lr, betas and weight decay; none: the schedule.
  void Begin(bool next, const std::vector<GivenRates>& rates) {
    zero::StepOptions options(next ? zero::Next::kTrain : zero::Next::kUnknown);
    for (const auto& [lr, beta1, beta2, weight_decay] : rates) {
      options.groups.push_back(
          {.rates = {.lr = lr, .beta1 = beta1, .beta2 = beta2}, .weight_decay = weight_decay});
    }
    const auto held = Held();
    watch_->Begins(true);
    CheckEngine(held->get().Begin(std::move(options)));
    trains_ = true;
  }
  void BeginEvaluation() {
    const auto held = Held();
    watch_->Begins(false);
    CheckEngine(held->get().BeginEvaluation());
    trains_ = false;
  }

  // Waits until the engine offers the use; (block, address of its weights) of each, and what backward of the
  // loss begins with. stream: of the engine's device, that the use is computed on.
  std::tuple<std::vector<std::pair<int, uint64_t>>, double> Enter(bool backward, int stage, int micro_batch,
                                                                  std::optional<uint64_t> stream) {
    const auto held = Held();
    DrivenEngine& of = held->get();
    absl::StatusOr<DrivenCompute::Entered> entered;
    {
      const GilReleased released;
      entered = of.compute().Enter(backward ? zero::Direction::kBackward : zero::Direction::kForward,
                                   tiering::StageIndex(stage), micro_batch, StreamOf(stream));
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    DrivenCompute::Entered use = ValueOfEngine(std::move(entered));
    std::vector<std::pair<int, uint64_t>> weights;
    for (const zero::Weights& each : use.weights())
      weights.emplace_back(each.block.value(), reinterpret_cast<uint64_t>(each.data));
    const std::lock_guard lock(mutex_);
    entered_.insert_or_assign(micro_batch, std::move(use));
    return {std::move(weights), of.compute().pass().loss_gradient};
  }

  // gradients: of a backward whose block trains, (parameter's number in the block, address, element type);
  // without any the block took no part. streams: of the engine's device, those that the use was computed on;
  // behind the first, what the engine does with it.
  void Leave(int micro_batch, int block,
             const std::optional<std::vector<std::tuple<int, uint64_t, std::string>>>& gradients,
             std::optional<double> loss, const std::vector<uint64_t>& streams,
             const std::vector<std::pair<uint64_t, int64_t>>& inputs) {
    const auto held = Held();
    DrivenEngine& of = held->get();
    std::optional<DrivenCompute::Entered> use;
    {
      const std::lock_guard lock(mutex_);
      auto found = entered_.extract(micro_batch);
      if (!found.empty()) use = std::move(found.mapped());
    }
    if (!use.has_value()) throw std::runtime_error("no use of this micro-batch is entered");
    DrivenCompute::Result result;
    result.loss = loss;
    for (const auto& [address, bytes] : inputs) {
      result.inputs.push_back({.data = reinterpret_cast<void*>(address),
                               .type = zero::ElementType::kUInt8,
                               .sizes = {bytes},
                               .on_device = on_device_});
    }
    for (const uint64_t stream : streams) {
      if (result.stream.has_value()) {
        result.also.push_back(*StreamOf(stream));
      } else {
        result.stream = StreamOf(stream);
      }
    }
    if (gradients.has_value()) {
      const zero::FlatLayout& layout = *layouts_.at(static_cast<size_t>(block));
      std::vector<zero::Gradient> of_block;
      for (const auto& [parameter, address, type] : *gradients) {
        of_block.push_back({parameter,
                            {.data = reinterpret_cast<void*>(address),
                             .type = ElementTypeOf(type),
                             .sizes = layout.parameters.at(static_cast<size_t>(parameter)).sizes,
                             .on_device = on_device_}});
      }
      result.gradients.emplace_back(tiering::BlockIndex(block), std::move(of_block));
    }
    absl::Status status;
    {
      const GilReleased released;
      status = of.compute().Leave(*std::move(use), std::move(result));
    }
    CheckEngine(status);
  }

  // (stage, micro-batch) of each use whose inputs have left since the last call.
  std::vector<std::pair<int, int>> Dropped() {
    std::vector<std::pair<int, int>> uses;
    for (const DrivenCompute::Dropped& each : Held()->get().compute().TakeDropped())
      uses.emplace_back(each.stage.value(), each.micro_batch);
    return uses;
  }
  // Within a use of backward: what forward of it was left with, each in memory of its own.
  std::vector<nb::object> Inputs(int stage, int micro_batch) {
    std::vector<nb::object> inputs;
    for (zero::HostBuffer& each :
         Held()->get().compute().TakeInputs(tiering::StageIndex(stage), micro_batch)) {
      auto* const memory = new zero::HostBuffer(std::move(each));  // NOLINT(cppcoreguidelines-owning-memory)
      const nb::capsule owner(memory, [](void* of) noexcept { delete static_cast<zero::HostBuffer*>(of); });
      inputs.push_back(nb::cast(nb::ndarray<uint8_t, nb::ndim<1>, nb::device::cpu>(
          memory->data(), {static_cast<size_t>(memory->bytes())}, owner)));
    }
    return inputs;
  }
  // Where inputs come back to on a device: room(stage, micro-batch, bytes) gives an address.
  void SetRoom(nb::callable room) {
    room_ = std::move(room);
    Held()->get().compute().set_make_room(
        [this](tiering::StageIndex stage, int micro_batch, int64_t bytes) -> void* {
          const GilHeld held;
          try {
            return reinterpret_cast<void*>(nb::cast<uint64_t>(
                room_(stage.value(), micro_batch, bytes)));  // NOLINT(performance-no-int-to-ptr)
          } catch (nb::python_error& error) {
            error.discard_as_unraisable("room for inputs that come back");
            return nullptr;
          }
        });
  }

  void Fail(const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      Held()->get().compute().Fail(absl::CancelledError(why));
      entered_.clear();
    }
    if (comm() == nullptr) return;
    const GilReleased released;
    comm()->Abort(absl::CancelledError(why));  // what waits for the others may never come to the failure
  }

  // tokens, samples, flops: of a training step on this rank, for the report; 0 where they are not known. The
  // result has those of all ranks, and what their processes wrote to drives so far.
  nb::dict Finish(int64_t tokens, int64_t samples, double flops) {
    const auto held = Held();
    DrivenEngine& of = held->get();
    absl::StatusOr<zero::StepResult> result;
    {
      const GilReleased released;
      result = of.Finish();
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    const zero::StepResult step = ValueOfEngine(std::move(result));
    Counts counts{
        .tokens = static_cast<double>(tokens), .samples = static_cast<double>(samples), .flops = flops};
    std::string breakdown;
    if (trains_) {
      Call([&](zero::Engine& engine) -> absl::Status {
        counts.written_bytes = static_cast<double>(engine.io_stats().DeviceWriteBytes());
        counts.ended_checkpoints = engine.checkpoint_ended() ? 1 : 0;
        RETURN_IF_ERROR(Sum(&counts));
        // On all ranks with the same step.
        const int world = comm() == nullptr ? 1 : comm()->world();
        if (counts.ended_checkpoints == world) checkpoint_error_.Update(engine.FinishCheckpoint());
        watch_->Stepped(engine, step, static_cast<int64_t>(counts.tokens), counts.flops);
        breakdown = watch_->breakdown();
        return absl::OkStatus();
      });
    }
    nb::dict out;
    out["step"] = step.step;
    out["loss"] = step.loss;
    out["grad_norm"] = step.grad_norm;
    out["lr"] = step.lr;
    out["loss_scale"] = step.loss_scale;
    out["skipped"] = step.skipped;
    out["seconds"] = step.seconds;
    out["stall_io_seconds"] = step.stall_io_seconds;
    out["compute_seconds"] = step.compute_seconds;
    out["optimizer_seconds"] = step.optimizer_seconds;
    out["evaluation_seconds"] = step.evaluation_seconds;
    out["nvme_read_bytes"] = step.nvme_read_bytes;
    out["nvme_write_bytes"] = step.nvme_write_bytes;
    out["tokens"] = static_cast<int64_t>(counts.tokens);
    out["samples"] = static_cast<int64_t>(counts.samples);
    out["written_bytes"] = static_cast<int64_t>(counts.written_bytes);
    if (!breakdown.empty()) out["breakdown"] = breakdown;
    return out;
  }

  // The first steps differ much from what was predicted of them: PlanAgain may be called before the next one.
  bool PlansAgainNow() const { return watch_->plans_again_now(); }
  // Another plan, in other memory than Arena's before, as far as it pays. Nothing refers to weights. A
  // checkpoint that is being copied is waited for.
  void PlanAgain() {
    SettleCheckpoint();
    Call([this](zero::Engine& of) -> absl::Status {
      ASSIGN_OR_RETURN(const std::string line, watch_->PlanAgain(of));
      heard_->Line(line);
      return absl::OkStatus();
    });
  }

  void Flush() {
    Call([this](zero::Engine& of) { return CommitDescription(of); });
  }
  // The path that the checkpoint has once it is whole. file: that goes into it, as file_name; empty: none.
  std::string BeginCheckpoint(const std::string& parent, const std::string& tag, bool latest,
                              const std::string& description, const std::string& name,
                              const std::string& file, const std::string& file_name) {
    Flush();
    zero::Engine::CheckpointRequest request = {.parent = parent,
                                               .naming = swap::CheckpointNaming{.description = description,
                                                                                .tag = tag,
                                                                                .latest = latest,
                                                                                .name = name,
                                                                                .file = file,
                                                                                .file_name = file_name}};
    checkpoints_ = parent;
    return Ask<std::string>([&](zero::Engine& of) { return of.BeginCheckpoint(std::move(request)); });
  }
  // Waits for it, and raises its error.
  void FinishCheckpoint() {
    SettleCheckpoint();
    TakeCheckpointError();
  }
  // Waits for it. TakeCheckpointError raises its error.
  void SettleCheckpoint() {
    absl::Status ended;
    Call([&](zero::Engine& of) {
      ended = of.FinishCheckpoint();
      return absl::OkStatus();
    });
    checkpoint_error_.Update(ended);
  }
  // Of a checkpoint that has ended: raised once.
  void TakeCheckpointError() {
    CheckEngine(std::exchange(checkpoint_error_, absl::OkStatus()), {.path = checkpoints_});
  }
  // Where the parameters of a block begin in its weights, in elements.
  std::vector<int64_t> Offsets(int block) const {
    std::vector<int64_t> offsets;
    for (const zero::Parameter& parameter : layouts_.at(static_cast<size_t>(block))->parameters)
      offsets.push_back(parameter.offset);
    return offsets;
  }
  // Address and bytes of the memory that weights lie in, and an object while whose life it stays mapped.
  nb::tuple Arena() {
    using Held = std::shared_ptr<const void>;
    auto [arena, held] = Ask<std::pair<std::span<std::byte>, Held>>(
        [](zero::Engine& of) { return std::pair(of.arena(), of.HoldArena()); });
    nb::capsule keeper(new Held(std::move(held)), [](void* of) noexcept { delete static_cast<Held*>(of); });
    return nb::make_tuple(reinterpret_cast<uint64_t>(arena.data()), static_cast<uint64_t>(arena.size()),
                          std::move(keeper));
  }
  // Of a parameter by its full name, in fp32, to `address`, which has room for its elements.
  void Read(const std::string& name, const std::string& kind, uint64_t address, uint64_t bytes) {
    const zero::StateKind which = StateKindOf(kind);
    const std::span<float> to(reinterpret_cast<float*>(address), bytes / sizeof(float));
    Call([&](zero::Engine& of) { return of.ReadState(name, which, to); });
  }
  void Write(const std::string& name, const std::string& kind, uint64_t address,
             const std::vector<int64_t>& sizes) {
    const zero::StateKind which = StateKindOf(kind);
    Call([&](zero::Engine& of) {
      return of.WriteState(name, which, {.data = reinterpret_cast<void*>(address), .sizes = sizes});
    });
  }

  // what: JSON, as ExportRun reads it; names: those in the module, by block.
  void Export(const std::string& what, const std::vector<std::vector<std::string>>& names) {
    const models::ModelLayout layout = ValueOrRaise(ModelLayoutOf(names, layouts_));
    const nlohmann::json json = ParseJson(what);
    Call([&](zero::Engine& of) { return ExportRun(of, layout, json); });
  }

  // What the commit of `step` says besides; what that of the last one said when the run was resumed.
  void Describe(int64_t step, const std::string& json) { heard_->Describe(step, ParseJson(json)); }
  std::string Description() {
    return Ask<std::string>([](zero::Engine& of) { return of.last_description().dump(); });
  }
  // JSON: what was planned, and what was used so far.
  std::string Info() {
    return Ask<std::string>([this](zero::Engine& of) {
      nlohmann::json info = InfoOf(of);
      info["model"] = model_;
      return info.dump();
    });
  }
  // JSON, after docs/report.md.
  std::string Report() {
    return Ask<std::string>([this](zero::Engine& of) { return watch_->Report(of); });
  }
  int64_t CommittedStep() const { return watch_->committed(); }
  std::string Exchanges() {
    return Ask<std::string>([this](zero::Engine&) { return watch_->Exchanges(); });
  }
  std::vector<std::string> TakeLog() { return heard_->TakeLines(); }

  void Close() {
    if (engine_ == nullptr) return;
    if (engine_->here()) {
      const std::lock_guard lock(mutex_);
      engine_->get().compute().Fail(absl::CancelledError("the engine was closed"));
      entered_.clear();
    }
    engine_.reset();
    ranks_.reset();
  }
  bool Closed() const { return engine_ == nullptr; }

 private:
  // Of a checkpoint, where the engine goes on from it.
  absl::Status MakeRun(GivenOptions& given, const zero::Measured& model) const {
    zero::EngineOptions& made = given.engine;
    const bool is_verified = given.restore_is_verified;
    if (!given.imported.path.empty()) return ImportRun(given.imported, model, layouts_, made, is_verified);
    if (made.storage.offload == zero::OffloadDevice::kNvme)
      return zero::RestoreRun(given.restore_from, made, is_verified);
    made.storage.state_dirs = {given.restore_from};  // state in memory comes from there itself
    return absl::OkStatus();
  }

  // What the engine's thread says and asks: it never calls Python.
  class Heard {
   public:
    void Line(const std::string& line) {
      const std::lock_guard lock(mutex_);
      if (lines_.size() < 1000) lines_.push_back(run::Spelt(line, run::Door::kPython));
    }
    // Past Python, which may be what is stuck. Does not return where the operation is hopeless.
    void Stuck(const zero::StuckOperation& operation, const zero::WatchOptions& watch,
               const std::string& rank) {
      using News = zero::StuckOperation::News;
      std::string line = absl::StrCat("penstock: ", rank, zero::StuckText(operation));
      if (operation.news == News::kStuck) {
        absl::StrAppend(&line,
                        watch.hopeless_seconds > 0
                            ? absl::StrFormat("; the process ends itself after %g s of that, and leaves the "
                                              "last commit",
                                              watch.hopeless_seconds)
                            : "; the run waits (penstock.watchdog_abort_seconds would end it)");
      } else if (operation.news == News::kHopeless) {
        absl::StrAppend(&line,
                        "; ended by penstock.watchdog_abort_seconds: the last commit stands, and resume=True "
                        "goes on from there");
      }
      const std::string told = line + "\n";
      (void)!write(STDERR_FILENO, told.data(), told.size());
      if (operation.news == News::kHopeless) _exit(1);
      Line(line);
    }
    std::vector<std::string> TakeLines() {
      const std::lock_guard lock(mutex_);
      return std::exchange(lines_, {});
    }
    void Describe(int64_t step, nlohmann::json what) {
      const std::lock_guard lock(mutex_);
      descriptions_[step] = std::move(what);
      descriptions_.erase(descriptions_.begin(), descriptions_.lower_bound(step - 8));
    }
    nlohmann::json Description(int64_t step) {
      const std::lock_guard lock(mutex_);
      const auto found = descriptions_.find(step);
      return found == descriptions_.end() ? nlohmann::json() : found->second;
    }

   private:
    std::mutex mutex_;
    std::vector<std::string> lines_;
    std::map<int64_t, nlohmann::json> descriptions_;
  };

  // Also of a run that this process has made no step of.
  absl::Status CommitDescription(zero::Engine& of) const {
    nlohmann::json description = heard_->Description(of.step());
    return description.is_null() ? of.CommitDescription() : of.CommitDescription(std::move(description));
  }
  // Of a step. Numbers that doubles hold.
  struct Counts {
    double tokens = 0, samples = 0, flops = 0;
    double written_bytes = 0;      // to drives, by the process
    double ended_checkpoints = 0;  // that were begun, and whose end nobody has heard of
  };
  // Over all ranks.
  absl::Status Sum(Counts* counts) const {
    if (comm() == nullptr) return absl::OkStatus();
    std::vector<Counts> all(static_cast<size_t>(comm()->world()));
    all[static_cast<size_t>(comm()->rank())] = *counts;
    RETURN_IF_ERROR(
        comm()->AllGather(zero::Channel::kSetup, {"what the step has counted"}, all.data(), sizeof(Counts)));
    *counts = Counts();
    for (const Counts& each : all) {
      counts->tokens += each.tokens;
      counts->samples += each.samples;
      counts->flops += each.flops;
      counts->written_bytes += each.written_bytes;
      counts->ended_checkpoints += each.ended_checkpoints;
    }
    return absl::OkStatus();
  }
  std::shared_ptr<zero::Comm> comm() const { return ranks_ == nullptr ? nullptr : ranks_->get().comm; }

  // Held as long as a call lasts: another thread may close the engine meanwhile.
  std::shared_ptr<Owned<DrivenEngine>> Held() const {
    if (engine_ == nullptr) throw std::runtime_error("this engine was closed");
    engine_->CheckHere();
    return engine_;
  }
  void Call(const std::function<absl::Status(zero::Engine&)>& call) {
    const auto held = Held();
    DrivenEngine& of = held->get();
    absl::Status status;
    {
      const GilReleased released;
      status = of.Call(call);
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();  // Ctrl-C, while it waited for other ranks
    CheckEngine(status);
  }
  // What the engine answers.
  template <class T>
  T Ask(const std::function<absl::StatusOr<T>(zero::Engine&)>& question) {
    absl::StatusOr<T> answer;
    Call([&](zero::Engine& of) {
      answer = question(of);
      return answer.status();
    });
    return *std::move(answer);
  }

  std::optional<zero::DeviceStream> StreamOf(std::optional<uint64_t> stream) const {
    if (!stream.has_value()) return std::nullopt;
    return zero::DeviceStream{.device = device_, .stream = reinterpret_cast<void*>(*stream)};
  }

  HeldRanks ranks_;  // null: there are no others. They outlive the engine
  std::shared_ptr<Heard> heard_;
  std::shared_ptr<RunWatch> watch_;  // the engine's hooks point there: it goes last
  nb::callable room_;                // the engine's thread calls it: it goes after the engine
  std::shared_ptr<Owned<DrivenEngine>> engine_;
  std::string checkpoints_;        // the directory of the last checkpoint
  absl::Status checkpoint_error_;  // of one that ended within a step, until it is raised
  bool trains_ = false;            // the pass that is open, or was the last
  bool on_device_ = false;         // the engine computes in the memory of its device
  int device_ = -1;                // and that one's number
  std::vector<std::shared_ptr<const zero::FlatLayout>> layouts_;
  nlohmann::json model_;  // as the state's identity has it
  std::mutex mutex_;
  std::map<int, DrivenCompute::Entered> entered_;  // by micro-batch
};

}  // namespace

void BindEngine(nb::module_& module) {
  module.def(
      "holds_run",
      [](const std::vector<std::string>& directories) {
        const swap::Finding found = swap::Probe(directories);
        if (found.beside) return false;  // one is made beside other files
        return ValueOrRaise(swap::HoldsRun(found), {.path = directories.empty() ? "" : directories.front()});
      },
      nb::arg("directories"),
      "Whether state directories hold a run, also one that is in use just now. OSError: they hold what was "
      "one, or may have been, or cannot be read.");
  module.def(
      "scheduled_rates",
      [](const std::string& schedule, int64_t update) {
        const zero::LrSchedule made = ValueOrRaise(zero::LrSchedule::FromJson(ParseJson(schedule)));
        const zero::ScheduledRates rates = made.At(update);
        return std::make_tuple(rates.lr, rates.beta1, rates.beta2);
      },
      nb::arg("schedule"), nb::arg("update"),
      "Learning rate and betas (None: the optimizer's own) of an update, 1 for the first.");
  module.def(
      "why_no_device",
      [](const std::string& name) {
        const GilReleased released;
        return MessageOf(OpenDevice(name).status());
      },
      nb::arg("name"),
      "Why the engine cannot have its blocks in the memory of this device (\"cuda:0\"); empty: it can.");
  module.def(
      "free_host_memory", [] { return zero::FindHostMemory().free_bytes; },
      "Bytes of host memory that this process may still take: of the machine, or of its control group.");
  module.def(
      "parse_size", [](const std::string& text) { return ValueOrRaise(tiering::ParseSize(text)); },
      nb::arg("text"), "Bytes: \"512MiB\", \"4GB\", \"1e9\".");
  module.def(
      "deepspeed_keys",
      [] {
        const auto keys = models::DeepSpeedKeys();
        return std::vector<std::string>(keys.begin(), keys.end());
      },
      "What DeepSpeed puts beside the client_state, in a file of model states.");
  module.def(
      "is_deepspeed_checkpoint",
      [](const std::string& path) { return ValueOrRaise(models::IsDeepSpeedCheckpoint(path)); },
      nb::arg("path"), "Whether DeepSpeed's save_checkpoint, or ds_to_universal, wrote this directory.");
  module.def(
      "deepspeed_checkpoint",
      [](const std::string& path, const std::vector<NamedShape>& parameters,
         const std::map<std::string, std::string>& names, const std::vector<std::string>& buffers,
         int64_t most_buffer_bytes) {
        absl::StatusOr<nlohmann::json> json;
        {
          const GilReleased released;
          json = DescribeCheckpoint(path, parameters, names, buffers, most_buffer_bytes);
        }
        using Handler = nlohmann::json::error_handler_t;
        return ValueOrRaise(std::move(json), {.path = path}).dump(-1, ' ', false, Handler::replace);
      },
      nb::arg("path"), nb::arg("parameters"), nb::arg("names"), nb::arg("buffers"),
      nb::arg("most_buffer_bytes"),
      "Where the run of a checkpoint of DeepSpeed's stood, as JSON. ValueError: it is not of a model with "
      "these parameters, or of a kind that is not served.");
  module.def(
      "verify_deepspeed_checkpoint",
      [](const std::string& path, const std::vector<NamedShape>& parameters,
         const std::map<std::string, std::string>& names, int rank, int world) {
        absl::Status status;
        {
          const GilReleased released;
          status = VerifyDeepSpeedCheckpoint(path, parameters, names, rank, world);
        }
        RaiseUnlessOk(status, {.path = path});
      },
      nb::arg("path"), nb::arg("parameters"), nb::arg("names"), nb::arg("rank"), nb::arg("world"),
      "Reads all of a checkpoint of DeepSpeed's and checks its checksums; of world ranks each its share.");
  module.def(
      "verify_checkpoint",
      [](const std::string& path, int rank, int world) {
        absl::Status status;
        {
          const GilReleased released;
          status = zero::VerifyCheckpoint(path, rank, world);
        }
        RaiseUnlessOk(status, {.path = path});
      },
      nb::arg("path"), nb::arg("rank"), nb::arg("world"),
      "Reads every tile of a checkpoint and checks it; of world ranks each its share. OSError: it is "
      "damaged.");
  nb::class_<PyPlan>(module, "Plan", "The plan of an engine that is not made, and what its step would take.")
      .def(nb::init<const std::vector<GivenBlock>&, const std::vector<GivenStage>&, const PySettings&,
                    const std::string&, int, bool, const std::vector<std::string>&>(),
           nb::arg("blocks"), nb::arg("stages"), nb::arg("settings"), nb::arg("options"),
           nb::arg("compute_threads"), nb::arg("probes_drive"), nb::arg("sources"))
      .def("json", &PyPlan::Json, nb::arg("asks_what_if"))
      .def("text", &PyPlan::Text)
      .def("html", &PyPlan::Html, nb::arg("title"));
  nb::class_<PyTrainingEngine>(
      module, "TrainingEngine", nb::is_weak_referenceable(),
      "Trains a model that its owner drives: enter and leave for each use of a block.")
      .def(nb::init<const std::vector<GivenBlock>&, const std::vector<GivenStage>&, const PySettings&,
                    const std::string&, const PyRanks*, run::WrittenCount*>(),
           nb::arg("blocks"), nb::arg("stages"), nb::arg("settings"), nb::arg("options"),
           nb::arg("ranks").none() = nb::none(), nb::arg("written").none() = nb::none())
      .def("begin", &PyTrainingEngine::Begin, nb::arg("next"), nb::arg("rates"))
      .def("begin_evaluation", &PyTrainingEngine::BeginEvaluation)
      .def("enter", &PyTrainingEngine::Enter, nb::arg("backward"), nb::arg("stage"), nb::arg("micro_batch"),
           nb::arg("stream").none() = nb::none())
      .def("leave", &PyTrainingEngine::Leave, nb::arg("micro_batch"), nb::arg("block"),
           nb::arg("gradients").none(), nb::arg("loss").none(), nb::arg("streams") = std::vector<uint64_t>(),
           nb::arg("inputs") = std::vector<std::pair<uint64_t, int64_t>>())
      .def("dropped", &PyTrainingEngine::Dropped)
      .def("inputs", &PyTrainingEngine::Inputs, nb::arg("stage"), nb::arg("micro_batch"))
      .def("set_room", &PyTrainingEngine::SetRoom, nb::arg("room"))
      .def("fail", &PyTrainingEngine::Fail, nb::arg("why"))
      .def("finish", &PyTrainingEngine::Finish, nb::arg("tokens") = 0, nb::arg("samples") = 0,
           nb::arg("flops") = 0.0)
      .def_prop_ro("plans_again_now", &PyTrainingEngine::PlansAgainNow)
      .def("plan_again", &PyTrainingEngine::PlanAgain)
      .def("flush", &PyTrainingEngine::Flush)
      .def("begin_checkpoint", &PyTrainingEngine::BeginCheckpoint, nb::arg("parent"), nb::arg("tag"),
           nb::arg("latest"), nb::arg("description"), nb::arg("name"), nb::arg("file"), nb::arg("file_name"))
      .def("finish_checkpoint", &PyTrainingEngine::FinishCheckpoint)
      .def("settle_checkpoint", &PyTrainingEngine::SettleCheckpoint)
      .def("take_checkpoint_error", &PyTrainingEngine::TakeCheckpointError)
      .def("export_checkpoint", &PyTrainingEngine::Export, nb::arg("what"), nb::arg("names"))
      .def("offsets", &PyTrainingEngine::Offsets, nb::arg("block"))
      .def("arena", &PyTrainingEngine::Arena)
      .def("read", &PyTrainingEngine::Read, nb::arg("name"), nb::arg("kind"), nb::arg("address"),
           nb::arg("bytes"))
      .def("write", &PyTrainingEngine::Write, nb::arg("name"), nb::arg("kind"), nb::arg("address"),
           nb::arg("sizes"))
      .def("describe", &PyTrainingEngine::Describe, nb::arg("step"), nb::arg("json"))
      .def("description", &PyTrainingEngine::Description)
      .def("info", &PyTrainingEngine::Info)
      .def("report", &PyTrainingEngine::Report)
      .def_prop_ro("committed_step", &PyTrainingEngine::CommittedStep)
      .def("exchanges", &PyTrainingEngine::Exchanges)
      .def("take_log", &PyTrainingEngine::TakeLog)
      .def("close", &PyTrainingEngine::Close)
      .def_prop_ro("closed", &PyTrainingEngine::Closed);
}

}  // namespace penstock::python
