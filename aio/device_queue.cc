#include "aio/device_queue.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/io_error.h"
#include "aio/numa.h"
#include "aio/sim_disk.h"

namespace penstock::aio {
namespace {

// The engine and queue whose callback runs on this thread now.
thread_local const EngineCore* t_callback_of = nullptr;
thread_local const DeviceQueue* t_callback_queue = nullptr;

}  // namespace

void DeviceQueue::RequestQueue::PushBack(Request* request) {
  request->next_ = nullptr;
  if (first == nullptr) {
    first = request;
  } else {
    last->next_ = request;
  }
  last = request;
}

void DeviceQueue::RequestQueue::PopFront() {
  Request* const front = first;
  first = front->next_;
  if (first == nullptr) last = nullptr;
  front->next_ = nullptr;
}

DeviceQueue::DeviceQueue(EngineCore& core, std::unique_ptr<Backend> backend, bool threaded)
    : core_(core), backend_(std::move(backend)), threaded_(threaded) {
  const uint32_t count = core.options.max_blocks_in_flight;
  pieces_.resize(count);
  for (Piece& piece : pieces_) {
    piece.next = free_pieces_;
    free_pieces_ = &piece;
  }
  completions_.resize(count);
  sectors_.reserve(core.options.bounce_buffers);
  free_bounces_.reserve(core.options.bounce_buffers);
}

DeviceQueue::~DeviceQueue() {
  Stop();
  while (free_slots_ != nullptr) delete std::exchange(free_slots_, free_slots_->next);
}

bool DeviceQueue::InCallback(const EngineCore* core) { return t_callback_of == core; }

absl::Status DeviceQueue::Start() {
  if (!threaded_) {
    return backend_->Start({&core_.options, [this](std::string_view line) { core_.NoteFallback(line); }});
  }
  std::atomic<int> started{0};
  absl::Status status;
  try {
    thread_ = std::thread([this, &started, &status] { ThreadMain(&started, &status); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("the I/O thread could not be started: ", error.what()));
  }
  started.wait(0);
  if (!status.ok()) thread_.join();
  return status;
}

void DeviceQueue::ThreadMain(std::atomic<int>* started, absl::Status* start_status) {
  pthread_setname_np(pthread_self(), "penstock-aio");
  if (core_.options.nice != 0) {
    const auto id = static_cast<id_t>(syscall(SYS_gettid));
    if (setpriority(PRIO_PROCESS, id, core_.options.nice) != 0) {
      core_.NoteFallback(
          absl::StrCat("nice ", core_.options.nice, " for I/O threads refused: ", ErrnoText(errno)));
    }
  }
  *start_status =
      backend_->Start({&core_.options, [this](std::string_view line) { core_.NoteFallback(line); }});
  const bool ok = start_status->ok();
  if (!ok) backend_->Finish();
  started->store(1);
  started->notify_one();  // the last touch: the starter's stack may be gone
  if (!ok) return;
  while (!(stopping_.load(std::memory_order_acquire) && all_first_ == nullptr &&
           !inbox_full_.load(std::memory_order_acquire))) {
    Turn(true);
  }
  backend_->Finish();
}

void DeviceQueue::Stop() {
  if (stopping_.exchange(true)) return;
  if (threaded_) {
    if (!thread_.joinable()) return;
    cancels_.store(true);
    WakeUp();
    thread_.join();
  } else {
    while (all_first_ != nullptr || inbox_full_.load()) {
      if (Turn(false) == 0 && all_first_ != nullptr) {
        const int64_t next = backend_->NextEventNs();
        if (next == INT64_MAX) break;
        core_.options.sim->clock().AdvanceTo(next);
      }
    }
  }
  LetGoOfFiles();
}

void DeviceQueue::LetGoOfFiles() {
  while (slots_ != nullptr) {
    FileSlot* const slot = std::exchange(slots_, slots_->next);
    backend_->ForgetFile(slot->file->fd());
    {
      const std::lock_guard<std::mutex> lock(slot->file->users_mutex_);
      std::erase(slot->file->users_, this);
    }
    delete slot;
  }
}

// A callback on another queue may have got past the engine's check before the shutdown began.
void DeviceQueue::CancelLate() {
  if (!inbox_full_.load(std::memory_order_acquire)) return;
  cancels_.store(true);
  now_ns_ = core_.clock->NowNs();
  TakeInbox();
  HandleCancels();
  RunCallbacks();
  LetGoOfFiles();
}

void DeviceQueue::Assign(const File& file) {
  device_ = file.device();
  device_name_ = file.device_name();
  if (threaded_ && file.sim() == nullptr)
    PinThreadToNode(thread_.native_handle(), NodeOfDevice(device_name_));
  assigned_.store(true, std::memory_order_release);
}

void DeviceQueue::WakeUp() {
  if (!threaded_) return;
  if (sleep_.exchange(Sleep::kAwake) == Sleep::kAwake) return;
  backend_->Wake();
  sleep_.notify_one();  // without a backend it sleeps on this
}

void DeviceQueue::Enqueue(Request* first, Request* last, bool urgent) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (inbox_.first == nullptr) {
      inbox_.first = first;
    } else {
      inbox_.last->next_ = first;
    }
    inbox_.last = last;
    inbox_full_.store(true, std::memory_order_seq_cst);
  }
  // While the device is kept busy anyway, new work of no urgency is found at the next turn without a system
  // call.
  if (!urgent && sleep_.load(std::memory_order_seq_cst) == Sleep::kBusy) return;
  WakeUp();
}

void DeviceQueue::RequestCancel() {
  cancels_.store(true, std::memory_order_seq_cst);
  WakeUp();
}

void DeviceQueue::TakeInbox() {
  Request* request = nullptr;
  void (*control)(DeviceQueue&, void*) = nullptr;
  void* argument = nullptr;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    request = std::exchange(inbox_.first, nullptr);
    inbox_.last = nullptr;
    control = control_;
    argument = control_argument_;
    inbox_full_.store(false, std::memory_order_relaxed);
  }
  if (request != nullptr) {
    const std::lock_guard<std::mutex> lock(all_mutex_);
    for (Request* r = request; r != nullptr; r = r->next_) {
      // Its cancel may have come before it was here to be found.
      if (r->cancel_.load(std::memory_order_relaxed)) cancels_.store(true, std::memory_order_relaxed);
      r->all_next_ = nullptr;
      r->all_previous_ = all_last_;
      (all_last_ == nullptr ? all_first_ : all_last_->all_next_) = r;
      all_last_ = r;
    }
  }
  while (request != nullptr) {
    Request* const next = request->next_;
    request->slot_ = SlotOf(*request->file_);
    if (broken_ != 0 || request->bytes_ == 0) {
      request->next_ = nullptr;
      if (request->op_ == Op::kSync && broken_ == 0) {
        syncs_.PushBack(request);
        request->queued_ = true;
        queued_requests_.Add(1);
      } else {
        request->error_ = broken_;
        request->cut_short_ = true;
        CompleteIfDone(*request);
      }
    } else {
      QueueOf(*request).PushBack(request);
      request->queued_ = true;
      queued_requests_.Add(1);
    }
    request = next;
  }
  if (control != nullptr) {
    control(*this, argument);
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    control_ = nullptr;
    control_done_.notify_all();
  }
}

// Runs `call` on the queue's thread, between two turns, and waits for it.
void DeviceQueue::RunOnQueue(void (*call)(DeviceQueue&, void*), void* argument) {
  if (!threaded_) {
    const std::lock_guard<std::recursive_mutex> lock(core_.turn_mutex);
    call(*this, argument);
    return;
  }
  if (t_callback_queue == this) {
    call(*this, argument);
    return;
  }
  std::unique_lock<std::mutex> lock(inbox_mutex_);
  control_done_.wait(lock, [&] { return control_ == nullptr; });
  control_ = call;
  control_argument_ = argument;
  inbox_full_.store(true, std::memory_order_seq_cst);
  lock.unlock();
  WakeUp();
  lock.lock();
  control_done_.wait(lock, [&] { return control_ != call || control_argument_ != argument; });
}

FileSlot* DeviceQueue::SlotOf(File& file) {
  for (FileSlot* slot = slots_; slot != nullptr; slot = slot->next) {
    if (slot->file == &file) return slot;
  }
  FileSlot* slot = free_slots_;
  if (slot != nullptr) {
    free_slots_ = slot->next;
  } else {
    slot = new FileSlot();
  }
  *slot = FileSlot();
  slot->file = &file;
  if (broken_ == 0 && file.fd() >= 0) slot->registered = backend_->RegisterFile(file.fd());
  slot->next = slots_;
  slots_ = slot;
  const std::lock_guard<std::mutex> lock(file.users_mutex_);
  file.users_.push_back(this);
  return slot;
}

void DeviceQueue::ForgetFile(File& file) {
  RunOnQueue(
      [](DeviceQueue& queue, void* argument) {
        for (FileSlot** link = &queue.slots_; *link != nullptr; link = &(*link)->next) {
          FileSlot* const slot = *link;
          if (slot->file != argument) continue;
          if (slot->registered >= 0) queue.backend_->UnregisterFile(slot->registered);
          queue.backend_->ForgetFile(slot->file->fd());
          *link = slot->next;
          slot->next = queue.free_slots_;
          queue.free_slots_ = slot;
          return;
        }
      },
      &file);
}

// No further pieces of the request; what is at the device is waited for.
void DeviceQueue::FinishCut(Request& request, bool cancelled, int error) {
  if (error != 0 && request.error_ == 0) request.error_ = error;
  request.cancelled_ |= cancelled;
  request.cut_short_ = true;
}

void DeviceQueue::HandleCancels() {
  if (!cancels_.exchange(false)) return;
  const bool all = stopping_.load(std::memory_order_acquire);
  const auto sweep = [&](RequestQueue& queue) {
    Request* request = std::exchange(queue.first, nullptr);
    queue.last = nullptr;
    while (request != nullptr) {
      Request* const next = request->next_;
      if (all || request->cancel_.load(std::memory_order_relaxed)) {
        request->next_ = nullptr;
        request->queued_ = false;
        queued_requests_.Add(~uint64_t{0});
        FinishCut(*request, true, 0);
        CompleteIfDone(*request);
      } else {
        queue.PushBack(request);
      }
      request = next;
    }
  };
  for (auto& direction : queues_) {
    for (RequestQueue& queue : direction) sweep(queue);
  }
  sweep(syncs_);
}

void DeviceQueue::CompleteIfDone(Request& request) {
  if (request.pieces_in_flight_ != 0 || request.queued_) return;
  if (request.tail_) {
    request.tail_ = false;
    --demand_tails_;
  }
  finished_.PushBack(&request);
}

size_t DeviceQueue::RunCallbacks() {
  size_t count = 0;
  bool awaited = false;
  while (finished_.first != nullptr) {
    Request* const request = finished_.first;
    finished_.PopFront();
    ++count;
    request->complete_ns_ = now_ns_;
    const Request::State end = request->error_ != 0  ? Request::State::kFailed
                               : request->cancelled_ ? Request::State::kCancelled
                                                     : Request::State::kDone;
    ClassCounters& counters =
        classes_[static_cast<size_t>(request->op_)][static_cast<size_t>(request->priority_)];
    counters.requests.Add(1);
    counters.bytes.Add(request->done_bytes());
    if (end == Request::State::kFailed) counters.failed.Add(1);
    if (end == Request::State::kCancelled) counters.cancelled.Add(1);
    counters.latency.Record(static_cast<uint64_t>(std::max<int64_t>(0, now_ns_ - request->submit_ns_)));
    {
      const std::lock_guard<std::mutex> lock(all_mutex_);
      (request->all_previous_ == nullptr ? all_first_ : request->all_previous_->all_next_) =
          request->all_next_;
      (request->all_next_ == nullptr ? all_last_ : request->all_next_->all_previous_) =
          request->all_previous_;
    }
    const Request::Callback callback = request->callback_;
    void* const context = request->context_;
    if (callback == nullptr) {
      request->state_.store(end, std::memory_order_seq_cst);  // the last touch
    } else {
      current_callback_.store(request, std::memory_order_seq_cst);
      request->state_.store(end, std::memory_order_seq_cst);
      const EngineCore* const outer = std::exchange(t_callback_of, &core_);
      const DeviceQueue* const outer_queue = std::exchange(t_callback_queue, this);
      callback(*request, context);
      t_callback_of = outer;
      t_callback_queue = outer_queue;
      current_callback_.store(nullptr, std::memory_order_seq_cst);
    }
    core_.pending.fetch_sub(1, std::memory_order_seq_cst);
    awaited = awaited || core_.IsAwaited(request);
  }
  if (awaited || (count != 0 && core_.waiters.load(std::memory_order_seq_cst) != 0)) core_.NotifyWaiters();
  return count;
}

size_t DeviceQueue::Turn(bool may_block) {
  now_ns_ = core_.clock->NowNs();
  if (inbox_full_.load(std::memory_order_acquire)) TakeInbox();
  HandleCancels();
  Dispatch();
  UpdateWatches();
  size_t finished = RunCallbacks();

  int64_t timeout_ns = may_block && finished == 0 ? TimeoutNs() : 0;
  if (timeout_ns != 0) {
    sleep_.store(Batch() > 1 ? Sleep::kBusy : Sleep::kIdle, std::memory_order_seq_cst);
    const bool stop_now = stopping_.load(std::memory_order_seq_cst) && all_first_ == nullptr;
    if (inbox_full_.load(std::memory_order_seq_cst) || cancels_.load(std::memory_order_seq_cst) || stop_now) {
      timeout_ns = 0;
    }
  }
  if (broken_ != 0) {
    if (timeout_ns != 0) sleep_.wait(Sleep::kIdle, std::memory_order_seq_cst);
    sleep_.store(Sleep::kAwake, std::memory_order_seq_cst);
    now_ns_ = core_.clock->NowNs();
  } else if (timeout_ns != 0 || in_flight_pieces_ != 0) {
    const int64_t reaped = backend_->Run(completions_, timeout_ns == 0 ? 0 : Batch(), timeout_ns);
    sleep_.store(Sleep::kAwake, std::memory_order_seq_cst);
    now_ns_ = core_.clock->NowNs();
    syscalls_.Set(backend_->syscalls());
    if (reaped < 0) {
      BreakDown(static_cast<int>(-reaped));
    } else {
      for (int64_t i = 0; i < reaped; ++i) HandleCompletion(completions_[static_cast<size_t>(i)]);
    }
    if (!threaded_ && reaped > 0) {
      // In virtual time no next turn follows by itself: what these completions made room for starts now.
      Dispatch();
      UpdateWatches();
    } else if (in_flight_pieces_ == 0 && queued_requests_.Get() == 0) {
      UpdateWatches();  // before anyone is told
    }
    finished += RunCallbacks();
  } else {
    sleep_.store(Sleep::kAwake, std::memory_order_seq_cst);
  }
  if (core_.options.stuck_after_ms > 0 && now_ns_ >= next_stuck_check_ns_) ReportStuck();
  return finished;
}

// The backend is gone for good: everything that it had fails, and everything that comes after. It is not run
// again.
void DeviceQueue::BreakDown(int error) {
  broken_ = error;
  core_.Log(absl::StrCat("device ", device_name_, ": the ", std::string(backend_->name()),
                         " backend broke down: ", ErrnoText(error), "; its requests fail from now on"));
  retries_first_ = nullptr;
  for (FileSlot* slot = slots_; slot != nullptr; slot = slot->next) {
    slot->trims = nullptr;
    slot->trim_count = 0;
    slot->registered = -1;
  }
  for (Piece& piece : pieces_) {
    if (piece.request != nullptr) Retire(piece, error);
  }
  const auto fail_all = [&](RequestQueue& queue) {
    while (queue.first != nullptr) {
      Request* const request = queue.first;
      Unqueue(queue, *request);
      FinishCut(*request, false, error);
      CompleteIfDone(*request);
    }
  };
  for (auto& direction : queues_) {
    for (RequestQueue& queue : direction) fail_all(queue);
  }
  fail_all(syncs_);
}

}  // namespace penstock::aio
