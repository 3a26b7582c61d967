// The directory side of checkpoints: names, listings, and how one appears whole or not at all.
#ifndef PENSTOCK_SWAP_CHECKPOINT_FILES_H_
#define PENSTOCK_SWAP_CHECKPOINT_FILES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/process_mark.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_lock.h"
#include "swap/format.h"

namespace penstock::swap {

// Called again and again by something long, with the seconds that it has worked since: returns when it may go
// on.
using Rest = std::function<void(double worked)>;

// A checkpoint that has no name yet: a directory `.NAME.partial` beside the others. Removed with its store
// file when destroyed, unless it was published.
class PartialCheckpoint {
 public:
  // Makes the parent if it is missing, and removes what killed runs left: of all checkpoints, or, where other
  // ranks may be writing there as well, of this part. `rank`: whose part of it this is, -1 where there is
  // one. kAlreadyExists: a checkpoint of this name that is not among `replaces`, as rank 0 finds, or a file
  // that would become part of this one. `lock`: of the parent, checked before anything there changes; null:
  // there is none. Both outlive this.
  static absl::StatusOr<PartialCheckpoint> Create(const std::string& parent, const std::string& name,
                                                  int rank, CheckpointLock* lock = nullptr,
                                                  std::span<const CheckpointSeen> replaces = {});
  PartialCheckpoint(PartialCheckpoint&& other) noexcept;
  PartialCheckpoint& operator=(PartialCheckpoint&&) = delete;
  ~PartialCheckpoint();

  const std::string& directory() const { return directory_; }  // of the rank's part
  // The durable file at `path` is part of it from here on, as `name`.
  absl::Status TakeIn(const std::string& path, const std::string& name) const;
  // Rank 0's, when all parts are there: gives the durable, closed store in directory() its name, makes that
  // durable, writes `latest` if that is possible, and removes those that are replaced and all but the newest
  // `keep` of the others (0: none of these), at the pace of `rest`. On an error nothing has been removed.
  // kFailedPrecondition: it, or the one of this name that it replaces, has a file that is not a checkpoint's.
  // `naming`: CheckpointOptions'; its errors leave the checkpoint under its own name.
  absl::Status Publish(uint32_t keep, const Rest& rest,
                       const std::optional<CheckpointNaming>& naming = std::nullopt);
  // The others': rank 0 publishes it.
  void HandOver() { directory_.clear(); }

 private:
  PartialCheckpoint(std::string parent, std::string name, int rank, CheckpointLock* lock,
                    std::span<const CheckpointSeen> replaces);
  // Takes the name of a checkpoint that is replaced, in one step where the file system can do that. Returns
  // where that one is now: under a name of no checkpoint.
  absl::StatusOr<std::string> TakeNameOf(const std::string& path) const;

  ProcessMark made_in_;
  CheckpointLock* lock_;
  std::span<const CheckpointSeen> replaces_;
  std::string parent_;
  std::string name_;
  std::string whole_;      // the checkpoint's directory
  std::string directory_;  // the part's; the same where there is one. Empty: published
};

// kInvalidArgument: `directory`, which need not be there, holds a state or checkpoint, or lies in a
// checkpoint: what another writes there would be taken for the run's, or keep the checkpoint from being
// removed.
absl::Status CheckOutsideStores(const std::string& directory);

// The directories of ranks' parts that are in `directory`, of whatever is in them.
absl::StatusOr<std::vector<std::string>> RankPartsIn(const std::string& directory);

// Without the scratch, which means nothing to anyone but the process that wrote it.
Layout LayoutWithoutScratch(const StoreShape& shape);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_FILES_H_
