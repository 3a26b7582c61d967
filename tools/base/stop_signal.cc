#include "tools/base/stop_signal.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "tools/base/cli.h"

namespace penstock::tools {
namespace {

// A repeat counts after a while only.
constexpr int64_t kRepeatNs = 1'500'000'000;
std::atomic<int> stop_signal{0};
std::atomic<int64_t> stopped_at_ns{0};
struct Line {
  char text[256] = {};
  size_t bytes = 0;
};
Line first_lines[2];  // of INT, TERM
Line last_line;

void WriteLine(const Line& line) {
  // Whoever does not read this stops no training.
  if (line.bytes > 0) (void)!write(STDERR_FILENO, line.text, line.bytes);
}

void OnStopSignal(int signal) {
  const int saved = errno;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ns = now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  int64_t first_ns = 0;
  if (stopped_at_ns.compare_exchange_strong(first_ns, now_ns)) {
    stop_signal.store(signal);
    WriteLine(first_lines[signal == SIGINT ? 0 : 1]);
  } else if (now_ns - first_ns >= kRepeatNs) {
    WriteLine(last_line);
    _exit(kExitFailed);
  }
  errno = saved;
}

void SetLine(const std::string& text, Line* line) {
  line->bytes = std::min(text.size(), sizeof(line->text));
  std::memcpy(line->text, text.data(), line->bytes);
}

}  // namespace

int StopSignal() { return stop_signal.load(); }

const char* StopSignalName(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

void CatchStopSignals(const std::string& what_stands, bool speaks) {
  if (speaks) {
    const std::string start = isatty(STDERR_FILENO) == 1 ? "\n" : "";
    for (const int signal : {SIGINT, SIGTERM}) {
      SetLine(absl::StrCat(start, StopSignalName(signal), ": stopping after this step; once more in ",
                           "two seconds or later stops at once, and leaves ", what_stands, "\n"),
              &first_lines[signal == SIGINT ? 0 : 1]);
    }
    SetLine(absl::StrCat(start, "stopped at once: ", what_stands, " stands\n"), &last_line);
  }
  struct sigaction action {};
  action.sa_handler = OnStopSignal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

NotedStopSignals::NotedStopSignals() {
  ::signal(SIGINT, OnStopSignal);
  ::signal(SIGTERM, OnStopSignal);
}

NotedStopSignals::~NotedStopSignals() {
  ::signal(SIGINT, SIG_DFL);
  ::signal(SIGTERM, SIG_DFL);
}

}  // namespace penstock::tools
