#include "tools/penstock/run_id.h"

#include <sys/random.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "run/watch/train_log.h"

namespace penstock::tools {
namespace {

// What a run is, without what tells two of the same flags apart: its id begins with that.
std::string WhatItIs(const zero::EngineOptions& options) {
  nlohmann::json what = options.resume.run;
  what["schedule"] =
      options.optimizer.schedule.has_value() ? options.optimizer.schedule->ToJson() : nlohmann::json();
  const std::string text = what.dump();
  return absl::StrFormat("%08x", static_cast<uint32_t>(kernels::Checksum(text.data(), text.size())));
}

std::string RandomDigits() {
  uint64_t random = 0;
  while (getrandom(&random, sizeof(random), 0) != static_cast<ssize_t>(sizeof(random))) {
  }
  return absl::StrFormat("%016x", random);
}

// A run from before there were ids takes that of the lines it has had since. One that left nothing to go on
// from starts over, and its log with it, if it is the same run to the last word; where every
// step is durable nothing can have been lost, and RunJournal says what is wrong.
absl::StatusOr<std::string> LoggedOrNew(const TrainOptions& flags, const TrainSettings& settings) {
  const zero::EngineOptions& options = settings.engine;
  const std::string what = WhatItIs(options);
  std::string logged;
  if (flags.resume && flags.log.has_value()) {
    ASSIGN_OR_RETURN(logged, run::TrainLog::RunIdIn(*flags.log));
  }
  const bool durable = options.storage.offload == zero::OffloadDevice::kNvme &&
                       options.storage.durability == zero::Durability::kStep;
  const bool same = absl::StartsWith(logged, what + "-");
  if (!logged.empty() && (settings.resumes || durable || same)) return logged;
  return absl::StrCat(what, "-", RandomDigits());
}

}  // namespace

absl::StatusOr<RunId> IdentifyRun(const TrainOptions& flags, TrainSettings* settings) {
  zero::EngineOptions& options = settings->engine;
  const nlohmann::json& recorded = settings->recorded;
  RunId run;
  run.recorded = recorded.is_object() && recorded.contains("run_id") && recorded["run_id"].is_string();
  if (run.recorded) {
    run.id = recorded["run_id"].get<std::string>();
  } else {
    ASSIGN_OR_RETURN(run.id, LoggedOrNew(flags, *settings));
    if (options.comm != nullptr) {
      ASSIGN_OR_RETURN(std::vector<std::string> all,
                       options.comm->AllTexts(zero::Channel::kSetup, {"the run's id"}, run.id));
      run.id = all.front();
    }
    if (settings->resumes) options.resume.run_changes["run_id"] = run.id;
  }
  options.resume.run["run_id"] = run.id;
  return run;
}

}  // namespace penstock::tools
