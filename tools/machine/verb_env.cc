#include "tools/machine/verb_env.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/base/cli.h"
#include "tools/machine/env_probe.h"

namespace penstock::tools {
namespace {

constexpr const char* kEnvName = "penstock env";

const char* StateName(EnvState state) {
  switch (state) {
    case EnvState::kOk:
      return "ok";
    case EnvState::kLimited:
      return "limited";
    case EnvState::kMissing:
      return "missing";
  }
  return "?";
}

std::string Text(const std::vector<EnvItem>& items) {
  std::string text;
  std::string section;
  for (const EnvItem& item : items) {
    if (item.section != section) {
      absl::StrAppend(&text, text.empty() ? "" : "\n", item.section, "\n");
      section = item.section;
    }
    absl::StrAppendFormat(&text, "  %-34s %s\n", item.name, item.value);
    if (item.state != EnvState::kOk) {
      absl::StrAppendFormat(&text, "  %-34s   %s: %s\n", "", StateName(item.state), item.cost);
    }
  }
  return text;
}

nlohmann::ordered_json Json(const std::vector<EnvItem>& items) {
  nlohmann::ordered_json json;
  for (const EnvItem& item : items) {
    nlohmann::ordered_json& entry = json[item.section][item.name];
    entry["value"] = item.value;
    entry["state"] = StateName(item.state);
    if (item.state != EnvState::kOk) entry["cost"] = item.cost;
  }
  return json;
}

}  // namespace

int RunEnv(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("What this machine offers to a run, what is missing, and what that costs", kEnvName);
  std::string directory = ".";
  bool json = false;
  app.add_option("--dir", directory,
                 "Directory to ask about, such as a state directory (default: the current one)");
  app.add_flag("--json", json, "One JSON object: {section: {name: {value, state, cost}}}");
  if (const std::optional<int> code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::StatusOr<std::vector<EnvItem>> items = ProbeEnvironment(directory);
  if (!items.ok()) return Fail(kEnvName, items.status(), err);
  if (json) {
    out << Json(*items).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n" << std::flush;
  } else {
    out << Text(*items) << std::flush;
  }
  return kExitOk;
}

}  // namespace penstock::tools
