// Who keeps checkpoints in a directory: one run at a time.
//
// A run that writes checkpoints removes old ones and what killed runs left, and takes the newest for its own.
// So two runs in one directory would remove each other's. The holder has an exclusive flock on a file in the
// directory: the kernel gives it up with the process, however that ends. Who only reads checkpoints takes no
// lock. Of several ranks, rank 0 holds it for all.
#ifndef PENSTOCK_SWAP_CHECKPOINT_LOCK_H_
#define PENSTOCK_SWAP_CHECKPOINT_LOCK_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/process_mark.h"

namespace penstock::swap {

class CheckpointLock {
 public:
  // The lock's file in its directory.
  static constexpr const char* kName = ".penstock.lock";

  // Takes `parent` for this process, and makes it where it is missing. kFailedPrecondition: another holds it,
  // still after some seconds that a killed one may take to end, or no file can be locked there;
  // kResourceExhausted: the disk is full.
  static absl::StatusOr<std::unique_ptr<CheckpointLock>> Take(const std::string& parent);
  // That the directory is still this process's, before anything in it is made or removed. Where it is gone
  // (removed, or moved away), where another one without content has its place, or only the lock's file was
  // removed, it is made and taken again. kNotFound: something else stands there, or another holds it. Any
  // other error: it could not be looked at. One thread at a time.
  absl::Status Check();
  // Gives it up, and removes the directories that Take made, where nothing was kept in them. In a forked
  // child neither: it is the parent's.
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  CheckpointLock(std::string parent, std::vector<std::string> made);
  absl::Status Lost(const std::string& why) const;

  const ProcessMark made_in_;
  const std::string parent_, path_;      // the directory, and the lock's file in it
  const std::vector<std::string> made_;  // directories, the outermost first
  int fd_ = -1;
  int directory_fd_ = -1;  // so that no other directory has its inode
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_LOCK_H_
