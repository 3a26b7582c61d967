// When work on a device's stream is over: reported from a thread of its own.
//
// An event that cannot be recorded does not undo what was enqueued before it. Then the stream itself is
// waited for: an error is reported when nothing of the work can touch its memory any more, and not before.
#ifndef PENSTOCK_ZERO_COMPUTE_STREAM_COMPLETIONS_H_
#define PENSTOCK_ZERO_COMPUTE_STREAM_COMPLETIONS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace penstock::zero {

// Calls back when what was enqueued on a stream up to a moment is over, in order, from a thread of its own.
// From any thread, with the device current.
//
// Events: the calls of a library: types Stream and Event, pointers; Enter(), once, on the thread;
// Create(Event*), Record(Event, Stream), Wait(Event), WaitForStream(Stream), which return an absl::Status;
// and Destroy(Event). A thread that waits must sleep: the cores are wanted for updates.
template <typename Events>
class StreamCompletions {
 public:
  using Stream = typename Events::Stream;
  using Event = typename Events::Event;
  using Done = std::function<void(absl::Status)>;

  explicit StreamCompletions(Events events) : events_(std::move(events)), thread_([this] { Work(); }) {}
  // After the last call back.
  ~StreamCompletions() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    there_.notify_all();
    thread_.join();
    for (Event event : free_) events_.Destroy(event);
  }
  StreamCompletions(const StreamCompletions&) = delete;
  StreamCompletions& operator=(const StreamCompletions&) = delete;

  // `done` gets `enqueued` if it is an error, else what the device says of the work.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): both are moved from, which is not seen in a template
  void Add(absl::Status enqueued, Stream stream, Done done) {
    Waiting added{.stream = stream, .event = nullptr, .status = std::move(enqueued), .done = std::move(done)};
    if (added.status.ok()) added.status = Record(stream, &added.event);
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(added));
    }
    there_.notify_one();
  }

 private:
  struct Waiting {
    Stream stream = nullptr;
    Event event = nullptr;  // null: the stream is waited for
    absl::Status status;    // why
    Done done;
  };

  absl::Status Record(Stream stream, Event* event) {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        *event = free_.back();
        free_.pop_back();
      }
    }
    if (*event == nullptr) {
      absl::Status status = events_.Create(event);
      if (!status.ok()) {
        *event = nullptr;
        return status;
      }
    }
    absl::Status status = events_.Record(*event, stream);
    if (!status.ok()) events_.Destroy(std::exchange(*event, nullptr));
    return status;
  }

  void Work() {
    events_.Enter();
    for (;;) {
      Waiting next;
      {
        std::unique_lock lock(mutex_);
        there_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
      if (next.event == nullptr) {
        next.status.Update(events_.WaitForStream(next.stream));
      } else {
        next.status.Update(events_.Wait(next.event));
        const std::lock_guard lock(mutex_);
        free_.push_back(next.event);
      }
      next.done(std::move(next.status));
    }
  }

  const Events events_;
  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<Waiting> waiting_;
  std::vector<Event> free_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_STREAM_COMPLETIONS_H_
