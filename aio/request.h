// One transfer between memory and a file: what is asked, how far it is, and how it ended.
//
//   Request request;
//   request.PrepareRead(file, /*offset=*/0, region.data(), region.bytes());
//   request.set_priority(Priority::kPrefetch);
//   absl::Status submitted = engine.Submit(&request);
//   ...
//   absl::Status status = engine.Wait(&request);
//
// Any offset, length and address will do, of any size (64 bit): the engine cuts a request into blocks, keeps
// as many of them in flight as pays, and brings ragged edges into shape. Multiples of the file's alignment
// are the fast path.
//
// States:  kIdle -> kQueued -> kActive -> kDone | kFailed | kCancelled, and back to kQueued when submitted
// again.
//          kQueued: accepted, no byte at the device yet.  kActive: at least one block was handed to the
//          kernel.
//
// Ownership: the caller owns the request, its memory, its segment array and its file until it is finished,
// and reuses it as often as it likes; nothing is allocated per request. Threads: prepare and submit from one
// thread at a time; state() and finished() may be called from any thread at any time, everything else only
// before submission or after completion. A write of part of a 4096-byte sector reads and rewrites that
// sector: such writes to one sector are put in order by the engine, within one engine.
#ifndef PENSTOCK_AIO_REQUEST_H_
#define PENSTOCK_AIO_REQUEST_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"

namespace penstock::aio {

class Engine;
class File;
class DeviceQueue;
struct FileSlot;

// In order of urgency; a class that is passed over again and again gets its turn all the same.
enum class Priority : uint8_t {
  kDemand = 0,      // somebody is waiting for it now
  kPrefetch = 1,    // will be needed
  kWriteBehind = 2  // must happen some time
};
inline constexpr int kPriorities = 3;
std::string_view PriorityName(Priority priority);  // "demand", "prefetch", "write-behind"

enum class Op : uint8_t { kRead = 0, kWrite = 1, kSync = 2 };
inline constexpr int kOps = 3;
std::string_view OpName(Op op);  // "read", "write", "sync"

// A run of memory. The segments of a request lie one after another in the file.
struct Segment {
  void* data = nullptr;
  uint64_t bytes = 0;
};

class Request {
 public:
  enum class State : uint8_t { kIdle, kQueued, kActive, kDone, kFailed, kCancelled };

  // Runs on the engine's I/O thread when the request is finished; must be short and must not block (no Wait).
  // It may submit requests, this one included, and it may destroy this one: the engine touches the request no
  // more. It must not throw. Wait() returns only after the callback has.
  using Callback = void (*)(Request& request, void* context);

  Request() = default;
  ~Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // What to do. Only while not submitted. Priority and callback are kept from the last use.
  void PrepareRead(File& file, uint64_t offset, void* data, uint64_t bytes);
  void PrepareWrite(File& file, uint64_t offset, const void* data, uint64_t bytes);
  // Scatter and gather: the segment array is not copied. Long, aligned segments move in place; short or
  // ragged ones are gathered through the engine's bounce buffers.
  void PrepareRead(File& file, uint64_t offset, std::span<const Segment> segments);
  void PrepareWrite(File& file, uint64_t offset, std::span<const Segment> segments);
  // fdatasync: on success every write that had completed before this was submitted survives a power cut. Not
  // a barrier.
  void PrepareSync(File& file);

  void set_priority(Priority priority) { priority_ = priority; }
  void set_on_complete(Callback callback, void* context) {
    callback_ = callback;
    context_ = context;
  }

  Op op() const { return op_; }
  Priority priority() const { return priority_; }
  File* file() const { return file_; }
  uint64_t offset() const { return offset_; }
  uint64_t bytes() const { return bytes_; }
  void* context() const { return context_; }

  State state() const { return state_.load(std::memory_order_acquire); }
  bool finished() const {
    const State now = state();
    return now == State::kDone || now == State::kFailed || now == State::kCancelled;
  }
  bool pending() const {
    const State now = state();
    return now == State::kQueued || now == State::kActive;
  }
  bool ok() const { return state() == State::kDone; }

  // How it ended; built here, so success costs nothing. The text has op, path, offset, length, bytes done and
  // errno, so the file must still be open. kCancelled; kOutOfRange (read past the end of the file);
  // kResourceExhausted (ENOSPC, EDQUOT, EFBIG); kDataLoss (EIO and its kin, retries included);
  // kFailedPrecondition (not finished; bad descriptor); and so on as IoErrorCode (aio/io_error.h) says.
  absl::Status status() const;
  // errno of the first failure, 0 if none; kEndOfFile where a read met the end of the file.
  int error_number() const { return error_; }
  static constexpr int kEndOfFile = -1;

  // Bytes known to be transferred. After a failure: a lower bound, not necessarily from the beginning.
  uint64_t done_bytes() const { return done_bytes_.load(std::memory_order_relaxed); }

  // Of the engine's clock: handed to Submit; first block handed to the device (0 if never); finished.
  int64_t submit_ns() const { return submit_ns_; }
  int64_t start_ns() const { return start_ns_.load(std::memory_order_relaxed); }
  int64_t complete_ns() const { return complete_ns_; }

 private:
  friend class Engine;
  friend class DeviceQueue;
  friend class Cutter;

  void Prepare(Op op, File& file, uint64_t offset, std::span<const Segment> segments);
  const Segment* segments() const { return segment_count_ == 1 && many_ == nullptr ? &one_ : many_; }

  // Set by the caller.
  File* file_ = nullptr;
  uint64_t offset_ = 0;
  uint64_t bytes_ = 0;
  Segment one_;
  const Segment* many_ = nullptr;
  uint32_t segment_count_ = 0;
  Op op_ = Op::kRead;
  Priority priority_ = Priority::kDemand;
  Callback callback_ = nullptr;
  void* context_ = nullptr;

  // Kept by the engine.
  std::atomic<State> state_{State::kIdle};
  std::atomic<bool> cancel_{false};
  bool cut_short_ = false;  // cancelled or failed: no further pieces
  bool cancelled_ = false;  // bytes were dropped because of Cancel
  bool queued_ = false;     // in the queue of its priority, not fully cut
  bool tail_ = false;       // fully cut, pieces at the device, and a demand
  int error_ = 0;
  uint32_t pieces_in_flight_ = 0;
  uint64_t cut_bytes_ = 0;  // how much of the request has been cut into pieces
  uint32_t cut_segment_ = 0;
  uint64_t cut_segment_offset_ = 0;
  std::atomic<uint64_t> done_bytes_{0};
  std::atomic<int64_t> start_ns_{0};
  int64_t submit_ns_ = 0;
  int64_t complete_ns_ = 0;
  int64_t reported_ns_ = 0;      // when it was last told to be stuck
  FileSlot* slot_ = nullptr;     // what the device queue keeps about the file
  Request* next_ = nullptr;      // in the device queue's inbox, then in the queue that it is cut from
  Request* all_next_ = nullptr;  // among all unfinished requests of the device queue, in order of submission
  Request* all_previous_ = nullptr;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_REQUEST_H_
