// What of a run outlives what: penstock.sync, penstock.durability and penstock.versions of --config; a run
// that goes on has its own.
#ifndef PENSTOCK_TOOLS_PENSTOCK_DURABILITY_KEYS_H_
#define PENSTOCK_TOOLS_PENSTOCK_DURABILITY_KEYS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "run/config.h"
#include "run/record/recorded_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// As config and record have them; empty: the config does not say.
std::optional<std::string> SyncSaid(const run::Config& config);
std::optional<std::string> DurabilitySaid(const run::Config& config);

// Of a new run.
void TakeDurability(const run::Config& config, zero::EngineOptions* engine);
// What a checkpoint's run is restored with: as it was made, but for what the config says.
void RestoreDurability(const run::Config& config, const nlohmann::json& run, zero::EngineOptions* engine);
// Of a run, once it is known whether it goes on. kFailedPrecondition: its store was made for something else.
absl::Status ResolveDurability(const run::Config& config, const run::RecordedOptions& recorded,
                               TrainSettings* settings);
// What is of no effect without a drive.
void NoteDurability(const run::Config& config, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_DURABILITY_KEYS_H_
