// Predicts a training step: the plan's own program, run by the executor on lanes in virtual time.
#ifndef PENSTOCK_TIERING_SIMULATE_SIMULATE_H_
#define PENSTOCK_TIERING_SIMULATE_SIMULATE_H_

#include <string>

#include "absl/status/statusor.h"
#include "tiering/plan/machine.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"

namespace penstock::tiering {

struct Prediction {
  double step_seconds = 0;  // steady state, nothing clipped
  // While every step is clipped, and all updates are made in the next forward. Predict fills it in; as
  // step_seconds where no update is made in backward.
  double clipped_step_seconds = 0;
  double lower_bound_seconds = 0;  // the busiest of the machine's parts, if nothing else ever made it wait
  // The least that a step takes while every step is clipped: lower_bound_seconds, or ClippedLowerBound where
  // that is more. Predict fills it in.
  double clipped_lower_bound_seconds = 0;
  // What each part would take alone, a step.
  double read_seconds = 0;  // of the drive
  double write_seconds = 0;
  double drive_seconds = 0;    // reads and writes as far as they go together (MachineModel::drive_seconds)
  double copy_in_seconds = 0;  // to and from a device with its own memory
  double copy_out_seconds = 0;
  double compute_seconds = 0;
  double update_seconds = 0;  // summed over workers
  double network_seconds = 0;
  std::string bound_by;  // "read", "write", "copy", "compute", "optimizer" or "network"
  Usage usage;           // of the measured steps
};

// Returns the seconds below which no order of its bytes brings a step of `plan` whose predecessor was clipped
// and which reads nothing twice: between the norm and the end of the next forward, all weights and state that
// are in memory at neither have to come in and go out; the rest of the step computes after that. The
// derivation is in docs/internals/planning.md. 0 where it says nothing: state in memory, a device with its
// own memory, several ranks, or previewed tiles, which are read twice.
double ClippedLowerBound(const ModelGraph& graph, const Plan& plan, const MachineModel& machine);

// Runs `steps` steps after two of warm-up. kInvalidArgument: a machine that has a rate of 0 or less. The
// observers are given every operation of the measured steps, and what compute waits for in them: the
// predicted lanes, for a trace.
absl::StatusOr<Prediction> Simulate(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                    int steps = 2, const Executor::Observer& observer = nullptr,
                                    const Executor::StallObserver& stall_observer = nullptr);

// A program of more tiles takes longer to simulate than what is chosen by it is worth.
inline constexpr int64_t kMostTilesSimulated = 4000;

// Simulate's prediction, in no time also where a plan has more tiles than that, as long as its blocks have
// many each: what the machine's parts would take alone is counted from the whole plan, and by how much a step
// is longer than that follows from two samples of it (tiering/simulate/plan_sample.h). The usage is then that
// of the larger sample, scaled up.
absl::StatusOr<Prediction> PredictStep(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                       int steps = 2);

// The same with both of its times.
absl::StatusOr<Prediction> Predict(const ModelGraph& graph, const Plan& plan, const MachineModel& machine);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_SIMULATE_H_
