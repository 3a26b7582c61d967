#include "base/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"

namespace penstock {
namespace {

absl::Status TooLong(const std::string& path, uint64_t limit_bytes) {
  return absl::InvalidArgumentError(
      absl::StrCat("read ", path, ": longer than the ", limit_bytes,
                   " bytes that a file of its kind may have; is it the right file?"));
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path, uint64_t limit_bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return MakeIoError({.op = "stat", .path = path, .error = errno});
  // The kernel's own files (/proc, /sys) have a size of 0: the end is where read() finds it.
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (size > limit_bytes) return TooLong(path, limit_bytes);
  std::string text;
  uint64_t done = 0;
  while (true) {
    // One byte more than expected, so that the usual file takes two reads and a growing one is noticed.
    text.resize(std::max<uint64_t>(size + 1, done + (uint64_t{64} << 10)));
    const ssize_t n = ::read(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return MakeIoError(
          {.op = "read", .path = path, .offset = done, .bytes = text.size() - done, .error = errno});
    }
    if (n == 0) break;
    done += static_cast<uint64_t>(n);
    if (done > limit_bytes) return TooLong(path, limit_bytes);
  }
  text.resize(done);
  return text;
}

}  // namespace

absl::StatusOr<int> OpenRegularFile(const std::string& path) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    // A socket, or a device that is not there, cannot be opened at all.
    if (errno == ENXIO) {
      return absl::FailedPreconditionError(absl::StrCat("read ", path, ": not a regular file"));
    }
    return MakeIoError({.op = "open", .path = path, .error = errno});
  }
  struct stat info {};
  absl::Status status;
  if (::fstat(fd, &info) != 0) {
    status = MakeIoError({.op = "stat", .path = path, .error = errno});
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "read ", path, ": it is ", std::string(DescribeKind(info.st_mode)), ", not a regular file"));
  }
  if (status.ok()) return fd;
  ::close(fd);
  return status;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t limit_bytes) {
  ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  absl::StatusOr<std::string> text = ReadAll(fd, path, limit_bytes);
  ::close(fd);
  return text;
}

}  // namespace penstock
