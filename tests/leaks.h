// What a process holds that it must give back: descriptors, threads, memory.
#ifndef PENSTOCK_TESTS_LEAKS_H_
#define PENSTOCK_TESTS_LEAKS_H_

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace penstock::tests {

inline int64_t Entries(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

struct Held {
  int64_t descriptors = Entries("/proc/self/fd");
  int64_t threads = Entries("/proc/self/task");
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
