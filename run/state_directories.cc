#include "run/state_directories.h"

#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"

namespace penstock::run {

absl::StatusOr<StateDirectories> ParseStateDirectories(const std::vector<std::string>& given) {
  StateDirectories directories;
  std::vector<std::optional<double>> weights;
  bool any = false;
  for (const std::string& each : given) {
    std::string path = each;
    std::optional<double> weight;
    const size_t sign = each.rfind('=');
    if (double number = 0; sign != std::string::npos && absl::SimpleAtod(each.substr(sign + 1), &number)) {
      ASSIGN_OR_RETURN(const bool is_name, PathExists(each));
      if (!is_name) {
        if (!(number > 0 && number <= 1e6))
          return absl::InvalidArgumentError(
              absl::StrCat(each, ": the weight of a state directory must be above 0 and at most 1e6"));
        weight = number;
        path = each.substr(0, sign);
      }
    }
    if (path.empty()) return absl::InvalidArgumentError(absl::StrCat("\"", each, "\": names no directory"));
    any |= weight.has_value();
    directories.paths.push_back(std::move(path));
    weights.push_back(weight);
  }
  for (size_t i = 0; any && i < weights.size(); ++i) directories.weights.push_back(weights[i].value_or(1));
  return directories;
}

}  // namespace penstock::run
