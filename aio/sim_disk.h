// A simulated disk in virtual time: a seed, a clock, files in memory, and everything that real disks do to
// their users.
//
//   VirtualClock clock;
//   SimDiskOptions options;  options.seed = 7;  options.clock = &clock;
//   SimDisk disk(options);
//   EngineOptions engine_options;  engine_options.backend = BackendKind::kSim;  engine_options.sim = &disk;
//   FileOptions file_options;  file_options.path = "/sim/tiles";  file_options.sim = &disk;  ...
//
// Model of time: a block takes latency, plus its bytes at the bandwidth of its direction; reads and writes
// share one device, so that blocks are served in order of arrival over `channels` channels whose bandwidths
// sum to the disk's. All times follow from the seed: one run is one sequence of events, whatever the machine.
//
// Model of faults, each counted in stats() so that a test can tell "survived" from "did not happen":
//   misaligned    address, offset or length off the alignment: EINVAL, as a real disk would (always enforced)
//   short         a transfer moves a part of what was asked, in whole sectors
//   EIO, ENOSPC   the transfer fails; ENOSPC also when the disk's capacity is used up
//   stall         a transfer takes `stall_ns` longer
//   torn          a write changes only some of its sectors and reports success
//   lost          a write reports success and changes nothing
//   misdirected   a write lands on another offset of the same file
//   crash         Crash(): writes in flight are dropped but for a seeded subset of their sectors. Files
//   opened before it
//                 fail with EIO for ever (reopen them), new ones cannot be opened until Restart()
// Rates are chances per transfer; FailNext and friends place single faults by hand.
//
//   process death EndProcess(): what was started is carried out, nothing else is; files opened before it fail
//   from then on. What was not synced stays as it is, to be lost by a later Crash().
// Power-loss mode: with `volatile_cache` completed writes are durable only after a sync (kSync,
// File::SyncData), and Crash() also drops a seeded subset of the sectors that were never synced. A sync that
// fails (FailNext) forgets what it should have written, as kernels do: it still reads back, and no later sync
// makes it durable. Only writing it again does.
//
// Threads: thread-safe, made for one. Ownership: outlives the engine and files that use it. Contents survive
// them, and survive Crash and Restart: that is what a test reopens.
#ifndef PENSTOCK_AIO_SIM_DISK_H_
#define PENSTOCK_AIO_SIM_DISK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/bytes.h"
#include "aio/clock.h"
#include "aio/request.h"

namespace penstock::aio {

struct SimFaultRates {
  double short_transfer = 0;
  double read_error = 0;   // EIO
  double write_error = 0;  // EIO
  double no_space = 0;     // ENOSPC on writes
  double stall = 0;
  double torn_write = 0;
  double lost_write = 0;
  double misdirected_write = 0;
};

struct SimDiskOptions {
  uint64_t seed = 1;
  VirtualClock* clock = nullptr;  // required
  std::string name = "sim0";      // the device name in statistics and errors
  double read_bytes_per_s = 3.0e9;
  double write_bytes_per_s = 3.0e9;
  int64_t latency_ns = 100'000;
  double latency_jitter = 0.1;  // of the latency, uniform
  int channels = 4;             // blocks served at once
  uint64_t capacity_bytes = 1ull << 40;
  uint32_t offset_alignment = 4096;
  uint32_t memory_alignment = 512;
  int64_t stall_ns = 50'000'000;
  bool volatile_cache = false;
  SimFaultRates rates;
};

struct SimDiskStats {
  uint64_t reads = 0, writes = 0, syncs = 0;
  uint64_t read_bytes = 0, write_bytes = 0;
  uint64_t misaligned = 0, short_transfers = 0, read_errors = 0, write_errors = 0, no_space = 0, stalls = 0;
  uint64_t torn_writes = 0, lost_writes = 0, misdirected_writes = 0;
  uint64_t crashes = 0, sectors_dropped_by_crash = 0;
  uint64_t allocated_bytes = 0;  // of all files, now
};

// An open file of the simulated disk.
struct SimFile;

class SimDisk {
 public:
  explicit SimDisk(const SimDiskOptions& options);
  ~SimDisk();
  SimDisk(const SimDisk&) = delete;
  SimDisk& operator=(const SimDisk&) = delete;

  // Files whose path begins with `directory` are on `other` from now on, a disk of its own with the same
  // clock, as behind a mount point. It outlives this one.
  void Mount(const std::string& directory, SimDisk* other);
  SimDisk* DiskOf(const std::string& path);

  // --- Placing faults
  // -------------------------------------------------------------------------------------------------
  void set_rates(const SimFaultRates& rates);
  // The next `count` transfers of this kind (of files whose path contains `path_part`) fail with `error`.
  void FailNext(Op op, int error, int count = 1, const std::string& path_part = "");
  // All transfers of this kind touching [offset, offset + bytes) of that file fail with EIO until
  // ClearBadRanges.
  void MarkBad(const std::string& path, uint64_t offset, uint64_t bytes);
  void ClearBadRanges();
  // Everything takes `factor` times as long from now on (1: as at first).
  void SlowDown(double factor);
  void Crash();
  void EndProcess();
  void Restart();  // after a Crash
  bool crashed() const;

  // --- Looking behind the engine's back
  // -------------------------------------------------------------------------------
  std::vector<std::string> ListFiles() const;
  bool Exists(const std::string& path) const;
  absl::StatusOr<std::string> Read(const std::string& path, uint64_t offset, uint64_t bytes) const;
  absl::Status Write(const std::string& path, uint64_t offset, std::string_view data);  // at once, fault-free
  absl::Status Remove(const std::string& path);
  absl::Status Rename(const std::string& from, const std::string& to);  // replaces, atomically

  SimDiskStats stats() const;
  const SimDiskOptions& options() const { return options_; }
  VirtualClock& clock() const { return *options_.clock; }

  // --- For File and the engine's backend
  // ------------------------------------------------------------------------------
  struct Transfer {
    SimFile* file = nullptr;
    Op op = Op::kRead;
    uint64_t offset = 0;
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    void* tag = nullptr;  // handed back with the completion
    int64_t result = 0;   // bytes, or -errno
    int64_t due_ns = 0;
  };
  absl::StatusOr<std::shared_ptr<SimFile>> OpenFile(const std::string& path, bool create, bool exclusive,
                                                    bool truncate);
  uint64_t FileBytes(const SimFile& file) const;
  absl::Status Resize(SimFile& file, uint64_t bytes);
  absl::Status Sync(SimFile& file);
  absl::Status Lock(SimFile& file, const void* owner);
  void Unlock(SimFile& file, const void* owner);
  // Starts a transfer now; it takes effect when it is due. Order among transfers in flight is the order of
  // due times.
  void Start(const Transfer& transfer);
  // Completes what is due at the clock's present time: at most `max` transfers, oldest first.
  size_t Reap(Transfer* out, size_t max);
  int64_t NextDueNs() const;  // INT64_MAX when nothing is in flight
  size_t in_flight() const;

 private:
  struct State;
  SimDiskOptions options_;
  std::unique_ptr<State> state_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_SIM_DISK_H_
