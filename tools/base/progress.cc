#include "tools/base/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/write_all.h"
#include "tools/base/size.h"

namespace penstock::tools {
namespace {

double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Errors are ignored: progress is no result.
void WriteTo(int fd, std::string_view text) { (void)WriteAll(fd, text); }

}  // namespace

std::string FormatDuration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e12) return "-";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const int64_t days = whole / 86400;
  const int64_t hours = whole / 3600 % 24;
  const int64_t minutes = whole / 60 % 60;
  if (days > 0) return absl::StrFormat("%dd %02d:%02d", days, hours, minutes);
  if (hours > 0) return absl::StrFormat("%d:%02d:%02d", hours, minutes, whole % 60);
  return absl::StrFormat("%d:%02d", minutes, whole % 60);
}

std::string FormatCount(double value) {
  if (!std::isfinite(value) || value < 0) return "-";
  constexpr std::array<const char*, 5> kUnits = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (value >= (unit == 0 ? 999.5 : 999.95) && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.*f%s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

std::string FormatProgress(const ProgressSample& sample, int columns) {
  // In the order of the line; `rank` says in which order they go when the window is narrow (the highest
  // first).
  struct Part {
    std::string text;
    int rank;
  };
  std::vector<Part> parts;
  parts.push_back({absl::StrCat("step ", sample.step, "/", sample.steps), 0});
  if (!std::isnan(sample.loss)) parts.push_back({absl::StrFormat("loss %.4f", sample.loss), 1});
  if (!std::isnan(sample.tokens_per_second)) {
    parts.push_back({absl::StrCat(FormatCount(sample.tokens_per_second), " tok/s"), 3});
  }
  if (!std::isnan(sample.read_bytes_per_second)) {
    parts.push_back({absl::StrCat("read ", FormatBandwidth(sample.read_bytes_per_second)), 4});
  }
  if (!std::isnan(sample.write_bytes_per_second)) {
    parts.push_back({absl::StrCat("write ", FormatBandwidth(sample.write_bytes_per_second)), 4});
  }
  if (!sample.waits_for.empty()) parts.push_back({absl::StrCat("waits: ", sample.waits_for), 5});
  if (!std::isnan(sample.seconds_left)) {
    parts.push_back({absl::StrCat("left ", FormatDuration(sample.seconds_left)), 2});
  }

  const auto join = [&parts] {
    return absl::StrJoin(parts, "  ", [](std::string* out, const Part& part) { out->append(part.text); });
  };
  std::string line = join();
  for (int rank = 5; rank > 0 && columns > 0 && line.size() > static_cast<size_t>(columns); --rank) {
    std::erase_if(parts, [rank](const Part& part) { return part.rank == rank; });
    line = join();
  }
  if (columns > 0 && line.size() > static_cast<size_t>(columns)) line.resize(static_cast<size_t>(columns));
  return line;
}

Preparing::Preparing(bool quiet, int fd)
    : quiet_(quiet), terminal_(::isatty(fd) == 1), fd_(fd), begin_(MonotonicSeconds()) {}

void Preparing::Show(std::string_view what) {
  constexpr double kPlainInterval = 15;
  if (quiet_) return;
  const double now = MonotonicSeconds();
  if (!terminal_ && now - shown_.value_or(begin_) < kPlainInterval) return;
  shown_ = now;
  // Short enough for any terminal.
  constexpr size_t kMost = 70;
  const std::string text(what);
  WriteTo(fd_, terminal_ ? absl::StrCat("\r\x1b[K", text.substr(0, kMost), " ...") : text + " ...\n");
  open_ = terminal_;
}

void Preparing::Clear() {
  if (open_) WriteTo(fd_, "\r\x1b[K");
  open_ = false;
}

Progress::Progress() : Progress(Options{}) {}

Progress::Progress(Options options) : options_(std::move(options)) {
  terminal_ = options_.terminal.value_or(!options_.sink && ::isatty(options_.fd) == 1);
  if (!options_.clock) options_.clock = MonotonicSeconds;
}

Progress::~Progress() { Finish(); }

void Progress::Update(const ProgressSample& sample) {
  const std::lock_guard<std::mutex> lock(mutex_);
  newest_ = sample;
  newest_shown_ = false;
  if (options_.quiet) return;
  const double now = options_.clock();
  const double interval = terminal_ ? 1.0 / options_.redraw_per_second : options_.plain_interval_seconds;
  const bool due = !last_shown_ || now - *last_shown_ >= interval || sample.step == sample.steps;
  if (!due) return;
  last_shown_ = now;
  Draw(sample);
}

void Progress::Print(std::string_view line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool redraw = line_open_;
  // One write for all of it, so that no other process's output lands in the middle of a line.
  std::string text = redraw ? "\r\x1b[K" : "";
  text.append(line);
  text += '\n';
  Write(text);
  line_open_ = false;
  if (redraw && newest_) Draw(*newest_);
}

void Progress::Finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (options_.quiet || !newest_) return;
  if (!newest_shown_) Draw(*newest_);
  if (line_open_) Write("\n");
  line_open_ = false;
}

void Progress::Draw(const ProgressSample& sample) {
  newest_shown_ = true;
  if (!terminal_) {
    Write(FormatProgress(sample) + "\n");
    return;
  }
  // One column stays free: a character in the last one would wrap the line on many terminals.
  Write(absl::StrCat("\r", FormatProgress(sample, Columns() - 1), "\x1b[K"));
  line_open_ = true;
}

int Progress::Columns() const {
  if (options_.columns > 0) return options_.columns;
  constexpr int kUsual = 80;
  struct winsize size {};
  if (::ioctl(options_.fd, TIOCGWINSZ, &size) != 0 || size.ws_col < 2) return kUsual;
  return size.ws_col;
}

void Progress::Write(std::string_view text) {
  if (options_.sink) {
    options_.sink(text);
    return;
  }
  WriteTo(options_.fd, text);
}

}  // namespace penstock::tools
