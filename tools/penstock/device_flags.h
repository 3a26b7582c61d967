// --device and --device-memory.
#ifndef PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_

#include "absl/status/status.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/config/config.h"

namespace penstock::tools {

// Opens what --device names and sets its budget. kInvalidArgument: no such device, not one that works here
// (the line says what is missing and the way out), or not a size.
//
// For tests alone: where the environment has PENSTOCK_TEST_DEVICE, `--device cuda` is the test-only device
// that it describes (zero/compute/test_device.h), so that the programs can be tried without a GPU.
absl::Status ResolveDevice(const TrainOptions& flags, const zero::Config& config, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_
