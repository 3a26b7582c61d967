// What a run keeps from its creation on, and the macro for values that may be errors. Internal to the words
// of `penstock train`.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RECORDED_OPTIONS_H_
#define PENSTOCK_TOOLS_PENSTOCK_RECORDED_OPTIONS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace penstock::tools {

// Values that a run keeps from its creation on. On resume a flag may repeat them, never change them.
class Kept {
 public:
  explicit Kept(const nlohmann::json& run) : run_(run) {}

  template <typename T>
  absl::StatusOr<T> Of(const char* name, const char* flag, const std::optional<T>& given,
                       const T& otherwise) const {
    if (!run_.contains(name)) return given.value_or(otherwise);
    const T kept = run_[name].get<T>();
    if (given.has_value() && *given != kept) {
      return absl::FailedPreconditionError(absl::StrCat(
          "--", flag, " ", nlohmann::json(*given).dump(), ": this run was created with ", run_[name].dump(),
          "; leave the flag out, or start another run in another --state-dir"));
    }
    return kept;
  }

 private:
  const nlohmann::json& run_;
};

// Takes the value of a StatusOr or returns its error.
#define PENSTOCK_TAKE(to, expression)       \
  do {                                      \
    auto taken = (expression);              \
    if (!taken.ok()) return taken.status(); \
    (to) = *std::move(taken);               \
  } while (false)

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RECORDED_OPTIONS_H_
