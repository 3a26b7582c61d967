// What a driven training tells of itself: the report (zero/engine/report.h), with what its own steps predict,
// and which step was committed last. An engine from Python measures no drive before it begins: until the
// first steps are over the prediction goes by the first forward, and by what is assumed of the drive; where
// they differ much from it, the engine plans once more. Also
// what DeepSpeed's wall_clock_breakdown and comms_logger tell.
#ifndef PENSTOCK_PYTHON_RUN_WATCH_H_
#define PENSTOCK_PYTHON_RUN_WATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine_options.h"
#include "run/watch/comms_log.h"
#include "run/watch/step_breakdown.h"
#include "zero/engine/engine.h"
#include "zero/engine/prediction_check.h"
#include "zero/engine/report.h"

namespace penstock::python {

class RunWatch {
 public:
  // Hooks that call back here: the watch outlives the engine.
  void Attach(GivenOptions* given);
  // The engine is made. `run_id`: as the run's record has it. Returns the plan in a line: empty where nothing
  // trains.
  std::string Planned(const zero::Engine& engine, const std::string& run_id);
  // A pass begins.
  void Begins(bool trains) { trains_.store(trains); }
  // A training step of `tokens` (0: not known) that computed `flops` in matrix products (0: not known). On
  // the engine's thread.
  void Stepped(const zero::Engine& engine, const zero::StepResult& result, int64_t tokens, double flops);
  // The step that was made last is one of the first, which differ much from what was predicted: PlanAgain is
  // called before the next.
  bool plans_again_now() const { return check_ != nullptr && check_->due(); }
  // On the engine's thread. Returns what came of it in a line.
  absl::StatusOr<std::string> PlanAgain(zero::Engine& engine) {
    return check_->PlanAgain(engine, std::nullopt);
  }
  // JSON, of all steps so far.
  std::string Report(const zero::Engine& engine);
  int64_t committed() const { return committed_.load(); }
  // Where the time of the last training step went; empty: nobody asked. On the engine's thread.
  const std::string& breakdown() const { return breakdown_line_; }
  // A table of what this rank exchanged; empty: nobody asked.
  std::string Exchanges() const { return exchanges_.has_value() ? exchanges_->Text() : ""; }

 private:
  zero::Report report_;
  bool plans_again_ = false;
  std::unique_ptr<zero::PredictionCheck> check_;
  std::atomic<int64_t> committed_ = 0;
  std::atomic<bool> trains_ = false;             // the pass that is open, or was the last
  std::optional<run::StepBreakdown> breakdown_;  // empty: nobody asked
  std::optional<run::CommsLog> exchanges_;       // likewise
  std::string breakdown_line_;
};

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_RUN_WATCH_H_
