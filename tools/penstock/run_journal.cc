#include "tools/penstock/run_journal.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

// What the log says of a step: what the report does.
nlohmann::json LineOf(nlohmann::json entry) {
  entry.erase("samples");
  entry.erase("written_bytes");
  return entry;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunJournal>> RunJournal::Open(const TrainOptions& flags, const RunId& run,
                                                             TrainSettings* settings) {
  auto journal = absl::WrapUnique(new RunJournal(flags, *settings));
  zero::EngineOptions& options = settings->engine;
  if (options.rank() == 0) {
    const run::MonitorOwner owner{.run_id = run.id, .resumes = flags.resume, .replaces = settings->replaces};
    const bool scales_loss = options.dtype == kernels::DType::kFp16;
    ASSIGN_OR_RETURN(journal->monitors_, run::Monitors::Open(settings->config, owner, scales_loss));
  }
  if (!flags.log.has_value()) return journal;
  run::LogOwner owner{.run_id = run.id, .resumes = flags.resume, .replaces = settings->replaces};
  // The record of a run from before there were ids says up to which step it had none.
  if (settings->resumes) {
    owner.nameless_until = run.recorded ? settings->recorded.value("run_id_since", int64_t{0})
                                        : std::numeric_limits<int64_t>::max();
  }
  ASSIGN_OR_RETURN(journal->log_, run::TrainLog::Open(*flags.log, owner));
  if (settings->resumes && !run.recorded)
    options.resume.run_changes["run_id_since"] = journal->log_->last_step();
  return journal;
}

absl::Status RunJournal::Begin(const zero::Engine& engine) {
  engine_ = &engine;
  const nlohmann::json& last = engine.last_description();
  begins_at_ = engine.step();
  begins_with_written_bytes_ =
      std::max(begins_with_written_bytes_, zero::JsonField<int64_t>(last, "written_bytes").value_or(0));
  // Records from before samples were counted are of runs whose steps are taken to have had the same size.
  begins_with_samples_ =
      zero::JsonField<int64_t>(last, "samples").value_or(begins_at_ * settings_.SamplesPerStep());
  if (log_ != nullptr) {
    RETURN_IF_ERROR(log_->Begin());
    if (resumes_) {
      RETURN_IF_ERROR(CheckAhead(engine.plan(), engine.step()));
      RETURN_IF_ERROR(log_->CutAfter(engine.step()));
    }
  }
  RETURN_IF_ERROR(monitors_.Begin(SamplesAt(engine.step())));
  if (!resumes_) return absl::OkStatus();
  if (last.is_object() && last.contains("unlogged") && last["unlogged"].is_array()) {
    for (const nlohmann::json& step : last["unlogged"]) RETURN_IF_ERROR(AddMissing(step));
  }
  return AddMissing(last);
}

// A step that a commit record knows, wherever it is not written yet.
absl::Status RunJournal::AddMissing(nlohmann::json step) {
  if (!step.is_object()) return absl::OkStatus();
  if (log_ != nullptr) {
    RETURN_IF_ERROR(log_->AddMissing(LineOf(step)));
  }
  if (!step.contains("samples"))
    step["samples"] = SamplesAt(zero::JsonField<int64_t>(step, "step").value_or(0));
  return monitors_.Append(step);
}

absl::Status RunJournal::CheckAhead(const zero::EnginePlan& plan, int64_t step) const {
  const bool durable = plan.plan.on_nvme && plan.plan.commits_every_step && !settings_.goes_back;
  if (log_ == nullptr || !durable || log_->last_step() <= step) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "--log ", log_path_, " has step ", log_->last_step(), ", and ",
      settings_.engine.storage.state_dirs.front(), step == 0 ? " none" : absl::StrCat(" only step ", step),
      ": commits were lost; go on from a checkpoint (--checkpoint-dir, with a --state-dir that is "
      "empty), or move the log away to go on from step ",
      step, " all the same"));
}

int64_t RunJournal::WrittenBytes() const {
  const uint64_t by_engine = engine_ != nullptr ? engine_->io_stats().DeviceWriteBytes() : 0;
  return begins_with_written_bytes_ + probe_written_bytes_ + static_cast<int64_t>(by_engine);
}

// What monitors and commit record say of a step.
nlohmann::json RunJournal::EntryOf(const zero::StepResult& result) const {
  nlohmann::json entry = zero::StepJson(result, settings_.TokensPerStep());
  entry["samples"] = SamplesAt(result.step);
  entry["written_bytes"] = WrittenBytes();
  return entry;
}

nlohmann::json RunJournal::DescriptionOf(const zero::StepResult& result) const {
  nlohmann::json description = EntryOf(result);
  if (!unlogged_.empty()) description["unlogged"] = unlogged_;
  return description;
}

absl::Status RunJournal::Committed(const zero::StepResult& result) {
  if (!any()) return absl::OkStatus();
  const nlohmann::json step = EntryOf(result);
  absl::Status status = Append(step);
  if (!trouble_.ok()) unlogged_.push_back(step);
  return status;
}

absl::Status RunJournal::Evaluated(const zero::Evaluation& evaluation) {
  nlohmann::json entry = zero::EvaluationJson(evaluation);
  entry["samples"] = SamplesAt(evaluation.step);
  return Append(entry);
}

absl::Status RunJournal::Append(const nlohmann::json& entry) {
  if (!trouble_.ok()) return absl::OkStatus();
  absl::Status status = Write(entry);
  if (settings_.on_nvme()) return status;
  trouble_ = std::move(status);
  return absl::OkStatus();
}

absl::Status RunJournal::Write(const nlohmann::json& entry) {
  // One line for an evaluation, also where the end of a finished run is looked at again.
  const bool again = entry.contains("windows") && log_ != nullptr &&
                     log_->last_evaluation() >= zero::JsonField<int64_t>(entry, "step").value_or(0);
  if (log_ != nullptr && !again) {
    RETURN_IF_ERROR(log_->Append(LineOf(entry)));
  }
  return monitors_.Append(entry);
}

}  // namespace penstock::tools
