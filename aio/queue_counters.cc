#include "aio/queue_counters.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kWatchWindow = 64;  // transfers
constexpr int64_t kSlowFactor = 20;
constexpr int64_t kSlowNs = 50'000'000;  // slower than ever is no news below this
constexpr int64_t kSlowTellNs = 60'000'000'000;

}  // namespace

void QueueCounters::RequestEnded(const Request& request, Request::State end, int64_t now_ns) {
  ClassCounters& counters =
      classes_[static_cast<size_t>(request.op())][static_cast<size_t>(request.priority())];
  counters.requests.Add(1);
  counters.bytes.Add(request.done_bytes());
  if (end == Request::State::kFailed) counters.failed.Add(1);
  if (end == Request::State::kCancelled) counters.cancelled.Add(1);
  counters.latency.Record(static_cast<uint64_t>(std::max<int64_t>(0, now_ns - request.submit_ns())));
}

void QueueCounters::Watch::Set(bool now_on, int64_t now_ns, SharedStopwatch& shared) {
  if (now_on == on) return;
  on = now_on;
  own.Set(on, now_ns);
  shared.Set(on, now_ns);
}

void QueueCounters::InFlight(EngineCore& core, uint64_t bytes, bool busy, int64_t now_ns) {
  in_flight_.Set(bytes);
  if (bytes > in_flight_peak_.Get()) in_flight_peak_.Set(bytes);
  busy_.Set(busy, now_ns, core.busy);
  saturated_.Set(busy && bytes >= core.saturating_bytes_in_flight.load(std::memory_order_relaxed), now_ns,
                 core.saturated);
}

void QueueCounters::Snapshot(int64_t now_ns, DeviceStats& stats) const {
  for (size_t op = 0; op < kOps; ++op) {
    for (size_t priority = 0; priority < kPriorities; ++priority) {
      const ClassCounters& from = classes_[op][priority];
      ClassStats& to = stats.classes[op][priority];
      to.requests = from.requests.Get();
      to.bytes = from.bytes.Get();
      to.failed = from.failed.Get();
      to.cancelled = from.cancelled.Get();
      to.latency = from.latency.Snapshot();
    }
    stats.service[op] = service_[op].Snapshot();
  }
  stats.device_read_bytes = read_bytes.Get();
  stats.device_write_bytes = write_bytes.Get();
  stats.saturated_bytes = saturated_bytes.Get();
  stats.pieces = pieces.Get();
  stats.fixed_pieces = fixed_pieces.Get();
  stats.bounced_pieces = bounced_pieces.Get();
  stats.read_modify_writes = read_modify_writes.Get();
  stats.syscalls = syscalls.Get();
  stats.short_transfers = short_transfers.Get();
  stats.retries = retries.Get();
  stats.io_errors_retried = io_errors_retried.Get();
  stats.stuck_reports = stuck_reports.Get();
  stats.in_flight_bytes = in_flight_.Get();
  stats.peak_in_flight_bytes = in_flight_peak_.Get();
  stats.queued_requests = queued_requests.Get();
  stats.busy_ns = busy_.own.TotalNs(now_ns);
  stats.saturated_ns = saturated_.own.TotalNs(now_ns);
}

std::string SlowDeviceWatch::Ended(Op op, int64_t service_ns, int64_t now_ns) {
  Direction& watch = directions_[op == Op::kWrite ? 1 : 0];
  watch.sum_ns += service_ns;
  if (++watch.count < kWatchWindow) return "";
  const int64_t mean_ns = watch.sum_ns / static_cast<int64_t>(watch.count);
  watch.count = 0;
  watch.sum_ns = 0;
  if (watch.best_mean_ns == 0 || mean_ns < watch.best_mean_ns)
    watch.best_mean_ns = std::max<int64_t>(1, mean_ns);
  if (mean_ns < kSlowNs || mean_ns < kSlowFactor * watch.best_mean_ns) return "";
  if (watch.told_ns != 0 && now_ns - watch.told_ns < kSlowTellNs) return "";
  watch.told_ns = now_ns;
  return absl::StrFormat("has become slow: a %s block takes %.0f ms, %.0f times what it took at its best",
                         std::string(OpName(op)), static_cast<double>(mean_ns) * 1e-6,
                         static_cast<double>(mean_ns) / static_cast<double>(watch.best_mean_ns));
}

}  // namespace penstock::aio
