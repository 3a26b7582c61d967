#include "base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "base/io_error.h"

namespace penstock {

absl::StatusOr<bool> TryLockFile(int fd, const std::string& path, LockMode mode,
                                 std::chrono::milliseconds patience) {
  const int operation = (mode == LockMode::kExclusive ? LOCK_EX : LOCK_SH) | LOCK_NB;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (::flock(fd, operation) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return MakeIoError({.op = "lock", .path = path, .error = errno});
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

bool CannotLock(const absl::Status& status) {
  const int error = ErrnoOf(status);
  return error == EBADF || error == EOPNOTSUPP || error == ENOLCK || error == EINVAL;
}

void UnlockFile(int fd) { (void)::flock(fd, LOCK_UN); }

absl::StatusOr<bool> IsFileAt(int fd, const std::string& path) {
  struct stat mine, there;
  if (::fstat(fd, &mine) != 0)
    return MakeIoError({.op = "look at the open file of", .path = path, .error = errno});
  if (::lstat(path.c_str(), &there) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return false;
    return MakeIoError({.op = "look at", .path = path, .error = errno});
  }
  return mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

DirectoryLock::~DirectoryLock() {
  if (fd_ < 0) return;
  UnlockFile(fd_);
  ::close(fd_);
}

absl::StatusOr<bool> DirectoryLock::Take(const std::string& directory, std::chrono::milliseconds patience) {
  fd_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd_ < 0) return MakeIoError({.op = "open", .path = directory, .error = errno});
  absl::StatusOr<bool> locked = TryLockFile(fd_, directory, LockMode::kExclusive, patience);
  return CannotLock(locked.status()) ? true : locked;
}

}  // namespace penstock
