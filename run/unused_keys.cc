#include "run/unused_keys.h"

#include "absl/strings/str_cat.h"
#include "run/settings.h"

namespace penstock::run {

std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where) {
  std::vector<std::string> notes;
  for (const auto& [given, path] :
       {std::pair{config.penstock.device_memory_budget_bytes.has_value(), "penstock.device_memory"},
        std::pair{config.aio.use_gds.value_or(false), "aio.use_gds"},
        std::pair{config.zero.offload_optimizer.ratio.has_value(),
                  "zero_optimization.offload_optimizer.ratio"}}) {
    if (!given) continue;
    notes.push_back(absl::StrCat(path, ": accepted and ignored: ", std::string(where), " ",
                                 std::string(FindKey(path)->without_device)));
  }
  return notes;
}

std::vector<std::string> KeysUnusedFromPython(const Config& config) {
  std::vector<std::string> notes = UnusedDeviceKeys(config, "from Python");
  const FlopsProfilerConfig& profiler = config.flops_profiler;
  for (const auto& [given, path] :
       {std::pair{profiler.module_depth.has_value(), "flops_profiler.module_depth"},
        std::pair{profiler.top_modules.has_value(), "flops_profiler.top_modules"},
        std::pair{profiler.detailed.has_value(), "flops_profiler.detailed"}}) {
    if (!given || !profiler.on()) continue;
    notes.push_back(
        absl::StrCat(path, ": accepted and ignored: ", std::string(FindKey(path)->python_ignores)));
  }
  return notes;
}

}  // namespace penstock::run
