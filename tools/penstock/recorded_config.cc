#include "tools/penstock/recorded_config.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "zero/config/config_json.h"
#include "zero/config/config_keys.h"

namespace penstock::tools {
namespace {

using nlohmann::json;

// By other names in the record, part of the state, or said of where it lies. A section has all of its keys.
constexpr std::string_view kNotKept[] = {"train_batch_size",
                                         "train_micro_batch_size_per_gpu",
                                         "gradient_accumulation_steps",
                                         "gradient_clipping",
                                         "optimizer",
                                         "scheduler",
                                         "fp16",
                                         "bf16",
                                         "elasticity",
                                         "checkpoint",
                                         "penstock.optimizer_states",
                                         "penstock.sync",
                                         "penstock.durability",
                                         "penstock.versions",
                                         "zero_optimization.cpu_offload",
                                         "zero_optimization.cpu_offload_param",
                                         "zero_optimization.offload_param.device",
                                         "zero_optimization.offload_param.nvme_path",
                                         "zero_optimization.offload_optimizer.device",
                                         "zero_optimization.offload_optimizer.nvme_path"};

constexpr const char* kMonitors[] = {"csv_monitor", "tensorboard"};

void MakeAbsolute(json* path) {
  std::error_code error;
  const std::string given = path->is_string() ? path->get<std::string>() : "";
  const std::filesystem::path absolute = std::filesystem::absolute(given.empty() ? "." : given, error);
  if (!error) *path = absolute.lexically_normal().string();
}

}  // namespace

bool IsRecorded(std::string_view path) {
  return std::none_of(std::begin(kNotKept), std::end(kNotKept), [&](std::string_view name) {
    return path.starts_with(name) && (path.size() == name.size() || path[name.size()] == '.');
  });
}

absl::StatusOr<json> ConfigToRecord(const std::string& file) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file));
  ASSIGN_OR_RETURN(const nlohmann::ordered_json said, zero::ParseHjson(text));
  ASSIGN_OR_RETURN(zero::CheckedKeys keys, zero::CheckKeys(said));
  json recorded = json::object();
  for (auto& [path, value] : keys.served) {
    if (IsRecorded(path)) recorded[path] = std::move(value);
  }
  // A monitor without output_path writes to the working directory.
  for (const char* monitor : kMonitors) {
    if (recorded.contains(absl::StrCat(monitor, ".enabled")))
      MakeAbsolute(&recorded[absl::StrCat(monitor, ".output_path")]);
  }
  if (recorded.contains("flops_profiler.output_file")) MakeAbsolute(&recorded["flops_profiler.output_file"]);
  return recorded;
}

absl::StatusOr<zero::Config> ConfigFromRecord(const json& recorded) {
  json config = json::object();
  bool named = recorded.is_object();
  for (const auto& [path, value] : recorded.items()) {
    named = named && !path.empty();
    if (named) config[json::json_pointer(absl::StrCat("/", absl::StrReplaceAll(path, {{".", "/"}})))] = value;
  }
  absl::StatusOr<zero::ParsedConfig> parsed = absl::InvalidArgumentError("it is no object");
  if (named) parsed = zero::ParseConfig(config.dump());
  if (parsed.ok()) return std::move(parsed->config);
  return absl::DataLossError(absl::StrCat("what this run's --config said cannot be read (",
                                          std::string(parsed.status().message()),
                                          "): go on with --config FILE"));
}

std::string RecordedKeys(const json& recorded) {
  std::vector<std::string> keys;
  for (const auto& [path, value] : recorded.items()) keys.push_back(path);
  return absl::StrJoin(keys, ", ");
}

}  // namespace penstock::tools
