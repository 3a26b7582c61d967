// Command lines on CLI11, with the manners of all our programs: exit code 2 for wrong arguments, one line on
// stderr that names the word and the nearest right one, help and version on stdout with exit code 0.
#ifndef PENSTOCK_TOOLS_BASE_CLI_H_
#define PENSTOCK_TOOLS_BASE_CLI_H_

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace penstock::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // the run failed: I/O, memory, data
inline constexpr int kExitWrong = 2;   // the arguments or the configuration are wrong

// Parses argv[1..] into `app`. Empty: the arguments are right, go on. Otherwise the program is to end with
// this code, and what there is to say has been said: help or version on `out`, or one line on `err` beginning
// with app.get_name().
std::optional<int> ParseFlags(CLI::App& app, int argc, const char* const* argv, std::ostream& out,
                              std::ostream& err);

// Its message, in which settings are spelt as flags (run::Spelt).
std::string MessageOf(const absl::Status& status);

// "PROGRAM: MESSAGE" as one line on `err`. Returns kExitWrong for what other arguments would mend:
// kInvalidArgument, kFailedPrecondition (a budget too small, a run in use, another run's directory) and
// kAlreadyExists; else kExitFailed.
int Fail(std::string_view program, const absl::Status& status, std::ostream& err);

// What a program says that the system gives no more memory, after its name.
inline constexpr std::string_view kNoMemory =
    ": the system gave this process no more memory: free some, raise its limit (ulimit -v), or give a "
    "smaller --host-memory; committed steps are safe\n";

// What `run` returns. What it throws, which is a bug, since errors are statuses, becomes one
// line on `err` that says what to report, and kExitFailed. So does std::bad_alloc, with a line that says what
// memory there is to be had.
int OrBug(const std::function<int()>& run, std::string_view program, std::string_view arguments,
          std::ostream& err);

// `text` with line breaks and other control characters as blanks.
std::string OneLine(std::string_view text);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_CLI_H_
