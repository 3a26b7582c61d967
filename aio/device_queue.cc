#include "aio/device_queue.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "aio/numa.h"
#include "aio/queue_files.h"
#include "aio/queue_inbox.h"
#include "aio/queue_requests.h"
#include "aio/queue_scheduler.h"
#include "aio/queue_transfers.h"
#include "aio/sim_disk.h"

namespace penstock::aio {
namespace {

// The engine and queue whose callback runs on this thread now.
thread_local const EngineCore* t_callback_of = nullptr;
thread_local const DeviceQueue* t_callback_queue = nullptr;

}  // namespace

void DeviceQueue::RequestList::PushBack(Request* request) {
  request->next_ = nullptr;
  Append(request, request);
}

void DeviceQueue::RequestList::Append(Request* chain, Request* chain_last) {
  (first == nullptr ? first : last->next_) = chain;
  last = chain_last;
}

Request* DeviceQueue::RequestList::PopFront() {
  Request* const front = first;
  first = front->next_;
  if (first == nullptr) last = nullptr;
  front->next_ = nullptr;
  return front;
}

DeviceQueue::DeviceQueue(EngineCore& core, std::unique_ptr<Backend> backend, bool threaded)
    : core_(core),
      backend_(std::move(backend)),
      threaded_(threaded),
      inbox_(std::make_unique<Inbox>(threaded ? backend_.get() : nullptr)),
      unfinished_(std::make_unique<Unfinished>()),
      files_(std::make_unique<Files>(*this, *backend_)),
      scheduler_(std::make_unique<Scheduler>(core, counters_.queued_requests)),
      transfers_(std::make_unique<Transfers>(*this)),
      completions_(core.options.max_blocks_in_flight) {}

DeviceQueue::~DeviceQueue() { Stop(); }

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
  while (!(inbox_->stopping() && unfinished_->empty() && !inbox_->full())) Turn(true);
  backend_->Finish();
}

void DeviceQueue::Stop() {
  if (!inbox_->Stop()) return;
  if (threaded_) {
    if (!thread_.joinable()) return;
    inbox_->RequestCancel();
    thread_.join();
  } else {
    while (!unfinished_->empty() || inbox_->full()) {
      if (Turn(false) == 0 && !unfinished_->empty()) {
        const int64_t next = backend_->NextEventNs();
        if (next == INT64_MAX) break;
        core_.options.sim->clock().AdvanceTo(next);
      }
    }
  }
  files_->ForgetAll();
}

// A callback on another queue may have got past the engine's check before the shutdown began.
void DeviceQueue::CancelLate() {
  if (!inbox_->full()) return;
  inbox_->NoteCancel();
  now_ns_ = core_.clock->NowNs();
  TakeInbox();
  HandleCancels();
  RunCallbacks();
  files_->ForgetAll();
}

void DeviceQueue::Assign(const File& file) {
  device_ = file.device();
  device_name_ = file.device_name();
  if (threaded_ && file.sim() == nullptr)
    PinThreadToNode(thread_.native_handle(), NodeOfDevice(device_name_));
  assigned_.store(true, std::memory_order_release);
}

void DeviceQueue::Enqueue(Request* first, Request* last, bool urgent) { inbox_->Add(first, last, urgent); }

void DeviceQueue::RequestCancel() { inbox_->RequestCancel(); }

void DeviceQueue::TakeInbox() {
  const Inbox::Delivery delivery = inbox_->Take();
  if (unfinished_->Add(delivery.requests)) inbox_->NoteCancel();
  for (Request *request = delivery.requests, *next = nullptr; request != nullptr; request = next) {
    next = request->next_;
    request->slot_ = files_->SlotOf(*request->file_);
    if (broken_ != 0 || (request->bytes_ == 0 && request->op_ != Op::kSync)) {
      CutShort(*request, false, broken_);
    } else {
      scheduler_->Add(*request);
    }
  }
  if (delivery.call == nullptr) return;
  delivery.call(*this, delivery.argument);
  inbox_->CallIsDone();
}

void DeviceQueue::ForgetFile(File& file) {
  const auto forget = [](DeviceQueue& queue, void* closing) {
    queue.files_->Forget(*static_cast<File*>(closing));
  };
  if (!threaded_) {
    const std::lock_guard<std::recursive_mutex> lock(core_.turn_mutex);
    forget(*this, &file);
  } else if (t_callback_queue == this) {
    forget(*this, &file);
  } else {
    inbox_->RunOnQueue(forget, &file);
  }
}

void DeviceQueue::HandleCancels() {
  if (!inbox_->TakeCancels()) return;
  RequestList cancelled = scheduler_->Take(/*all=*/inbox_->stopping());
  while (!cancelled.empty()) CutShort(*cancelled.PopFront(), true, 0);
}

void DeviceQueue::Dispatch() {
  transfers_->Retry();
  while (Request* const request = scheduler_->NextSync()) {
    Piece* const piece = transfers_->Free();
    if (piece == nullptr) break;
    piece->kind = Piece::Kind::kSync;
    piece->op = Op::kSync;
    transfers_->Launch(*request, *piece);
    scheduler_->Remove(*request);
  }
  // One block of each direction in turn, so that neither fills all places.
  const int first = scheduler_->TakeTurn();
  for (bool any = true; any;) {
    any = DispatchFrom(first);
    any |= DispatchFrom(1 - first);
  }
  counters_.InFlight(core_, scheduler_->in_flight_bytes(), scheduler_->in_flight_pieces() != 0, now_ns_);
}

bool DeviceQueue::DispatchFrom(int direction) {
  Request* const request = scheduler_->Next(direction);
  Piece* const piece = request == nullptr ? nullptr : transfers_->Free();
  if (piece == nullptr) return false;
  piece->slot = request->slot_;
  Cutter::Next(*request, {core_.options.block_bytes, core_.options.bounce_bytes}, *piece);
  if (!scheduler_->HasRoom(*request, piece->bytes)) return false;
  const int error = piece->kind == Piece::Kind::kInPlace ? 0 : transfers_->PrepareBounce(*request, *piece);
  if (error != 0) {
    scheduler_->Remove(*request);
    CutShort(*request, false, error);
    return true;
  }
  if (transfers_->MustWait(*piece)) return false;
  Cutter::Take(*request, *piece);
  transfers_->Launch(*request, *piece);
  scheduler_->Cut(*request, piece->bytes);
  return true;
}

// No further pieces of the request; what is at the device is waited for.
void DeviceQueue::CutShort(Request& request, bool cancelled, int error) {
  if (error != 0 && request.error_ == 0) request.error_ = error;
  request.cancelled_ |= cancelled;
  request.cut_short_ = true;
  CompleteIfDone(request);
}

void DeviceQueue::CompleteIfDone(Request& request) {
  if (request.pieces_in_flight_ != 0 || request.queued_) return;
  scheduler_->Completed(request);
  finished_.PushBack(&request);
}

void DeviceQueue::EndPiece(Request& request, int error) {
  if (error == 0) {
    CompleteIfDone(request);
    return;
  }
  // A request with pieces in flight that still waits in a queue is that queue's first.
  if (request.queued_) scheduler_->Remove(request);
  CutShort(request, false, error);
}

size_t DeviceQueue::RunCallbacks() {
  size_t count = 0;
  bool awaited = false;
  while (!finished_.empty()) {
    Request* const request = finished_.PopFront();
    ++count;
    request->complete_ns_ = now_ns_;
    const Request::State end = request->error_ != 0  ? Request::State::kFailed
                               : request->cancelled_ ? Request::State::kCancelled
                                                     : Request::State::kDone;
    counters_.RequestEnded(*request, end, now_ns_);
    unfinished_->Remove(*request);
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
  if (inbox_->full()) TakeInbox();
  HandleCancels();
  Dispatch();
  size_t finished = RunCallbacks();

  const uint32_t batch = transfers_->has_retries() ? 1 : scheduler_->Batch();
  int64_t timeout_ns = may_block && finished == 0 ? TimeoutNs() : 0;
  if (timeout_ns != 0) {
    if (!inbox_->PrepareToSleep(/*busy=*/batch > 1, /*idle=*/unfinished_->empty())) timeout_ns = 0;
  }
  if (broken_ != 0) {
    if (timeout_ns != 0) inbox_->SleepWithoutBackend();
    inbox_->EndSleep();
    now_ns_ = core_.clock->NowNs();
  } else if (timeout_ns != 0 || scheduler_->in_flight_pieces() != 0) {
    const int64_t reaped = backend_->Run(completions_, timeout_ns == 0 ? 0 : batch, timeout_ns);
    inbox_->EndSleep();
    now_ns_ = core_.clock->NowNs();
    counters_.syscalls.Set(backend_->syscalls());
    if (reaped < 0) {
      BreakDown(static_cast<int>(-reaped));
    } else {
      for (int64_t i = 0; i < reaped; ++i) transfers_->Complete(completions_[static_cast<size_t>(i)]);
    }
    if (!threaded_ && reaped > 0) {
      // In virtual time no next turn follows by itself: what these completions made room for starts now.
      Dispatch();
    } else if (scheduler_->in_flight_pieces() == 0 && counters_.queued_requests.Get() == 0) {
      counters_.InFlight(core_, 0, false, now_ns_);  // before anyone is told
    }
    finished += RunCallbacks();
  } else {
    inbox_->EndSleep();
  }
  if (core_.options.stuck_after_ms > 0 && now_ns_ >= next_stuck_check_ns_) ReportStuck();
  return finished;
}

int64_t DeviceQueue::TimeoutNs() const {
  if (transfers_->has_retries()) return 0;
  if (unfinished_->empty()) return -1;
  if (scheduler_->in_flight_pieces() == 0) return 1'000'000;
  if (core_.options.stuck_after_ms <= 0) return -1;
  return std::clamp<int64_t>(next_stuck_check_ns_ - now_ns_, 1'000'000, 1'000'000'000);
}

// The backend is gone for good: everything that it had fails, and everything that comes after. It is not run
// again.
void DeviceQueue::BreakDown(int error) {
  broken_ = error;
  core_.Log(absl::StrCat("device ", device_name_, ": the ", std::string(backend_->name()),
                         " backend broke down: ", ErrnoText(error), "; its requests fail from now on"));
  files_->BackendIsGone();
  transfers_->FailAll(error);
  RequestList waiting = scheduler_->Take(/*all=*/true);
  while (!waiting.empty()) CutShort(*waiting.PopFront(), false, error);
}

void DeviceQueue::ReportStuck() {
  const int64_t limit_ns = core_.options.stuck_after_ms * 1'000'000;
  next_stuck_check_ns_ = now_ns_ + std::clamp<int64_t>(limit_ns / 4, 1'000'000, 1'000'000'000);
  for (const std::string& line : unfinished_->TellStuck(now_ns_, limit_ns, counters_.stuck_reports)) {
    core_.Log(absl::StrCat("device ", device_name_, " is stuck: ", line, "; ", scheduler_->in_flight_pieces(),
                           " transfers in flight"));
  }
}

void DeviceQueue::Describe(size_t limit, std::vector<std::string>& lines) const {
  unfinished_->Describe(core_.clock->NowNs(), limit, lines);
}

DeviceStats DeviceQueue::Snapshot() const {
  DeviceStats stats;
  if (assigned()) stats.device = device_name_;
  stats.backend = std::string(backend_->name());
  counters_.Snapshot(core_.clock->NowNs(), stats);
  clockid_t cpu_clock{};
  timespec cpu{};
  if (threaded_ && thread_.joinable() &&
      pthread_getcpuclockid(const_cast<std::thread&>(thread_).native_handle(), &cpu_clock) == 0 &&
      clock_gettime(cpu_clock, &cpu) == 0) {
    stats.cpu_ns = int64_t{cpu.tv_sec} * 1'000'000'000 + cpu.tv_nsec + backend_->WorkerCpuNs();
  }
  return stats;
}

}  // namespace penstock::aio
