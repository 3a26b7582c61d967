// Checkpoints: named, complete, self-contained copies of a commit, written while training goes on.
//
// A checkpoint is a store of its own (FORMAT.md) with one slot a tile, in one directory: it is opened,
// inspected, verified and exported like a run, with StoreOptions::read_only. It carries the uuid, identity,
// step, updates and payload of its run, and the very checksums of the tiles, which are verified as they are
// copied.
//
//   auto copy = CheckpointCopy::Begin(store, options);  // after FinishCommit; holds its versions
//   ... training goes on; now and then, on the executor's thread:
//   absl::StatusOr<bool> done = (*copy)->Poll();        // never waits for the disk
//
// The pace is the caller's: a Poll starts at most one transfer for each tile that fits into the memory given
// (four at most). Memory for one tile, and a Poll for every N tiles that training reads or writes, let the
// copy take about one part in N of the traffic.
//
// It appears under its name only when it is whole and durable: until then it is `.NAME.partial`. What a
// killed run left of that kind is removed by the next Begin. Beside the checkpoints, the file `latest` holds
// the name of the newest.
//
// The run's store outlives the copy. While it is copied a store of three slots goes on: the third holds what
// the checkpoint still needs. A store of two can be copied only while it stands still (WriteCheckpoint).
#ifndef PENSTOCK_SWAP_CHECKPOINT_H_
#define PENSTOCK_SWAP_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"

namespace penstock::swap {

struct CheckpointOptions {
  std::string parent;  // the directory of all checkpoints; made if missing
  // Where tiles pass through, best from an arena: at least one padded tile; two or more overlap reads and
  // writes.
  std::span<std::byte> memory;
  uint32_t keep = 0;  // after this one is done, remove all but the newest `keep`; 0: keep all
  bool allow_unaligned_file_system = false;
};

// "step-00000123": names sort as steps do.
std::string CheckpointName(uint64_t step);

struct CheckpointEntry {
  std::string name;
  std::string path;
  uint64_t step = 0;
};
// The complete checkpoints in a directory, oldest first; none if there is no such directory.
std::vector<CheckpointEntry> ListCheckpoints(const std::string& parent);

// The checkpoint that `path` means: itself if it holds a store, else the one that its `latest` names, else
// its newest. kNotFound.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);

class CheckpointCopy {
 public:
  // Creates the checkpoint's file and reserves its space. Holds the committed versions (Store::Retain) until
  // they are copied. kFailedPrecondition: nothing committed, a commit in flight, a store of two slots.
  // kAlreadyExists: a checkpoint of this step. kResourceExhausted: no space; training can go on without.
  static absl::StatusOr<std::unique_ptr<CheckpointCopy>> Begin(Store& store,
                                                               const CheckpointOptions& options);
  // Gives up if it is not done: waits for its transfers, releases the versions, removes the partial
  // checkpoint.
  ~CheckpointCopy();
  CheckpointCopy(const CheckpointCopy&) = delete;
  CheckpointCopy& operator=(const CheckpointCopy&) = delete;

  // Takes finished transfers on, at the lowest priority; true when the checkpoint stands under its name.
  // Costs the checksum of a tile for each tile that has arrived. An error (damage in the run, a full disk)
  // ends the copy; the run is not touched by it.
  absl::StatusOr<bool> Poll();

  uint64_t bytes_done() const { return bytes_done_; }
  uint64_t bytes_total() const;
  const std::string& path() const { return path_; }  // where it stands when done

 private:
  friend absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options);
  struct Lane {
    enum class Phase : uint8_t { kIdle, kReading, kWriting };
    TileIo io;
    std::byte* memory = nullptr;
    Phase phase = Phase::kIdle;
    uint32_t tile = 0;
  };
  enum class Phase : uint8_t { kCopying, kCommitting, kDone, kFailed };

  CheckpointCopy(Store& store, const CheckpointOptions& options, bool retained);
  static absl::StatusOr<std::unique_ptr<CheckpointCopy>> Start(Store& store, const CheckpointOptions& options,
                                                               bool retain);
  absl::StatusOr<bool> Advance();
  absl::Status AdvanceLane(Lane* lane);
  absl::Status Publish();
  const Record& source() const { return *record_; }

  Store& store_;
  CheckpointOptions options_;
  bool retained_;  // through Store::Retain; else the store stands still
  std::unique_ptr<Record> record_;
  std::string name_;
  std::string partial_;  // directory while it is written
  std::string path_;
  std::unique_ptr<Store> target_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  CommitIo commit_;
  Phase phase_ = Phase::kCopying;
  uint32_t next_tile_ = 0;
  uint32_t tiles_done_ = 0;
  uint64_t bytes_done_ = 0;
};

// A whole checkpoint at once, of a store of any number of slots that stands still meanwhile. Blocks.
absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options);

// Copies the committed version of every tile of `from` (a checkpoint) to `to`, freshly created with the same
// layout, and commits it there with the same step, updates and payload: how a run goes on from a checkpoint.
// Everything is verified on the way. `memory`: at least one padded tile. Blocks.
absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_H_
