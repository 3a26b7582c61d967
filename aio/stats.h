// Counters and histograms of an engine: cheap enough to be always on (a few relaxed stores a block).
#ifndef PENSTOCK_AIO_STATS_H_
#define PENSTOCK_AIO_STATS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "aio/request.h"

namespace penstock::aio {

// Durations in buckets of 1/8 of a power of two: any percentile within 6.25% of the truth, 1 ns to 584 years,
// in 4 KiB.
class Histogram {
 public:
  static constexpr int kSubBits = 3;
  static constexpr int kBuckets = (64 - kSubBits + 1) << kSubBits;

  void Record(uint64_t ns) {
    ++buckets_[static_cast<size_t>(BucketOf(ns))];
    ++count_;
    sum_ns_ += ns;
    if (ns > max_ns_) max_ns_ = ns;
  }
  void Merge(const Histogram& other);
  // Removes what was in `earlier`, a snapshot of this same histogram; the maximum stays that of the whole
  // time.
  void Subtract(const Histogram& earlier);

  uint64_t count() const { return count_; }
  uint64_t max_ns() const { return max_ns_; }
  double mean_ns() const {
    return count_ == 0 ? 0 : static_cast<double>(sum_ns_) / static_cast<double>(count_);
  }
  // The upper edge of the bucket in which the given share (0.5, 0.99, 0.999) of the values is reached; 0 when
  // empty.
  uint64_t PercentileNs(double share) const;

  static int BucketOf(uint64_t ns);
  static uint64_t BucketUpperNs(int bucket);  // the largest value that falls into the bucket

 private:
  friend class AtomicHistogram;
  std::array<uint64_t, kBuckets> buckets_{};
  uint64_t count_ = 0;
  uint64_t sum_ns_ = 0;
  uint64_t max_ns_ = 0;
};

// The same with one writer and readers at any time.
class AtomicHistogram {
 public:
  void Record(uint64_t ns);
  Histogram Snapshot() const;

 private:
  std::array<std::atomic<uint64_t>, Histogram::kBuckets> buckets_{};
  std::atomic<uint64_t> sum_ns_{0};
  std::atomic<uint64_t> max_ns_{0};
};

struct ClassStats {
  uint64_t requests = 0;  // finished, however
  uint64_t bytes = 0;     // transferred for the caller (padding and read-modify-write reads not counted)
  uint64_t failed = 0;
  uint64_t cancelled = 0;
  Histogram latency;  // Submit to completion

  void Merge(const ClassStats& other);
};

struct DeviceStats {
  std::string device;   // "vda"
  std::string backend;  // "io_uring", "libaio", "threads", "nil", "sim"
  std::array<std::array<ClassStats, kPriorities>, kOps> classes;  // [op][priority]
  std::array<Histogram, kOps> service;                            // a block's time at the device

  uint64_t device_read_bytes = 0;  // handed over by the device, padding and read-modify-write included
  uint64_t device_write_bytes = 0;
  uint64_t saturated_bytes = 0;     // of both, those that arrived during EngineStats::saturated_ns
  uint64_t pieces = 0;              // blocks handed to the backend
  uint64_t fixed_pieces = 0;        // of these: from registered memory
  uint64_t bounced_pieces = 0;      // of these: through a bounce buffer, because ragged or short
  uint64_t read_modify_writes = 0;  // sectors read because only part of them was written
  uint64_t syscalls = 0;            // made by the I/O thread to submit, reap and wake
  uint64_t short_transfers = 0;     // continued
  uint64_t retries = 0;             // EINTR, EAGAIN, ENOMEM and, within a bound, EIO
  uint64_t io_errors_retried = 0;   // the EIO ones among them
  uint64_t stuck_reports = 0;
  uint64_t in_flight_bytes = 0;  // now
  uint64_t peak_in_flight_bytes = 0;
  uint64_t queued_requests = 0;  // now: accepted and not fully handed over
  int64_t busy_ns = 0;           // time with anything in flight
  int64_t saturated_ns = 0;      // time with in_flight_bytes at saturation or above
  int64_t cpu_ns = 0;  // CPU of the I/O thread (kernel work on its behalf included; workers of `threads` too)

  const ClassStats& Of(Op op, Priority priority) const {
    return classes[static_cast<size_t>(op)][static_cast<size_t>(priority)];
  }
  // What an engine before has counted of the same device comes to it; what is so now stays.
  void Merge(const DeviceStats& earlier);
  // All priorities of an op together.
  ClassStats Total(Op op) const;
  // I/O thread CPU per GiB moved; 0 when nothing was.
  double CpuMsPerGiB() const;
};

struct EngineStats {
  std::string backend;                 // of the first device; "io_uring" before any I/O
  std::vector<std::string> fallbacks;  // every step down the ladder, with its reason
  std::vector<DeviceStats> devices;    // in order of first use
  uint64_t saturating_bytes_in_flight = 0;
  int64_t busy_ns = 0;       // over all devices: time with anything in flight anywhere
  int64_t saturated_ns = 0;  // time with at least one device saturated

  // What an engine before has counted comes to it; what is so now, and the backend, stay.
  void Merge(const EngineStats& earlier);
  ClassStats Total(Op op) const;
  uint64_t DeviceReadBytes() const;
  uint64_t DeviceWriteBytes() const;
  uint64_t SaturatedBytes() const;  // read and written while at least one device was saturated
  uint64_t IoErrorsRetried() const;
  double CpuMsPerGiB() const;
  double saturated_seconds() const { return static_cast<double>(saturated_ns) * 1e-9; }
  double busy_seconds() const { return static_cast<double>(busy_ns) * 1e-9; }
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_STATS_H_
