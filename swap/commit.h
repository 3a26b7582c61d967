// What makes a step real: the commit record, and the object that writes it without blocking anyone.
//
// A commit is one checksummed record that names the live slot, version and checksums of every tile, beside
// the owner's payload. It goes to the place that the last valid record does not stand in, in two copies.
// Until it is whole there, recovery finds the previous record, whose tiles nobody has touched; once it is
// whole, recovery finds this one. Nothing in between exists.
//
//   CommitIo io;                                        // owned by the caller, reused for every commit
//   io.set_on_complete(&WakeExecutor, executor);
//   absl::Status started = store->Commit(&io, {.step = 7, .updates = 7, .payload = json});
//   ... the next step's first reads may start; writes wait ...
//   if (io.finished()) absl::Status committed = store->FinishCommit(&io);   // on the executor's thread
//
// Stages on the I/O threads: [power: fdatasync of every file] -> record, two copies -> [power: fdatasync of
// the record's file] -> done.
#ifndef PENSTOCK_SWAP_COMMIT_H_
#define PENSTOCK_SWAP_COMMIT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "aio/request.h"
#include "swap/format.h"

namespace penstock::swap {

class Store;

// What the owner says about a commit.
struct CommitInfo {
  uint64_t step = 0;         // the step that this commit completes; a skipped one is committed too
  uint64_t updates = 0;      // optimizer updates applied so far; below `step` after skips
  std::string_view payload;  // JSON for a resumed run: schedule, loss scale, random state, data position,
                             // log line; at most StoreOptions::payload_capacity bytes. Copied; opaque here
  Uuid checkpoint{};         // Record::checkpoint
};

// What recovery found.
struct Recovered {
  uint64_t sequence = 0;  // commits made in this store so far
  uint64_t step = 0;
  uint64_t updates = 0;
  std::string payload;
  // Copies of superblock or record that are damaged and could be done without, one line each. Empty when all
  // is well.
  std::vector<std::string> damage;
  // A commit after this one that did not come to its end, as a kill or a power cut leaves it: one line for
  // each copy. The next commit writes over it.
  std::vector<std::string> cut_short;
};

// One commit in flight. Owned by the caller, who leaves it alone from Commit until it is finished and, if it
// has a callback, until that has returned; then it goes to FinishCommit, and may be reused.
class CommitIo {
 public:
  // Runs on an I/O thread; must be short, must not block and must not call the store.
  using Callback = void (*)(CommitIo& io, void* context);

  CommitIo() = default;
  CommitIo(const CommitIo&) = delete;
  CommitIo& operator=(const CommitIo&) = delete;

  void set_on_complete(Callback callback, void* context) {
    callback_ = callback;
    context_ = context;
  }
  // True once the last stage has ended, well or not; any thread.
  bool finished() const { return state_.load(std::memory_order_acquire) == State::kFinished; }
  bool pending() const { return state_.load(std::memory_order_acquire) == State::kPending; }

  uint64_t sequence() const { return sequence_; }
  uint64_t step() const { return step_; }
  // Bytes of one copy of the record, and the time that the commit took by the engine's clock (0 until
  // finished).
  uint64_t record_bytes() const { return record_bytes_; }
  int64_t duration_ns() const { return end_ns_ - begin_ns_; }

 private:
  friend class Store;
  enum class State : uint8_t { kIdle, kPending, kFinished };
  enum class Step : uint8_t { kSyncTiles, kWriteRecord, kSyncRecord, kDone };

  std::atomic<State> state_{State::kIdle};
  Callback callback_ = nullptr;
  void* context_ = nullptr;
  Store* store_ = nullptr;
  Step stage_ = Step::kDone;
  std::atomic<uint32_t> outstanding_{0};              // requests of the present stage that have not finished
  std::vector<std::unique_ptr<aio::Request>> syncs_;  // one a directory; made on first use
  std::array<aio::Request, 2> copies_;
  std::atomic<bool> stage_failed_{false};  // one of them did not end well
  Step failed_stage_ = Step::kDone;        // kDone: none
  absl::Status submit_error_;              // of a stage that could not even be submitted
  uint64_t sequence_ = 0;
  uint64_t step_ = 0;
  uint64_t record_bytes_ = 0;
  int64_t begin_ns_ = 0;
  int64_t end_ns_ = 0;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_COMMIT_H_
