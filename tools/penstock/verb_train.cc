// `penstock train`.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu_features.h"
#include "tiering/simulate/run_prediction.h"
#include "tools/base/cli.h"
#include "tools/machine/machine_probe.h"
#include "tools/penstock/plan_text.h"
#include "tools/base/progress.h"
#include "tools/penstock/ranks.h"
#include "tools/base/size.h"
#include "tools/penstock/trace.h"
#include "tools/penstock/train_log.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/verbs.h"
#include "tools/base/version.h"
#include "zero/engine/engine_state.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/report.h"
#include "zero/memory/threads.h"

namespace penstock::tools {
namespace {

constexpr const char* kName = "penstock train";
constexpr int64_t kEvaluationBatches = 16;

std::atomic<int> stop_signals{0};

// The first asks for an orderly stop; a second one ends the process, and the last commit stands.
void OnStopSignal(int) {
  if (stop_signals.fetch_add(1) > 0) _exit(kExitFailed);
}

void CatchStopSignals() {
  struct sigaction action {};
  action.sa_handler = OnStopSignal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

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
  Training(TrainWords words, TrainSettings settings, std::ostream& out)
      : words_(std::move(words)),
        settings_(std::move(settings)),
        out_(out),
        progress_(ProgressOptions(words_)) {}

  absl::Status Run() {
    absl::Status status = Prepare();
    const bool started = engine_ != nullptr;
    if (status.ok()) status = Loop();
    if (zero::Comm* comm = settings_.engine.comm.get(); comm != nullptr && !status.ok()) comm->Abort(status);
    progress_.Finish();
    if (trace_ != nullptr) status.Update(trace_->Close());
    if (run_prediction_ != nullptr && run_prediction_->Finish()) Predicted();
    if (started) status.Update(WriteReport(status));
    if (status.ok()) Summarize();
    return status;
  }

 private:
  static Progress::Options ProgressOptions(const TrainWords& words) {
    Progress::Options options;
    options.quiet = words.quiet;
    return options;
  }

  void Say(const std::string& text) {
    if (words_.quiet) return;
    out_ << text;
    if (!text.empty() && text.back() != '\n') out_ << '\n';
    out_.flush();
  }

  absl::Status Prepare() {
    for (const std::string& note : settings_.notes) Say(note);
    const TokenFormat format = InferTokenFormat(settings_.data_path, settings_.vocab);
    absl::StatusOr<std::unique_ptr<Dataset>> data =
        Dataset::Open(settings_.data_path, format, settings_.model.vocab, settings_.seq);
    if (!data.ok()) return data.status();
    data_ = std::move(*data);
    if (!settings_.eval_path.empty()) {
      data = Dataset::Open(settings_.eval_path, InferTokenFormat(settings_.eval_path, settings_.vocab),
                           settings_.model.vocab, settings_.seq);
      if (!data.ok()) return data.status();
      eval_data_ = std::move(*data);
    }
    zero::EngineOptions& options = settings_.engine;
    absl::StatusOr<uint64_t> fingerprint = data_->Fingerprint();
    if (!fingerprint.ok()) return fingerprint.status();
    options.run["data_fingerprint"] = *fingerprint;
    if (options.comm != nullptr) {
      // What the words and the config come to.
      nlohmann::json same = options.run;
      same["dtype"] = static_cast<int>(options.dtype);
      same["offload"] = static_cast<int>(options.offload);
      same["resumes"] = settings_.resumes;
      same["tile_bytes"] = options.tile_bytes;
      same["update_order"] = static_cast<int>(options.update_order);
      if (absl::Status status = zero::AgreeOnWords(*options.comm, same); !status.ok()) return status;
      Say(absl::StrCat(options.world(), " ranks: ", options.comm->name()));
    }
    options.stops = [] { return stop_signals.load() != 0; };

    zero::SetIntraOpThreads(options.intra_op_threads);
    options.log = [this](const std::string& line) {
      if (!words_.quiet) progress_.Print(line);
    };
    options.machine = [this](int64_t state_bytes, const std::function<void()>& compute) {
      return Probe(state_bytes, compute);
    };
    options.planned = [this](const zero::EnginePlan& plan) { return Planned(plan); };
    options.describe = [this](const zero::StepResult& result) {
      return zero::StepJson(result, TokensPerStep());
    };
    options.committed = [this](const zero::StepResult& result) { return Committed(result); };
    options.checkpointed = [this](int64_t step, const std::string& path, const absl::Status& status) {
      if (settings_.engine.rank() > 0) return;  // it is one checkpoint of all
      progress_.Print(
          status.ok() ? absl::StrCat("checkpoint of step ", step, " in ", path)
                      : absl::StrCat("no checkpoint of step ", step, ": ", std::string(status.message())));
    };
    options.tick = [this](tiering::Stall waiting) { Tick(waiting); };
    if (words_.trace.has_value()) {
      absl::StatusOr<std::unique_ptr<Trace>> trace = Trace::Open(*words_.trace);
      if (!trace.ok()) return trace.status();
      trace_ = std::move(*trace);
    }
    options.observer = [this](tiering::OpId id, const tiering::Op& op, double start, double end) {
      if (trace_ != nullptr) trace_->Add(id, op, start, end);
      if (run_prediction_ != nullptr && trains_) run_prediction_->Observe(op, start, end);
    };
    if (trace_ != nullptr) {
      options.stall_observer = [this](tiering::Stall cause, double start, double end) {
        trace_->AddStall(cause, start, end);
      };
    }
    report_.Start(options, kVersion, options.world());
    absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
        zero::Engine::Create(MakeGpt(settings_.model), options);
    if (!engine.ok()) return engine.status();
    engine_ = std::move(*engine);
    engine_->set_knee_bytes(machine_.drives.knee_bytes);
    report_.Planned(*engine_, machine_.drives, prediction_);
    run_prediction_ =
        std::make_unique<tiering::RunPrediction>(engine_->plan().graph, engine_->plan().plan, machine_.model,
                                                 static_cast<int64_t>(machine_.drives.knee_bytes));
    if (engine_->run().value("data_fingerprint", *fingerprint) != *fingerprint) {
      return absl::FailedPreconditionError(
          absl::StrCat("--data ", settings_.data_path,
                       ": not the text that this run was created with; --resume goes "
                       "on with the same data only"));
    }
    if (log_ != nullptr && words_.resume) {
      absl::Status status = CheckLogged(*log_, engine_->plan(), engine_->step());
      if (status.ok()) status = log_->CutAfter(engine_->step());
      if (status.ok()) status = log_->AddMissing(engine_->last_description());
      if (!status.ok()) return status;
    }
    if (engine_->resumed_from().has_value())
      Say(absl::StrCat("resumed from step ", *engine_->resumed_from()));
    return absl::OkStatus();
  }

  // Where every step is durable, a log that is ahead of the state says that commits were lost: to a file that
  // was cut off, an old copy of the directory, a power cut.
  absl::Status CheckLogged(const TrainLog& log, const zero::EnginePlan& plan, int64_t step) const {
    const bool durable = plan.plan.on_nvme && plan.plan.commits_every_step && !settings_.goes_back;
    if (!durable || log.last_step() <= step) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("--log ", *words_.log, " has step ", log.last_step(), ", and ",
                                            settings_.engine.state_dirs.front(),
                                            step == 0 ? " none" : absl::StrCat(" only step ", step),
                                            ": commits were lost; go on from a checkpoint (--checkpoint-dir, "
                                            "with a --state-dir that is empty), or move "
                                            "the log away to go on from step ",
                                            step, " all the same"));
  }

  tiering::MachineModel Probe(int64_t state_bytes, const std::function<void()>& compute) {
    const zero::EngineOptions& options = settings_.engine;
    MachineRequest request = RequestFor(options, state_bytes, compute);
    request.stored_profile = false;  // the report has what the drive is worth now
    const auto [read_before, written_before] = BytesByKernel();
    absl::StatusOr<Machine> machine = ProbeMachine(request);
    const auto [read, written] = BytesByKernel();
    report_.Probed(read - read_before, written - written_before);
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
    const zero::EngineOptions& options = settings_.engine;
    machine_.model = plan.options.machine;  // of all ranks
    absl::StatusOr<tiering::Prediction> prediction = tiering::Predict(plan.graph, plan.plan, machine_.model);
    if (!prediction.ok()) return prediction.status();
    prediction_ = *prediction;
    Say(PlanText({plan, options, machine_, prediction_}));
    Say(absl::StrCat("threads: ", options.intra_op_threads, " for compute, ", options.update_workers,
                     " for updates; ", zero::DescribeBlas().name, "; kernels ", kernels::DescribeCpu()));
    // Before gigabytes are made for a run that could not tell of itself.
    if (words_.log.has_value()) {
      absl::StatusOr<std::unique_ptr<TrainLog>> log = TrainLog::Open(*words_.log, words_.resume);
      if (!log.ok()) return log.status();
      log_ = std::move(*log);
      if (words_.resume && !settings_.resumes) {
        // Nothing is overwritten that somebody may still want to look at.
        if (absl::Status status = CheckLogged(*log_, plan, 0); !status.ok()) return status;
      }
    }
    if (!settings_.resumes && plan.plan.on_nvme) Say("initialising");
    return absl::OkStatus();
  }

  // What the run's own steps say of it; told once, when the first have.
  void Predicted() {
    report_.Predicted(run_prediction_->prediction());
    if (words_.quiet || !run_prediction_->first_window()) return;
    progress_.Print(CalibratedText(run_prediction_->prediction(), run_prediction_->machine(),
                                   run_prediction_->drive_seen()));
  }

  int64_t TokensPerStep() const {
    return settings_.batch * settings_.accumulate * settings_.seq * settings_.engine.world();
  }
  // Several ranks stop after the same step: the one in which all of them heard of it.
  bool Stops() const { return settings_.engine.world() > 1 ? newest_.stops : stop_signals.load() != 0; }

  absl::StatusOr<std::vector<zero::Batch>> Batches(int64_t step) const {
    std::vector<zero::Batch> batches;
    for (int64_t m = 0; m < settings_.accumulate; ++m) {
      zero::Batch batch = ExampleBatch(settings_.batch, settings_.seq);
      const absl::Status filled =
          data_->Fill({.step = step,
                       .micro_batch = m,
                       .rank = settings_.engine.rank(),
                       .world = settings_.engine.world()},
                      settings_.batch, settings_.engine.seed, batch.inputs.data_ptr<int64_t>(),
                      batch.targets.data_ptr<int64_t>());
      if (!filled.ok()) return filled;
      batches.push_back(std::move(batch));
    }
    return batches;
  }

  absl::Status Loop() {
    CatchStopSignals();
    begin_ = Seconds();
    bool evaluated = false;
    while (engine_->step() < settings_.steps && !Stops()) {
      const int64_t step = engine_->step() + 1;
      absl::StatusOr<std::vector<zero::Batch>> batches = Batches(step);
      if (!batches.ok()) return batches.status();
      const bool evaluates = settings_.eval_every > 0 && step % settings_.eval_every == 0;
      const bool last = step == settings_.steps;
      absl::StatusOr<zero::StepResult> result =
          engine_->Step(std::move(*batches), last || evaluates ? zero::Next::kUnknown : zero::Next::kTrain);
      if (!result.ok()) return result.status();
      report_.Stepped(*engine_, *result, TokensPerStep());
      if (run_prediction_->Stepped()) Predicted();
      if (std::isnan(first_loss_)) first_loss_ = result->loss;
      newest_ = *result;
      if (result->skipped)
        progress_.Print(absl::StrCat("step ", step, ": gradients are not finite, update skipped"));
      Show(engine_->waiting_for());
      evaluated = evaluates;
      if (evaluates) {
        if (absl::Status status = Evaluate(); !status.ok()) return status;
      }
    }
    if (eval_data_ != nullptr && !evaluated && !Stops()) {
      if (absl::Status status = Evaluate(); !status.ok()) return status;
    }
    absl::Status status = engine_->Flush();
    if (status.ok() && Stops()) {
      progress_.Print(
          absl::StrCat("stopped by a signal after step ", engine_->step(), ", which is committed"));
    }
    return status;
  }

  absl::Status Evaluate() {
    std::vector<zero::Batch> batches;
    const int64_t windows = eval_data_->EvalWindows();
    for (int64_t first = 0; first < windows && static_cast<int64_t>(batches.size()) < kEvaluationBatches;) {
      const int64_t rows = std::min(settings_.batch, windows - first);
      if (rows < settings_.batch && !batches.empty()) break;  // one shape for all but a very short text
      zero::Batch batch = ExampleBatch(rows, settings_.seq);
      const absl::Status filled = eval_data_->FillEval(first, rows, batch.inputs.data_ptr<int64_t>(),
                                                       batch.targets.data_ptr<int64_t>());
      if (!filled.ok()) return filled;
      batches.push_back(std::move(batch));
      first += rows;
    }
    trains_ = false;
    absl::StatusOr<double> loss = engine_->Evaluate(batches);
    trains_ = true;
    if (!loss.ok()) return loss.status();
    evaluation_ = *loss;
    if (!words_.quiet) progress_.Print(absl::StrFormat("step %d  eval loss %.4f", engine_->step(), *loss));
    return absl::OkStatus();
  }

  absl::Status Committed(const zero::StepResult& result) {
    if (log_ == nullptr) return absl::OkStatus();
    return log_->Append(zero::StepJson(result, TokensPerStep()));
  }

  void Tick(tiering::Stall waiting) {
    if (engine_ != nullptr && engine_->step() < settings_.steps) Show(waiting);
  }

  void Show(tiering::Stall waiting) {
    const double now = Seconds();
    constexpr double kOften = 0.1;
    if (moved_.empty() || now - moved_.back().at > kOften) {
      const aio::EngineStats io = engine_->io_stats();
      moved_.push_back({now, io.DeviceReadBytes(), io.DeviceWriteBytes()});
    }
    // Over the last step at least: within one, forward and backward move different things.
    while (moved_.size() > 2 && now - moved_[1].at >= std::max(0.5, newest_.seconds)) moved_.pop_front();
    const Moved &before = moved_.front(), &last = moved_.back();
    const double passed = last.at - before.at;
    ProgressSample sample;
    sample.step = engine_->step();
    sample.steps = settings_.steps;
    constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
    sample.loss = sample.tokens_per_second = sample.seconds_left = kUnknown;
    sample.read_bytes_per_second = sample.write_bytes_per_second = kUnknown;
    if (newest_.step > 0) {
      const int64_t from = engine_->resumed_from().value_or(0);
      const double per_step = (now - begin_) / static_cast<double>(std::max<int64_t>(1, newest_.step - from));
      sample.loss = newest_.loss;
      sample.tokens_per_second = static_cast<double>(TokensPerStep()) / newest_.seconds;
      sample.seconds_left = per_step * static_cast<double>(settings_.steps - newest_.step);
    }
    if (passed > 0) {
      sample.read_bytes_per_second = static_cast<double>(last.read_bytes - before.read_bytes) / passed;
      sample.write_bytes_per_second = static_cast<double>(last.write_bytes - before.write_bytes) / passed;
    }
    sample.waits_for = std::string(tiering::StallName(waiting));
    progress_.Update(sample);
  }

  absl::Status WriteReport(const absl::Status& status) {
    const std::string text = report_.Finish(engine_.get(), status);
    if (!words_.report.has_value()) return absl::OkStatus();
    std::ofstream file(*words_.report, std::ios::trunc);
    file << text;
    file.close();
    if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("--report ", *words_.report, ": write"));
    return absl::OkStatus();
  }

  void Summarize() {
    const double seconds = Seconds() - begin_;
    const int64_t steps = engine_->step() - engine_->resumed_from().value_or(0);
    std::string text;
    if (steps > 0) {
      text = absl::StrFormat("%d steps in %s: loss %.4f -> %.4f, %s tokens/s\n", steps,
                             FormatDuration(seconds), first_loss_, newest_.loss,
                             FormatCount(static_cast<double>(steps * TokensPerStep()) / seconds));
    } else {
      text = absl::StrCat("nothing to do: step ", engine_->step(), " of ", settings_.steps, " is done\n");
    }
    if (!std::isnan(evaluation_)) absl::StrAppend(&text, absl::StrFormat("eval loss %.4f\n", evaluation_));
    if (engine_->plan().plan.on_nvme && steps > 1) {
      absl::StrAppend(
          &text,
          absl::StrFormat("drive: %.1f bytes per parameter and step, %.2f GB/s while saturated; a step "
                          "took %.2f of its floor\n",
                          report_.bytes_per_param_per_step(), report_.io_gbps(), report_.overlap_ratio()));
    }
    absl::StrAppend(&text, "memory: ", FormatBytes(engine_->peak_managed_bytes()), " managed at its peak");
    if (settings_.engine.host_memory_bytes > 0) {
      absl::StrAppend(&text, " of a budget of ", FormatBytes(settings_.engine.host_memory_bytes));
    }
    absl::StrAppend(&text, "\n");
    if (engine_->plan().plan.on_nvme) {
      absl::StrAppend(&text, "state: ", settings_.engine.state_dirs.front(), ", step ",
                      engine_->committed_step(), " committed; go on with --resume --steps N\n");
    }
    Say(text);
  }

  const TrainWords words_;
  TrainSettings settings_;
  std::ostream& out_;
  Progress progress_;
  zero::Report report_;
  Machine machine_;
  std::unique_ptr<tiering::RunPrediction> run_prediction_;
  bool trains_ = true;  // and does not evaluate just now
  tiering::Prediction prediction_;
  std::unique_ptr<Dataset> data_, eval_data_;
  std::unique_ptr<TrainLog> log_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<zero::Engine> engine_;
  zero::StepResult newest_;
  double first_loss_ = std::numeric_limits<double>::quiet_NaN();
  double evaluation_ = std::numeric_limits<double>::quiet_NaN();
  double begin_ = 0;
  struct Moved {
    double at = 0;
    uint64_t read_bytes = 0, write_bytes = 0;
  };
  std::deque<Moved> moved_;  // by the drive, as the live view saw it
};

absl::Status Train(const TrainWords& words, std::ostream& out) {
  std::shared_ptr<zero::Comm> comm;
  if (!words.check) {
    absl::StatusOr<std::shared_ptr<zero::Comm>> connected = ConnectRanks(words);
    if (!connected.ok()) return connected.status();
    comm = std::move(*connected);
  }
  TrainWords of_rank = words;
  if (comm != nullptr && comm->rank() > 0) {
    // Rank 0 speaks for all.
    of_rank.quiet = true;
    of_rank.report.reset();
    of_rank.log.reset();
    of_rank.trace.reset();
  }
  absl::StatusOr<TrainSettings> settings = ResolveTrainWords(words, /*needs_data=*/!words.check, comm);
  if (!settings.ok() && comm != nullptr) comm->Abort(settings.status());
  if (!settings.ok()) return settings.status();
  if (words.check) {
    for (const std::string& note : settings->notes) out << note << "\n";
    out << "the words and the config are right" << std::endl;
    return absl::OkStatus();
  }
  return Training(of_rank, *std::move(settings), out).Run();
}

}  // namespace

int RunTrain(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Trains a GPT whose state may be many times larger than memory", kName);
  TrainWords words;
  DeclareTrainWords(app, words, /*plans=*/false);
  if (const auto code = ParseWords(app, argc, argv, out, err)) return *code;
  const absl::Status status = Train(words, out);
  if (status.ok()) return kExitOk;
  const absl::StatusOr<zero::RankEnvironment> environment = zero::ReadRankEnvironment();
  const bool many = environment.ok() && environment->world > 1;
  return Fail(many ? absl::StrCat(kName, " (rank ", environment->rank, ")") : std::string(kName), status,
              err);
}

}  // namespace penstock::tools
