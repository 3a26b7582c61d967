// The step that a run's own steps predict: what they show of the machine, simulated
// (tiering/simulate/calibrate.h).
//
// Drives drift by factors within minutes. So the steps are looked at in windows, each twice as long as the
// one before: the first two steps after the one that fills the pipeline, the next four, eight. Each window's
// rates predict a step; the run's prediction is their mean, every step counted once.
#ifndef PENSTOCK_TIERING_SIMULATE_RUN_PREDICTION_H_
#define PENSTOCK_TIERING_SIMULATE_RUN_PREDICTION_H_

#include <cstdint>
#include <optional>

#include "tiering/plan/machine.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/calibrate.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering {

class RunPrediction {
 public:
  // As Calibration takes them; graph and plan outlive it.
  RunPrediction(const ModelGraph& graph, const Plan& plan, const MachineModel& machine, int64_t busy_bytes)
      : graph_(graph), plan_(plan), machine_(machine), busy_bytes_(busy_bytes) {}

  // Of the executor's lanes; before the first step is over nothing is kept.
  void Observe(const Op& op, double start_seconds, double end_seconds);
  // A step is over. True: so is a window, and there is a prediction.
  bool Stepped();
  // The run is over, and with it the window: true if it had a step.
  bool Finish();

  // Step, clipped step and the lower bounds of both: the means; all else of the newest window.
  const Prediction& prediction() const { return prediction_; }
  const MachineModel& machine() const { return machine_; }
  bool drive_seen() const { return drive_seen_; }
  bool first_window() const { return windows_ == 1; }

 private:
  bool EndWindow();

  const ModelGraph& graph_;
  const Plan& plan_;
  MachineModel machine_;  // as the newest window, before there is one the caller, knows it
  const int64_t busy_bytes_;
  std::optional<Calibration> window_;
  int64_t steps_ = 0, begun_after_ = 0;  // done; of them before the window
  int64_t predicted_steps_ = 0, windows_ = 0;
  Prediction prediction_;
  bool drive_seen_ = false;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_RUN_PREDICTION_H_
