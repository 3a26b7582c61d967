// --config beside the flags: what the file says, and what takes the places that it leaves open.
#ifndef PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "run/config.h"
#include "tools/penstock/recorded_options.h"
#include "tools/penstock/train_options.h"

namespace penstock::tools {

// All that the config says of a run, before flags and defaults take its open places.
void NoteConfig(const run::Config& config, const RecordedOptions& recorded);

// Keys that the config has lost since the run was made are as in a file that never had them.
void FillRemoved(const run::ParsedConfig& parsed, const RecordedOptions& recorded, int64_t steps,
                 run::Config* config);

// Flags go into the places that the file leaves open, and DeepSpeed's values into the rest of those: a line
// for each of the latter into *filled.
void FillFromFlagsAndDeepSpeed(const TrainOptions& flags, int64_t steps, run::ParsedConfig* parsed,
                               std::vector<std::string>* filled);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_
