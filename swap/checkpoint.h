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
// missing where the disk is full. Python's front end reads it, and asks for it (CheckpointNaming).
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
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/checkpoint_lock.h"
#include "swap/store.h"

namespace penstock::swap {

// A checkpoint of a directory at one time, for a decision that is carried out later.
struct CheckpointSeen {
  std::string name;
  Uuid uuid{};  // zeros: could not be read
  bool operator==(const CheckpointSeen&) const = default;
};

// How a checkpoint is found and read by Python's front end.
struct CheckpointNaming {
  // What describes the store's parameters (kDescriptionFile), written beside the store before the checkpoint
  // has its name; of several ranks, in the part of rank 0. Empty: no such file.
  std::string description;
  std::string tag;     // name of a symbolic link to it, beside it; empty: none
  bool latest = true;  // false: `latest` stays as it is
  std::string name;    // CheckpointName, or with a number behind it; empty: CheckpointName of its step
  // A durable file beside the checkpoints that goes into this rank's part, there as `file_name`
  // ("client_state-….pt"), before the checkpoint has its name; empty: none. It is gone from where it was,
  // also where the checkpoint fails later.
  std::string file;
  std::string file_name;
};
inline constexpr const char* kDescriptionFile = "parameters.json";

struct CheckpointOptions {
  std::string parent;  // the directory of all checkpoints; made if missing
  // Where tiles pass through, best from an arena: one padded tile.
  std::span<std::byte> memory;
  uint32_t keep = 0;  // after this one is done, remove all but the newest `keep`; 0: keep all
  // Of an older run, which this one's replaces: they stay until the first of this one is durable under its
  // name, and are then removed. Those that somebody reads just then are removed after a later one.
  std::vector<CheckpointSeen> replaces;
  // Of `parent`, checked before anything there changes; null: nobody else is at work there. Outlives the
  // copy.
  CheckpointLock* lock = nullptr;
  bool allow_unaligned_file_system = false;
  // Its tag and `latest` are given in this order once the checkpoint is durable under its own name, and one
  // that cannot be given is an error. Default: `latest` is a note for people.
  std::optional<CheckpointNaming> naming;
  // Of several ranks: which of them this is, and how their copies meet when this one's part is durable, or
  // could not be made. `meet` runs on the copy's thread; what it returns is the same on all ranks: an error
  // if any of them had one.
  int rank = 0;
  Uuid id{};  // the same on all ranks, and of no other checkpoint: parts of two never pass as one
  std::function<absl::Status(const absl::Status& mine)> meet;
};

// "DIR/rank-2": where rank 2 keeps its part of what all ranks keep in DIR.
std::string RankDirectory(const std::string& directory, int rank);

// "step-00000123": names sort as steps do. `number`: where there are several of one step, which must not take
// each other's place, "step-00000123.2" is the second.
std::string CheckpointName(uint64_t step, int number = 1);

struct CheckpointEntry {
  std::string name;
  std::string path;
  uint64_t step = 0;
};
// Returns the complete checkpoints in a directory, oldest first; none if there is no such directory. An error
// means that it is not known which there are, and never that there are none.
absl::StatusOr<std::vector<CheckpointEntry>> ListCheckpoints(const std::string& parent);

// Returns the checkpoint that `path` means: itself if it holds a store, else the newest in it. kNotFound:
// there is none. Any other error means that this is not known.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);

// Removes what killed runs left in a directory of checkpoints. What is in use, or has another file in it than
// a checkpoint's, or cannot be removed stays; an error means that the directory could not be listed.
absl::Status RemovePartialCheckpoints(const std::string& parent);

// Removes all but the newest `keep` (0: none), and none with another file in it. On an error it removed none.
absl::Status KeepNewestCheckpoints(const std::string& parent, uint32_t keep,
                                   std::span<const CheckpointSeen> replaced = {},
                                   const std::string& spare = "");

// Returns the checkpoints in a directory, as ListCheckpoints does. `until_ns`: without those whose file was
// modified later, in nanoseconds since the epoch.
absl::StatusOr<std::vector<CheckpointSeen>> SeeCheckpoints(const std::string& parent,
                                                           std::optional<int64_t> until_ns = std::nullopt);

// kFailedPrecondition: a checkpoint is in the directory that is not among `seen`.
absl::Status CheckSeen(const std::string& parent, std::span<const CheckpointSeen> seen);

// The checkpoints of a directory that a new run replaces, locked until then: nobody begins to read one.
class ReplacedCheckpoints {
 public:
  // Locks all checkpoints in `parent`. CheckSeen's errors. kFailedPrecondition: one is in use, not of this
  // program's making, or has something of somebody else's in it, which would stay.
  static absl::StatusOr<ReplacedCheckpoints> Lock(const std::string& parent,
                                                  std::span<const CheckpointSeen> seen);
  ReplacedCheckpoints(ReplacedCheckpoints&&) noexcept;
  ReplacedCheckpoints& operator=(ReplacedCheckpoints&&) noexcept;
  ~ReplacedCheckpoints();  // unlocks what was not removed

  // Removes them, the newest first, what killed runs left, and `latest`. Nothing else is touched. After an
  // error those that were not removed stay.
  absl::Status Remove();

 private:
  struct Locked;
  explicit ReplacedCheckpoints(std::string parent);

  std::string parent_;
  std::unique_ptr<Locked> locked_;
};

// A whole checkpoint at once. Blocks; swap/checkpoint_copy.h writes one while training goes on.
absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options);

// Copies the committed version of every tile of `from` (a checkpoint) to `to`, freshly created with the same
// layout, and commits it there with the same step, updates and payload: how a run goes on from a checkpoint.
// Everything is verified on the way. `memory`: at least one padded tile. Blocks.
absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_H_
