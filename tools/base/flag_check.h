// Errors of wrong flags.
#ifndef PENSTOCK_TOOLS_BASE_FLAG_CHECK_H_
#define PENSTOCK_TOOLS_BASE_FLAG_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace penstock::tools {

inline absl::Status WrongFlag(const std::string& line) { return absl::InvalidArgumentError(line); }

// A number that must lie in a range; the flag's name goes into the message.
template <typename T>
absl::Status CheckFlag(const char* flag, T value, T least, T most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return WrongFlag(absl::StrCat(flag, " ", value, ": must be between ", least, " and ", most));
}

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_FLAG_CHECK_H_
