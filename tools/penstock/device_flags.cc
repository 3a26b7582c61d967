#include "tools/penstock/device_flags.h"

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/unused_keys.h"
#include "tools/base/flag_check.h"
#include "zero/compute/libtorch/cuda_device.h"
#include "zero/compute/test_device.h"

namespace penstock::tools {
namespace {

absl::StatusOr<std::shared_ptr<zero::Device>> Open(int local_rank) {
  const char* test = std::getenv("PENSTOCK_TEST_DEVICE");
  return test != nullptr ? zero::TestDevice::Parse(test) : zero::OpenCudaDevice(local_rank);
}

}  // namespace

absl::StatusOr<ChosenDevice> ChooseDevice(const std::string& name, int64_t budget_bytes, int local_rank) {
  if (name != "cpu" && name != "cuda")
    return WrongFlag(absl::StrCat("--device ", name, ": must be cpu or cuda"));
  if (name == "cpu") return ChosenDevice{zero::HostDevice()};
  absl::StatusOr<std::shared_ptr<zero::Device>> device = Open(local_rank);
  if (!device.ok()) return WrongFlag(absl::StrCat("--device cuda: ", std::string(device.status().message())));
  if (budget_bytes > (*device)->capacity_bytes()) {
    return WrongFlag(absl::StrCat("--device-memory ", budget_bytes, " bytes: the device has ",
                                  (*device)->capacity_bytes(), " (", (*device)->Describe(), ")"));
  }
  return ChosenDevice{*std::move(device), budget_bytes};
}

absl::Status ResolveDevice(const TrainOptions& flags, const run::Config& config, TrainSettings* settings) {
  const auto& comm = settings->engine.comm;
  ASSIGN_OR_RETURN(
      const ChosenDevice chosen,
      ChooseDevice(flags.device.value_or("cpu"), config.penstock.device_memory_budget_bytes.value_or(0),
                   comm != nullptr ? comm->environment().local_rank : 0));
  settings->engine.device = chosen.device;
  settings->engine.memory.device_memory_budget_bytes = chosen.budget_bytes;
  if (chosen.device->has_own_memory()) return absl::OkStatus();
  for (std::string& note : run::UnusedDeviceKeys(config, "with --device cpu", GivenFlags(flags)))
    settings->notes.push_back(std::move(note));
  return absl::OkStatus();
}

}  // namespace penstock::tools
