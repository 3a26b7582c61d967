// --batch and --accumulate beside the three batch sizes of --config: flags over config over defaults; on
// resume, the run's own.
#ifndef PENSTOCK_TOOLS_PENSTOCK_BATCH_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_BATCH_FLAGS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "run/config.h"
#include "run/record/recorded_options.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// What elasticity chooses goes into `config`, in the place of its batch sizes, and into `notes`. `starts`:
// the run trains; else the note for an impossible number of ranks says what a possible one would have.
// kInvalidArgument: this number of ranks cannot share the batch.
absl::Status ResolveElasticity(const TrainOptions& flags, int64_t world, bool starts, run::Config* config,
                               std::vector<std::string>* notes);

// `run`: the record of a run that goes on, or null.
absl::Status ResolveBatchSizes(const TrainOptions& flags, const run::Config& config,
                               const run::RecordedOptions& recorded, const nlohmann::json& run,
                               run::Changes* changes, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_BATCH_FLAGS_H_
