// What a run may use: --host-memory, and the keys of --config for tiles, transfers and updates.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RESOURCE_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_RESOURCE_FLAGS_H_

#include "absl/status/status.h"
#include "run/config.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// The budget of host memory, and the device with its own (device_flags.h).
absl::Status ResolveMemory(const TrainOptions& flags, const run::Config& config, TrainSettings* settings);

// Tiles, their updates and their transfers. After ResolveMemory and the optimizer.
void ResolveIo(const run::Config& config, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RESOURCE_FLAGS_H_
