#include "zero/lanes/stuck_operation.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace penstock::zero {

std::string StuckText(const StuckOperation& operation) {
  if (operation.news == StuckOperation::News::kEnded)
    return absl::StrFormat("no longer stuck: %s ended after %.3g s", operation.what, operation.seconds);
  std::string text = absl::StrFormat("stuck: %s: %.3g s on %s without a sign of life", operation.what,
                                     operation.seconds, operation.where);
  if (operation.others > 0) absl::StrAppend(&text, ", and ", operation.others, " more behind it");
  return text;
}

}  // namespace penstock::zero
