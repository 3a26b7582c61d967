#include "swap/checkpoint_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

// How long a killed run may hold its lock: the kernel still finishes its writes.
constexpr auto kPatience = std::chrono::milliseconds(2000);

constexpr int kFileFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
constexpr int kDirectoryFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

constexpr const char* kWayOut = "give another `checkpoint_dir`";

absl::Status CannotLock(const std::string& parent, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return absl::Status(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kFailedPrecondition,
                      absl::StrCat("checkpoints go to ", parent, ", which cannot be locked: ",
                                   std::strerror(error), ": ", full ? "make room, or " : "", kWayOut));
}

// Opens the lock's file; `made`: it was not there.
int OpenOrMake(const std::string& path, bool* made) {
  const int fd = ::open(path.c_str(), kFileFlags | O_EXCL, 0600);
  *made = fd >= 0;
  return fd >= 0 || errno != EEXIST ? fd : ::open(path.c_str(), kFileFlags, 0600);
}

// The open directory, or nothing at all, has this name; or another one does, that is empty.
absl::StatusOr<bool> IsFree(int fd, const std::string& path) {
  struct stat own {
  }, there{};
  if (::fstat(fd, &own) != 0)
    return MakeIoError({.op = "look at the open directory of", .path = path, .error = errno});
  if (::stat(path.c_str(), &there) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return true;
    return MakeIoError({.op = "look at", .path = path, .error = errno});
  }
  if (own.st_dev == there.st_dev && own.st_ino == there.st_ino) return true;
  if (!S_ISDIR(there.st_mode)) return false;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(path));
  return names.empty();
}

}  // namespace

CheckpointLock::CheckpointLock(std::string parent, std::vector<std::string> made)
    : parent_(std::move(parent)), path_(absl::StrCat(parent_, "/", kName)), made_(std::move(made)) {}

absl::StatusOr<std::unique_ptr<CheckpointLock>> CheckpointLock::Take(const std::string& parent) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::vector<std::string> made;
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
    const absl::Status there = MakeDirectories(parent, &made);
    std::unique_ptr<CheckpointLock> lock(new CheckpointLock(parent, made));  // which removes them again
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
    const std::string& path = lock->path_;
    bool made_file = false;
    const int fd = OpenOrMake(path, &made_file);
    if (fd < 0 && errno == ENOENT && !late) continue;
    if (fd < 0) return CannotLock(parent, errno);
    const absl::StatusOr<bool> locked = TryLockFile(fd, path);
    if (locked.ok() && *locked) {
      // Likewise the file.
      const int directory = ::open(parent.c_str(), kDirectoryFlags);
      const absl::StatusOr<bool> at_its_place = IsFileAt(fd, path);
      if (directory >= 0 && at_its_place.ok() && *at_its_place) {
        lock->fd_ = fd;
        lock->directory_fd_ = directory;
        return lock;
      }
      if (directory >= 0) ::close(directory);
      ::close(fd);
      RETURN_IF_ERROR(at_its_place.status());
      if (late) return CannotLock(parent, EAGAIN);
      continue;
    }
    // Where none can be locked nobody holds it: what was made for nothing goes, and the directories with it.
    if (!locked.ok() && made_file && IsFileAt(fd, path).value_or(false)) (void)::unlink(path.c_str());
    ::close(fd);
    if (!locked.ok()) return CannotLock(parent, ErrnoOf(locked.status()));
    if (late) {
      return absl::FailedPreconditionError(
          absl::StrCat("checkpoints go to ", parent, ", which is in use by another process, whose run keeps ",
                       "its own there: let that one end, or ", kWayOut));
    }
  }
}

absl::Status CheckpointLock::Lost(const std::string& why) const {
  return absl::NotFoundError(absl::StrCat(
      "the run's directory of checkpoints, ", parent_, ", was moved away while it trained, and ", why,
      ": nothing is written or removed there; bring it back, and the next checkpoint goes there again"));
}

absl::Status CheckpointLock::Check() {
  ASSIGN_OR_RETURN(const bool at_its_place, IsFileAt(fd_, path_));
  if (at_its_place) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool free, IsFree(directory_fd_, parent_));
  if (!free) return Lost("another has its place");
  const absl::Status there = MakeDirectories(parent_);
  if (!there.ok()) return Lost(absl::StrCat("cannot be made again: ", std::string(there.message())));
  const int fd = ::open(path_.c_str(), kFileFlags | O_EXCL, 0600);
  if (fd < 0) return Lost(absl::StrCat("cannot be taken again: ", std::strerror(errno)));
  const int directory = ::open(parent_.c_str(), kDirectoryFlags);
  const absl::StatusOr<bool> locked = TryLockFile(fd, path_);
  const bool taken = locked.ok() && *locked && directory >= 0 && IsFileAt(fd, path_).value_or(false) &&
                     ::dup3(fd, fd_, O_CLOEXEC) >= 0 && ::dup3(directory, directory_fd_, O_CLOEXEC) >= 0;
  ::close(fd);
  if (directory >= 0) ::close(directory);
  if (!locked.ok()) return Lost(absl::StrCat("cannot be locked again: ", locked.status().message()));
  return taken ? absl::OkStatus() : Lost("another process has taken the one in its place");
}

CheckpointLock::~CheckpointLock() {
  if (!made_in_.here()) {
    if (fd_ >= 0) {
      ::close(fd_);
      ::close(directory_fd_);
    }
    return;
  }
  if (fd_ >= 0) {
    // Before it is given up: nobody has locked a file of this name but the holder. What somebody else put
    // there, with something in it, stays.
    struct stat file {};
    if (::fstat(fd_, &file) == 0 && S_ISREG(file.st_mode) && file.st_size == 0 &&
        IsFileAt(fd_, path_).value_or(false))
      (void)::unlink(path_.c_str());
    UnlockFile(fd_);
    ::close(fd_);
    ::close(directory_fd_);
  }
  for (auto each = made_.rbegin(); each != made_.rend(); ++each) (void)::rmdir(each->c_str());
}

}  // namespace penstock::swap
