#include "aio/engine.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "aio/backend.h"
#include "aio/device_queue.h"
#include "aio/sim_disk.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

constexpr size_t kQueuesMax = 64;

std::unique_ptr<Backend> MakeHostBackend(const EngineOptions& options, BackendKind kind) {
  if (options.backend_factory) return options.backend_factory();
  switch (kind) {
    case BackendKind::kAuto:
    case BackendKind::kIoUring:
      return MakeIoUringBackend();
    case BackendKind::kLibaio:
      return MakeLibaioBackend();
    case BackendKind::kThreads:
      return MakeThreadsBackend();
    case BackendKind::kNil:
      return MakeNilBackend();
    case BackendKind::kSim:
      return MakeSimBackend(options.sim);
  }
  return nullptr;
}

std::unique_ptr<Backend> MakeBackend(const EngineOptions& options, BackendKind kind) {
  std::unique_ptr<Backend> backend = MakeHostBackend(options, kind);
  if (backend == nullptr || options.device_transfers == nullptr || kind == BackendKind::kSim) return backend;
  return MakeDeviceBackend(std::move(backend), options.device_transfers);
}

// The next rung of the ladder; kAuto when there is none.
BackendKind NextRung(BackendKind kind) {
  if (kind == BackendKind::kIoUring) return BackendKind::kLibaio;
  if (kind == BackendKind::kLibaio) return BackendKind::kThreads;
  return BackendKind::kAuto;
}

absl::Status CheckOptions(const EngineOptions& options) {
  const auto range = [](std::string_view name, uint64_t value, uint64_t least, uint64_t most) {
    if (value >= least && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("engine: ", std::string(name), " is ", value, ", must be from ", least, " to ", most));
  };
  for (const absl::Status& status :
       {range("block_bytes", options.block_bytes, kSectorBytes, 64 * kMiB),
        range("max_blocks_in_flight", options.max_blocks_in_flight, 1, 4096),
        range("bounce_bytes", options.bounce_bytes, 64 * kKiB, 64 * kMiB),
        range("bounce_buffers", options.bounce_buffers, 1, 1024),
        range("worker_threads", static_cast<uint64_t>(options.worker_threads), 1, 1024),
        range("io_error_retries", static_cast<uint64_t>(options.io_error_retries), 0, 1000),
        range("max_read_bytes_in_flight", options.max_read_bytes_in_flight, 1, uint64_t{1} << 50),
        range("max_write_bytes_in_flight", options.max_write_bytes_in_flight, 1, uint64_t{1} << 50)}) {
    RETURN_IF_ERROR(status);
  }
  if (!IsAligned(options.block_bytes, kSectorBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("engine: block_bytes is ", options.block_bytes, ", must be a multiple of 4096"));
  }
  if (!IsAligned(options.bounce_bytes, kSectorBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("engine: bounce_bytes is ", options.bounce_bytes, ", must be a multiple of 4096"));
  }
  if ((options.backend == BackendKind::kSim) != (options.sim != nullptr)) {
    return absl::InvalidArgumentError("engine: the sim backend and a simulated disk go together");
  }
  for (const Arena* arena : options.arenas) {
    if (arena == nullptr) return absl::InvalidArgumentError("engine: a null arena");
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view BackendName(BackendKind kind) {
  switch (kind) {
    case BackendKind::kAuto:
      return "auto";
    case BackendKind::kIoUring:
      return "io_uring";
    case BackendKind::kLibaio:
      return "libaio";
    case BackendKind::kThreads:
      return "threads";
    case BackendKind::kNil:
      return "nil";
    case BackendKind::kSim:
      return "sim";
  }
  return "unknown";
}

absl::StatusOr<BackendKind> ParseBackend(std::string_view name) {
  for (const BackendKind kind : {BackendKind::kAuto, BackendKind::kIoUring, BackendKind::kLibaio,
                                 BackendKind::kThreads, BackendKind::kNil, BackendKind::kSim}) {
    if (name == BackendName(kind)) return kind;
  }
  return absl::InvalidArgumentError(absl::StrCat("no I/O backend \"", std::string(name),
                                                 "\": auto, io_uring, libaio, threads, nil or sim"));
}

class Engine::Impl {
 public:
  explicit Impl(EngineOptions options) { core.options = std::move(options); }

  // A started queue of the present kind, or of a later rung. Under queue_mutex, or before anyone else knows
  // the engine.
  absl::StatusOr<std::unique_ptr<DeviceQueue>> StartQueue() {
    const EngineOptions& options = core.options;
    while (true) {
      absl::Status status;
      if (std::unique_ptr<Backend> backend = MakeBackend(options, kind); backend != nullptr) {
        auto queue = std::make_unique<DeviceQueue>(core, std::move(backend), /*threaded=*/!virtual_time);
        status = queue->Start();
        if (status.ok()) return queue;
      } else {
        status = absl::UnavailableError("not in this build");
      }
      const BackendKind next = NextRung(kind);
      if (options.backend_factory || next == BackendKind::kAuto ||
          !(options.allow_fallback || options.backend == BackendKind::kAuto)) {
        return absl::Status(status.code(),
                            absl::StrCat("I/O backend ", std::string(BackendName(kind)),
                                         " is not available: ", std::string(status.message())));
      }
      core.NoteFallback(absl::StrCat(std::string(BackendName(kind)), " is not available (",
                                     std::string(status.message()), "); using ",
                                     std::string(BackendName(next))));
      kind = next;
    }
  }

  DeviceQueue* FindQueue(const File& file) const {
    const size_t count = queue_count.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) {
      if (queues[i]->assigned() && queues[i]->device() == file.device()) return queues[i].get();
    }
    return nullptr;
  }

  absl::StatusOr<DeviceQueue*> QueueOf(const File& file) {
    if (DeviceQueue* const queue = FindQueue(file); queue != nullptr) return queue;
    const std::lock_guard<std::mutex> lock(queue_mutex);
    if (DeviceQueue* const queue = FindQueue(file); queue != nullptr) return queue;
    const size_t count = queue_count.load(std::memory_order_relaxed);
    for (size_t i = 0; i < count; ++i) {
      if (queues[i]->assigned()) continue;
      queues[i]->Assign(file);
      return queues[i].get();
    }
    if (count == kQueuesMax) return absl::ResourceExhaustedError("engine: files on more than 64 devices");
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue, StartQueue());
    queue->Assign(file);
    queues[count] = std::move(queue);
    queue_count.store(count + 1, std::memory_order_release);
    return queues[count].get();
  }

  absl::Status Check(const Request* request) const;
  void Reset(Request& request) const;

  // Waits until `ready` or the deadline; in virtual time moves the clock along.
  // `awaited`: the one request that matters, null if it is not one.
  template <typename Ready>
  bool WaitUntil(const Ready& ready, const Request* awaited, int64_t deadline_ns);
  int64_t Deadline(int64_t timeout_ms) const;

  size_t PollLocked();
  int64_t NextEventNs() const {
    int64_t next = kNever;
    const size_t count = queue_count.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) next = std::min(next, queues[i]->NextEventNs());
    return next;
  }

  bool InCallbackOf(const Request* request) const {
    const size_t count = queue_count.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) {
      if (queues[i]->InCallbackOf(request)) return true;
    }
    return false;
  }
  // Finished, and its callback has returned.
  // Sequentially consistent: the waiter has registered before it looks, the queue looks for waiters after it
  // has finished the request, and one of them must see the other.
  bool Over(const Request* request) const {
    const Request::State state = request->state_.load(std::memory_order_seq_cst);
    return state != Request::State::kQueued && state != Request::State::kActive && !InCallbackOf(request);
  }

  EngineCore core;
  BackendKind kind = BackendKind::kIoUring;
  bool virtual_time = false;
  std::atomic<bool> shutting_down{false};
  mutable std::mutex queue_mutex;
  std::array<std::unique_ptr<DeviceQueue>, kQueuesMax> queues;
  std::atomic<size_t> queue_count{0};
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options) {
  RETURN_IF_ERROR(CheckOptions(options));
  auto impl = std::make_unique<Impl>(std::move(options));
  EngineCore& core = impl->core;
  if (core.options.backend != BackendKind::kAuto) impl->kind = core.options.backend;
  impl->virtual_time = core.options.backend == BackendKind::kSim;
  core.clock =
      impl->virtual_time ? static_cast<const Clock*>(&core.options.sim->clock()) : &SteadyClock::Get();
  core.saturating_bytes_in_flight = core.options.saturating_bytes_in_flight;
  core.read_cap_bytes = core.options.max_read_bytes_in_flight;
  core.write_cap_bytes = core.options.max_write_bytes_in_flight;
  // The first queue starts now and waits for its device: what does not work is known before there is any
  // file.
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue, impl->StartQueue());
  impl->queues[0] = std::move(queue);
  impl->queue_count = 1;
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::~Engine() {
  if (!made_in_.here()) {
    (void)impl_.release();  // its threads, and what they hold, are the parent's
    return;
  }
  impl_->shutting_down = true;
  const size_t count = impl_->queue_count;
  for (size_t i = 0; i < count; ++i) {
    if (impl_->virtual_time) {
      const std::lock_guard<std::recursive_mutex> lock(impl_->core.turn_mutex);
      impl_->queues[i]->Stop();
    } else {
      impl_->queues[i]->Stop();
    }
  }
  for (size_t i = 0; i < count; ++i) impl_->queues[i]->CancelLate();
}

absl::Status Engine::Impl::Check(const Request* request) const {
  if (request == nullptr) return absl::InvalidArgumentError("submit: a null request");
  const File* const file = request->file_;
  if (file == nullptr) return absl::InvalidArgumentError("submit: the request was never prepared");
  const auto refuse = [&](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat("submit: ", std::string(OpName(request->op_)), " ",
                                                   file->path(), ", offset ", request->offset_, ", ",
                                                   request->bytes_, " bytes: ", why...));
  };
  if (request->pending()) return refuse("still pending from before");
  if (request->offset_ > INT64_MAX || request->bytes_ > INT64_MAX - request->offset_) {
    return refuse("ends beyond the largest possible file offset");
  }
  if (request->op_ == Op::kWrite && file->read_only()) return refuse("the file was opened read-only");
  if (request->bytes_ != 0) {
    const Segment* const segments = request->segments();
    for (uint32_t i = 0; i < request->segment_count_; ++i) {
      if (segments[i].data == nullptr && segments[i].bytes != 0)
        return refuse("segment ", i, " has no memory");
    }
  }
  if (file->alignment().offset > core.options.bounce_bytes) {
    return refuse("its sectors of ", file->alignment().offset,
                  " bytes are larger than EngineOptions::bounce_bytes");
  }
  if ((file->sim() != nullptr) != virtual_time) {
    if (core.options.backend != BackendKind::kNil && !core.options.backend_factory) {
      return refuse(virtual_time ? "a real file on an engine with a simulated disk"
                                 : "a simulated file on an engine with a real backend");
    }
  }
  return absl::OkStatus();
}

void Engine::Impl::Reset(Request& request) const {
  request.cancel_.store(false, std::memory_order_relaxed);
  request.cut_short_ = false;
  request.cancelled_ = false;
  request.queued_ = false;
  request.tail_ = false;
  request.error_ = 0;
  request.pieces_in_flight_ = 0;
  request.cut_bytes_ = 0;
  request.cut_segment_ = 0;
  request.cut_segment_offset_ = 0;
  request.done_bytes_.store(0, std::memory_order_relaxed);
  request.start_ns_.store(0, std::memory_order_relaxed);
  request.complete_ns_ = 0;
  request.reported_ns_ = 0;
  request.slot_ = nullptr;
  request.next_ = nullptr;
}

absl::Status Engine::Submit(Request* request) { return Submit(std::span<Request* const>(&request, 1)); }

absl::Status Engine::Submit(std::span<Request* const> requests) {
  RETURN_IF_ERROR(made_in_.Check("this I/O engine"));
  if (impl_->shutting_down.load(std::memory_order_acquire)) {
    return absl::FailedPreconditionError("submit: the engine is shutting down");
  }
  // Everything that can fail comes first, so that either all are taken over or none is.
  const int64_t now_ns = impl_->core.clock->NowNs();
  for (size_t i = 0; i < requests.size(); ++i) {
    absl::Status status = impl_->Check(requests[i]);
    if (status.ok()) status = impl_->QueueOf(*requests[i]->file_).status();
    if (!status.ok()) {
      while (i-- > 0) requests[i]->state_.store(Request::State::kIdle, std::memory_order_release);
      return status;
    }
    impl_->Reset(*requests[i]);
    requests[i]->submit_ns_ = now_ns;
    // From here on the request counts as pending: one that is named twice is found by the check.
    requests[i]->state_.store(Request::State::kQueued, std::memory_order_release);
  }
  impl_->core.pending.fetch_add(requests.size(), std::memory_order_relaxed);
  // Runs of requests for one queue are handed over together. A request that was handed over may be finished
  // and gone.
  for (size_t i = 0; i < requests.size();) {
    DeviceQueue* const queue = impl_->FindQueue(*requests[i]->file_);
    Request* const first = requests[i];
    Request* last = first;
    bool urgent = first->priority_ == Priority::kDemand;
    for (++i; i < requests.size() && requests[i]->file_->device() == queue->device(); ++i) {
      urgent |= requests[i]->priority_ == Priority::kDemand;
      last->next_ = requests[i];
      last = requests[i];
    }
    queue->Enqueue(first, last, urgent);
  }
  return absl::OkStatus();
}

size_t Engine::Impl::PollLocked() {
  size_t finished = 0;
  const size_t count = queue_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    // A completion lets more be started, which may be due at once.
    while (const size_t now = queues[i]->Turn(false)) finished += now;
  }
  return finished;
}

template <typename Ready>
bool Engine::Impl::WaitUntil(const Ready& ready, const Request* awaited, int64_t deadline_ns) {
  if (ready()) return true;
  if (virtual_time) {
    const std::lock_guard<std::recursive_mutex> lock(core.turn_mutex);
    VirtualClock& clock = core.options.sim->clock();
    while (true) {
      PollLocked();
      if (ready()) return true;
      const int64_t next = NextEventNs();
      if (next > deadline_ns || next == kNever) {
        if (deadline_ns != kNever) clock.AdvanceTo(deadline_ns);
        return ready();
      }
      clock.AdvanceTo(next);
    }
  }
  WaiterGuard guard(core, awaited);
  std::unique_lock<std::mutex> lock(core.wait_mutex);
  if (deadline_ns == kNever) {
    core.wait_changed.wait(lock, ready);
    return true;
  }
  const auto left = std::chrono::nanoseconds(std::max<int64_t>(0, deadline_ns - core.clock->NowNs()));
  return core.wait_changed.wait_for(lock, left, ready);
}

int64_t Engine::Impl::Deadline(int64_t timeout_ms) const {
  return timeout_ms < 0 ? kNever : core.clock->NowNs() + timeout_ms * 1'000'000;
}

namespace {

absl::Status RefuseWaitInCallback() {
  return absl::FailedPreconditionError(
      "wait: called from a completion callback, which would wait for itself");
}

}  // namespace

absl::Status Engine::Wait(Request* request, int64_t timeout_ms) {
  Request* const one[] = {request};
  return WaitAll(one, timeout_ms);
}

absl::Status Engine::WaitAll(std::span<Request* const> requests, int64_t timeout_ms) {
  RETURN_IF_ERROR(made_in_.Check("this I/O engine"));
  if (DeviceQueue::InCallback(&impl_->core)) return RefuseWaitInCallback();
  const int64_t deadline_ns = impl_->Deadline(timeout_ms);
  // The last first: it is likely to be the last to finish, and then the others cost no wake-up.
  for (size_t i = requests.size(); i-- > 0;) {
    const Request* const request = requests[i];
    if (impl_->WaitUntil([&] { return impl_->Over(request); }, request, deadline_ns)) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("wait: not finished after ", timeout_ms, " ms; pending: ", DescribePending(4)));
  }
  for (const Request* request : requests) {
    RETURN_IF_ERROR(request->status());
  }
  return absl::OkStatus();
}

size_t Engine::WaitSome(std::span<Request* const> requests, size_t count, int64_t timeout_ms) {
  const auto finished = [&] {
    return static_cast<size_t>(
        std::count_if(requests.begin(), requests.end(), [&](const Request* r) { return impl_->Over(r); }));
  };
  if (made_in_.here() && !DeviceQueue::InCallback(&impl_->core)) {
    const size_t wanted = std::min(count, requests.size());
    impl_->WaitUntil([&] { return finished() >= wanted; }, nullptr, impl_->Deadline(timeout_ms));
  }
  return finished();
}

absl::Status Engine::Drain(int64_t timeout_ms) {
  RETURN_IF_ERROR(made_in_.Check("this I/O engine"));
  if (DeviceQueue::InCallback(&impl_->core)) return RefuseWaitInCallback();
  const auto over = [&] { return impl_->core.pending.load(std::memory_order_seq_cst) == 0; };
  if (impl_->WaitUntil(over, nullptr, impl_->Deadline(timeout_ms))) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("drain: not finished after ", timeout_ms, " ms; pending: ", DescribePending(4)));
}

void Engine::Cancel(Request* request) {
  if (!made_in_.here() || request->file_ == nullptr || !request->pending()) return;
  DeviceQueue* const queue = impl_->FindQueue(*request->file_);
  if (queue == nullptr) return;
  request->cancel_.store(true, std::memory_order_relaxed);
  queue->RequestCancel();
}

void Engine::set_saturating_bytes_in_flight(uint64_t bytes) {
  impl_->core.saturating_bytes_in_flight = bytes;
}
uint64_t Engine::saturating_bytes_in_flight() const { return impl_->core.saturating_bytes_in_flight; }

void Engine::RaiseCapsToSaturation() {
  const uint64_t twice = std::min(2 * saturating_bytes_in_flight(), 64 * kMiB);
  set_max_in_flight(std::max(options().max_read_bytes_in_flight, twice),
                    std::max(options().max_write_bytes_in_flight, twice));
}

void Engine::set_max_in_flight(uint64_t read_bytes, uint64_t write_bytes) {
  impl_->core.read_cap_bytes = std::max<uint64_t>(1, read_bytes);
  impl_->core.write_cap_bytes = std::max<uint64_t>(1, write_bytes);
}

EngineStats Engine::stats() const {
  if (!made_in_.here()) return {};
  EngineStats stats;
  stats.backend = backend_name();
  {
    const std::lock_guard<std::mutex> lock(impl_->core.log_mutex);
    stats.fallbacks = impl_->core.fallbacks;
  }
  const size_t count = impl_->queue_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    if (impl_->queues[i]->assigned()) stats.devices.push_back(impl_->queues[i]->Snapshot());
  }
  const int64_t now_ns = impl_->core.clock->NowNs();
  stats.saturating_bytes_in_flight = saturating_bytes_in_flight();
  stats.busy_ns = impl_->core.busy.TotalNs(now_ns);
  stats.saturated_ns = impl_->core.saturated.TotalNs(now_ns);
  return stats;
}

uint64_t Engine::moved_bytes() const {
  uint64_t bytes = 0;
  const size_t count = impl_->queue_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) bytes += impl_->queues[i]->moved_bytes();
  return bytes;
}

const EngineOptions& Engine::options() const { return impl_->core.options; }
const Clock& Engine::clock() const { return *impl_->core.clock; }

std::string Engine::backend_name() const { return std::string(impl_->queues[0]->backend_name()); }

std::string Engine::DescribePending(size_t limit) const {
  if (!made_in_.here()) return "";
  std::vector<std::string> lines;
  const size_t count = impl_->queue_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) impl_->queues[i]->Describe(limit, lines);
  return absl::StrJoin(lines, "\n");
}

bool Engine::virtual_time() const { return impl_->virtual_time; }

size_t Engine::Poll() {
  if (!made_in_.here() || !impl_->virtual_time || DeviceQueue::InCallback(&impl_->core)) return 0;
  const std::lock_guard<std::recursive_mutex> lock(impl_->core.turn_mutex);
  return impl_->PollLocked();
}

int64_t Engine::NextEventNs() const {
  if (!made_in_.here() || !impl_->virtual_time) return kNever;
  const std::lock_guard<std::recursive_mutex> lock(impl_->core.turn_mutex);
  return impl_->NextEventNs();
}

void Engine::RunUntil(int64_t ns) {
  if (!made_in_.here() || !impl_->virtual_time || DeviceQueue::InCallback(&impl_->core)) return;
  const std::lock_guard<std::recursive_mutex> lock(impl_->core.turn_mutex);
  VirtualClock& clock = impl_->core.options.sim->clock();
  impl_->PollLocked();
  for (int64_t next = impl_->NextEventNs(); next <= ns; next = impl_->NextEventNs()) {
    clock.AdvanceTo(next);
    impl_->PollLocked();
  }
  clock.AdvanceTo(ns);
}

}  // namespace penstock::aio
