#include "tools/penstock/config_flags.h"

#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
#include "tools/penstock/durability_keys.h"
#include "tools/penstock/optimizer_flags.h"
#include "tools/penstock/schedule_flags.h"

namespace penstock::tools {

void NoteConfig(const run::Config& config, const RecordedOptions& recorded) {
  recorded.BeginConfig();
  recorded.NoteConfig("train_batch", config.train_batch_size);
  recorded.NoteConfig("batch", config.micro_batch_per_rank);
  recorded.NoteConfig("accumulate", config.gradient_accumulation_steps);
  recorded.NoteConfig("clip", config.gradient_clipping);
  recorded.NoteConfig("optimizer_states", config.penstock.optimizer_states);
  recorded.NoteConfig("sync", SyncSaid(config));
  recorded.NoteConfig("durability", DurabilitySaid(config));
  recorded.NoteConfig("scheduler", SchedulerSaid(config));
  recorded.NoteConfig("loss_scale", LossScaleSaid(config.fp16));
  if (config.bf16.has_value())
    recorded.NoteConfig("dtype", std::optional<std::string>(*config.bf16 ? "bf16" : "fp32"));
  if (config.fp16.enabled.value_or(false)) recorded.NoteConfig("dtype", std::optional<std::string>("fp16"));
  NoteOptimizer(config.optimizer, recorded);
}

void FillRemoved(const run::ParsedConfig& parsed, const RecordedOptions& recorded, int64_t steps,
                 run::Config* config) {
  if (!parsed.deepspeeds) return;  // the program's own defaults
  run::Config filled = *config;
  run::FillDefaults(parsed.autos, steps, std::max<int64_t>(1, DefaultWarmup(steps)), &filled);
  const auto take = [&recorded](const char* name, auto& to, const auto& from) {
    if (recorded.Removed(name)) to = from;
  };
  take("clip", config->gradient_clipping, filled.gradient_clipping);
  take("lr", config->optimizer.lr, filled.optimizer.lr);
  take("weight_decay", config->optimizer.weight_decay, filled.optimizer.weight_decay);
  take("beta1", config->optimizer.beta1, filled.optimizer.beta1);
  take("beta2", config->optimizer.beta2, filled.optimizer.beta2);
  take("eps", config->optimizer.eps, filled.optimizer.eps);
  take("momentum", config->optimizer.momentum, filled.optimizer.momentum);
}

void FillFromFlagsAndDeepSpeed(const TrainOptions& flags, int64_t steps, run::ParsedConfig* parsed,
                               std::vector<std::string>* filled) {
  run::Config& config = parsed->config;
  run::OptimizerConfig& optimizer = config.optimizer;
  const auto fill = [](auto& open, const auto& flag) {
    if (!open.has_value()) open = flag;
  };
  fill(optimizer.lr, flags.lr);
  fill(optimizer.weight_decay, flags.weight_decay);
  fill(config.gradient_clipping, flags.clip);
  fill(config.micro_batch_per_rank, flags.batch);
  fill(config.gradient_accumulation_steps, flags.accumulate);
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
