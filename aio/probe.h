// What this machine offers to I/O, found by trying it: for `penstock env`, for error messages, for bug
// reports.
#ifndef PENSTOCK_AIO_PROBE_H_
#define PENSTOCK_AIO_PROBE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::aio {

// One feature: whether it is there, and, if not, why and what its lack costs.
struct Feature {
  std::string name;
  bool available = false;
  std::string detail;  // the reason, or what was seen
};

struct IoFeatures {
  std::string kernel;             // "6.18.44"
  std::vector<Feature> io_uring;  // ring modes, fixed buffers, fixed files, timed waits, polled I/O
  Feature io_uring_works;         // an engine on it moved bytes
  Feature libaio_works;
  std::vector<Feature> memory;       // hugetlb, transparent huge pages, locking
  uint64_t memlock_limit_bytes = 0;  // UINT64_MAX: none
  uint64_t aio_max_requests = 0;     // fs.aio-max-nr, for all processes together
  uint64_t aio_used_requests = 0;    // fs.aio-nr
  int numa_nodes = 1;
  std::string best_backend;  // what BackendKind::kAuto comes down to here
};
// Opens rings, contexts and small mappings and closes them again; a few milliseconds, no files.
IoFeatures ProbeIo();

struct DirectoryFeatures {
  std::string directory;
  std::string file_system;  // "ext4"
  std::string device;       // "vda"
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  Feature direct_io;                  // detail: alignment and where it is known from
  uint32_t memory_alignment = 0;      // of direct I/O; 0 where there is none
  uint32_t offset_alignment = 0;      // as the kernel reports it; the engine uses at least 4096
  uint32_t logical_sector_bytes = 0;  // 0 where the device has no queue of its own (network, memory)
  uint32_t physical_sector_bytes = 0;
  uint64_t max_transfer_bytes = 0;  // larger blocks are split by the kernel
  uint32_t queue_requests = 0;      // the kernel's queue depth
  int numa_node = -1;
  bool rotational = false;
  bool preallocation = false;  // fallocate works
  bool copy_on_write = false;  // overwriting in place costs an allocation each time
};
// Makes a small file without a name in the directory. Errors: the directory is missing or not writable.
absl::StatusOr<DirectoryFeatures> ProbeDirectory(const std::string& directory);

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_PROBE_H_
