#include "zero/engine/prediction_check.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace penstock::zero {

absl::Status CanPlanAgain(int world, OffloadDevice offload) {
  if (world > 1) {
    return absl::FailedPreconditionError(
        "of no effect over several ranks: they have one plan, and it stays as it was made at the start");
  }
  if (offload != OffloadDevice::kNvme) {
    return absl::FailedPreconditionError(
        "of no effect without offload to nvme: state in memory stays where it is");
  }
  return absl::OkStatus();
}

PredictionCheck::PredictionCheck(const Engine& engine, const tiering::Prediction& at_start,
                                 int64_t busy_bytes, bool plans_again, Report* report)
    : busy_bytes_(busy_bytes), report_(report), plans_again_(plans_again) {
  Begin(engine, at_start);
}

void PredictionCheck::Begin(const Engine& engine, const tiering::Prediction& prediction) {
  const EnginePlan& plan = engine.plan();
  seen_ = std::make_unique<tiering::RunPrediction>(plan.graph, plan.plan, plan.options.machine, busy_bytes_,
                                                   prediction);
}

bool PredictionCheck::Stepped(const StepResult& result) {
  if (!seen_->Stepped({.seconds = result.seconds, .deferred = result.speculative_share == 0})) return false;
  report_->Predicted(seen_->prediction());
  due_ = std::exchange(plans_again_, false) && seen_->beside().differs_much();
  return true;
}

bool PredictionCheck::Finish() {
  if (!seen_->Finish()) return false;
  report_->Predicted(seen_->prediction());
  return true;
}

absl::StatusOr<std::string> PredictionCheck::PlanAgain(Engine& engine, std::optional<int64_t> steps_left) {
  due_ = false;
  const tiering::RunPrediction::Beside beside = seen_->beside();
  const std::string said =
      absl::StrFormat("after step %d: a step was predicted to take %.3g s, and the first took %.3g s",
                      engine.step(), beside.predicted_seconds, beside.measured_seconds);
  const absl::StatusOr<PlannedAgain> again = engine.Replan({.graph = seen_->shown().graph,
                                                            .machine = seen_->shown().machine,
                                                            .measured_seconds = beside.measured_seconds,
                                                            .deferred_share = beside.deferred_share,
                                                            .steps_left = steps_left});
  RETURN_IF_ERROR(engine.usable());
  report_->PlannedAgain(engine, beside, again);
  if (!again.ok()) {
    Begin(engine, seen_->prediction());
    return absl::StrCat("not planned again ", said, "; ", std::string(again.status().message()));
  }
  if (!again->explained) {
    return absl::StrCat("not planned again ", said,
                        absl::StrFormat("; by the times and bandwidths that they showed it would be %.3g s, "
                                        "which does not explain them",
                                        again->seconds));
  }
  if (again->moved.empty()) {
    return absl::StrCat("planned again ", said,
                        absl::StrFormat("; everything stays where it is, and a step is predicted to take "
                                        "%.3g s",
                                        again->seconds));
  }
  Begin(engine, again->prediction);
  return absl::StrCat("planned again ", said,
                      absl::StrFormat("; a step is predicted to take %.3g s from here on, and %.3g s as it "
                                      "was: ",
                                      again->seconds, again->kept_seconds),
                      absl::StrJoin(again->moved, ", "));
}

}  // namespace penstock::zero
