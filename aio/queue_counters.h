// What a device queue counts, and how it notices that its device has become slow.
#ifndef PENSTOCK_AIO_QUEUE_COUNTERS_H_
#define PENSTOCK_AIO_QUEUE_COUNTERS_H_

#include <array>
#include <cstdint>
#include <string>

#include "aio/engine_core.h"
#include "aio/request.h"
#include "aio/stats.h"

namespace penstock::aio {

// Written by the queue's thread, read by any. Meanings: DeviceStats.
class QueueCounters {
 public:
  Counter read_bytes, write_bytes, saturated_bytes, pieces, fixed_pieces, bounced_pieces, read_modify_writes;
  Counter syscalls, short_transfers, retries, io_errors_retried, stuck_reports, queued_requests;

  void RequestEnded(const Request& request, Request::State end, int64_t now_ns);
  void PieceEnded(Op op, int64_t service_ns) {
    service_[static_cast<size_t>(op)].Record(static_cast<uint64_t>(service_ns));
  }
  // What is in flight, which stays so until the next completions; nothing where not busy.
  void InFlight(EngineCore& core, uint64_t bytes, bool busy, int64_t now_ns);

  // Everything that is counted here.
  void Snapshot(int64_t now_ns, DeviceStats& stats) const;

 private:
  struct ClassCounters {
    Counter requests, bytes, failed, cancelled;
    AtomicHistogram latency;
  };
  // Of one queue and of the engine's.
  struct Watch {
    bool on = false;
    Stopwatch own;
    void Set(bool now_on, int64_t now_ns, SharedStopwatch& shared);
  };

  std::array<std::array<ClassCounters, kPriorities>, kOps> classes_;
  std::array<AtomicHistogram, kOps> service_;
  Counter in_flight_, in_flight_peak_;
  Watch busy_, saturated_;
};

// Mean service time of windows of transfers, against the best window seen. The queue's thread only.
class SlowDeviceWatch {
 public:
  // A read or a write that succeeded. The text for the log where the device is much slower than it was at its
  // best, once a minute; else empty, and nothing is allocated.
  std::string Ended(Op op, int64_t service_ns, int64_t now_ns);

 private:
  struct Direction {
    uint64_t count = 0;
    int64_t sum_ns = 0;
    int64_t best_mean_ns = 0;
    int64_t told_ns = 0;
  };
  std::array<Direction, 2> directions_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_COUNTERS_H_
