// What a process holds that it must give back: descriptors, threads, memory.
#ifndef PENSTOCK_TESTS_LEAKS_H_
#define PENSTOCK_TESTS_LEAKS_H_

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace penstock::tests {

inline int64_t Entries(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

// Those that the process started: io_uring's workers are the kernel's, which ends them when they have idled.
inline int64_t Threads() {
  int64_t threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    threads += name.starts_with("iou-") ? 0 : 1;
  }
  return threads;
}

// How many there are as soon as there are no more than `most`, or after ten seconds: the kernel lists a
// thread for a moment after it was joined.
inline int64_t ThreadsOnceAtMost(int64_t most) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int64_t threads = Threads();
  while (threads > most && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    threads = Threads();
  }
  return threads;
}

struct Held {
  int64_t descriptors = Entries("/proc/self/fd");
  int64_t threads = Threads();
  // Sanitizers keep what is freed, and find leaks themselves: 0.
  int64_t resident_bytes = [] {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    return int64_t{0};
#else
    int64_t pages = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    return resident * int64_t{sysconf(_SC_PAGESIZE)};
#endif
  }();
};

}  // namespace penstock::tests

#endif  // PENSTOCK_TESTS_LEAKS_H_
