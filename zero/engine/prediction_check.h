// A run's steps held against what was predicted of them: the prediction that they make themselves
// (tiering/simulate/run_prediction.h), in the report, and another plan where the first of them differ much
// from the one before (Engine::Replan). Called on the engine's thread.
//
//   PredictionCheck check(engine, at_start, busy_bytes, /*plans_again=*/true, &report);
//   ... check.Observe of every finished operation, check.Stepped after every step ...
//   if (check.due()) { ASSIGN_OR_RETURN(const std::string line, check.PlanAgain(engine, steps_left)); }
#ifndef PENSTOCK_ZERO_ENGINE_PREDICTION_CHECK_H_
#define PENSTOCK_ZERO_ENGINE_PREDICTION_CHECK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiering/program/op.h"
#include "tiering/simulate/run_prediction.h"
#include "tiering/simulate/simulate.h"
#include "zero/engine/engine.h"
#include "zero/engine/report.h"

namespace penstock::zero {

// Whether a plan can be made again by steps: of one rank, with its state on a drive. Else why not, for a line
// where it was asked for.
absl::Status CanPlanAgain(int world, OffloadDevice offload);

class PredictionCheck {
 public:
  // `at_start`: of the engine's plan. `busy_bytes`: in flight, which saturate the drive. `report` outlives
  // it, and the engine does. `plans_again`: once, where the first steps differ much.
  PredictionCheck(const Engine& engine, const tiering::Prediction& at_start, int64_t busy_bytes,
                  bool plans_again, Report* report);

  void Observe(const tiering::Op& op, double start_seconds, double end_seconds) {
    seen_->Observe(op, start_seconds, end_seconds);
  }
  // A step is over. True: it was the last of a window, and the run's prediction is another.
  bool Stepped(const StepResult& result);
  // The run is over. True: likewise.
  bool Finish();
  const tiering::RunPrediction& seen() const { return *seen_; }

  // The steps that were made are the first window, and differ much from their prediction: PlanAgain is called
  // before the next one.
  bool due() const { return due_; }
  // Returns what came of it in a line. An error that leaves the engine as it was is such a line, too.
  absl::StatusOr<std::string> PlanAgain(Engine& engine, std::optional<int64_t> steps_left);

 private:
  void Begin(const Engine& engine, const tiering::Prediction& prediction);

  const int64_t busy_bytes_;
  Report* const report_;
  bool plans_again_;
  bool due_ = false;
  std::unique_ptr<tiering::RunPrediction> seen_;  // of the plan that the engine has
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_PREDICTION_CHECK_H_
