// A device queue: everything of the engine that belongs to one block device. One thread owns the backend,
// cuts requests into pieces, keeps them in flight within the byte caps, continues short transfers, retries,
// and completes requests. On the simulated disk there is no thread: the thread that calls Engine::Poll or
// waits is the queue's thread for that moment.
//
// Internal to aio. Enqueue, Cancel, Wake, Describe, Snapshot and ForgetFile may be called from any thread;
// everything else runs on the queue's thread.
#ifndef PENSTOCK_AIO_DEVICE_QUEUE_H_
#define PENSTOCK_AIO_DEVICE_QUEUE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "aio/arena.h"
#include "aio/backend.h"
#include "aio/engine_core.h"
#include "aio/file_user.h"
#include "aio/piece.h"

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
  uint64_t moved_bytes() const { return device_read_bytes_.Get() + device_write_bytes_.Get(); }

 private:
  enum class Sleep : uint8_t {
    kAwake,
    kIdle,
    kBusy
  };  // kBusy: only a demand or a control message is worth a wake

  // A FIFO through Request::next_.
  struct RequestQueue {
    Request* first = nullptr;
    Request* last = nullptr;
    void PushBack(Request* request);
    void PopFront();
  };
  struct ClassCounters {
    Counter requests, bytes, failed, cancelled;
    AtomicHistogram latency;
  };

  // device_queue.cc
  void ThreadMain(std::atomic<int>* started, absl::Status* start_status);
  void WakeUp();
  void TakeInbox();
  void HandleCancels();
  void FinishCut(Request& request, bool cancelled, int error);
  void CompleteIfDone(Request& request);
  size_t RunCallbacks();
  void BreakDown(int error);
  FileSlot* SlotOf(File& file);
  void LetGoOfFiles();
  void RunOnQueue(void (*call)(DeviceQueue&, void*), void* argument);

  // device_queue_report.cc
  void ReportStuck();
  void WatchService(Op op, int64_t service_ns);

  // device_queue_dispatch.cc
  void Dispatch();
  bool DispatchFrom(int direction);
  int PickClass(int direction) const;
  bool MustWait(const Piece& piece) const;
  void Launch(Request& request, Piece& piece);
  void Unqueue(RequestQueue& queue, Request& request);
  RequestQueue& QueueOf(const Request& request);
  void SendToDevice(Piece& piece);
  void HandleCompletion(const Completion& completion);
  void AfterRead(Piece& piece, uint64_t moved);
  void AfterWrite(Piece& piece, uint64_t moved);
  void RetryOrFail(Piece& piece, int error, const std::string* why = nullptr);
  void Retire(Piece& piece, int error);
  void RunTrims(FileSlot& slot);
  void UpdateWatches();
  uint32_t Batch() const;
  int64_t TimeoutNs() const;
  int WhyNotBounced(const Request& request, const Piece& piece);
  bool MakeBounceBuffers();

  EngineCore& core_;
  std::unique_ptr<Backend> backend_;
  const bool threaded_;
  std::thread thread_;
  std::atomic<bool> assigned_{false};
  uint64_t device_ = 0;
  std::string device_name_;

  // Handed over by other threads.
  mutable std::mutex inbox_mutex_;
  RequestQueue inbox_;
  void (*control_)(DeviceQueue&, void*) = nullptr;  // one at a time
  void* control_argument_ = nullptr;
  std::condition_variable control_done_;
  std::atomic<bool> inbox_full_{false};
  std::atomic<bool> cancels_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<Sleep> sleep_{Sleep::kAwake};
  std::atomic<Request*> current_callback_{nullptr};

  // All unfinished requests, for descriptions; the queue's thread writes under the mutex.
  mutable std::mutex all_mutex_;
  Request* all_first_ = nullptr;
  Request* all_last_ = nullptr;

  // The queue's thread only, from here on.
  std::array<std::array<RequestQueue, kPriorities>, 2> queues_;  // [0 reads, 1 writes][priority]
  RequestQueue syncs_;
  std::array<std::array<uint64_t, kPriorities>, 2> passed_over_{};  // bytes that went before a waiting class
  int next_direction_ = 0;
  RequestQueue finished_;
  std::vector<Piece> pieces_;
  Piece* free_pieces_ = nullptr;
  Piece* retries_first_ = nullptr;  // to be sent again
  std::vector<Piece*> sectors_;     // one-sector writes in flight
  std::vector<Completion> completions_;
  std::vector<int> free_bounces_;
  std::unique_ptr<Arena> bounce_memory_;  // from the first bounced piece on
  uint64_t bounce_bytes_ = 0;
  FileSlot* slots_ = nullptr;
  FileSlot* free_slots_ = nullptr;
  std::array<uint64_t, 2> in_flight_bytes_{};
  uint32_t in_flight_pieces_ = 0;
  uint32_t demand_tails_ =
      0;  // demand requests that are fully cut and in flight: somebody waits for these very pieces
  bool busy_ = false;
  bool saturated_ = false;
  int broken_ = 0;  // errno that ended the backend
  int64_t now_ns_ = 0;
  int64_t next_stuck_check_ns_ = 0;
  uint64_t device_errors_ = 0;

  // Watching for a device that slows down: mean service time of windows of transfers, against the best window
  // seen.
  struct ServiceWatch {
    uint64_t count = 0;
    int64_t sum_ns = 0;
    int64_t best_mean_ns = 0;
    int64_t told_ns = 0;
  };
  std::array<ServiceWatch, 2> watches_;

  // Statistics, readable from any thread.
  std::array<std::array<ClassCounters, kPriorities>, kOps> classes_;
  std::array<AtomicHistogram, kOps> service_;
  Counter device_read_bytes_, device_write_bytes_, saturated_bytes_, piece_count_, fixed_pieces_,
      bounced_pieces_, read_modify_writes_;
  Counter syscalls_, wakes_, short_transfers_, retries_, io_errors_retried_, stuck_reports_;
  Counter in_flight_now_, in_flight_peak_, queued_requests_;
  Stopwatch busy_watch_, saturated_watch_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_DEVICE_QUEUE_H_
