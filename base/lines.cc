#include "base/lines.h"

#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"

namespace penstock {

absl::StatusOr<uint64_t> ForEachLine(int fd, const std::string& path,
                                     const std::function<bool(std::string_view line)>& take) {
  constexpr size_t kPieceBytes = 64 << 10;
  std::string seen;  // from the first byte that is not taken
  uint64_t taken = 0, read = 0;
  size_t searched = 0;
  while (true) {
    const size_t before = seen.size();
    seen.resize(before + kPieceBytes);
    const ssize_t n = ::pread(fd, seen.data() + before, kPieceBytes, static_cast<off_t>(read));
    seen.resize(before + (n > 0 ? static_cast<size_t>(n) : 0));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return MakeIoError({.op = "read", .path = path, .offset = read, .bytes = kPieceBytes, .error = errno});
    if (n == 0) return taken;
    read += static_cast<uint64_t>(n);
    size_t from = 0;
    for (size_t end = seen.find('\n', searched); end != std::string::npos; end = seen.find('\n', from)) {
      if (!take(std::string_view(seen).substr(from, end - from))) return taken;
      taken += end + 1 - from;
      from = end + 1;
    }
    seen.erase(0, from);
    searched = seen.size();
    if (searched > kMostLineBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the line at byte ", taken, " is longer than ", kMostLineBytes, " bytes"));
    }
  }
}

}  // namespace penstock
