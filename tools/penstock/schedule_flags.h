// --lr, --warmup, --clip and the scheduler and loss scale of --config: of a new run, and where a run that
// goes on is changed.
#ifndef PENSTOCK_TOOLS_PENSTOCK_SCHEDULE_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_SCHEDULE_FLAGS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/status/status.h"
#include "run/config.h"
#include "run/record/recorded_options.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// Steps of warm-up where nobody says how many.
int64_t DefaultWarmup(int64_t steps);

// The config's scheduler goes by the optimizer's rate, not by one that it names itself.
bool GoesByOptimizersRate(const run::SchedulerConfig& scheduler);

// The flags leave the config's scheduler in force: they win, also over rates that the scheduler names itself.
bool KeepsScheduler(const TrainOptions& flags, const run::SchedulerConfig& scheduler);

// The config's scheduler, apart from what the run's other flags make of it: to tell whether the file changed.
std::optional<nlohmann::json> SchedulerSaid(const run::Config& config);
// What --config says of fp16's loss scale, key by key.
std::optional<nlohmann::json> LossScaleSaid(const run::Fp16Config& config);

// The optimizer, its loss scale and schedule, and, in the config, what else a run settles when it begins
// (run::Settle). `run`: the record of a run that goes on, or null.
absl::Status ResolveOptimizer(const TrainOptions& flags, const run::RecordedOptions& recorded,
                              const nlohmann::json& run, run::Changes* changes, run::ParsedConfig* parsed,
                              TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_SCHEDULE_FLAGS_H_
