// What work takes by itself, measured while other work may have the processors.
#ifndef PENSTOCK_ZERO_COMPUTE_STOPWATCH_H_
#define PENSTOCK_ZERO_COMPUTE_STOPWATCH_H_

#include <algorithm>
#include <chrono>

#include "zero/memory/host_memory.h"
#include "zero/memory/thread_times.h"

namespace penstock::zero {

// Runs from its making on.
class Stopwatch {
 public:
  // `threads`: that work together.
  explicit Stopwatch(int threads = 1) : threads_(threads) {}

  struct Reading {
    double seconds = 0;
    bool disturbed = false;  // by other work, for a twentieth of the time or more
  };

  double Passed() const {  // everything in it
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  // Of work of this process's threads. Where it was disturbed, the time of the thread that worked the longest
  // counts: threads that share their work evenly, and sleep where they wait for each other, would have taken
  // that long alone. More threads than processors disturb each other, and a quota holds them up, in training
  // too: then everything counts.
  Reading Read() const {
    const double passed = Passed();
    if (threads_ > DefaultIntraOpThreads() || HasProcessorQuota()) return {passed, false};
    const ThreadTimes now = ThreadTimes::Now();
    const double waited = now.LongestWaitSince(times_);
    if (waited <= passed / 20) return {passed, false};
    return {std::min(now.LongestRunSince(times_), passed), true};
  }

 private:
  const int threads_;
  const ThreadTimes times_ = ThreadTimes::Now();
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_STOPWATCH_H_
