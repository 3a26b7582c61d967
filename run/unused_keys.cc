#include "run/unused_keys.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "run/settings.h"

namespace penstock::run {
namespace {

struct Key {
  bool given;
  const char* path;
};

// `why` is the row's reason; `where` goes before it.
void AddLines(std::initializer_list<Key> keys, std::string_view Setting::*why, std::string_view where,
              std::vector<std::string>* lines) {
  for (const auto& [given, path] : keys) {
    if (!given) continue;
    lines->push_back(absl::StrCat(path, ": accepted and ignored: ", std::string(where),
                                  where.empty() ? "" : " ", std::string(FindKey(path)->*why)));
  }
}

}  // namespace

std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where) {
  std::vector<std::string> lines;
  AddLines({{config.penstock.device_memory_budget_bytes.has_value(), "penstock.device_memory"},
            {config.aio.use_gds.value_or(false), "aio.use_gds"},
            {config.zero.offload_optimizer.ratio.has_value(), "zero_optimization.offload_optimizer.ratio"}},
           &Setting::without_device, where, &lines);
  return lines;
}

std::vector<std::string> KeysUnusedFromPython(const Config& config) {
  std::vector<std::string> lines = UnusedDeviceKeys(config, "from Python");
  const FlopsProfilerConfig& profiler = config.flops_profiler;
  if (!profiler.on()) return lines;
  AddLines({{profiler.module_depth.has_value(), "flops_profiler.module_depth"},
            {profiler.top_modules.has_value(), "flops_profiler.top_modules"},
            {profiler.detailed.has_value(), "flops_profiler.detailed"}},
           &Setting::python_ignores, "", &lines);
  return lines;
}

std::vector<std::string> KeysUnusedOnCommandLine(const Config& config) {
  std::vector<std::string> lines;
  AddLines({{!config.managed_gradient_accumulation.value_or(true), "managed_gradient_accumulation"},
            {config.wandb.on(), "wandb.enabled"},
            {config.penstock.blocks.has_value(), "penstock.blocks"},
            {config.penstock.forwards_per_step.has_value(), "penstock.forwards_per_step"}},
           &Setting::command_line_ignores, "", &lines);
  return lines;
}

}  // namespace penstock::run
