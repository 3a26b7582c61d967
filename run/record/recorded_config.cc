#include "run/record/recorded_config.h"

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
#include "run/settings.h"
#include "zero/config/config_json.h"

namespace penstock::run {
namespace {

using nlohmann::json;

constexpr const char* kMonitors[] = {"csv_monitor", "tensorboard"};

void MakeAbsolute(json* path) {
  std::error_code error;
  const std::string given = path->is_string() ? path->get<std::string>() : "";
  const std::filesystem::path absolute = std::filesystem::absolute(given.empty() ? "." : given, error);
  if (!error) *path = absolute.lexically_normal().string();
}

}  // namespace

absl::StatusOr<json> ConfigToRecord(const std::string& file) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file));
  ASSIGN_OR_RETURN(const nlohmann::ordered_json said, zero::ParseHjson(text));
  ASSIGN_OR_RETURN(CheckedKeys keys, CheckKeys(said));
  json recorded = json::object();
  for (auto& [path, value] : keys.served) {
    if (HoldsAsConfigured(path)) recorded[path] = std::move(value);
  }
  // A monitor without output_path writes to the working directory.
  for (const char* monitor : kMonitors) {
    if (recorded.contains(absl::StrCat(monitor, ".enabled")))
      MakeAbsolute(&recorded[absl::StrCat(monitor, ".output_path")]);
  }
  if (recorded.contains("flops_profiler.output_file")) MakeAbsolute(&recorded["flops_profiler.output_file"]);
  return recorded;
}

absl::StatusOr<Config> ConfigFromRecord(const json& recorded) {
  json config = json::object();
  bool named = recorded.is_object();
  for (const auto& [path, value] : recorded.items()) {
    named = named && !path.empty();
    if (named) config[json::json_pointer(absl::StrCat("/", absl::StrReplaceAll(path, {{".", "/"}})))] = value;
  }
  absl::StatusOr<ParsedConfig> parsed = absl::InvalidArgumentError("it is no object");
  if (named) parsed = ParseConfig(config.dump());
  if (parsed.ok()) return std::move(parsed->config);
  return absl::DataLossError(absl::StrCat("what this run's `config` said cannot be read (",
                                          std::string(parsed.status().message()),
                                          "): go on with `config` FILE"));
}

std::string RecordedKeys(const json& recorded) {
  std::vector<std::string> keys;
  for (const auto& [path, value] : recorded.items()) keys.push_back(path);
  return absl::StrJoin(keys, ", ");
}

}  // namespace penstock::run
