#include "run/given_values.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/settings.h"

namespace penstock::run {
namespace {

using nlohmann::ordered_json;

// The value in the form that a configuration has it in.
absl::StatusOr<ordered_json> AsConfigured(const Setting& setting, const std::string& spelling,
                                          const ordered_json& value) {
  if (setting.type == KeyType::kPaths && value.is_string()) return ordered_json::array({value});
  if (!value.is_number_float() || std::isfinite(value.get<double>())) return value;
  if (value.get<double>() > 0 && !setting.infinite.empty()) return ordered_json(ScalarOf(setting.infinite));
  return absl::InvalidArgumentError(
      absl::StrCat(spelling, " is ", value.get<double>(), ": must be ", RangeOf(setting, "a number")));
}

}  // namespace

absl::Status TakeGiven(const GivenValues& values, Config* config) {
  std::map<std::string, nlohmann::json> checked;
  for (const auto& [spelling, given] : values) {
    if (given.is_null()) continue;
    const auto [setting, path] = spelling.starts_with("--") ? FindFlag(spelling) : FindKeyword(spelling);
    if (setting == nullptr) return absl::InvalidArgumentError(absl::StrCat("there is no setting ", spelling));
    if (path.empty()) continue;
    ASSIGN_OR_RETURN(const ordered_json value, AsConfigured(*setting, spelling, given));
    ASSIGN_OR_RETURN(checked[path], CheckValue(*setting, spelling, value));
  }
  constexpr const char* kOffload = "zero_optimization.offload_optimizer.device";
  if (const auto offload = checked.find(kOffload); offload != checked.end())
    checked["zero_optimization.offload_param.device"] = offload->second;
  Fill(checked, config);
  return absl::OkStatus();
}

}  // namespace penstock::run
