// What a training left in files, read leniently: a report, a log and a trace of one run together.
#ifndef PENSTOCK_TOOLS_PAGES_RUN_FILES_H_
#define PENSTOCK_TOOLS_PAGES_RUN_FILES_H_

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/pages/trace_view.h"

namespace penstock::tools {

inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
// A number of `object`; kMissing where it is none.
double NumberOf(const nlohmann::json& object, const char* key);

// A `steps` entry of the report, or a line of the log; what is missing or null is NaN.
struct StepFigures {
  int64_t step = 0;
  double loss = kMissing, grad_norm = kMissing, lr = kMissing, tokens = kMissing;
  double seconds = kMissing, stall_io_seconds = kMissing, compute_seconds = kMissing;
  double nvme_read_bytes = kMissing, nvme_write_bytes = kMissing;
  bool loss_not_finite = false;  // written as null
  bool skipped = false, redone = false;
};

struct EvaluationFigures {
  int64_t step = 0;
  double loss = kMissing;
};

struct Run {
  std::string name;                                  // of the file, where that tells it from the others
  std::string run_id;                                // empty: not known
  nlohmann::json report = nlohmann::json::object();  // empty: there is only a log
  std::vector<StepFigures> steps;                    // in order: the log's where it has more
  std::vector<EvaluationFigures> evaluations;
  int64_t first_reported_step = 0, last_reported_step = 0;  // that the report has itself; a log may have more
  std::optional<TraceView> trace;

  // A number of the report, or of its "totals" and the like ("totals.tokens"); NaN where it is none.
  double Figure(const char* path) const;
  std::string Text(const char* key) const;  // "" where it is none
  // Whether the report's totals have this step: those of its process. A log may have steps of other ones.
  bool OfProcess(int64_t step) const { return step >= FirstOfProcess() && step <= last_reported_step; }
  int64_t FirstOfProcess() const;
};

// Each file is a report, a log or a trace, told by what is in it. A log joins the report of its run_id, or is
// a run of its own; a trace joins the report or log of its run_id, the one before it where several have it;
// one that names no run joins what stands before it. A log's last line may be torn. kInvalidArgument, which
// names the file: it cannot be read, it is none of these, a trace is of none of the runs, or a run has two.
absl::StatusOr<std::vector<Run>> ReadRuns(const std::vector<std::string>& paths);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_RUN_FILES_H_
