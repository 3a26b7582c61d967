// What the device queues of one engine share, and the small parts that are read from any thread while they
// work: stopwatches, counters with one writer, and the meeting of waiters and queues.
//
// Internal to aio.
#ifndef PENSTOCK_AIO_ENGINE_CORE_H_
#define PENSTOCK_AIO_ENGINE_CORE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "aio/clock.h"
#include "aio/engine.h"
#include "aio/request.h"

namespace penstock::aio {

// A span of time that is switched on and off, seen from any thread.
class Stopwatch {
 public:
  void Set(bool on, int64_t now_ns);
  int64_t TotalNs(int64_t now_ns) const;

 private:
  mutable std::mutex mutex_;
  int64_t since_ns_ = 0;
  int64_t total_ns_ = 0;
  bool on_ = false;
};

// The same over several queues: on while any of them is.
class SharedStopwatch {
 public:
  void Set(bool on, int64_t now_ns);
  int64_t TotalNs(int64_t now_ns) const { return watch_.TotalNs(now_ns); }
  bool on() const { return count_.load(std::memory_order_relaxed) > 0; }

 private:
  std::mutex mutex_;
  std::atomic<int> count_{0};  // written under the mutex
  Stopwatch watch_;
};

// What the queues of one engine share.
struct EngineCore {
  EngineOptions options;
  const Clock* clock = nullptr;
  std::atomic<uint64_t> saturating_bytes_in_flight{0};
  std::atomic<uint64_t> read_cap_bytes{0};
  std::atomic<uint64_t> write_cap_bytes{0};
  std::atomic<uint64_t> pending{0};  // requests accepted and not finished
  SharedStopwatch busy;
  SharedStopwatch saturated;

  // Held by the thread that drives the queues in virtual time; a callback may destroy a file.
  std::recursive_mutex turn_mutex;

  // Waiters sleep here. One that waits for a single request leaves its address, so that queues wake it for
  // that one only; the others are counted, and woken after every batch of completions.
  std::array<std::atomic<const Request*>, 16> awaited{};
  std::atomic<int> awaited_count{0};
  std::atomic<int> waiters{0};
  bool IsAwaited(const Request* request) const;
  std::mutex wait_mutex;
  std::condition_variable wait_changed;
  void NotifyWaiters();

  std::mutex log_mutex;
  std::vector<std::string> fallbacks;  // under log_mutex
  void Log(std::string_view line);
  void NoteFallback(std::string_view line);  // logs and remembers it, once
};

// Registers a waiter for as long as it lives.
class WaiterGuard {
 public:
  WaiterGuard(EngineCore& core, const Request* awaited);
  ~WaiterGuard();
  WaiterGuard(const WaiterGuard&) = delete;
  WaiterGuard& operator=(const WaiterGuard&) = delete;

 private:
  EngineCore& core_;
  std::atomic<const Request*>* slot_ = nullptr;  // null: counted in `waiters`
};

// A counter with one writer: no locked instruction, readable from anywhere.
class Counter {
 public:
  void Add(uint64_t amount) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  void Set(uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  uint64_t Get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_ENGINE_CORE_H_
