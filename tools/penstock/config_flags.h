// --config beside the flags: what the file says, and what takes the places that it leaves open.
#ifndef PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "run/config.h"
#include "run/record/recorded_options.h"
#include "tools/penstock/train_options.h"

namespace penstock::tools {

// All that the config says of a run, before flags and defaults take its open places.
void NoteConfig(const run::Config& config, const run::RecordedOptions& recorded);

// Puts the flags that are settings of a config into it. Offload is that of both its blocks. A line goes into
// *notes where another optimizer takes the place of the config's.
absl::Status TakeFlags(const TrainOptions& flags, run::Config* config, std::vector<std::string>* notes);

// Keys that the config has lost since the run was made are as in a file that never had them.
void FillRemoved(const run::ParsedConfig& parsed, const run::RecordedOptions& recorded, int64_t steps,
                 run::Config* config);

// DeepSpeed's values go into the places that file and flags leave open: a line for each into *filled.
void FillFromDeepSpeed(const TrainOptions& flags, int64_t steps, run::ParsedConfig* parsed,
                       std::vector<std::string>* filled);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_CONFIG_FLAGS_H_
