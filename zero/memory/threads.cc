#include "zero/memory/threads.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

template <typename Function>
Function Symbol(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

void SetIntraOpThreads(int threads) {
  at::set_num_threads(threads);
  if (auto set = Symbol<void (*)(int)>("openblas_set_num_threads")) set(threads);
}

int DefaultIntraOpThreads() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) > 0)
    return CPU_COUNT(&allowed);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int IntraOpThreads() { return at::get_num_threads(); }

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

BlasInfo DescribeBlas() {
  auto config = Symbol<char* (*)()>("openblas_get_config");
  if (config == nullptr) {
    return {at::hasMKL() ? "MKL" : "reference BLAS (20 times slower: install libopenblas0-pthread)",
            at::hasMKL()};
  }
  BlasInfo info{config(), true};
  if (auto parallel = Symbol<int (*)()>("openblas_get_parallel")) {
    constexpr const char* kKinds[] = {"one thread", "pthreads", "OpenMP"};
    const int kind = parallel();
    if (kind >= 0 && kind < 3) absl::StrAppend(&info.name, " (", kKinds[kind], ")");
  }
  return info;
}

}  // namespace penstock::zero
