#include "tools/penstock/run_watch.h"

#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/base/cli.h"

namespace penstock::tools {

using News = zero::StuckOperation::News;

void RunWatch::Begin(const run::TrainLog* log, std::string what_stands, int64_t step) {
  log_ = log;
  what_stands_ = std::move(what_stands);
  step_ = step;
}

std::string RunWatch::LineOf(const zero::StuckOperation& operation) const {
  std::string line = absl::StrCat(rank_, zero::StuckText(operation));
  if (operation.news != News::kStuck) return line;
  return absl::StrCat(line, options_.hopeless_seconds > 0
                                ? absl::StrFormat("; the run ends itself after %g s of that, and leaves %s",
                                                  options_.hopeless_seconds, what_stands_)
                                : "; the run waits (penstock.watchdog_abort_seconds would end it)");
}

void RunWatch::Log(const zero::StuckOperation& operation, const std::string& line) const {
  if (log_ != nullptr)
    log_->AppendAside({{"step", step_.load()}, {"seconds", operation.seconds}, {"stuck", line}});
}

void RunWatch::Tell(const zero::StuckOperation& operation) {
  if (operation.news == News::kHopeless) End(operation);
  const std::string line = LineOf(operation);
  progress_.Print(line);
  Log(operation, line);
}

void RunWatch::End(const zero::StuckOperation& operation) {
  // Nothing from here on is waited for: who hangs on a drive may hang on the log's, or on a terminal.
  std::thread([] {
    sleep(2);
    _exit(kExitFailed);
  }).detach();
  const std::string line =
      absl::StrCat(LineOf(operation), "; ended by penstock.watchdog_abort_seconds: ", what_stands_,
                   " stands, --resume goes on from there");
  const std::string told =
      absl::StrCat(isatty(STDERR_FILENO) == 1 ? "\n" : "", "penstock train: ", line, "\n");
  (void)!write(STDERR_FILENO, told.data(), told.size());
  Log(operation, line);
  _exit(kExitFailed);
}

}  // namespace penstock::tools
