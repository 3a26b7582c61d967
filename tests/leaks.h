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
  int64_t resident_bytes = [] {
    int64_t pages = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    return resident * sysconf(_SC_PAGESIZE);
  }();
};

}  // namespace penstock::tests

#endif  // PENSTOCK_TESTS_LEAKS_H_
