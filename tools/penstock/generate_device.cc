#include "tools/penstock/generate_device.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "generate/device_pass.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/penstock/device_flags.h"
#include "zero/compute/libtorch/threads.h"

namespace penstock::tools {

absl::Status OpenDeviceForGeneration(const GenerateMemoryFlags& flags, generate::GeneratorOptions* options) {
  int64_t given = 0;
  if (flags.device_memory.has_value()) {
    const absl::StatusOr<int64_t> bytes = ParseSize(*flags.device_memory);
    if (!bytes.ok() || *bytes <= 0) {
      return WrongFlag(absl::StrCat(
          "--device-memory ", *flags.device_memory, ": ",
          bytes.ok() ? "must be a size above 0, as 512MiB or 4GiB" : std::string(bytes.status().message())));
    }
    given = *bytes;
  }
  ASSIGN_OR_RETURN(const ChosenDevice chosen, ChooseDevice(flags.device, given, /*local_rank=*/0));
  options->device = chosen.device;
  const int64_t budget = chosen.budget_bytes > 0 ? chosen.budget_bytes : chosen.device->capacity_bytes();
  options->wish.device = {.budget_bytes = static_cast<uint64_t>(budget),
                          .slack = chosen.device->tensor_slack()};
  zero::SetIntraOpThreads(options->threads);
  options->compute = generate::LibTorchCompute();
  return absl::OkStatus();
}

int RunGenerate(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  return RunGenerateWith(OpenDeviceForGeneration, argc, argv, out, err);
}

}  // namespace penstock::tools
