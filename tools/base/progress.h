// The live progress of a run: one line redrawn in place on a terminal, plain lines elsewhere.
//
// On a terminal the line is redrawn at most `redraw_per_second` times a second and never wider than the
// window. Anywhere else (a file, a pipe, CI) a whole line is written at most every `plain_interval_seconds`,
// and always for the first and the last step. Quiet writes no progress at all; Print still writes.
//
// Safe from several threads. Errors of the sink are ignored: progress is no result.
#ifndef PENSTOCK_TOOLS_BASE_PROGRESS_H_
#define PENSTOCK_TOOLS_BASE_PROGRESS_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace penstock::tools {

// What a line shows. A value that is not known yet is NaN (or empty) and is left out.
struct ProgressSample {
  int64_t step = 0;   // last finished step
  int64_t steps = 0;  // the last step of the run
  double loss = 0;
  double tokens_per_second = 0;
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  std::string waits_for;    // what the step waits for most: "read", "write", "compute", ...
  double seconds_left = 0;  // estimate
};

// "step 12/200  loss 3.1416  5.2k tok/s  read 3.42 GB/s  write 1.20 GB/s  waits: read  left 1:02:03". Parts
// drop off the end's less important first (waits, bandwidths, tokens/s) until it fits `columns`; 0 means no
// limit.
std::string FormatProgress(const ProgressSample& sample, int columns = 0);

// "0:05", "12:34", "1:02:03", "3d 04:05"; "-" when not finite or negative.
std::string FormatDuration(double seconds);

// "950", "5.2k", "1.3M": for counts and rates; "-" when not finite or negative.
std::string FormatCount(double value);

// What goes on before there is a step to show: on a terminal one line that is redrawn and in the end cleared,
// a line every five seconds elsewhere, the first at once.
class Preparing {
 public:
  explicit Preparing(bool quiet, int fd = 2);
  ~Preparing() { Clear(); }
  Preparing(const Preparing&) = delete;
  Preparing& operator=(const Preparing&) = delete;
  void Show(std::string_view what);
  void Clear();

 private:
  const bool quiet_, terminal_;
  const int fd_;
  const double begin_;
  bool open_ = false;
  std::optional<double> shown_;
};

class Progress {
 public:
  struct Options {
    bool quiet = false;
    double redraw_per_second = 10;
    double plain_interval_seconds = 5;
    std::optional<bool> terminal = std::nullopt;           // empty: ask isatty of `fd`
    int fd = 2;                                            // where the lines go
    std::function<void(std::string_view)> sink = nullptr;  // instead of `fd`, for tests
    std::function<double()> clock = nullptr;               // seconds, monotonic; empty: CLOCK_MONOTONIC
    int columns = 0;  // 0: ask the terminal each time (80 where it does not say)
  };

  Progress();
  explicit Progress(Options options);
  ~Progress();  // Finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows the sample, or drops it when the last one was shown too recently. The last step (step == steps)
  // always shows.
  void Update(const ProgressSample& sample);

  // Writes a line of its own above the live line, also when quiet. `line` has no newline at its end.
  void Print(std::string_view line);

  // Leaves the live line as it stands, completed with the newest sample, and ends it with a newline.
  // Idempotent.
  void Finish();

 private:
  void Write(std::string_view text);
  int Columns() const;
  void Draw(const ProgressSample& sample);

  Options options_;
  bool terminal_ = false;
  std::mutex mutex_;
  std::optional<ProgressSample> newest_;
  bool newest_shown_ = false;
  bool line_open_ = false;
  std::optional<double> last_shown_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_PROGRESS_H_
