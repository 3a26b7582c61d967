// A device queue: everything of the engine that belongs to one block device. One thread owns the backend,
// cuts requests into pieces, keeps them in flight within the byte caps, continues short transfers, retries,
// and completes requests. On the simulated disk there is no thread: the thread that calls Engine::Poll or
// waits is the queue's thread for that moment.
//
//   Inbox      (queue_inbox.h)      requests, cancels and calls of other threads; the queue's sleep
//   Unfinished (queue_requests.h)   every request until it ends, to be described from any thread
//   Scheduler  (queue_scheduler.h)  which request's block goes to the device next, within the byte caps
//   Transfers  (queue_transfers.h)  blocks at the device: short ones continued, failed ones tried again
//   Files      (queue_files.h)      what the queue and its backend keep about a file
//   BouncePool (bounce_pool.h), QueueCounters (queue_counters.h)
//
// Internal to aio. Enqueue, RequestCancel, Describe, Snapshot and ForgetFile may be called from any thread;
// everything else runs on the queue's thread, the parts' functions too where their headers do not say else.
#ifndef PENSTOCK_AIO_DEVICE_QUEUE_H_
#define PENSTOCK_AIO_DEVICE_QUEUE_H_

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "aio/backend.h"
#include "aio/engine_core.h"
#include "aio/file_user.h"
#include "aio/piece.h"
#include "aio/queue_counters.h"

namespace penstock::aio {

class DeviceQueue final : public FileUser {
 public:
  DeviceQueue(EngineCore& core, std::unique_ptr<Backend> backend, bool threaded);
  ~DeviceQueue() override;

  // Starts the backend (on the queue's own thread if it has one) and says whether it works.
  absl::Status Start();
  // Cancels what is queued, waits for what is in flight, stops the thread and lets go of all files.
  void Stop();
  // After all queues of the engine have stopped: cancels what came in meanwhile.
  void CancelLate();

  // The device that this queue serves; taken by the first file. Under the engine's queue mutex.
  bool assigned() const { return assigned_.load(std::memory_order_acquire); }
  uint64_t device() const { return device_; }
  void Assign(const File& file);

  // A chain of requests linked by next_, already marked queued. `urgent`: one of them is a demand.
  void Enqueue(Request* first, Request* last, bool urgent);
  void RequestCancel();  // some pending request has its cancel flag set
  bool InCallbackOf(const Request* request) const {
    return current_callback_.load(std::memory_order_seq_cst) == request;
  }
  static bool InCallback(const EngineCore* core);  // this thread runs a callback of this engine

  // One turn: take over, cut, hand over, reap, complete. Returns requests finished. The queue's thread only
  // (the caller's, one at a time, if the queue has none).
  size_t Turn(bool may_block);
  int64_t NextEventNs() const { return backend_->NextEventNs(); }

  void ForgetFile(File& file) override;
  void Describe(size_t limit, std::vector<std::string>& lines) const;
  DeviceStats Snapshot() const;
  std::string_view backend_name() const { return backend_->name(); }
  uint64_t moved_bytes() const { return counters_.read_bytes.Get() + counters_.write_bytes.Get(); }

 private:
  // A FIFO through Request::next_. A request is in one at most.
  struct RequestList {
    Request* first = nullptr;
    Request* last = nullptr;
    bool empty() const { return first == nullptr; }
    void PushBack(Request* request);
    void Append(Request* chain, Request* chain_last);  // linked already
    Request* PopFront();
  };
  class Inbox;
  class Unfinished;
  class Scheduler;
  class Transfers;
  class Files;

  void ThreadMain(std::atomic<int>* started, absl::Status* start_status);
  void TakeInbox();
  void HandleCancels();
  void Dispatch();
  bool DispatchFrom(int direction);
  void CutShort(Request& request, bool cancelled, int error);
  void CompleteIfDone(Request& request);
  void EndPiece(Request& request, int error);
  size_t RunCallbacks();
  void ReportStuck();
  void BreakDown(int error);
  int64_t TimeoutNs() const;

  EngineCore& core_;
  std::unique_ptr<Backend> backend_;
  const bool threaded_;
  std::thread thread_;
  std::atomic<bool> assigned_{false};
  uint64_t device_ = 0;
  std::string device_name_;
  std::atomic<Request*> current_callback_{nullptr};

  QueueCounters counters_;
  std::unique_ptr<Inbox> inbox_;
  std::unique_ptr<Unfinished> unfinished_;
  std::unique_ptr<Files> files_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Transfers> transfers_;

  // The queue's thread only.
  RequestList finished_;
  std::vector<Completion> completions_;
  int broken_ = 0;  // errno that ended the backend
  int64_t now_ns_ = 0;
  int64_t next_stuck_check_ns_ = 0;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_DEVICE_QUEUE_H_
