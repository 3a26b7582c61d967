#include "base/file_lock.h"

#include <sys/file.h>

#include <cerrno>

#include "base/io_error.h"

namespace penstock {

absl::StatusOr<bool> TryLockFile(int fd, const std::string& path, LockMode mode) {
  while (::flock(fd, (mode == LockMode::kExclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR) return MakeIoError({.op = "lock", .path = path, .error = errno});
  }
  return true;
}

bool CannotBeLocked(const absl::Status& status) {
  const int error = ErrnoOf(status);
  return error == EBADF || error == EOPNOTSUPP || error == ENOLCK || error == EINVAL;
}

void UnlockFile(int fd) { (void)::flock(fd, LOCK_UN); }

}  // namespace penstock
