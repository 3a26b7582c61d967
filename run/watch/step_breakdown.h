// Where the time of each step went: DeepSpeed's wall_clock_breakdown, from what the engine's lanes tell.
#ifndef PENSTOCK_RUN_WATCH_STEP_BREAKDOWN_H_
#define PENSTOCK_RUN_WATCH_STEP_BREAKDOWN_H_

#include <array>
#include <cstdint>
#include <string>

#include "tiering/program/op.h"

namespace penstock::run {

class StepBreakdown {
 public:
  // Of the executor's observers, while a step is made.
  void Observe(const tiering::Op& op, double start_seconds, double end_seconds);
  void ObserveStall(tiering::Stall cause, double start_seconds, double end_seconds);

  // "step 12 time (ms) | fwd: 3.10 | bwd: 7.25 | step: 1.50 | wait read: 2.00 | ... | all: 13.20", of what
  // was seen since the last line. fwd and bwd are forward and backward, one after the other; bwd computes
  // each stage once more, from its saved activations. step is the optimizer's, summed over its workers,
  // beside them. Each wait is of forward and backward, for that cause; what was not waited for is left out.
  // all: the step.
  std::string Line(int64_t step, double seconds);

 private:
  double forward_ = 0, backward_ = 0, update_ = 0;
  std::array<double, tiering::kStalls> waits_{};
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_STEP_BREAKDOWN_H_
