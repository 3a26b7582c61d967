#include "tiering/simulate/simulate.h"

#include <algorithm>

#include "base/status_macros.h"
#include "tiering/program/program.h"
#include "tiering/simulate/sim_lanes.h"

namespace penstock::tiering {

absl::StatusOr<Prediction> Simulate(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                    int steps, const Executor::Observer& observer,
                                    const Executor::StallObserver& stall_observer) {
  constexpr int kWarmUp = 2;
  if (!machine.moves()) return absl::InvalidArgumentError("a rate of the machine is no number above 0");
  ProgramBuilder builder(graph, plan, 1);
  SimLanes lanes(plan, machine);
  Executor executor(&lanes);
  OpId norm = -1;
  int64_t read_bytes = 0, write_bytes = 0, in_bytes = 0, out_bytes = 0;  // of the step appended last
  auto append = [&] {
    std::vector<Op> ops = builder.Append(Pass::kTrain);
    read_bytes = write_bytes = in_bytes = out_bytes = 0;
    for (const Op& op : ops) {
      if (op.replay) continue;
      if (op.lane == Lane::kRead) read_bytes += op.bytes;
      if (op.lane == Lane::kWrite) write_bytes += op.bytes;
      if (op.lane == Lane::kCopyIn) in_bytes += op.bytes;
      if (op.lane == Lane::kCopyOut) out_bytes += op.bytes;
    }
    const OpId last = builder.next_id() - 1;  // a training pass ends with its norm
    executor.Append(std::move(ops));
    return last;
  };
  OpId next_norm = append();
  double begin = 0;
  double computed = 0, updated = 0, networked = 0;
  const auto network_work = [&] { return lanes.work(Lane::kAllGather) + lanes.work(Lane::kReduceScatter); };
  for (int step = 1; step <= kWarmUp + steps; ++step) {
    norm = next_norm;
    // One step ahead, as the engine does: reads for the next step start before this one ends.
    next_norm = append();
    executor.OpenGate(step);
    RETURN_IF_ERROR(executor.RunUntil(norm));
    if (step == kWarmUp) {
      begin = lanes.Now();
      executor.TakeUsage();
      computed = lanes.work(Lane::kCompute);
      updated = lanes.work(Lane::kUpdate);
      networked = network_work();
      executor.set_observer(observer);
      executor.set_stall_observer(stall_observer);
    }
  }
  Prediction prediction;
  prediction.usage = executor.TakeUsage();
  prediction.step_seconds = (lanes.Now() - begin) / steps;
  const auto read = static_cast<double>(read_bytes);
  const auto written = static_cast<double>(write_bytes);
  prediction.read_seconds = read / machine.read_bytes_per_s;
  prediction.write_seconds = written / machine.write_bytes_per_s;
  prediction.drive_seconds = machine.drive_seconds(read, written);
  prediction.copy_in_seconds = static_cast<double>(in_bytes) / machine.h2d_bytes_per_s;
  prediction.copy_out_seconds = static_cast<double>(out_bytes) / machine.d2h_bytes_per_s;
  prediction.compute_seconds = (lanes.work(Lane::kCompute) - computed) / steps;
  prediction.update_seconds = (lanes.work(Lane::kUpdate) - updated) / steps;
  prediction.network_seconds = (network_work() - networked) / steps / machine.network_bytes_per_s;
  const double update = prediction.update_seconds / std::max(1, machine.update_workers);
  const double cores =
      machine.cores > 0
          ? (prediction.compute_seconds * (plan.device.has_own_memory ? 0 : machine.compute_threads) +
             prediction.update_seconds) /
                machine.cores
          : 0;
  const double copy = std::max(prediction.copy_in_seconds, prediction.copy_out_seconds);
  prediction.lower_bound_seconds = std::max({prediction.drive_seconds, copy, prediction.compute_seconds,
                                             update, cores, prediction.network_seconds});
  // Writes may lie behind by up to a step when the measured ones begin and end; in the long run no step is
  // shorter than what its busiest part needs.
  prediction.step_seconds = std::max(prediction.step_seconds, prediction.lower_bound_seconds);
  if (prediction.lower_bound_seconds == prediction.drive_seconds && read + written > 0) {
    prediction.bound_by = prediction.read_seconds >= prediction.write_seconds ? "read" : "write";
  } else if (copy > 0 && prediction.lower_bound_seconds == copy) {
    prediction.bound_by = "copy";
  } else if (prediction.network_seconds > 0 && prediction.lower_bound_seconds == prediction.network_seconds) {
    prediction.bound_by = "network";
  } else if (prediction.compute_seconds >= update) {
    prediction.bound_by = "compute";
  } else {
    prediction.bound_by = "optimizer";
  }
  return prediction;
}

absl::StatusOr<Prediction> Predict(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  ASSIGN_OR_RETURN(Prediction prediction, Simulate(graph, plan, machine));
  prediction.clipped_step_seconds = prediction.step_seconds;
  if (!plan.speculates || !plan.clips) return prediction;
  Plan clipped = plan;
  for (BlockPlan& block : clipped.blocks)
    std::fill(block.speculative_update.begin(), block.speculative_update.end(), 0);
  ASSIGN_OR_RETURN(const Prediction later, Simulate(graph, clipped, machine));
  prediction.clipped_step_seconds = later.step_seconds;
  return prediction;
}

}  // namespace penstock::tiering
