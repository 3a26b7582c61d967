#include "base/process_mark.h"

#include <pthread.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace penstock {
namespace {

// Between this process and the one that was there first.
std::atomic<uint64_t> forks{0};

void CountFork() { forks.fetch_add(1, std::memory_order_relaxed); }

void HearOfForks() {
  static const bool heard = pthread_atfork(nullptr, nullptr, &CountFork) == 0;
  PENSTOCK_CHECK(heard, "there is no memory to hear of forks");
}

}  // namespace

ProcessMark::ProcessMark() {
  HearOfForks();
  forks_ = forks.load(std::memory_order_relaxed);
}

bool ProcessMark::here() const { return forks_ == forks.load(std::memory_order_relaxed); }

absl::Status ProcessMark::Check(absl::string_view what) const {
  if (here()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " belongs to the parent process: a forked child must make its own"));
}

}  // namespace penstock
