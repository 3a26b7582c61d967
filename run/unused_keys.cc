#include "run/unused_keys.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "run/settings.h"
#include "zero/engine/prediction_check.h"

namespace penstock::run {
namespace {

// A line for each key that the configuration gives and that has a reason there. `where` goes before it. What
// is said with a feature that is off has no line, nor a value that is as good as none.
std::vector<std::string> Lines(const Config& config, std::string_view Setting::*why, std::string_view where,
                               const GivenValues& flags = {}) {
  std::vector<std::string> lines;
  for (const std::string_view section : SectionPaths()) {
    if (section == "flops_profiler" && !config.flops_profiler.on()) continue;
    for (const Setting& setting : SectionKeys(section)) {
      if ((setting.*why).empty() || !setting.HasPlace() || !setting.canonical.empty()) continue;
      const nlohmann::json value = setting.Find(config);
      const bool is_neutral = !setting.neutral.empty() && value == ScalarOf(setting.neutral);
      if (value.is_null() || is_neutral) continue;
      const std::string flag(setting.flag);
      lines.push_back(absl::StrCat(flags.contains(flag) ? flag : PathOf(section, setting),
                                   ": accepted and ignored: ", std::string(where), where.empty() ? "" : " ",
                                   std::string(setting.*why)));
    }
  }
  return lines;
}

}  // namespace

std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where,
                                          const GivenValues& flags) {
  return Lines(config, &Setting::without_device, where, flags);
}

std::vector<std::string> UnusedPlaceKeys(const Config& config, int world, OffloadDevice offload,
                                         const GivenValues& flags) {
  std::vector<std::string> lines;
  if (world == 1) lines = Lines(config, &Setting::without_ranks, "with one rank", flags);
  if (offload != OffloadDevice::kNvme) {
    for (std::string& line : Lines(config, &Setting::without_drive, "without offload to nvme", flags))
      lines.push_back(std::move(line));
  }
  const absl::Status can = zero::CanPlanAgain(world, offload);
  if (config.penstock.replan == "auto" && !can.ok())
    lines.push_back(absl::StrCat("penstock.replan \"auto\": ", can.message()));
  return lines;
}

std::vector<std::string> KeysUnusedFromPython(const Config& config) {
  return Lines(config, &Setting::python_ignores, "");
}

std::vector<std::string> KeysUnusedOnCommandLine(const Config& config) {
  return Lines(config, &Setting::command_line_ignores, "");
}

}  // namespace penstock::run
