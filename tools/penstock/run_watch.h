// What a training tells of operations that are stuck (zero/lanes/watchdog.h): a line on stderr, a line in its
// log, and where penstock.watchdog_abort_seconds says so, its end.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RUN_WATCH_H_
#define PENSTOCK_TOOLS_PENSTOCK_RUN_WATCH_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "run/watch/train_log.h"
#include "tools/base/progress.h"
#include "zero/lanes/stuck_operation.h"

namespace penstock::tools {

class RunWatch {
 public:
  // `rank`: who speaks, empty where there is only one.
  RunWatch(const zero::WatchOptions& options, std::string rank, Progress* progress)
      : options_(options), rank_(std::move(rank)), progress_(*progress) {}

  // Before the first step, from the caller's thread. `log` may be null. `what_stands`: "the last committed
  // step".
  void Begin(const run::TrainLog* log, std::string what_stands, int64_t step);
  // The log has its line.
  void Logged(int64_t step) { step_ = step; }
  // From any thread. Does not return where the operation is hopeless.
  void Tell(const zero::StuckOperation& operation);

 private:
  std::string LineOf(const zero::StuckOperation& operation) const;
  void Log(const zero::StuckOperation& operation, const std::string& line) const;
  [[noreturn]] void End(const zero::StuckOperation& operation);

  const zero::WatchOptions options_;
  const std::string rank_;
  Progress& progress_;
  const run::TrainLog* log_ = nullptr;
  std::string what_stands_;
  std::atomic<int64_t> step_{0};
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RUN_WATCH_H_
