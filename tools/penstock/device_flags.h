// --device and --device-memory.
#ifndef PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/config.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/device.h"

namespace penstock::tools {

struct ChosenDevice {
  std::shared_ptr<zero::Device> device;
  int64_t budget_bytes = 0;  // 0: what is free there, or the device is the processor
};

// Opens what --device names. `budget_bytes`: of its memory; 0: none was given. kInvalidArgument: no such
// device, not one that works here (the line says what is missing and the way out), or one that has less.
//
// For tests alone: where the environment has PENSTOCK_TEST_DEVICE, `--device cuda` is the test-only device
// that it describes (zero/compute/test_device.h), so that the programs can be tried without a GPU.
absl::StatusOr<ChosenDevice> ChooseDevice(const std::string& name, int64_t budget_bytes, int local_rank);

// The same for training: `config` has the flags' budget.
absl::Status ResolveDevice(const TrainOptions& flags, const run::Config& config, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_DEVICE_FLAGS_H_
