#include "tiering/simulate/simulate.h"

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "tiering/program/program.h"
#include "tiering/program/step_ops.h"
#include "tiering/simulate/plan_sample.h"
#include "tiering/simulate/sim_lanes.h"

namespace penstock::tiering {
namespace {

// What a step asks of the machine's parts.
struct StepWork {
  int64_t read_bytes = 0, write_bytes = 0, in_bytes = 0, out_bytes = 0;
  double compute_seconds = 0;
  double update_seconds = 0;  // summed over workers
  double network_bytes = 0;

  void AddBytes(Lane lane, int64_t bytes) {
    if (lane == Lane::kRead) read_bytes += bytes;
    if (lane == Lane::kWrite) write_bytes += bytes;
    if (lane == Lane::kCopyIn) in_bytes += bytes;
    if (lane == Lane::kCopyOut) out_bytes += bytes;
  }
};

StepWork WorkOf(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  const CondensedPlan condensed(plan);
  const SimLanes lanes(condensed.plan(), machine);
  StepWork work;
  ForStepOps(graph, condensed.plan(), /*speculative_update=*/true, [&](const Op& op) {
    work.AddBytes(op.lane, op.bytes * condensed.times(op));
    const double of_op = lanes.Work(op) * static_cast<double>(condensed.times(op));
    if (op.lane == Lane::kCompute) work.compute_seconds += of_op;
    if (op.lane == Lane::kUpdate) work.update_seconds += of_op;
    if (op.lane == Lane::kAllGather || op.lane == Lane::kReduceScatter) work.network_bytes += of_op;
  });
  return work;
}

// What each part takes alone, and which is the busiest.
void BoundStep(const StepWork& work, const Plan& plan, const MachineModel& machine, Prediction* prediction) {
  const auto read = static_cast<double>(work.read_bytes);
  const auto written = static_cast<double>(work.write_bytes);
  prediction->read_seconds = read / machine.read_bytes_per_s;
  prediction->write_seconds = written / machine.write_bytes_per_s;
  prediction->drive_seconds = machine.drive_seconds(read, written);
  prediction->copy_in_seconds = static_cast<double>(work.in_bytes) / machine.h2d_bytes_per_s;
  prediction->copy_out_seconds = static_cast<double>(work.out_bytes) / machine.d2h_bytes_per_s;
  prediction->compute_seconds = work.compute_seconds;
  prediction->update_seconds = work.update_seconds;
  prediction->network_seconds = work.network_bytes / machine.network_bytes_per_s;
  const double update = prediction->update_seconds / std::max(1, machine.update_workers);
  const double cores =
      machine.cores > 0
          ? (prediction->compute_seconds * (plan.device.has_own_memory ? 0 : machine.compute_threads) +
             prediction->update_seconds) /
                machine.cores
          : 0;
  const double copy = std::max(prediction->copy_in_seconds, prediction->copy_out_seconds);
  prediction->lower_bound_seconds = std::max({prediction->drive_seconds, copy, prediction->compute_seconds,
                                              update, cores, prediction->network_seconds});
  if (prediction->lower_bound_seconds == prediction->drive_seconds && read + written > 0) {
    prediction->bound_by = prediction->read_seconds >= prediction->write_seconds ? "read" : "write";
  } else if (copy > 0 && prediction->lower_bound_seconds == copy) {
    prediction->bound_by = "copy";
  } else if (prediction->network_seconds > 0 &&
             prediction->lower_bound_seconds == prediction->network_seconds) {
    prediction->bound_by = "network";
  } else if (prediction->compute_seconds >= update) {
    prediction->bound_by = "compute";
  } else {
    prediction->bound_by = "optimizer";
  }
}

int64_t LargestBlockInTiles(const Plan& plan) {
  size_t most = 0;
  for (const BlockPlan& block : plan.blocks) most = std::max(most, block.tiles.size());
  return static_cast<int64_t>(most);
}

void Scale(double by, Usage* usage) {
  const auto scale = [by](int64_t& count) { count = std::llround(static_cast<double>(count) * by); };
  usage->compute_union_seconds *= by;
  for (double& seconds : usage->busy_seconds) seconds *= by;
  for (double& seconds : usage->stall_seconds) seconds *= by;
  for (int64_t& bytes : usage->bytes) scale(bytes);
  for (int64_t& operations : usage->operations) scale(operations);
}

}  // namespace

double ClippedLowerBound(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  if (!plan.on_nvme || !plan.clips || plan.device.has_own_memory || plan.world > 1 ||
      plan.previewed_share() > 0)
    return 0;
  double forward = 0, backward = 0;
  for (const StageShape& stage : graph.stages) {
    forward += stage.forward_seconds;
    backward += stage.backward_seconds;
  }
  double read = 0, written = 0;
  for (const BlockPlan& block : plan.blocks) {
    for (const TileIndex t : block.tiles.indices()) {
      const int64_t elements = block.tiles[t].elements;
      const auto weights = static_cast<double>(elements * plan.precision.weight_bytes());
      const double state = static_cast<double>(plan.precision.UnpaddedBytes(elements)) - weights;
      const double moved = (block.private_weight_slot.valid() ? 0 : weights) +
                           (block.private_tile_slot[t].valid() ? 0 : state);
      read += moved;
      written += moved;
      if (!block.gradient_slot.valid()) read += static_cast<double>(elements * plan.precision.gradient_bytes);
    }
  }
  // What the ring and the shared weight slots hold may be on its way at either time.
  double on_its_way = static_cast<double>(plan.tile_slots.front().bytes) * plan.tile_ring;
  for (const WeightClass& cls : plan.weight_classes) on_its_way += static_cast<double>(cls.bytes * cls.slots);
  const auto passes = static_cast<double>(plan.micro_batches) * plan.calls;
  return std::max(forward, machine.drive_seconds(std::max(0.0, read - on_its_way),
                                                 std::max(0.0, written - on_its_way))) +
         (passes - 1) * forward + passes * backward;
}

absl::StatusOr<Prediction> Simulate(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                    int steps, const Executor::Observer& observer,
                                    const Executor::StallObserver& stall_observer) {
  constexpr int kWarmUp = 2;
  if (!machine.moves()) return absl::InvalidArgumentError("a rate of the machine is no number above 0");
  ProgramBuilder builder(graph, plan, 1);
  SimLanes lanes(plan, machine);
  Executor executor(&lanes);
  OpId norm = -1;
  StepWork work;  // its bytes are those of the step appended last
  auto append = [&] {
    std::vector<Op> ops = builder.Append(Pass::kTrain);
    work = StepWork();
    for (const Op& op : ops) {
      if (!op.replay) work.AddBytes(op.lane, op.bytes);
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
  work.compute_seconds = (lanes.work(Lane::kCompute) - computed) / steps;
  work.update_seconds = (lanes.work(Lane::kUpdate) - updated) / steps;
  work.network_bytes = (network_work() - networked) / steps;
  BoundStep(work, plan, machine, &prediction);
  // Writes may lie behind by up to a step when the measured ones begin and end; in the long run no step is
  // shorter than what its busiest part needs.
  prediction.step_seconds = std::max(prediction.step_seconds, prediction.lower_bound_seconds);
  return prediction;
}

absl::StatusOr<Prediction> PredictStep(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                                       int steps) {
  constexpr int64_t kFew = 32;  // tiles of the largest block in the smaller sample
  const int64_t most = LargestBlockInTiles(plan);
  if (plan.tile_count() <= kMostTilesSimulated || most < 4 * kFew)
    return Simulate(graph, plan, machine, steps);
  const double share = static_cast<double>(kFew) / static_cast<double>(most);
  const auto simulate = [&](double of_plan) {
    const PlanSample sample = SampleOf(graph, plan, of_plan);
    return Simulate(sample.graph, sample.plan, machine, steps);
  };
  ASSIGN_OR_RETURN(const Prediction smaller, simulate(share));
  ASSIGN_OR_RETURN(Prediction prediction, simulate(2 * share));
  const double seconds = prediction.step_seconds, bound = prediction.lower_bound_seconds;
  if (!(bound > smaller.lower_bound_seconds)) return Simulate(graph, plan, machine, steps);
  BoundStep(WorkOf(graph, plan, machine), plan, machine, &prediction);
  // What does not grow with the work, as a commit and the turn from forward to backward, is not scaled up.
  const double slope = (seconds - smaller.step_seconds) / (bound - smaller.lower_bound_seconds);
  prediction.step_seconds =
      std::max(prediction.lower_bound_seconds, seconds + slope * (prediction.lower_bound_seconds - bound));
  Scale(prediction.step_seconds / seconds, &prediction.usage);
  return prediction;
}

absl::StatusOr<Prediction> Predict(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  ASSIGN_OR_RETURN(Prediction prediction, PredictStep(graph, plan, machine));
  prediction.clipped_step_seconds = prediction.step_seconds;
  prediction.clipped_lower_bound_seconds =
      std::max(prediction.lower_bound_seconds, ClippedLowerBound(graph, plan, machine));
  if (!plan.speculates || !plan.clips) return prediction;
  Plan clipped = plan;
  for (BlockPlan& block : clipped.blocks)
    std::fill(block.speculative_update.begin(), block.speculative_update.end(), 0);
  ASSIGN_OR_RETURN(const Prediction later, PredictStep(graph, clipped, machine));
  prediction.clipped_step_seconds = later.step_seconds;
  return prediction;
}

}  // namespace penstock::tiering
