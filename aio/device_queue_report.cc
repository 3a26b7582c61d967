// What a device queue tells: requests that are stuck, a device that has become slow, statistics.
#include <pthread.h>

#include <algorithm>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/device_queue.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kWatchWindow = 64;  // transfers
constexpr int64_t kSlowFactor = 20;
constexpr int64_t kSlowNs = 50'000'000;  // slower than ever is no news below this
constexpr int64_t kSlowTellNs = 60'000'000'000;

std::string DescribeRequest(const Request& request, int64_t now_ns) {
  const Request::State state = request.state();
  return absl::StrFormat("%s %s: offset %u, %u bytes, %u done, %s, %s for %.1f s",
                         std::string(OpName(request.op())).c_str(), request.file()->path().c_str(),
                         request.offset(), request.bytes(), request.done_bytes(),
                         std::string(PriorityName(request.priority())).c_str(),
                         state == Request::State::kQueued ? "queued" : "at the device",
                         static_cast<double>(now_ns - request.submit_ns()) * 1e-9);
}

}  // namespace

void DeviceQueue::WatchService(Op op, int64_t service_ns) {
  ServiceWatch& watch = watches_[op == Op::kWrite ? 1 : 0];
  watch.sum_ns += service_ns;
  if (++watch.count < kWatchWindow) return;
  const int64_t mean_ns = watch.sum_ns / static_cast<int64_t>(watch.count);
  watch.count = 0;
  watch.sum_ns = 0;
  if (watch.best_mean_ns == 0 || mean_ns < watch.best_mean_ns)
    watch.best_mean_ns = std::max<int64_t>(1, mean_ns);
  if (mean_ns < kSlowNs || mean_ns < kSlowFactor * watch.best_mean_ns) return;
  if (watch.told_ns != 0 && now_ns_ - watch.told_ns < kSlowTellNs) return;
  watch.told_ns = now_ns_;
  core_.Log(absl::StrFormat(
      "device %s has become slow: a %s block takes %.0f ms, %.0f times what it took at its best",
      device_name_, std::string(OpName(op)).c_str(), static_cast<double>(mean_ns) * 1e-6,
      static_cast<double>(mean_ns) / static_cast<double>(watch.best_mean_ns)));
}

void DeviceQueue::ReportStuck() {
  const int64_t limit_ns = core_.options.stuck_after_ms * 1'000'000;
  next_stuck_check_ns_ = now_ns_ + std::clamp<int64_t>(limit_ns / 4, 1'000'000, 1'000'000'000);
  std::vector<std::string> lines;
  {
    const std::lock_guard<std::mutex> lock(all_mutex_);
    for (Request* request = all_first_; request != nullptr; request = request->all_next_) {
      const int64_t age_ns = now_ns_ - request->submit_ns_;
      if (age_ns < limit_ns) break;  // the list is in order of submission
      if (request->reported_ns_ != 0 && age_ns < 2 * (request->reported_ns_ - request->submit_ns_)) continue;
      request->reported_ns_ = now_ns_;
      stuck_reports_.Add(1);
      if (lines.size() < 4) lines.push_back(DescribeRequest(*request, now_ns_));
    }
  }
  for (const std::string& line : lines) {
    core_.Log(absl::StrCat("device ", device_name_, " is stuck: ", line, "; ", in_flight_pieces_,
                           " transfers in flight"));
  }
}

void DeviceQueue::Describe(size_t limit, std::vector<std::string>& lines) const {
  const int64_t now_ns = core_.clock->NowNs();
  const std::lock_guard<std::mutex> lock(all_mutex_);
  for (const Request* request = all_first_; request != nullptr && lines.size() < limit;
       request = request->all_next_) {
    lines.push_back(DescribeRequest(*request, now_ns));
  }
}

DeviceStats DeviceQueue::Snapshot() const {
  const int64_t now_ns = core_.clock->NowNs();
  DeviceStats stats;
  if (assigned()) stats.device = device_name_;
  stats.backend = std::string(backend_->name());
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
  stats.device_read_bytes = device_read_bytes_.Get();
  stats.device_write_bytes = device_write_bytes_.Get();
  stats.saturated_bytes = saturated_bytes_.Get();
  stats.pieces = piece_count_.Get();
  stats.fixed_pieces = fixed_pieces_.Get();
  stats.bounced_pieces = bounced_pieces_.Get();
  stats.read_modify_writes = read_modify_writes_.Get();
  stats.syscalls = syscalls_.Get();
  stats.short_transfers = short_transfers_.Get();
  stats.retries = retries_.Get();
  stats.io_errors_retried = io_errors_retried_.Get();
  stats.stuck_reports = stuck_reports_.Get();
  stats.in_flight_bytes = in_flight_now_.Get();
  stats.peak_in_flight_bytes = in_flight_peak_.Get();
  stats.queued_requests = queued_requests_.Get();
  stats.busy_ns = busy_watch_.TotalNs(now_ns);
  stats.saturated_ns = saturated_watch_.TotalNs(now_ns);
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
