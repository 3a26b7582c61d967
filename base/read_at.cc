#include "base/read_at.h"

#include <unistd.h>

#include <cerrno>

#include "base/io_error.h"

namespace penstock {

absl::StatusOr<size_t> ReadAt(int fd, std::string_view path, uint64_t offset, void* to, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        ::pread(fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return MakeIoError(
          {.op = "read", .path = path, .offset = offset, .bytes = bytes, .done_bytes = done, .error = errno});
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

}  // namespace penstock
