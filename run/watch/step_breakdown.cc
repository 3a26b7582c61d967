#include "run/watch/step_breakdown.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace penstock::run {

using tiering::OpKind;

void StepBreakdown::Observe(const tiering::Op& op, double start_seconds, double end_seconds) {
  const double seconds = end_seconds - start_seconds;
  if (op.evaluates) return;
  if (op.kind == OpKind::kUpdateOnDevice || op.lane == tiering::Lane::kUpdate) {
    update_ += seconds;
  } else if (op.lane == tiering::Lane::kCompute) {
    (op.kind == OpKind::kForward ? forward_ : backward_) += seconds;
  }
}

void StepBreakdown::ObserveStall(tiering::Stall cause, double start_seconds, double end_seconds) {
  if (cause != tiering::Stall::kNone) waits_[static_cast<size_t>(cause)] += end_seconds - start_seconds;
}

std::string StepBreakdown::Line(int64_t step, double seconds) {
  std::string line = absl::StrFormat("step %d time (ms) | fwd: %.2f | bwd: %.2f | step: %.2f", step,
                                     1e3 * forward_, 1e3 * backward_, 1e3 * update_);
  for (size_t i = 0; i < waits_.size(); ++i) {
    if (waits_[i] <= 0) continue;
    absl::StrAppend(&line, " | wait ", std::string(tiering::StallName(static_cast<tiering::Stall>(i))),
                    absl::StrFormat(": %.2f", 1e3 * waits_[i]));
  }
  absl::StrAppend(&line, absl::StrFormat(" | all: %.2f", 1e3 * seconds));
  *this = StepBreakdown();
  return line;
}

}  // namespace penstock::run
