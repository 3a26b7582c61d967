// Advisory locks (flock) of open files and directories: answers in which an interrupted or failed call is
// never "another process has it".
#ifndef PENSTOCK_BASE_FILE_LOCK_H_
#define PENSTOCK_BASE_FILE_LOCK_H_

#include <chrono>
#include <string>

#include "absl/status/statusor.h"

namespace penstock {

enum class LockMode { kShared, kExclusive };

// Locks the file of the open descriptor `fd`; a lock that it has is changed to `mode`. False: another has
// held one that excludes it for as long as `patience`. An error, which names `path`: the file system cannot
// lock it (ENOLCK, EOPNOTSUPP; EBADF of a directory on NFS), or the call failed.
//
// The lock belongs to the open file: copies of the descriptor, those of forked children too, have it until
// UnlockFile or the last close.
absl::StatusOr<bool> TryLockFile(int fd, const std::string& path, LockMode mode = LockMode::kExclusive,
                                 std::chrono::milliseconds patience = {});

// Whether TryLockFile failed because the file system locks no such file: nobody has a lock there.
bool CannotLock(const absl::Status& status);

// Gives the lock up, for forked children's copies of the descriptor too.
void UnlockFile(int fd);

// Returns whether the open file is what has this name, links not followed: who takes a lock by a name asks it
// afterwards, since the name may have gone to another file before the lock was had.
absl::StatusOr<bool> IsFileAt(int fd, const std::string& path);

// An exclusive lock of a directory, given up when this is destroyed.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Must be called once. False: another has held it for as long as `patience`. Where directories cannot be
  // locked, as on NFS, true: nobody has a lock there.
  absl::StatusOr<bool> Take(const std::string& directory, std::chrono::milliseconds patience = {});

 private:
  int fd_ = -1;
};

}  // namespace penstock

#endif  // PENSTOCK_BASE_FILE_LOCK_H_
