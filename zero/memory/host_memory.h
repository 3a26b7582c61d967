// How much memory this process may still take: what the machine has free, and what every control group above
// the process leaves of its limit, whichever is least.
//
// A container, a service or a batch job runs in a control group. Its limit is usually far below what the
// machine has, /proc/meminfo does not show it, and who goes beyond it is killed without a word. Both versions
// are read (memory.max and memory.high; memory.limit_in_bytes), both at once where a machine has both, and
// every parent up to the root, or up to what a container sees of it.
#ifndef PENSTOCK_ZERO_MEMORY_HOST_MEMORY_H_
#define PENSTOCK_ZERO_MEMORY_HOST_MEMORY_H_

#include <cstdint>
#include <string>

namespace penstock::zero {

struct HostMemory {
  int64_t free_bytes = 0;   // page cache that can be dropped counts as free
  int64_t limit_bytes = 0;  // of what bounds free_bytes: of the control group, or all memory of the machine
  // What bounds it, for people: "this machine", or the limit's file.
  std::string bound_by;
  bool is_cgroup = false;
  // The least limit beyond which somebody is killed, of all groups and of the machine; a neighbour may leave
  // less of another one free. memory.high is none: it slows down.
  int64_t hard_limit_bytes = 0;
  std::string hard_limit_by;
  // Huge pages that are reserved and free (vm.nr_hugepages): an arena of them is no group's memory.
  int64_t huge_page_bytes = 0;
  // What this process has already, which is no longer free and need not be found again.
  int64_t own_bytes = 0;
};

// `root`: where /proc and /sys/fs/cgroup are, for tests. Where nothing can be read, 4 GiB are taken to be
// free.
HostMemory FindHostMemory(const std::string& root = "");

// A control group above this process bounds its time on the processors (cpu.max, cpu.cfs_quota_us).
bool HasProcessorQuota(const std::string& root = "");

// What a process takes beside its budget, as a control group counts: code and LibTorch's tables, the heap,
// stacks, scratch of BLAS and oneDNN (which grows with the threads), buffers of the rings.
int64_t ProcessOverheadBytes(int threads);
// Of that, what no process does without.
int64_t LeastProcessOverheadBytes();

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_HOST_MEMORY_H_
