#include "zero/config/json_difference.h"

#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

std::string DifferenceBelow(const nlohmann::json& theirs, const nlohmann::json& ours, const std::string& path,
                            const std::string& there, const std::string& here) {
  if (theirs.is_object() && ours.is_object()) {
    const auto below = [&](const std::string& key) {
      return path.empty() ? key : absl::StrCat(path, ".", key);
    };
    for (const auto& [key, value] : ours.items()) {
      if (!theirs.contains(key))
        return absl::StrCat(below(key), " is not ", there, ", and ", value.dump(), " ", here);
      if (theirs[key] != value) return DifferenceBelow(theirs[key], value, below(key), there, here);
    }
    for (const auto& [key, value] : theirs.items()) {
      if (!ours.contains(key))
        return absl::StrCat(below(key), " is ", value.dump(), " ", there, ", and not ", here);
    }
  }
  return absl::StrCat(path, " is ", theirs.dump(), " ", there, " and ", ours.dump(), " ", here);
}

}  // namespace

std::string JsonDifference(const nlohmann::json& theirs, const nlohmann::json& ours, const std::string& there,
                           const std::string& here) {
  return theirs == ours ? "" : DifferenceBelow(theirs, ours, "", there, here);
}

}  // namespace penstock::zero
