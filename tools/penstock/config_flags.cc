#include "tools/penstock/config_flags.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/given_values.h"
#include "run/optimizer_options.h"
#include "run/settings.h"
#include "tools/penstock/schedule_flags.h"

namespace penstock::tools {

void NoteConfig(const run::Config& config, const run::RecordedOptions& recorded) {
  recorded.BeginConfig();
  for (const auto& [name, value] : run::SaidByRecord(config)) recorded.NoteConfig(name, std::optional(value));
  recorded.NoteConfig("scheduler", SchedulerSaid(config));
  recorded.NoteConfig("loss_scale", LossScaleSaid(config.fp16));
  if (config.bf16.has_value())
    recorded.NoteConfig("dtype", std::optional<std::string>(*config.bf16 ? "bf16" : "fp32"));
  if (config.fp16.enabled.value_or(false)) recorded.NoteConfig("dtype", std::optional<std::string>("fp16"));
  if (const auto meant = run::MeantOptimizer(config.optimizer); meant.has_value())
    recorded.NoteConfig("optimizer", std::optional<std::string>(run::Name(*meant)));
}

absl::Status TakeFlags(const TrainOptions& flags, run::Config* config, std::vector<std::string>* notes) {
  run::GivenValues given = GivenFlags(flags);
  given.erase("--state-dir");  // whose weights are apart
  const std::optional<run::OptimizerType> of_file = config->optimizer.type;
  RETURN_IF_ERROR(run::TakeGiven(given, config));
  if (!flags.optimizer.has_value()) return absl::OkStatus();
  if (of_file.has_value() && of_file != config->optimizer.type) {
    notes->push_back(absl::StrCat(
        "--optimizer ", *flags.optimizer, " in the place of the config's ", std::string(run::Name(*of_file)),
        ": of its parameters those hold that both have, and the others are dropped"));
  }
  // DeepSpeed's "Adam" is AdamW unless its file says otherwise; who names a flag means what it says.
  if (config->optimizer.type == run::OptimizerType::kAdam && of_file != run::OptimizerType::kAdam)
    config->optimizer.adam_w_mode = false;
  return absl::OkStatus();
}

void FillRemoved(const run::ParsedConfig& parsed, const run::RecordedOptions& recorded, int64_t steps,
                 run::Config* config) {
  if (!parsed.deepspeeds) return;  // the program's own defaults
  run::Config filled = *config;
  run::FillDefaults(parsed.autos, steps, std::max<int64_t>(1, DefaultWarmup(steps)), &filled);
  // Batch sizes follow from each other and from the number of ranks (ResolveBatchSizes).
  const std::set<std::string> others = {"train_batch", "batch", "accumulate"};
  run::CopyRecorded(
      filled,
      [&](const std::string& name) { return !others.contains(name) && recorded.Removed(name.c_str()); },
      config);
}

void FillFromDeepSpeed(const TrainOptions& flags, int64_t steps, run::ParsedConfig* parsed,
                       std::vector<std::string>* filled) {
  run::Config& config = parsed->config;
  const bool typed = flags.dtype.value_or("auto") != "auto";
  if (typed && !config.bf16.has_value()) config.bf16 = *flags.dtype == "bf16";
  const bool warms_up = config.scheduler.has_value() &&
                        config.scheduler->type != run::SchedulerType::kLrRangeTest &&
                        config.scheduler->type != run::SchedulerType::kOneCycle;
  if (warms_up && flags.warmup.has_value() && !config.scheduler->warmup_num_steps.has_value()) {
    config.scheduler->warmup_num_steps = flags.warmup;
  }
  if (warms_up && flags.lr.has_value() && GoesByOptimizersRate(*config.scheduler)) {
    config.scheduler->warmup_max_lr = flags.lr;
  }
  const std::vector<std::string> open =
      run::FillDefaults(parsed->autos, steps, std::max<int64_t>(1, DefaultWarmup(steps)), &config);
  // Of a schedule that flags replace nothing is said.
  const bool replaced =
      config.scheduler.has_value() ? !KeepsScheduler(flags, *config.scheduler) : flags.warmup.has_value();
  for (const std::string& line : open) {
    if (!(replaced && absl::StartsWith(line, "scheduler"))) filled->push_back(line);
  }
}

}  // namespace penstock::tools
