#include "tools/penstock/device_flags.h"

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tiering/plan/byte_size.h"
#include "tools/penstock/flag_check.h"
#include "zero/compute/libtorch/cuda_device.h"
#include "zero/compute/test_device.h"

namespace penstock::tools {
namespace {

absl::StatusOr<std::shared_ptr<zero::Device>> Open(int local_rank) {
  const char* test = std::getenv("PENSTOCK_TEST_DEVICE");
  return test != nullptr ? zero::TestDevice::Parse(test) : zero::OpenCudaDevice(local_rank);
}

}  // namespace

absl::Status ResolveDevice(const TrainOptions& flags, const zero::Config& config, TrainSettings* settings) {
  const std::string name = flags.device.value_or("cpu");
  if (name != "cpu" && name != "cuda")
    return WrongFlag(absl::StrCat("--device ", name, ": must be cpu or cuda"));
  int64_t budget = config.penstock.device_memory_budget_bytes.value_or(0);
  if (flags.device_memory.has_value()) {
    const absl::StatusOr<int64_t> bytes = tiering::ParseSize(*flags.device_memory);
    if (!bytes.ok() || *bytes <= 0) {
      return WrongFlag(absl::StrCat("--device-memory ", *flags.device_memory, ": ",
                                    bytes.ok() ? "must be above 0" : std::string(bytes.status().message())));
    }
    budget = *bytes;
  }
  if (name == "cpu") {
    if (flags.device_memory.has_value()) {
      settings->notes.emplace_back(
          "--device-memory is of no effect with --device cpu: host memory is all there is");
    }
    if (config.penstock.device_memory_budget_bytes.has_value()) {
      settings->notes.emplace_back(
          "penstock.device_memory: accepted and ignored: with --device cpu host memory is all there is");
    }
    if (config.aio.use_gds.value_or(false)) {
      settings->notes.emplace_back(
          "aio.use_gds: accepted and ignored: with --device cpu weights end in host memory");
    }
    if (config.zero.offload_optimizer.ratio.has_value()) {
      settings->notes.emplace_back(
          "zero_optimization.offload_optimizer.ratio: accepted and ignored: with --device cpu the "
          "processor updates everything");
    }
    return absl::OkStatus();
  }
  const auto& comm = settings->engine.comm;
  absl::StatusOr<std::shared_ptr<zero::Device>> device =
      Open(comm != nullptr ? comm->environment().local_rank : 0);
  if (!device.ok()) return WrongFlag(absl::StrCat("--device cuda: ", std::string(device.status().message())));
  if (budget > (*device)->capacity_bytes()) {
    return WrongFlag(absl::StrCat("--device-memory ", budget, " bytes: the device has ",
                                  (*device)->capacity_bytes(), " (", (*device)->Describe(), ")"));
  }
  settings->engine.device = *std::move(device);
  settings->engine.memory.device_memory_budget_bytes = budget;
  return absl::OkStatus();
}

}  // namespace penstock::tools
