#include "tools/penstock/schedule_flags.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "tools/base/flag_check.h"
#include "tools/penstock/optimizer_flags.h"

namespace penstock::tools {
namespace {

// What a schedule's last step of its own is; 0: it has none.
int64_t HorizonOf(const zero::LrSchedule& schedule) {
  if (const auto* cosine = std::get_if<zero::WarmupThenCosine>(&schedule.spec())) return cosine->horizon;
  if (const auto* decay = std::get_if<zero::WarmupDecayLr>(&schedule.spec())) return decay->total_num_steps;
  if (const auto* cosine = std::get_if<zero::WarmupCosineLr>(&schedule.spec()))
    return cosine->total_num_steps;
  return 0;
}

// The loss scale of a run that goes on, where its config says something else of it than before.
absl::Status ReviseLossScale(const run::RecordedOptions& recorded, const nlohmann::json& run,
                             run::Changes* changes, zero::EngineOptions* engine) {
  const nlohmann::json recorded_scale = run.value("loss_scale", nlohmann::json());
  if (engine->dtype != kernels::DType::kFp16 || !recorded_scale.is_object()) return absl::OkStatus();
  if (!recorded.ConfigChanges("loss_scale", nullptr) && !recorded.Removed("loss_scale"))
    return absl::OkStatus();
  const nlohmann::json asked = engine->optimizer.loss_scale.ToJson();
  for (const auto& [key, now] : asked.items()) {
    const nlohmann::json before = recorded_scale.value(key, nlohmann::json());
    if (before == now) continue;
    changes->Tell(absl::StrCat("loss scale: ", key), before.dump(), now.dump(),
                  recorded.SourceOf("loss_scale"));
    engine->optimizer.new_loss_scale = engine->optimizer.loss_scale;
  }
  return absl::OkStatus();
}

// Of a run for whose schedule nobody gives a scheduler.
absl::StatusOr<zero::LrSchedule> OwnSchedule(const TrainOptions& flags, const run::ParsedConfig& parsed,
                                             double lr, int64_t steps) {
  // DeepSpeed's rate is constant then.
  if (parsed.deepspeeds && !parsed.config.scheduler.has_value() && !flags.warmup.has_value()) {
    return zero::LrSchedule::Create(zero::Constant{.lr = lr});
  }
  const int64_t warmup = flags.warmup.value_or(DefaultWarmup(steps));
  RETURN_IF_ERROR(CheckFlag<int64_t>("--warmup", warmup, 0, int64_t{1} << 40));
  return zero::LrSchedule::Create(
      zero::WarmupThenCosine{.lr = lr, .min_lr = lr / 10, .warmup = warmup, .horizon = steps});
}

// `schedule` with the rate and the warm-up that are asked for now. `old_lr` was the run's own.
absl::StatusOr<zero::LrSchedule> WithNewRates(const zero::LrSchedule& schedule, const TrainOptions& flags,
                                              const run::RecordedOptions& recorded, bool lr_changes,
                                              double old_lr, double lr, run::Changes* changes) {
  zero::LrScheduleSpec spec = schedule.spec();
  const auto warm = [&](int64_t* steps) {
    if (!flags.warmup.has_value() || *flags.warmup == *steps) return;
    changes->Tell("warmup", absl::StrCat(*steps), absl::StrCat(*flags.warmup), "--warmup");
    *steps = *flags.warmup;
  };
  if (auto* constant = std::get_if<zero::Constant>(&spec)) {
    if (flags.warmup.has_value()) {
      return WrongFlag("--warmup: this run trains at a constant rate: give a scheduler in --config");
    }
    constant->lr = lr;
  } else if (auto* cosine = std::get_if<zero::WarmupThenCosine>(&spec)) {
    if (lr_changes) {
      cosine->min_lr = cosine->lr > 0 ? cosine->min_lr / cosine->lr * lr : lr / 10;
      cosine->lr = lr;
    }
    warm(&cosine->warmup);
  } else if (auto* of_ratio = std::get_if<zero::WarmupCosineLr>(&spec)) {
    if (lr_changes) of_ratio->lr = lr;
    warm(&of_ratio->warmup_num_steps);
  } else {
    auto* decay = std::get_if<zero::WarmupDecayLr>(&spec);
    auto* warmup = decay != nullptr ? &decay->warmup : std::get_if<zero::WarmupLr>(&spec);
    if (warmup == nullptr) {
      return WrongFlag(absl::StrCat(lr_changes ? recorded.SourceOf("lr") : "--warmup",
                                    ": the rates of this run are those of its scheduler ",
                                    std::string(schedule.name()), ": give another scheduler in --config"));
    }
    // One that names its rate itself goes by the flag alone.
    if (lr_changes && (recorded.by_flag("lr") || warmup->warmup_max_lr == old_lr)) warmup->warmup_max_lr = lr;
    warm(&warmup->warmup_num_steps);
  }
  return zero::LrSchedule::Create(spec);
}

// The schedule of a run that goes on, where its user changes it: its own with another peak rate or warm-up,
// its horizon as it was, or the one that the config has anew.
absl::Status ReviseSchedule(const TrainOptions& flags, const run::ParsedConfig& parsed,
                            const run::RecordedOptions& recorded, const nlohmann::json& run,
                            run::Changes* changes, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const run::Config& config = parsed.config;
  const double lr = zero::LearningRate(engine.optimizer.algorithm);
  const nlohmann::json recorded_schedule = run.value("schedule", nlohmann::json());
  absl::StatusOr<zero::LrSchedule> schedule = absl::NotFoundError("it has none");
  if (!recorded_schedule.is_null()) {
    schedule = zero::LrSchedule::FromJson(recorded_schedule);
    RETURN_IF_ERROR(schedule.status());
  }
  bool changed = false;
  absl::StatusOr<zero::LrSchedule> of_config = absl::NotFoundError("the config has none");
  if (config.scheduler.has_value()) {
    run::Config filled = config;
    filled.optimizer.lr = lr;  // the run's own, or what was just given
    if (parsed.deepspeeds) {
      run::FillDefaults(parsed.autos, settings->steps, std::max<int64_t>(1, DefaultWarmup(settings->steps)),
                        &filled);
    }
    of_config = run::MakeSchedule(*filled.scheduler, lr, settings->steps);
    RETURN_IF_ERROR(of_config.status());
    const bool recorded_too = run.contains("config") && run["config"].contains("scheduler");
    const absl::StatusOr<zero::LrSchedule> as_made =
        run::MakeSchedule(*config.scheduler, run.value("lr", lr), run.value("steps", settings->steps));
    const bool as_recorded = !recorded_too && as_made.ok() && as_made->ToJson() == recorded_schedule;
    if (recorded.ConfigChanges("scheduler", nullptr) && !as_recorded) {
      changes->Tell("scheduler", recorded_schedule.dump(), of_config->ToJson().dump(),
                    "scheduler in --config");
      schedule = of_config;
      changed = true;
    }
  }
  if (recorded.Removed("scheduler")) {
    ASSIGN_OR_RETURN(schedule, OwnSchedule(flags, parsed, lr, settings->steps));
    changes->Tell("scheduler", recorded_schedule.dump(), schedule->ToJson().dump(),
                  recorded.SourceOf("scheduler"));
    changed = true;
  }
  // A flag also wins over a scheduler that the config has anew.
  const bool lr_changes = changed ? flags.lr.has_value() : changes->run.contains("lr");
  if (schedule.ok() && (lr_changes || flags.warmup.has_value())) {
    ASSIGN_OR_RETURN(schedule,
                     WithNewRates(*schedule, flags, recorded, lr_changes, run.value("lr", lr), lr, changes));
    changed = changed || schedule->ToJson() != recorded_schedule;
  } else if (!schedule.ok() && flags.warmup.has_value()) {
    return WrongFlag("--warmup: this run trains at a constant rate: give a scheduler in --config");
  }
  if (changed) engine.optimizer.new_schedule = *schedule;
  if (!schedule.ok()) return absl::OkStatus();
  const int64_t horizon = HorizonOf(*schedule);
  if (horizon > 0 && settings->steps > horizon) {
    settings->notes.push_back(absl::StrFormat(
        "the schedule of this run was made for %d steps: those after it train at a rate of %g (--lr, or "
        "another scheduler in --config, changes that)",
        horizon, schedule->At(settings->steps).lr));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t DefaultWarmup(int64_t steps) { return std::min<int64_t>(100, steps / 10); }

bool GoesByOptimizersRate(const run::SchedulerConfig& scheduler) {
  switch (scheduler.type) {
    case run::SchedulerType::kWarmupCosineLr:
      return true;
    case run::SchedulerType::kWarmupLr:
    case run::SchedulerType::kWarmupDecayLr:
      return !scheduler.warmup_max_lr.has_value();
    default:
      return false;
  }
}

bool KeepsScheduler(const TrainOptions& flags, const run::SchedulerConfig& scheduler) {
  return (!flags.warmup.has_value() || scheduler.warmup_num_steps == flags.warmup) &&
         (!flags.lr.has_value() || GoesByOptimizersRate(scheduler) || scheduler.warmup_max_lr == flags.lr);
}

std::optional<nlohmann::json> SchedulerSaid(const run::Config& config) {
  if (!config.scheduler.has_value()) return std::nullopt;
  constexpr int64_t kAnySteps = 1'000'000;
  const absl::StatusOr<zero::LrSchedule> schedule = run::MakeSchedule(*config.scheduler, /*lr=*/1, kAnySteps);
  return schedule.ok() ? schedule->ToJson() : nlohmann::json();
}

std::optional<nlohmann::json> LossScaleSaid(const run::Fp16Config& config) {
  nlohmann::json said = nlohmann::json::object();
  const auto add = [&said](const char* key, const auto& value) {
    if (value.has_value()) said[key] = *value;
  };
  add("loss_scale", config.loss_scale);
  add("initial_scale_power", config.initial_scale_power);
  add("loss_scale_window", config.loss_scale_window);
  add("hysteresis", config.hysteresis);
  add("consecutive_hysteresis", config.consecutive_hysteresis);
  add("min_loss_scale", config.min_loss_scale);
  if (said.empty()) return std::nullopt;
  return said;
}

absl::Status ResolveOptimizer(const TrainOptions& flags, const run::RecordedOptions& recorded,
                              const nlohmann::json& run, run::Changes* changes, run::ParsedConfig* parsed,
                              TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  run::Config& config = parsed->config;
  ASSIGN_OR_RETURN(engine.optimizer.algorithm,
                   ResolveOptimizerOptions(config.optimizer, recorded, &settings->to_record));
  RETURN_IF_ERROR(run::Settle(
      [&](const char* name, const nlohmann::json& given,
          const nlohmann::json& otherwise) -> absl::StatusOr<nlohmann::json> {
        ASSIGN_OR_RETURN(settings->to_record[name], recorded.Of(name, given, otherwise));
        return settings->to_record[name];
      },
      &config));
  ASSIGN_OR_RETURN(zero::LossScaler scaler, run::MakeLossScaler(config.fp16));
  engine.optimizer.loss_scale = scaler.options();
  const double lr = zero::LearningRate(engine.optimizer.algorithm);
  if (flags.warmup.has_value()) {
    RETURN_IF_ERROR(CheckFlag<int64_t>("--warmup", *flags.warmup, 0, int64_t{1} << 40));
  }
  if (settings->resumes) {
    RETURN_IF_ERROR(ReviseLossScale(recorded, run, changes, &engine));
    return ReviseSchedule(flags, *parsed, recorded, run, changes, settings);
  }

  if (config.scheduler.has_value() && KeepsScheduler(flags, *config.scheduler)) {
    ASSIGN_OR_RETURN(zero::LrSchedule schedule, run::MakeSchedule(*config.scheduler, lr, settings->steps));
    engine.optimizer.schedule = schedule;
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(engine.optimizer.schedule, OwnSchedule(flags, *parsed, lr, settings->steps));
  if (config.scheduler.has_value()) {
    settings->notes.push_back(absl::StrFormat(
        "%s takes the place of the config's scheduler: %d steps of warm-up, then a cosine to a "
        "tenth of the rate",
        flags.lr.has_value() ? "--lr" : "--warmup", flags.warmup.value_or(DefaultWarmup(settings->steps))));
  }
  return absl::OkStatus();
}

}  // namespace penstock::tools
