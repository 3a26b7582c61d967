// The time that requests are stamped with: the machine's steady clock, or one that a test drives by hand.
#ifndef PENSTOCK_AIO_CLOCK_H_
#define PENSTOCK_AIO_CLOCK_H_

#include <atomic>
#include <cstdint>

namespace penstock::aio {

// Nanoseconds since an arbitrary start; never goes back. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowNs() const = 0;
};

// CLOCK_MONOTONIC (about 20 ns a call). One instance serves the whole process.
class SteadyClock final : public Clock {
 public:
  int64_t NowNs() const override;
  static const SteadyClock& Get();
};

// Stands still between AdvanceTo and AdvanceBy. A simulation shares one of these between the simulated disk
// and everything else that takes time, so that a whole run is one deterministic sequence of events.
class VirtualClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns_.load(std::memory_order_acquire); }

  // Moves to `ns` if that is later than now; an earlier time leaves the clock alone.
  void AdvanceTo(int64_t ns) {
    int64_t now = now_ns_.load(std::memory_order_acquire);
    while (now < ns && !now_ns_.compare_exchange_weak(now, ns)) {
    }
  }
  void AdvanceBy(int64_t ns) { AdvanceTo(NowNs() + ns); }

 private:
  std::atomic<int64_t> now_ns_{0};
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_CLOCK_H_
