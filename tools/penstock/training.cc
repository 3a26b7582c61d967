#include "tools/penstock/training.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "kernels/cpu_features.h"
#include "models/data/data_mixture.h"
#include "models/families/family.h"
#include "models/families/stages.h"
#include "run/config_options.h"
#include "run/settings.h"
#include "run/watch/comms_log.h"
#include "run/watch/run_metrics.h"
#include "run/watch/step_breakdown.h"
#include "run/watch/wear_budget.h"
#include "run/watch/written_count.h"
#include "swap/checkpoint.h"
#include "text/tokenizer.h"
#include "tiering/simulate/run_prediction.h"
#include "tiering/simulate/simulate.h"
#include "tools/base/cli.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"
#include "tools/base/stop_signal.h"
#include "tools/base/version.h"
#include "tools/machine/machine_probe.h"
#include "tools/machine/product_rate.h"
#include "tools/pages/plan_text.h"
#include "tools/pages/trace.h"
#include "tools/penstock/checkpoint_flags.h"
#include "tools/penstock/flops_profile.h"
#include "tools/penstock/plan_model.h"
#include "tools/penstock/ranks.h"
#include "tools/penstock/run_id.h"
#include "tools/penstock/run_journal.h"
#include "tools/penstock/run_watch.h"
#include "tools/penstock/step_display.h"
#include "tools/penstock/text_flags.h"
#include "tools/state/base_files.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/config/json_field.h"
#include "zero/engine/engine.h"
#include "zero/engine/prediction_check.h"
#include "zero/engine/report.h"
#include "zero/ranks/agree.h"

namespace penstock::tools {
namespace {

// Steps in a row whose gradients are not finite, after which nothing is to be expected from more of them.
constexpr int64_t kMostNotFinite = 10;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Read from and written to drives by this process, as the kernel counts.
std::pair<int64_t, int64_t> BytesByKernel() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {int64_t{512} * usage.ru_inblock, int64_t{512} * usage.ru_oublock};
}

class Training {
 public:
  Training(TrainOptions flags, TrainSettings settings, std::ostream& out)
      : flags_(std::move(flags)),
        settings_(std::move(settings)),
        out_(out),
        progress_(ProgressOptions(flags_)),
        preparing_(flags_.quiet),
        display_(&progress_, settings_.steps, settings_.TokensPerStep()),
        watch_(settings_.engine.watch, RankName(settings_.engine), &progress_),
        wear_(settings_.config.penstock.wear_budget_tb) {}

  absl::Status Run() {
    absl::Status status = Prepare();
    const bool started = engine_ != nullptr;
    if (status.ok()) status = Loop();
    if (zero::Comm* comm = settings_.engine.comm.get(); comm != nullptr && !status.ok()) comm->Abort(status);
    progress_.Finish();
    if (trace_ != nullptr) status.Update(trace_->Close());
    if (check_ != nullptr && check_->Finish()) Predicted();
    if (started && comms_.has_value()) {
      const std::string text = comms_->Text();
      Tell(text.substr(0, text.size() - 1));
    }
    if (started) TellMissedProfile();
    if (started) EndMetrics();
    if (started) status.Update(WriteReport(status));
    if (status.ok()) Summarize();
    return status;
  }

 private:
  static std::string RankName(const zero::EngineOptions& options) {
    return options.world() > 1 ? absl::StrCat("rank ", options.rank(), ": ") : std::string();
  }
  static Progress::Options ProgressOptions(const TrainOptions& flags) {
    Progress::Options options;
    options.quiet = flags.quiet;
    return options;
  }

  void Say(const std::string& text) {
    if (flags_.quiet) return;
    out_ << text;
    if (!text.empty() && text.back() != '\n') out_ << '\n';
    out_.flush();
  }

  // Of what somebody has to hear of, also with --quiet; one rank speaks for all.
  void Tell(const std::string& text) {
    if (settings_.engine.rank() == 0) progress_.Print(run::Spelt(text, run::Door::kCommandLine));
  }

  absl::Status Prepare() {
    for (const std::string& note : settings_.notes) Say(note);
    RETURN_IF_ERROR(OpenTexts());
    ASSIGN_OR_RETURN(const RunId run, IdentifyRun(flags_, &settings_));
    run_id_ = run.id;
    ASSIGN_OR_RETURN(journal_, RunJournal::Open(flags_, run, &settings_));
    RETURN_IF_ERROR(CheckWearBefore());
    SetHooks();
    if (flags_.trace.has_value()) {
      ASSIGN_OR_RETURN(trace_, Trace::Open(*flags_.trace, run_id_));
    }
    if (absl::Status made = MakeEngine(); !made.ok()) {
      if (written_.has_value() && !flags_.resume) made.Update(written_->Revert());
      return made;
    }
    RETURN_IF_ERROR(CheckRecord());
    RETURN_IF_ERROR(RemoveOldReport());
    if (flags_.prometheus.has_value())
      metrics_ = std::make_unique<run::RunMetrics>(*flags_.prometheus, run_id_, settings_.engine.rank());
    RETURN_IF_ERROR(journal_->Begin(*engine_));
    RETURN_IF_ERROR(SaveWritten());
    for (const std::string& decision : settings_.decisions) Tell(decision);
    if (engine_->resumed_from().has_value())
      Say(absl::StrCat("resumed from step ", *engine_->resumed_from()));
    for (const std::string& change : settings_.changes)
      Tell(absl::StrCat("changed from step ", engine_->step() + 1, " on: ", change));
    TellWhereBaseIs();
    return absl::OkStatus();
  }

  // The record changes with the next commit: where there is none, whoever looks at the run asks the old
  // place.
  void TellWhereBaseIs() {
    const nlohmann::json& changes = settings_.engine.resume.run_changes;
    if (!settings_.resumes || engine_->step() < settings_.steps || !changes.contains(kBaseKey)) return;
    const std::string now = PathOfBase(changes[kBaseKey]);
    if (now == PathOfBase(settings_.recorded[kBaseKey])) return;
    Tell(absl::StrCat("the run has no step left, so it is not recorded that its weights lie in ", now,
                      " now: verify, sample and export take --model ", now));
  }

  absl::Status OpenEach() {
    ASSIGN_OR_RETURN(
        texts_, tools::OpenTexts(settings_, tokenizer_.get(),
                                 {.preparing = [this](const std::string& what) { preparing_.Show(what); },
                                  .say = [this](const std::string& line) { Say(line); },
                                  .tell = [this](const std::string& line) { Tell(line); },
                                  .stops = [this] { return StopAsked(); }}));
    return absl::OkStatus();
  }

  // And agrees on them, and on all else, with the other ranks.
  absl::Status OpenTexts() {
    std::optional<NotedStopSignals> noted;
    if (!settings_.text.tokenizer.empty()) {
      ASSIGN_OR_RETURN(tokenizer_, text::Tokenizer::Open(settings_.text.tokenizer));
      if (const int64_t budget = settings_.engine.memory.host_memory_budget_bytes; budget > 0)
        tokenizer_->LimitMemory(static_cast<uint64_t>(budget));
      for (const std::string& note : tokenizer_->notes()) Say(note);
      noted.emplace();  // tokens take long to make; stopped, nothing is left of them
    }
    const absl::Status opened = OpenEach();
    noted.reset();
    if (StopSignal() != 0) return absl::CancelledError("stopped before the first step");
    RETURN_IF_ERROR(opened);
    zero::EngineOptions& options = settings_.engine;
    ASSIGN_OR_RETURN(uint64_t fingerprint, texts_.training->Fingerprint());
    options.resume.run["data_fingerprint"] = fingerprint;
    if (const nlohmann::json& run = settings_.recorded;
        run.is_object() && run.value("data_fingerprint", fingerprint) != fingerprint) {
      options.resume.run_changes["data_fingerprint"] = fingerprint;
      settings_.changes.push_back(absl::StrCat("the text: another one (--data ",
                                               absl::StrJoin(settings_.data_paths, " --data "), ")"));
    }
    if (options.comm != nullptr) {
      ASSIGN_OR_RETURN(
          std::vector<std::string> agreed,
          AgreeOnRun(*options.comm, flags_, settings_, *texts_.training, texts_.evaluation.get()));
      for (const std::string& line : agreed) Say(line);
    }
    return absl::OkStatus();
  }

  void SetHooks() {
    zero::EngineHooks& hooks = settings_.engine.hooks;
    hooks.stops = [this] { return StopAsked(); };
    hooks.log = [this](const std::string& line) {
      if (flags_.quiet) return;
      preparing_.Clear();
      progress_.Print(run::Spelt(line, run::Door::kCommandLine));
    };
    hooks.preparing = [this](const std::string& what) { preparing_.Show(what); };
    hooks.machine = [this](int64_t state_bytes, const std::function<void()>& compute) {
      return Probe(state_bytes, compute);
    };
    hooks.planned = [this](const zero::EnginePlan& plan) { return Planned(plan); };
    hooks.describe = [this](const zero::StepResult& result) { return journal_->DescriptionOf(result); };
    hooks.committed = [this](const zero::StepResult& result) { return Committed(result); };
    hooks.checkpointed = [this](int64_t step, const std::string& path, const absl::Status& status) {
      if (settings_.engine.rank() > 0) return;  // it is one checkpoint of all
      progress_.Print(status.ok() ? absl::StrCat("checkpoint of step ", step, " in ", path)
                                  : absl::StrCat("no checkpoint of step ", step, ": ", MessageOf(status)));
    };
    hooks.tick = [this](tiering::Stall waiting) { Tick(waiting); };
    hooks.stuck = [this](const zero::StuckOperation& operation) { watch_.Tell(operation); };
    hooks.observer = [this](tiering::OpId id, const tiering::Op& op, double start, double end) {
      if (trace_ != nullptr) trace_->Add(id, op, start, end);
      if (check_ != nullptr && trains_) check_->Observe(op, start, end);
      if (breakdown_.has_value() && trains_) breakdown_->Observe(op, start, end);
      if (profile_.has_value() && trains_) profile_->Observe(op, start, end);
      if (comms_.has_value()) comms_->Observe(op, start, end);
    };
    if (settings_.config.wall_clock_breakdown.value_or(false) && settings_.engine.rank() == 0)
      breakdown_.emplace();
    if (settings_.config.comms_logger.value_or(false) && settings_.engine.rank() == 0) comms_.emplace();
    if (!flags_.trace.has_value() && !breakdown_.has_value()) return;
    hooks.stall_observer = [this](tiering::Stall cause, double start, double end) {
      if (trace_ != nullptr) trace_->AddStall(cause, start, end);
      if (breakdown_.has_value() && trains_) breakdown_->ObserveStall(cause, start, end);
    };
  }

  absl::Status MakeEngine() {
    const zero::EngineOptions& options = settings_.engine;
    zero::SetIntraOpThreads(options.intra_op_threads);
    report_.Start(options, kVersion, options.world());
    report_.Identify(run_id_);
    PrepareProfile();
    absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
        zero::CreateEngine(models::MakeModel(*settings_.model), options);
    preparing_.Clear();
    if (!engine.ok()) return NameTilesThatFit(engine.status(), settings_, options);
    engine_ = std::move(*engine);
    engine_->set_saturating_bytes_in_flight(machine_.drives.saturating_bytes_in_flight);
    report_.Planned(*engine_, machine_.drives, prediction_);
    check_ = std::make_unique<zero::PredictionCheck>(
        *engine_, prediction_, static_cast<int64_t>(machine_.drives.saturating_bytes_in_flight),
        run::PlansAgain(settings_.config.penstock, options.world(), options.storage.offload), &report_);
    return absl::OkStatus();
  }

  // What the model computes, and what of that is told.
  void PrepareProfile() {
    const zero::EngineOptions& options = settings_.engine;
    std::vector<models::StageProducts> products = settings_.model->Products();
    const int64_t sequences = settings_.batch * settings_.accumulate;
    report_.Computes(ModelFlopsPerStep(products, sequences, settings_.seq) * options.world());
    const run::FlopsProfilerConfig& config = settings_.config.flops_profiler;
    if (!config.on() || options.rank() > 0) return;
    FlopsProfile::Step step{.sequences = sequences,
                            .length = settings_.seq,
                            .parameters = settings_.model->Layout().parameters(),
                            .ranks = options.world()};
    if (!options.device->has_own_memory()) {
      const ProductRate rate = MeasureProductRate(options.dtype);
      step.product_flops_per_second = rate.flops_per_second;
      step.product = absl::StrCat(rate.of, ", threads: ", options.intra_op_threads);
      report_.MeasuredProduct(rate.flops_per_second);
    }
    profile_.emplace(config, std::move(products), step);
  }

  void TellProfile(const zero::StepResult& result) {
    if (!profile_.has_value() || result.step != profile_->profile_step()) return;
    const std::string text = profile_->Text(result);
    const std::optional<std::string>& path = settings_.config.flops_profiler.output_file;
    if (!path.has_value()) {
      Tell(text.substr(0, text.size() - 1));
      return;
    }
    const absl::Status written = WriteWholeFile("flops_profiler.output_file", *path, text);
    Tell(written.ok() ? absl::StrCat("flops profile of step ", result.step, " in ", *path)
                      : absl::StrCat(std::string(written.message()), "; training goes on"));
  }

  void TellMissedProfile() {
    if (!profile_.has_value() || engine_->step() >= profile_->profile_step()) return;
    Tell(absl::StrCat("flops_profiler.profile_step: step ", profile_->profile_step(),
                      " was never reached, the last one was ", engine_->step(),
                      ": no profile was made; name a step that is"));
  }

  // What the flags were held against was read before the run was this process's: another may have gone on
  // with it meanwhile, and have changed it.
  absl::Status CheckRecord() const {
    if (!settings_.resumes || !settings_.on_nvme()) return absl::OkStatus();
    const nlohmann::json& now = engine_->run();
    for (const auto& [key, before] : settings_.recorded.items()) {
      if (key == "blas") continue;  // each rank's own
      const bool of_run = now.contains(key) && !settings_.engine.resume.run_changes.contains(key);
      if (!of_run || now[key] == before) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(Place(), ": the run was changed by another process while this one started (its ", key,
                       " was ", before.dump(), ", and is ", now[key].dump(), "): start this one again"));
    }
    return absl::OkStatus();
  }

  tiering::MachineModel Probe(int64_t state_bytes, const std::function<void()>& compute) {
    const zero::EngineOptions& options = settings_.engine;
    MachineRequest request = RequestFor(options, state_bytes, compute);
    request.stored_profile = false;  // the report has what the drive is worth now
    const auto [read_before, written_before] = BytesByKernel();
    absl::StatusOr<Machine> machine = ProbeMachine(request);
    const auto [read, written] = BytesByKernel();
    report_.Probed(read - read_before, written - written_before);
    journal_->Probed(written - written_before);
    if (flags_.resume) save_trouble_ = SaveWritten();  // also of a start that is refused
    if (machine.ok())
      machine_ = *std::move(machine);  // it only fails where a file is wrong, and there is none
    if (options.comm != nullptr) {
      // Ranks of one host share what it has.
      const int sharing = options.comm->environment().local_world;
      tiering::MachineModel& model = machine_.model;
      model.read_bytes_per_s /= sharing;
      model.write_bytes_per_s /= sharing;
      model.mixed_bytes_per_s /= sharing;
      if (model.cores > 0) model.cores = std::max(1, model.cores / sharing);
    }
    return machine_.model;
  }

  absl::Status Planned(const zero::EnginePlan& plan) {
    RETURN_IF_ERROR(save_trouble_);
    const zero::EngineOptions& options = settings_.engine;
    if (trace_ != nullptr) trace_->Planned(plan.plan);
    machine_.model = plan.options.machine;  // of all ranks
    ASSIGN_OR_RETURN(tiering::Prediction prediction, tiering::Predict(plan.graph, plan.plan, machine_.model));
    prediction_ = prediction;
    preparing_.Clear();
    if (engine_ != nullptr) return absl::OkStatus();  // another plan for the run that is under way
    ASSIGN_OR_RETURN(std::string process, ProcessMemoryText(plan, options, zero::FindHostMemory()));
    Say(PlanText({plan, options, machine_, prediction_}));
    Say(process);
    Say(absl::StrCat("threads: ", options.intra_op_threads, " for compute, ", options.optimizer.workers,
                     " for updates; ", zero::DescribeBlas().name, "; kernels ", kernels::DescribeCpu()));
    if (!settings_.on_nvme()) {
      Say(absl::StrCat("checkpoints: the last step, at the end or at a signal to stop, ",
                       FormatBytes(plan.state_bytes), " in ", options.storage.checkpoints.parent, " (",
                       FormatBytes(FreeBytes(options.storage.checkpoints.parent)), " free)",
                       options.storage.checkpoints.every > 0
                           ? absl::StrCat(", and every ", options.storage.checkpoints.every, " steps")
                           : "; a kill before that leaves nothing (--checkpoint-every N bounds that)"));
    }
    if (flags_.resume && !settings_.resumes) {
      // Nothing is overwritten that somebody may still want to look at.
      RETURN_IF_ERROR(journal_->CheckAhead(plan, 0));
    }
    // One that goes on may still be refused its place, and so may one that replaces another.
    if (!settings_.resumes) {
      RETURN_IF_ERROR(CheckReplaced(settings_));
      RETURN_IF_ERROR(RemoveOldReport());
    }
    if (!settings_.resumes && plan.plan.on_nvme) {
      Say("initialising");
      RETURN_IF_ERROR(SaveWritten(plan.state_bytes));  // a kill before the first commit leaves no other count
    }
    return absl::OkStatus();
  }

  // What the run's own steps say of it; told once, when the first have.
  void Predicted() {
    const tiering::RunPrediction& seen = check_->seen();
    if (flags_.quiet || !seen.first_window()) return;
    progress_.Print(CalibratedText(seen.prediction(), seen.shown().machine, seen.shown().drive_seen));
  }

  // Where the first steps have shown that the plan was made for another machine.
  absl::Status PlanAgain() {
    if (!check_->due() || Stops()) return absl::OkStatus();
    absl::StatusOr<std::string> line = check_->PlanAgain(*engine_, settings_.steps - engine_->step());
    preparing_.Clear();
    RETURN_IF_ERROR(line.status());
    if (!flags_.quiet) progress_.Print(*line);
    return SaveWritten();
  }

  // Several ranks stop after the same step: the one in which all of them heard of it.
  bool Stops() const {
    return settings_.engine.world() > 1 ? newest_.stops || evaluation_stopped_ : StopAsked();
  }
  // By a signal, because the log cannot be written and what is in memory alone is to be kept, or because the
  // drives are not to be written more.
  bool StopAsked() const { return StopSignal() != 0 || !LogTrouble().ok() || !wear_trouble_.ok(); }
  // Before there is a journal there is none.
  absl::Status LogTrouble() const { return journal_ != nullptr ? journal_->trouble() : absl::OkStatus(); }

  absl::StatusOr<std::vector<zero::Batch>> Batches(int64_t step) const {
    std::vector<zero::Batch> batches;
    for (int64_t m = 0; m < settings_.accumulate; ++m) {
      const zero::TensorBatch batch = ExampleBatch(settings_.batch, settings_.seq);
      RETURN_IF_ERROR(
          texts_.training->Fill({.step = step,
                                 .micro_batch = m,
                                 .rank = settings_.engine.rank(),
                                 .world = settings_.engine.world(),
                                 .rows = settings_.batch * settings_.accumulate * settings_.engine.world()},
                                settings_.batch, settings_.engine.seed, batch.inputs.data_ptr<int64_t>(),
                                batch.targets.data_ptr<int64_t>()));
      batches.push_back(batch);
    }
    return batches;
  }

  std::string Place() const {
    return settings_.on_nvme() ? settings_.engine.storage.state_dirs.front()
                               : settings_.engine.storage.checkpoints.parent;
  }

  // A run whose gradients stay what they are learns nothing more. The loss scale of fp16 that is sought makes
  // such steps on purpose, and gives up by itself.
  absl::Status CheckFinite(bool at_end) const {
    const zero::EngineOptions& options = settings_.engine;
    const bool searches = options.dtype == kernels::DType::kFp16 && options.optimizer.loss_scale.dynamic;
    const int64_t made = engine_->step() - engine_->resumed_from().value_or(0);
    if (not_finite_ == 0 || searches) return absl::OkStatus();
    if (not_finite_ < kMostNotFinite && !(at_end && not_finite_ == made)) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrFormat(
        "the gradients of the last %d steps up to step %d were not finite, and the loss is %s: "
        "nothing was learnt "
        "from them, and the weights are those of before; --resume with a smaller --lr, go "
        "back to a checkpoint "
        "(--checkpoint-dir), or look at the data",
        not_finite_, engine_->step(),
        std::isfinite(newest_.loss) ? absl::StrCat(newest_.loss) : "not either"));
  }

  // Of all ranks, as far as this one knows: they write alike.
  double WrittenByAll() const {
    return static_cast<double>(journal_->WrittenBytes()) * settings_.engine.world();
  }
  // Before the drive is measured, which writes to it. What was written before is that of file and record.
  absl::Status CheckWearBefore() {
    absl::Status used_up;
    if (wear_.any() && settings_.engine.rank() == 0) {
      absl::StatusOr<run::WrittenCount> count =
          flags_.resume ? run::WrittenCount::Read(Place(), settings_.recorded) : run::WrittenCount(Place());
      used_up = count.status();
      if (count.ok()) {
        written_ = *std::move(count);
        journal_->WroteBefore(written_->before());
        const bool trains =
            zero::JsonField<int64_t>(settings_.recorded, "last_step").value_or(0) < settings_.steps;
        if (trains) used_up = wear_.Check(WrittenByAll());
      }
    }
    if (settings_.engine.comm == nullptr) return used_up;
    return zero::AgreeOnStatus(*settings_.engine.comm, zero::Channel::kSetup, used_up);
  }
  // `more`: that will have been written before it is saved again.
  absl::Status SaveWritten(int64_t more = 0) {
    return written_.has_value() ? written_->Save(run_id_, journal_->WrittenBytes() + more) : absl::OkStatus();
  }
  // Before the first step. One rank speaks and decides for all: the others hear of it as of a stop.
  absl::Status CheckWear() {
    if (!wear_.any() || settings_.engine.rank() > 0) return absl::OkStatus();
    const zero::EngineOptions& options = settings_.engine;
    const std::vector<std::string> lines = wear_.Warnings(
        engine_->plan(), options,
        {.written_bytes = WrittenByAll(), .first_step = engine_->step(), .last_step = settings_.steps});
    for (const std::string& line : lines) Tell(line);
    wear_trouble_ = settings_.steps > engine_->step() ? wear_.Check(WrittenByAll()) : absl::OkStatus();
    return options.world() == 1 ? wear_trouble_ : absl::OkStatus();
  }

  absl::Status Loop() {
    const char* const stands =
        settings_.on_nvme()
            ? (engine_->plan().plan.commits_every_step ? "the last committed step" : "the last checkpoint")
            : "the newest checkpoint, if there is one";
    CatchStopSignals(stands, settings_.engine.rank() == 0);
    watch_.Begin(journal_->log(), stands, engine_->step());
    RETURN_IF_ERROR(CheckWear());
    begin_ = Seconds();
    bool evaluated = false;
    absl::Status trouble = Steps(&evaluated);
    if (trouble.ok()) trouble = CheckFinite(/*at_end=*/true);
    // Before anything else may fail: what was trained is kept, also where the data or an evaluation was
    // wrong. An error of one rank alone is not for all of them to keep something after: they are told.
    const bool together = settings_.engine.world() == 1 || trouble.ok() || not_finite_ > 0;
    absl::StatusOr<std::string> kept = together ? engine_->Keep() : absl::StatusOr<std::string>(trouble);
    if (!kept.ok()) {
      const absl::Status& cause = trouble.ok() ? kept.status() : trouble;
      if (settings_.on_nvme()) return cause;
      const absl::StatusOr<std::string> newest =
          swap::FindCheckpoint(settings_.engine.storage.checkpoints.parent);
      return absl::Status(
          cause.code(),
          absl::StrCat("step ", engine_->step(), " is lost with this process",
                       trouble.ok() ? ", because its checkpoint could not be written: " : ": ",
                       std::string(cause.message()), "; ",
                       newest.ok()                         ? absl::StrCat("--resume goes on from ", *newest)
                       : absl::IsNotFound(newest.status()) ? "there is no older one"
                                                           : std::string(newest.status().message())));
    }
    kept_ = *std::move(kept);
    trouble.Update(SaveWritten());
    if (texts_.evaluation != nullptr && !evaluated && !Stops() && trouble.ok()) trouble = Evaluate();
    if (const int signal = StopSignal(); Stops() && journal_->trouble().ok() && wear_trouble_.ok()) {
      // Another rank may be the one that heard it.
      stopped_by_ = signal != 0 ? StopSignalName(signal) : "a signal to another rank";
      report_.Stopped(stopped_by_);
      Tell(absl::StrCat("stopped by ", stopped_by_, " after step ", engine_->step(), WhereItIs(),
                        engine_->step() > 0 ? "; go on with --resume" : ""));
    }
    trouble.Update(journal_->trouble());
    if (!wear_trouble_.ok()) {
      wear_trouble_ = wear_.Check(WrittenByAll());  // with what was written to keep that step
      trouble.Update(
          absl::Status(wear_trouble_.code(), absl::StrCat("after step ", engine_->step(), WhereItIs(), ": ",
                                                          std::string(wear_trouble_.message()))));
    }
    return trouble;
  }

  // All steps that are left, with the evaluations between them. `evaluated`: after the last of them too.
  absl::Status Steps(bool* evaluated) {
    absl::Status trouble;
    if (texts_.evaluation != nullptr && settings_.eval_every > 0 && journal_->log() != nullptr &&
        engine_->step() > 0 && engine_->step() % settings_.eval_every == 0 &&
        journal_->log()->last_evaluation() < engine_->step() && settings_.engine.world() == 1) {
      // A kill came between the step and its evaluation. (Of several ranks only one knows the log.)
      RETURN_IF_ERROR(Evaluate());
      *evaluated = true;
    }
    while (engine_->step() < settings_.steps && !Stops() && trouble.ok()) {
      const int64_t step = engine_->step() + 1;
      ASSIGN_OR_RETURN(std::vector<zero::Batch> batches, Batches(step));
      const bool evaluates = settings_.eval_every > 0 && step % settings_.eval_every == 0;
      const bool last = step == settings_.steps;
      ASSIGN_OR_RETURN(
          zero::StepResult result,
          engine_->Step(std::move(batches), last || evaluates ? zero::Next::kUnknown : zero::Next::kTrain));
      report_.Stepped(*engine_, result, settings_.TokensPerStep());
      if (check_->Stepped(result)) Predicted();
      if (breakdown_.has_value()) Tell(breakdown_->Line(step, result.seconds));
      TellProfile(result);
      wear_trouble_ = wear_.Check(WrittenByAll());
      trouble = SaveWritten();
      if (std::isnan(first_loss_)) first_loss_ = result.loss;
      newest_ = result;
      if (result.skipped) Tell(absl::StrCat("step ", step, ": gradients are not finite, update skipped"));
      not_finite_ = result.skipped ? not_finite_ + 1 : 0;
      trouble.Update(CheckFinite(/*at_end=*/false));
      Show(engine_->waiting_for());
      *evaluated = evaluates && trouble.ok();
      if (*evaluated) {
        RETURN_IF_ERROR(Evaluate());
      }
      if (trouble.ok() && !last) trouble = PlanAgain();
    }
    return trouble;
  }

  // ", which is ...": where the last step is to be found after the process.
  std::string WhereItIs() const {
    if (engine_->step() == 0) return ": nothing was trained";
    if (!settings_.on_nvme() && kept_.empty()) return ", which was there before";
    if (!settings_.on_nvme()) return absl::StrCat(", which is kept in ", kept_);
    return absl::StrCat(engine_->committed_step() == engine_->step() ? ", which is committed in "
                                                                     : ", not all of which is committed in ",
                        Place());
  }

  // Whether any rank is asked to stop; all of them hear the same.
  absl::StatusOr<bool> AnyStops() const {
    zero::Comm* const comm = settings_.engine.comm.get();
    if (comm == nullptr) return StopAsked();
    ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                     zero::AllNumbers(*comm, "whether to stop", StopAsked() ? 1 : 0));
    return std::count(all.begin(), all.end(), 1) > 0;
  }

  // Every window is a batch of its own, and their losses are added up one by one: the bits of the mean depend
  // neither on --batch nor on how many pass through the model at once.
  absl::Status Evaluate() {
    const double start = Seconds();
    const int64_t all = texts_.evaluation->EvalWindows();
    const int64_t windows = settings_.eval_windows > 0 ? std::min(all, settings_.eval_windows) : all;
    const int64_t at_once = engine_->EvaluatesAtOnce(ExampleBatch(1, settings_.seq));
    double sum = 0;
    for (int64_t first = 0; first < windows; first += at_once) {
      // A long evaluation does not keep a stop waiting; --resume makes it again.
      ASSIGN_OR_RETURN(evaluation_stopped_, AnyStops());
      if (evaluation_stopped_) return absl::OkStatus();
      std::vector<zero::Batch> batches;
      for (int64_t w = first; w < std::min(windows, first + at_once); ++w) {
        const zero::TensorBatch batch = ExampleBatch(1, settings_.seq);
        RETURN_IF_ERROR(texts_.evaluation->FillEval(w, batch.inputs.data_ptr<int64_t>(),
                                                    batch.targets.data_ptr<int64_t>()));
        batches.push_back(batch);
      }
      trains_ = false;
      absl::StatusOr<std::vector<double>> losses = engine_->EvaluateEach(batches);
      trains_ = true;
      RETURN_IF_ERROR(losses.status());
      for (const double loss : *losses) sum += loss;
    }
    zero::Evaluation evaluation;
    evaluation.step = engine_->step();
    evaluation.loss = evaluation_ = sum / static_cast<double>(windows);
    evaluation.windows = windows;
    evaluation.seconds = Seconds() - start;
    report_.Evaluated(evaluation);
    if (!flags_.quiet) {
      progress_.Print(absl::StrFormat("step %d  eval loss %.4f over %d sequences", evaluation.step,
                                      evaluation.loss, windows));
    }
    return journal_->Evaluated(evaluation);
  }

  absl::Status Committed(const zero::StepResult& result) {
    if (metrics_ != nullptr) {
      const absl::Status written = metrics_->Committed(result, *engine_, MetricTotals());
      if (!written.ok()) progress_.Print(absl::StrCat(MessageOf(written), "; training goes on"));
    }
    absl::Status status = journal_->Committed(result);
    if (journal_->any() && journal_->trouble().ok()) watch_.Logged(result.step);
    return status;
  }

  run::RunMetrics::Totals MetricTotals() const {
    return {.last_step = settings_.steps,
            .tokens_per_step = settings_.TokensPerStep(),
            .read_bytes = report_.ReadBytes(*engine_),
            .written_bytes = report_.WriteBytes(*engine_),
            .run_written_bytes = journal_->WrittenBytes(),
            .budget_bytes = settings_.engine.memory.host_memory_budget_bytes};
  }

  // With what was moved since the last commit: figures and report say the same.
  void EndMetrics() {
    if (metrics_ == nullptr) return;
    const absl::Status written = metrics_->Ended(*engine_, MetricTotals());
    if (!written.ok()) progress_.Print(MessageOf(written));
  }

  void Tick(tiering::Stall waiting) {
    if (engine_ != nullptr && engine_->step() < settings_.steps) Show(waiting);
  }

  void Show(tiering::Stall waiting) { display_.Show(*engine_, newest_, Seconds() - begin_, waiting); }

  // A run that is killed leaves no report, rather than an earlier run's.
  absl::Status RemoveOldReport() const {
    return flags_.report.has_value() ? RemoveOldFile("--report", *flags_.report) : absl::OkStatus();
  }

  absl::Status WriteReport(const absl::Status& status) {
    if (journal_->begun()) report_.RunWrote(journal_->WrittenBytes());
    const std::string text = report_.Finish(engine_.get(), absl::Status(status.code(), MessageOf(status)));
    if (!flags_.report.has_value()) return absl::OkStatus();
    return WriteWholeFile("--report", *flags_.report, text);
  }

  void Summarize() {
    const double seconds = Seconds() - begin_;
    const int64_t steps = engine_->step() - engine_->resumed_from().value_or(0);
    std::string text;
    if (steps > 0) {
      text = absl::StrFormat("%d steps in %s: loss %.4f -> %.4f, %s tokens/s\n", steps,
                             FormatDuration(seconds), first_loss_, newest_.loss,
                             FormatCount(static_cast<double>(steps * settings_.TokensPerStep()) / seconds));
    } else if (stopped_by_.empty()) {
      text = absl::StrCat("nothing to do: step ", engine_->step(), " of ", settings_.steps, " is done\n");
    }
    if (steps > 0 && not_finite_ == steps) {
      absl::StrAppend(&text,
                      "all of them were skipped while the loss scale was sought: nothing was learnt yet\n");
    }
    if (!std::isnan(evaluation_)) absl::StrAppend(&text, absl::StrFormat("eval loss %.4f\n", evaluation_));
    if (engine_->plan().plan.on_nvme && steps > 1) {
      absl::StrAppend(
          &text,
          absl::StrFormat("drive: %.1f bytes per parameter and step, %.2f GB/s while saturated; a step "
                          "took %.2f of its busiest part",
                          report_.bytes_per_param_per_step(), report_.io_gbps(), report_.overlap_ratio()));
      if (report_.floor_ratio() > 0) {
        absl::StrAppend(&text, absl::StrFormat(", %.2f of its lower bound", report_.floor_ratio()));
      }
      absl::StrAppend(&text, "\n");
    }
    absl::StrAppend(&text, "memory: ", FormatBytes(engine_->peak_managed_bytes()), " managed at its peak");
    if (settings_.engine.memory.host_memory_budget_bytes > 0) {
      absl::StrAppend(&text, " of a budget of ",
                      FormatBytes(settings_.engine.memory.host_memory_budget_bytes));
    }
    absl::StrAppend(&text, "\n");
    if (engine_->plan().plan.on_nvme) {
      absl::StrAppend(&text, "state: ", settings_.engine.storage.state_dirs.front(), ", step ",
                      engine_->committed_step(), " committed; go on with --resume --steps N\n");
    } else if (!kept_.empty()) {
      absl::StrAppend(&text, "state: ", kept_, ", step ", engine_->step(),
                      " kept; go on with --resume --checkpoint-dir ",
                      settings_.engine.storage.checkpoints.parent, " --steps N\n");
    }
    Say(text);
  }

  const TrainOptions flags_;
  TrainSettings settings_;
  std::ostream& out_;
  Progress progress_;
  Preparing preparing_;
  StepDisplay display_;
  RunWatch watch_;
  const run::WearBudget wear_;
  absl::Status wear_trouble_;                 // it is used up
  std::optional<run::WrittenCount> written_;  // empty: there is no budget, or another rank keeps it
  absl::Status save_trouble_;
  zero::Report report_;
  Machine machine_;
  std::unique_ptr<zero::PredictionCheck> check_;
  bool trains_ = true;  // and does not evaluate just now
  tiering::Prediction prediction_;
  std::unique_ptr<text::Tokenizer> tokenizer_;  // null: bytes, or tokens as they are
  Texts texts_;
  std::unique_ptr<RunJournal> journal_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<zero::Engine> engine_;
  std::string run_id_;
  std::string kept_;                             // the checkpoint of the last step, where there is no drive
  std::string stopped_by_;                       // a signal's name
  bool evaluation_stopped_ = false;              // before its end, by a stop that all ranks heard of
  int64_t not_finite_ = 0;                       // steps in a row
  std::unique_ptr<run::RunMetrics> metrics_;     // null: nobody asked
  std::optional<run::StepBreakdown> breakdown_;  // empty: the same
  std::optional<FlopsProfile> profile_;
  std::optional<run::CommsLog> comms_;
  zero::StepResult newest_;
  double first_loss_ = std::numeric_limits<double>::quiet_NaN();
  double evaluation_ = std::numeric_limits<double>::quiet_NaN();
  double begin_ = 0;
};

}  // namespace

absl::Status RunTraining(TrainOptions flags, TrainSettings settings, std::ostream& out) {
  return Training(std::move(flags), std::move(settings), out).Run();
}

}  // namespace penstock::tools
