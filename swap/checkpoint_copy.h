// Writing a checkpoint on a thread of its own, while training goes on.
//
//   auto copy = CheckpointCopy::OfStore(store, options);  // after FinishCommit; holds its versions
//   (*copy)->Allow(2);                                     // now and then: so many tiles more, at leisure
//   if ((*copy)->finished()) absl::Status done = (*copy)->Finish();
//
// The pace is the caller's: no tile is touched before it was allowed. Transfers have the lowest priority, so
// that training's overtake them, as long as the copy keeps up with what is allowed; where it does not,
// because the drive is never idle, they take turns with training's, so that the last step does not pay for
// what those before it left. Checksums run on the copy's thread. Memory: one tile.
//
// A checkpoint appears under its name only when it is whole and durable: until then it is `.NAME.partial`.
// Then the same thread removes those that are kept no longer, piece by piece: a file system that frees
// gigabytes at once keeps training's writes waiting.
//
// Copying a store holds its committed versions (Store::Retain) until Finish. A store of three slots trains on
// as long as it likes meanwhile. One of two slots has room for one step: its tiles can be written once more,
// and refuse a second time (Store::WriteTile), so that the copy must be finished by then.
//
// Threads: OfStore, OfMemory, Finish and the destructor on the executor's thread; the others on any.
#ifndef PENSTOCK_SWAP_CHECKPOINT_COPY_H_
#define PENSTOCK_SWAP_CHECKPOINT_COPY_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/checkpoint.h"
#include "swap/store.h"

namespace penstock::swap {

// A tile on its way into a checkpoint; its memory belongs to the source until the next tile is asked for.
struct CheckpointTile {
  uint64_t version = 0;                          // above 0
  std::array<const void*, kMaxSegments> data{};  // padded, as Store::WriteTile wants them
  std::array<uint64_t, kMaxSegments> checksums{};
};

// What a checkpoint is made of. `fetch` runs on the copy's thread, tile after tile; whatever it gives stays
// as it is until the end of the copy. `target` is the checkpoint, whose checksums the tile must have;
// `priority` is that of its reads, if it needs any.
struct CheckpointSource {
  Layout layout;
  std::string identity;
  std::optional<Uuid> uuid;  // of the run; else random
  uint64_t step = 0;
  uint64_t updates = 0;
  std::string payload;
  std::function<absl::Status(const Store& target, uint32_t tile, aio::Priority priority, CheckpointTile* to)>
      fetch;
};

class CheckpointCopy {
 public:
  // Copies what `store` has committed, with the same uuid and the very checksums, verified on the way.
  // `options.memory` holds one padded tile. kFailedPrecondition: nothing committed, a commit in flight, a
  // version held already. Finish returns the errors of the copy's thread: kAlreadyExists: a checkpoint
  // of this step; kResourceExhausted: no space.
  static absl::StatusOr<std::unique_ptr<CheckpointCopy>> OfStore(Store& store,
                                                                 const CheckpointOptions& options);
  // Of state that no store has: what is in memory. `options.memory` is of no matter.
  static std::unique_ptr<CheckpointCopy> OfMemory(aio::Engine& engine, const CheckpointOptions& options,
                                                  CheckpointSource source);
  // Gives up if it is not finished: waits for the tile in flight and removes the partial checkpoint.
  ~CheckpointCopy();
  CheckpointCopy(const CheckpointCopy&) = delete;
  CheckpointCopy& operator=(const CheckpointCopy&) = delete;

  void Allow(uint32_t tiles);
  void AllowAll();
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Allows all, waits until no tile of the source is needed any more, and releases what was held. Finish
  // returns how it ended; where several ranks write one checkpoint, that waits for all of them, and this
  // does not.
  void FinishTiles();
  // Allows all, waits for the end and releases what was held. An error (damage in the run, a full disk) left
  // nothing behind, and did not touch the run.
  absl::Status Finish();

  double seconds() const;  // since it began, or until it ended
  uint64_t step() const { return source_.step; }
  uint32_t tiles() const { return static_cast<uint32_t>(source_.layout.tiles.size()); }
  uint32_t tiles_done() const { return tiles_done_.load(std::memory_order_relaxed); }
  const std::string& path() const { return path_; }  // where it stands when done

 private:
  CheckpointCopy(aio::Engine& engine, const CheckpointOptions& options, CheckpointSource source, Store* held);
  void Run();
  absl::Status Write();
  absl::Status WriteStore(const std::string& directory);
  absl::Status WriteTiles(Store& target);
  std::optional<aio::Priority> WaitForLeave();  // of the next tile; none: given up
  void Rest(double worked);                     // nine times as long, unless somebody waits for the end

  aio::Engine& engine_;
  const CheckpointOptions options_;
  const CheckpointSource source_;
  Store* held_;  // to be released; null: nothing is held
  const std::string name_;
  const std::string path_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;  // before finished_
  std::atomic<bool> finished_{false};
  std::atomic<uint32_t> tiles_done_{0};
  std::mutex mutex_;
  std::condition_variable leave_there_, over_;
  uint64_t allowed_ = 0;  // tiles, from the start
  uint64_t started_ = 0;
  bool given_up_ = false;
  bool awaited_ = false;     // by FinishTiles
  bool hurries_ = false;     // Finish waits
  bool tiles_over_ = false;  // all copied, or none will be any more
  absl::Status status_;      // the thread's, read after joining it
  std::thread thread_;       // last: it uses all of the above
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_CHECKPOINT_COPY_H_
