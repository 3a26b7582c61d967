// What other threads hand to a device queue, and how the queue's thread sleeps until they do.
#ifndef PENSTOCK_AIO_QUEUE_INBOX_H_
#define PENSTOCK_AIO_QUEUE_INBOX_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "aio/device_queue.h"

namespace penstock::aio {

class DeviceQueue::Inbox {
 public:
  // A function that runs on the queue's thread, between two turns.
  using Call = void (*)(DeviceQueue&, void*);
  struct Delivery {
    Request* requests = nullptr;  // linked by next_, in order of arrival
    Call call = nullptr;          // to be run after these are taken over; then CallIsDone
    void* argument = nullptr;
  };

  // sleeper: the backend in which the queue's thread sleeps; null: the queue has no thread, and nobody
  // sleeps.
  explicit Inbox(Backend* sleeper) : sleeper_(sleeper) {}

  // Any thread.
  void Add(Request* first, Request* last, bool urgent);
  void RequestCancel();
  // Runs `call` on the queue's thread and returns when it is done. Not on the queue's thread.
  void RunOnQueue(Call call, void* argument);
  // True the first time. The queue's thread ends when everything is finished; a cancel is one of all that is
  // queued.
  bool Stop() { return !stopping_.exchange(true); }
  void Wake();

  // The queue's thread.
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  bool full() const { return full_.load(std::memory_order_acquire); }
  Delivery Take();
  void CallIsDone();
  // A request arrived with its cancel flag set.
  void NoteCancel() { cancels_.store(true, std::memory_order_relaxed); }
  // Whether a cancel was requested since the last call.
  bool TakeCancels() { return cancels_.exchange(false); }

  // Before the thread sleeps. Returns false if there is something to do instead. busy: only a demand, a
  // cancel or a call is worth a wake, the rest is found at the next turn without a system call. idle: no
  // request is unfinished.
  bool PrepareToSleep(bool busy, bool idle);
  void SleepWithoutBackend();  // after PrepareToSleep(false, ...)
  void EndSleep() { sleep_.store(Sleep::kAwake, std::memory_order_seq_cst); }

 private:
  enum class Sleep : uint8_t { kAwake, kIdle, kBusy };

  Backend* const sleeper_;
  std::mutex mutex_;
  RequestList requests_;
  Call call_ = nullptr;  // one at a time
  void* argument_ = nullptr;
  std::condition_variable call_done_;
  std::atomic<bool> full_{false};
  std::atomic<bool> cancels_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<Sleep> sleep_{Sleep::kAwake};
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_INBOX_H_
