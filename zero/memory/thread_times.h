// What this process's threads have had of the processors, and how many those are.
#ifndef PENSTOCK_ZERO_MEMORY_THREAD_TIMES_H_
#define PENSTOCK_ZERO_MEMORY_THREAD_TIMES_H_

#include <cstdint>
#include <map>

namespace penstock::zero {

// One for each processor that this process may use.
int DefaultIntraOpThreads();
// Of the optimizer, by default, in each of the `sharing` processes of one host that train together. Where a
// device computes the processors have little to do but updates: two are left to what moves. Else they
// compute.
int DefaultUpdateThreads(bool device_computes, int sharing);

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

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_THREAD_TIMES_H_
