// Advisory locks (flock) of open files and directories: answers in which an interrupted or failed call is
// never "another process has it".
#ifndef PENSTOCK_BASE_FILE_LOCK_H_
#define PENSTOCK_BASE_FILE_LOCK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock {

enum class LockMode { kShared, kExclusive };

// Locks the file of the open descriptor `fd` without waiting; a lock that it has is changed to `mode`. False:
// another holds one that excludes it. An error, which names `path`: the file system cannot lock it (ENOLCK,
// EOPNOTSUPP; EBADF of a directory on NFS), or the call failed.
//
// The lock belongs to the open file: copies of the descriptor, those of forked children too, have it until
// UnlockFile or the last close.
absl::StatusOr<bool> TryLockFile(int fd, const std::string& path, LockMode mode = LockMode::kExclusive);

// Returns whether such an error means that files of this kind cannot be locked there, and not that this call
// failed.
bool CannotBeLocked(const absl::Status& status);

// Gives the lock up, for forked children's copies of the descriptor too.
void UnlockFile(int fd);

}  // namespace penstock

#endif  // PENSTOCK_BASE_FILE_LOCK_H_
