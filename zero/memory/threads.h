// Threads and BLAS of LibTorch, chosen on purpose.
//
// LibTorch 1.13 has two pools that do not know each other: its own OpenMP threads (elementwise work, and
// oneDNN's bf16 products) and OpenBLAS's (fp32 products). Both are given the same number here; the number
// changes the bits of some sums, so a run records it and a resumed run restores it. Waiting threads should
// sleep, not spin, since updates and I/O need the cores too: programs set OMP_WAIT_POLICY=passive before
// libgomp reads it (tools/penstock/penstock.cc).
#ifndef PENSTOCK_ZERO_MEMORY_THREADS_H_
#define PENSTOCK_ZERO_MEMORY_THREADS_H_

#include <cstdint>
#include <map>
#include <string>

namespace penstock::zero {

// For this thread and for OpenBLAS. LibTorch's number is per thread: the engine sets it on its compute thread
// too.
void SetIntraOpThreads(int threads);
// One for each processor that this process may use.
int DefaultIntraOpThreads();
int IntraOpThreads();  // what LibTorch computes with on this thread

// How long each thread of this process has had a processor since it began, and how long it was ready to run
// while other work had them all: Linux's schedstat, of which nothing is known where the kernel does not say
// it. What the host of a virtual machine takes away is no wait; what a control group's quota takes away is
// one (HasProcessorQuota in zero/memory/host_memory.h).
class ThreadTimes {
 public:
  static ThreadTimes Now();
  // Of the thread that has the most of it since `before`, in seconds.
  double LongestRunSince(const ThreadTimes& before) const { return LongestSince(before, &Times::ran_ns); }
  double LongestWaitSince(const ThreadTimes& before) const { return LongestSince(before, &Times::waited_ns); }

 private:
  struct Times {
    int64_t ran_ns = 0, waited_ns = 0;
  };
  double LongestSince(const ThreadTimes& before, int64_t Times::*of) const;

  std::map<int, Times> threads_;
};

struct BlasInfo {
  std::string name;  // "OpenBLAS 0.3.21 SkylakeX (pthreads)"; "reference BLAS" where nothing better answers
  bool optimized = false;
};
BlasInfo DescribeBlas();

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_THREADS_H_
