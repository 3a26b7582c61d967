#include "aio/stats.h"

#include <algorithm>
#include <bit>

namespace penstock::aio {

int Histogram::BucketOf(uint64_t ns) {
  constexpr uint64_t kSub = 1u << kSubBits;
  if (ns < kSub) return static_cast<int>(ns);  // the first buckets are single values
  const int power = 63 - std::countl_zero(ns);
  const int sub = static_cast<int>((ns >> (power - kSubBits)) & (kSub - 1));
  return ((power - kSubBits + 1) << kSubBits) + sub;
}

uint64_t Histogram::BucketUpperNs(int bucket) {
  constexpr int kSub = 1 << kSubBits;
  if (bucket < kSub) return static_cast<uint64_t>(bucket);
  const int power = (bucket >> kSubBits) + kSubBits - 1;
  const uint64_t sub = static_cast<uint64_t>(bucket & (kSub - 1));
  const uint64_t width = uint64_t{1} << (power - kSubBits);
  return (uint64_t{1} << power) + sub * width + (width - 1);
}

void Histogram::Merge(const Histogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  sum_ns_ += other.sum_ns_;
  max_ns_ = std::max(max_ns_, other.max_ns_);
}

void Histogram::Subtract(const Histogram& earlier) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] -= std::min(buckets_[i], earlier.buckets_[i]);
  count_ -= std::min(count_, earlier.count_);
  sum_ns_ -= std::min(sum_ns_, earlier.sum_ns_);
}

uint64_t Histogram::PercentileNs(double share) const {
  if (count_ == 0) return 0;
  const double wanted = share * static_cast<double>(count_);
  uint64_t seen = 0;
  for (int i = 0; i < kBuckets; ++i) {
    seen += buckets_[static_cast<size_t>(i)];
    if (seen > 0 && static_cast<double>(seen) >= wanted) return std::min(BucketUpperNs(i), max_ns_);
  }
  return max_ns_;
}

namespace {

// One writer: a load and a store, no locked instruction.
void Add(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

void AtomicHistogram::Record(uint64_t ns) {
  Add(buckets_[static_cast<size_t>(Histogram::BucketOf(ns))], 1);
  Add(sum_ns_, ns);
  if (ns > max_ns_.load(std::memory_order_relaxed)) max_ns_.store(ns, std::memory_order_relaxed);
}

Histogram AtomicHistogram::Snapshot() const {
  Histogram result;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    result.buckets_[i] = buckets_[i].load(std::memory_order_relaxed);
    result.count_ += result.buckets_[i];
  }
  result.sum_ns_ = sum_ns_.load(std::memory_order_relaxed);
  result.max_ns_ = max_ns_.load(std::memory_order_relaxed);
  return result;
}

void ClassStats::Merge(const ClassStats& other) {
  requests += other.requests;
  bytes += other.bytes;
  failed += other.failed;
  cancelled += other.cancelled;
  latency.Merge(other.latency);
}

void DeviceStats::Merge(const DeviceStats& earlier) {
  for (size_t op = 0; op < classes.size(); ++op) {
    for (size_t p = 0; p < classes[op].size(); ++p) classes[op][p].Merge(earlier.classes[op][p]);
    service[op].Merge(earlier.service[op]);
  }
  device_read_bytes += earlier.device_read_bytes;
  device_write_bytes += earlier.device_write_bytes;
  saturated_bytes += earlier.saturated_bytes;
  pieces += earlier.pieces;
  fixed_pieces += earlier.fixed_pieces;
  bounced_pieces += earlier.bounced_pieces;
  read_modify_writes += earlier.read_modify_writes;
  syscalls += earlier.syscalls;
  short_transfers += earlier.short_transfers;
  retries += earlier.retries;
  io_errors_retried += earlier.io_errors_retried;
  stuck_reports += earlier.stuck_reports;
  peak_in_flight_bytes = std::max(peak_in_flight_bytes, earlier.peak_in_flight_bytes);
  busy_ns += earlier.busy_ns;
  saturated_ns += earlier.saturated_ns;
  cpu_ns += earlier.cpu_ns;
}

ClassStats DeviceStats::Total(Op op) const {
  ClassStats total;
  for (const ClassStats& one : classes[static_cast<size_t>(op)]) total.Merge(one);
  return total;
}

namespace {

double MsPerGiB(int64_t cpu_ns, uint64_t bytes) {
  if (bytes == 0) return 0;
  return static_cast<double>(cpu_ns) * 1e-6 / (static_cast<double>(bytes) / 1073741824.0);
}

}  // namespace

double DeviceStats::CpuMsPerGiB() const { return MsPerGiB(cpu_ns, device_read_bytes + device_write_bytes); }

void EngineStats::Merge(const EngineStats& earlier) {
  for (const DeviceStats& each : earlier.devices) {
    const auto same = std::find_if(devices.begin(), devices.end(), [&](const DeviceStats& device) {
      return device.device == each.device && device.backend == each.backend;
    });
    if (same != devices.end()) {
      same->Merge(each);
      continue;
    }
    devices.push_back(each);
    devices.back().in_flight_bytes = devices.back().queued_requests = 0;
  }
  busy_ns += earlier.busy_ns;
  saturated_ns += earlier.saturated_ns;
}

ClassStats EngineStats::Total(Op op) const {
  ClassStats total;
  for (const DeviceStats& device : devices) total.Merge(device.Total(op));
  return total;
}

uint64_t EngineStats::DeviceReadBytes() const {
  uint64_t total = 0;
  for (const DeviceStats& device : devices) total += device.device_read_bytes;
  return total;
}

uint64_t EngineStats::DeviceWriteBytes() const {
  uint64_t total = 0;
  for (const DeviceStats& device : devices) total += device.device_write_bytes;
  return total;
}

uint64_t EngineStats::SaturatedBytes() const {
  uint64_t total = 0;
  for (const DeviceStats& device : devices) total += device.saturated_bytes;
  return total;
}

uint64_t EngineStats::IoErrorsRetried() const {
  uint64_t total = 0;
  for (const DeviceStats& device : devices) total += device.io_errors_retried;
  return total;
}

double EngineStats::CpuMsPerGiB() const {
  int64_t cpu_ns = 0;
  for (const DeviceStats& device : devices) cpu_ns += device.cpu_ns;
  return MsPerGiB(cpu_ns, DeviceReadBytes() + DeviceWriteBytes());
}

}  // namespace penstock::aio
