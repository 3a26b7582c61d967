// What a training writes down of itself, step by step: its log and its monitors, each complete across kills,
// and what the commit record keeps for that.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RUN_JOURNAL_H_
#define PENSTOCK_TOOLS_PENSTOCK_RUN_JOURNAL_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/watch/monitors.h"
#include "run/watch/train_log.h"
#include "tools/penstock/run_id.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/engine/engine.h"
#include "zero/engine/report.h"

namespace penstock::tools {

class RunJournal {
 public:
  // Opens what the flags and the config name, and changes nothing of it yet. `settings` outlives it.
  static absl::StatusOr<std::unique_ptr<RunJournal>> Open(const TrainOptions& flags, const RunId& run,
                                                          TrainSettings* settings);

  // Before the first step, when the run is this process's: log and monitors end where it goes on. Lines
  // behind that go, and steps that were committed without a line get one. `engine` outlives the journal.
  absl::Status Begin(const zero::Engine& engine);
  // Where every step is durable, a log that is ahead of the state says that commits were lost: to a file that
  // was cut off, an old copy of the directory, a power cut. kDataLoss says so.
  absl::Status CheckAhead(const zero::EnginePlan& plan, int64_t step) const;

  // What the commit record says of a step, with the steps that had no line until then.
  nlohmann::json DescriptionOf(const zero::StepResult& result) const;
  // A step was committed, or an evaluation made. A step on a drive outlives a log that cannot be written, and
  // the error is returned. One in memory alone does not: it is to be kept first, its line with it, and the
  // error waits in trouble().
  absl::Status Committed(const zero::StepResult& result);
  absl::Status Evaluated(const zero::Evaluation& evaluation);

  bool any() const { return log_ != nullptr || monitors_.any(); }
  const absl::Status& trouble() const { return trouble_; }
  // Null: none is kept here.
  const run::TrainLog* log() const { return log_.get(); }
  // To drives, by this process and those before it. `before`: what those wrote, where it is more than the
  // last commit says. `probe`: what measuring the machine took.
  void WroteBefore(int64_t bytes) { begins_with_written_bytes_ = bytes; }
  void Probed(int64_t written_bytes) { probe_written_bytes_ = written_bytes; }
  bool begun() const { return engine_ != nullptr; }  // else what the last commit says is not known yet
  int64_t WrittenBytes() const;

 private:
  RunJournal(const TrainOptions& flags, const TrainSettings& settings)
      : log_path_(flags.log.value_or("")), resumes_(flags.resume), settings_(settings) {}
  nlohmann::json EntryOf(const zero::StepResult& result) const;
  absl::Status AddMissing(nlohmann::json step);
  absl::Status Append(const nlohmann::json& entry);
  absl::Status Write(const nlohmann::json& entry);
  // That were trained on up to a step of this process, and those before it.
  int64_t SamplesAt(int64_t step) const {
    return begins_with_samples_ + (step - begins_at_) * settings_.SamplesPerStep();
  }

  const std::string log_path_;
  const bool resumes_;
  const TrainSettings& settings_;
  const zero::Engine* engine_ = nullptr;
  std::unique_ptr<run::TrainLog> log_;
  run::Monitors monitors_;
  absl::Status trouble_;
  std::vector<nlohmann::json> unlogged_;             // steps since there is trouble
  int64_t begins_at_ = 0, begins_with_samples_ = 0;  // the step, and its samples
  int64_t begins_with_written_bytes_ = 0, probe_written_bytes_ = 0;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RUN_JOURNAL_H_
