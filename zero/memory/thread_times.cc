#include "zero/memory/thread_times.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

namespace penstock::zero {

int DefaultIntraOpThreads() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) > 0)
    return CPU_COUNT(&allowed);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int DefaultUpdateThreads(bool device_computes, int sharing) {
  return device_computes ? std::max(1, DefaultIntraOpThreads() / sharing - 2) : 1;
}

ThreadTimes ThreadTimes::Now() {
  ThreadTimes now;
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end; !error && task != end;
       task.increment(error)) {
    const std::string id = task->path().filename().string();
    int thread = 0;
    Times times;
    std::ifstream file(task->path() / "schedstat");  // a thread may have ended meanwhile
    if (std::from_chars(id.data(), id.data() + id.size(), thread).ec == std::errc() &&
        file >> times.ran_ns >> times.waited_ns)
      now.threads_[thread] = times;
  }
  return now;
}

double ThreadTimes::LongestSince(const ThreadTimes& before, int64_t Times::*of) const {
  int64_t longest = 0;
  for (const auto& [thread, times] : threads_) {
    const auto then = before.threads_.find(thread);
    longest = std::max(longest, times.*of - (then != before.threads_.end() ? then->second.*of : 0));
  }
  return static_cast<double>(longest) * 1e-9;
}

}  // namespace penstock::zero
