#include "run/watch/comms_log.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/plan/byte_size.h"

namespace penstock::run {

void CommsLog::Observe(const tiering::Op& op, double start_seconds, double end_seconds) {
  if (tiering::TraitsOf(op.kind).stall != tiering::Stall::kNetwork) return;
  Sum& sum = sums_[op.kind];
  const double seconds = end_seconds - start_seconds;
  ++sum.count;
  sum.bytes += op.bytes;
  sum.seconds += seconds;
  sum.longest = std::max(sum.longest, seconds);
}

std::string CommsLog::Text() const {
  if (sums_.empty()) return "exchanges between ranks: none\n";
  std::string text = absl::StrFormat("%-28s %10s %12s %12s %12s %14s\n", "exchanges of this rank", "count",
                                     "bytes", "seconds", "longest s", "bytes/s");
  for (const auto& [kind, sum] : sums_) {
    const double rate = sum.seconds > 0 ? static_cast<double>(sum.bytes) / sum.seconds : 0;
    absl::StrAppend(
        &text, absl::StrFormat("%-28s %10d %12s %12.4g %12.4g %14s\n", std::string(tiering::OpKindName(kind)),
                               sum.count, sum.bytes > 0 ? tiering::FormatBytes(sum.bytes) : "-", sum.seconds,
                               sum.longest, sum.bytes > 0 ? tiering::FormatBandwidth(rate) : "-"));
  }
  return text;
}

}  // namespace penstock::run
