#include "swap/checkpoint_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

// How long a killed run may hold its lock: the kernel still finishes its writes.
constexpr auto kPatience = std::chrono::milliseconds(2000);

constexpr const char* kWayOut = "give another --checkpoint-dir";

absl::Status CannotLock(const std::string& parent, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return absl::Status(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kFailedPrecondition,
                      absl::StrCat("checkpoints go to ", parent, ", which cannot be locked: ",
                                   std::strerror(error), ": ", full ? "make room, or " : "", kWayOut));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointLock>> CheckpointLock::Take(const std::string& parent) {
  const std::string path = absl::StrCat(parent, "/", kName);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::vector<std::string> made;
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
    const absl::Status there = MakeDirectories(parent, &made);
    std::unique_ptr<CheckpointLock> lock(new CheckpointLock(path, made));  // which removes them again
    const bool late = std::chrono::steady_clock::now() >= deadline;
    // Whoever held it may have removed the directory just now.
    if (absl::IsNotFound(there) && !late) continue;
    if (!there.ok()) {
      const bool full = absl::IsResourceExhausted(there);
      return absl::Status(
          full ? there.code() : absl::StatusCode::kFailedPrecondition,
          absl::StrCat("checkpoints go to ", parent, ", which cannot be made: ", std::string(there.message()),
                       ": ", full ? "make room, or " : "", kWayOut));
    }
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT && !late) continue;
    if (fd < 0) return CannotLock(parent, errno);
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) {
      // Likewise the file.
      if (IsFileAt(fd, path)) {
        lock->fd_ = fd;
        return lock;
      }
      ::close(fd);
      if (late) return CannotLock(parent, EAGAIN);
      continue;
    }
    const int error = errno;
    ::close(fd);
    if (error != EWOULDBLOCK && error != EINTR) return CannotLock(parent, error);
    if (late) {
      return absl::FailedPreconditionError(
          absl::StrCat("checkpoints go to ", parent, ", which is in use by another process, whose run keeps ",
                       "its own there: let that one end, or ", kWayOut));
    }
  }
}

CheckpointLock::~CheckpointLock() {
  if (fd_ >= 0) {
    // Before it is given up: nobody has locked a file of this name but the holder. What somebody else put
    // there, with something in it, stays.
    struct stat file {};
    if (::fstat(fd_, &file) == 0 && S_ISREG(file.st_mode) && file.st_size == 0 && IsFileAt(fd_, path_))
      (void)::unlink(path_.c_str());
    ::close(fd_);
  }
  for (auto each = made_.rbegin(); each != made_.rend(); ++each) (void)::rmdir(each->c_str());
}

}  // namespace penstock::swap
