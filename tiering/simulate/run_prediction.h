// The step that a run's own steps predict: what they show of the machine, simulated
// (tiering/simulate/calibrate.h); and how far they are from what was predicted before them.
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
  // As Calibration takes them; graph and plan outlive it. `at_start`: what was predicted before the first
  // step.
  RunPrediction(const ModelGraph& graph, const Plan& plan, const MachineModel& machine, int64_t busy_bytes,
                const Prediction& at_start)
      : graph_(graph), plan_(plan), busy_bytes_(busy_bytes), at_start_(at_start) {
    shown_.machine = machine;
  }

  // Of the executor's lanes; before the first step is over nothing is kept.
  void Observe(const Op& op, double start_seconds, double end_seconds);
  // What a step took, and whether all its updates wait for the next forward, as those of a clipped one do.
  struct Step {
    double seconds = 0;
    bool deferred = false;
  };
  // A step is over. True: so is a window, and there is a prediction.
  bool Stepped(const Step& step);
  // The run is over, and with it the window: true if it had a step.
  bool Finish();

  // Step, clipped step and the lower bounds of both: the means; all else of the newest window.
  const Prediction& prediction() const { return prediction_; }
  // What the newest window showed, before there is one the caller's machine and no graph.
  const Calibration::Result& shown() const { return shown_; }
  bool first_window() const { return windows_ == 1; }

  // The steps of the newest window, in the mean.
  struct Beside {
    double measured_seconds = 0;
    double predicted_seconds = 0;  // for steps of their kind, before the first step
    double deferred_share = 0;     // of the steps
    // By half of what was predicted or more, either way.
    bool differs_much() const;
  };
  const Beside& beside() const { return beside_; }

 private:
  bool EndWindow();

  const ModelGraph& graph_;
  const Plan& plan_;
  const int64_t busy_bytes_;
  const Prediction at_start_;
  Calibration::Result shown_;  // its machine: as the newest window, before there is one the caller, knows it
  std::optional<Calibration> window_;
  Beside sums_, beside_;                 // of the window so far; of the newest that is over
  int64_t steps_ = 0, begun_after_ = 0;  // done; of them before the window
  int64_t predicted_steps_ = 0, windows_ = 0;
  Prediction prediction_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_RUN_PREDICTION_H_
