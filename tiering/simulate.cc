#include "tiering/simulate.h"

#include <algorithm>

#include "tiering/program.h"
#include "tiering/sim_lanes.h"

namespace penstock::tiering {

absl::StatusOr<Prediction> Simulate(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                    int steps) {
  constexpr int kWarmUp = 2;
  ProgramBuilder builder(graph, plan, 1);
  SimLanes lanes(plan, machine);
  Executor executor(&lanes);
  OpId norm = -1;
  auto append = [&] {
    std::vector<Op> ops = builder.Append(Pass::kTrain);
    const OpId last = builder.next_id() - 1;  // a training pass ends with its norm
    executor.Append(std::move(ops));
    return last;
  };
  OpId next_norm = append();
  double begin = 0;
  for (int step = 1; step <= kWarmUp + steps; ++step) {
    norm = next_norm;
    // One step ahead, as the engine does: reads for the next step start before this one ends.
    next_norm = append();
    executor.OpenGate(step);
    if (absl::Status status = executor.RunUntil(norm); !status.ok()) return status;
    if (step == kWarmUp) {
      begin = lanes.Now();
      executor.TakeUsage();
    }
  }
  Prediction prediction;
  prediction.usage = executor.TakeUsage();
  prediction.step_seconds = (lanes.Now() - begin) / steps;
  auto per_step = [&](Lane lane) { return prediction.usage.busy_seconds[static_cast<size_t>(lane)] / steps; };
  prediction.read_seconds = static_cast<double>(plan.nvme_read_bytes) / machine.read_bytes_per_s;
  prediction.write_seconds = static_cast<double>(plan.nvme_write_bytes) / machine.write_bytes_per_s;
  prediction.compute_seconds = per_step(Lane::kCompute);
  prediction.update_seconds = per_step(Lane::kUpdate);
  const double drive = prediction.read_seconds + prediction.write_seconds;
  const double update = prediction.update_seconds / std::max(1, machine.update_workers);
  prediction.floor_seconds = std::max({drive, prediction.compute_seconds, update});
  // A few steps may leave work to those after them; for ever they cannot.
  prediction.step_seconds = std::max(prediction.step_seconds, prediction.floor_seconds);
  if (prediction.floor_seconds == drive && drive > 0) {
    prediction.bound_by = prediction.read_seconds >= prediction.write_seconds ? "read" : "write";
  } else if (prediction.floor_seconds == prediction.compute_seconds) {
    prediction.bound_by = "compute";
  } else {
    prediction.bound_by = "optimizer";
  }
  return prediction;
}

}  // namespace penstock::tiering
