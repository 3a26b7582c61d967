// Checkpoints: named, complete, self-contained copies of a commit, written while training goes on.
//
// A checkpoint is a store of its own (FORMAT.md) with one slot a tile, in one directory: it is opened,
// inspected, verified and exported like a run, with StoreOptions::read_only. It carries the uuid, identity,
// step, updates and payload of its run, and the very checksums of the tiles, which are verified as they are
// copied.
//
// It appears under its name only when it is whole and durable: until then it is `.NAME.partial`. What a
// killed run left of that kind is removed by the next. Beside the checkpoints, the file `latest` holds the
// name of the one that was written last: a note for people, which this program never reads and which may be
// missing where the disk is full.
//
// Several ranks write one together: each its own store, in `rank-K/` of the checkpoint, all of the same step.
// It gets its name when all of them are done, from rank 0; so it is whole or not there, like any other.
//
// checkpoint_copy.h writes one while training goes on.
#ifndef PENSTOCK_SWAP_CHECKPOINT_H_
#define PENSTOCK_SWAP_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/checkpoint_lock.h"
#include "swap/store.h"

namespace penstock::swap {

struct CheckpointOptions {
  std::string parent;  // the directory of all checkpoints; made if missing
  // Where tiles pass through, best from an arena: one padded tile.
  std::span<std::byte> memory;
  uint32_t keep = 0;  // after this one is done, remove all but the newest `keep`; 0: keep all
  // Of `parent`, checked before anything there changes; null: nobody else is at work there. Outlives the
  // copy.
  CheckpointLock* lock = nullptr;
  bool allow_unaligned_file_system = false;
  // Of several ranks: which of them this is, and how their copies meet when this one's part is durable, or
  // could not be made. `meet` runs on the copy's thread; what it returns is the same on all ranks: an error
  // if any of them had one.
  int rank = 0;
  std::function<absl::Status(const absl::Status& mine)> meet;
};

// "DIR/rank-2": where rank 2 keeps its part of what all ranks keep in DIR.
std::string RankDirectory(const std::string& directory, int rank);

// "step-00000123": names sort as steps do.
std::string CheckpointName(uint64_t step);

struct CheckpointEntry {
  std::string name;
  std::string path;
  uint64_t step = 0;
};
// The complete checkpoints in a directory, oldest first; none if there is no such directory.
std::vector<CheckpointEntry> ListCheckpoints(const std::string& parent);

// The checkpoint that `path` means: itself if it holds a store, else the newest in it. kNotFound.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);

// Removes what killed runs left in a directory of checkpoints. Nothing else is touched.
void RemovePartialCheckpoints(const std::string& parent);

// Removes all but the newest `keep` (0: none is removed).
void KeepNewestCheckpoints(const std::string& parent, uint32_t keep);

// Removes all checkpoints in a directory, those of killed runs included, and `latest`. Nothing else is
// touched; what is in use stays (kFailedPrecondition).
absl::Status RemoveCheckpoints(const std::string& parent);

// A whole checkpoint at once. Blocks; swap/checkpoint_copy.h writes one while training goes on.
absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options);

// Copies the committed version of every tile of `from` (a checkpoint) to `to`, freshly created with the same
// layout, and commits it there with the same step, updates and payload: how a run goes on from a checkpoint.
// Everything is verified on the way. `memory`: at least one padded tile. Blocks.
absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_H_
