#include "tools/base/process_start.h"

#include <time.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/small_file.h"

namespace penstock::tools {
namespace {

int64_t NowNs(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

std::optional<int64_t> ProcessStartNs() {
  const absl::StatusOr<std::string> stat = ReadSmallFile("/proc/self/stat");
  if (!stat.ok()) return std::nullopt;
  // Field 22, in ticks since the machine was started. The second one, a name, may hold anything up to its
  // parenthesis.
  const size_t name_end = stat->rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  const std::vector<std::string> fields =
      absl::StrSplit(stat->substr(name_end + 1), ' ', absl::SkipWhitespace());
  constexpr size_t kStart = 22 - 3;
  int64_t ticks = 0;
  const int64_t per_second = ::sysconf(_SC_CLK_TCK);
  if (fields.size() <= kStart || !absl::SimpleAtoi(fields[kStart], &ticks) || per_second <= 0)
    return std::nullopt;
  const int64_t tick_ns = 1'000'000'000 / per_second;
  return NowNs(CLOCK_REALTIME) - NowNs(CLOCK_BOOTTIME) + (ticks + 1) * tick_ns;
}

}  // namespace penstock::tools
