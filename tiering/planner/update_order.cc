#include "tiering/planner/update_order.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "tiering/simulate/simulate.h"

namespace penstock::tiering {
namespace {

constexpr int64_t kMostTilesSimulated = 4000;
constexpr int64_t kSample = 1 << 20;  // elements, to tell bytes per element by
// Of a gain that was computed and not tried, no more than this share of steps may be replayed.
constexpr double kCautiousReplayRate = 0.2;

void MarkInBackward(Plan* plan, double share) {
  double sum = 0;
  bool any = false;
  for (const BlockIndex b : plan->blocks.indices()) {
    // A device updates what lives there when the norm is known.
    const bool here = plan->blocks[b].trains && !plan->on_device(b);
    for (const TileIndex t : plan->blocks[b].tiles.indices()) {
      char& early = plan->blocks[b].in_backward[t];
      const double of_tile = here && plan->blocks[b].updates(t) ? share : 0;
      sum += of_tile;
      early = of_tile > 0 && sum >= 1 - 1e-9 ? 1 : 0;
      if (early != 0) sum -= 1;
      any |= early != 0;
    }
  }
  plan->speculates = any;
}

double StepSeconds(const ModelGraph& graph, const MachineModel& machine, const Plan& plan) {
  // A single step may borrow time from its neighbours; where steps are cheap, some are averaged.
  const int steps = FewTilesToSimulate(plan) ? 4 : 1;
  const absl::StatusOr<Prediction> prediction = Simulate(graph, plan, machine, steps);
  return prediction.ok() ? prediction->step_seconds : std::numeric_limits<double>::max();
}

// Of what has state.
int64_t TrainedElements(const ModelGraph& graph, const Plan& plan) {
  int64_t elements = graph.trained_elements();
  for (const BlockPlan& block : plan.blocks) elements -= block.trained_from;
  return elements;
}

// The share of tiles whose update in backward gives the drive as much to do in backward as the processor has.
double EvenShare(const ModelGraph& graph, const Plan& plan) {
  double forward = 0, backward = 0;
  for (const StageShape& stage : graph.stages) {
    forward += stage.forward_seconds;
    backward += stage.backward_seconds;
  }
  if (forward + backward <= 0) return 0;
  const double weights = plan.precision.weight_bytes();
  const double update = 2.0 * static_cast<double>(plan.precision.UnpaddedBytes(kSample)) / kSample;
  // Of what is frozen the weights are read in both.
  const double trained =
      static_cast<double>(TrainedElements(graph, plan)) / static_cast<double>(graph.elements());
  // What a device writes of its own updates falls into forward, and is borne by the others' tiles.
  const double there = plan.on_device_share();
  const double written_there = there < 1 ? there * update / 2 / (1 - there) : 0;
  const double all = trained * (update + written_there) + (2 - trained) * weights;
  const double in_backward = all * backward / (forward + backward);
  return std::clamp((in_backward - weights) / (trained * (update - weights)), 0.0, 1.0);
}

}  // namespace

bool TooManyTilesToSimulate(const Plan& plan) { return plan.tile_count() > kMostTilesSimulated; }
bool FewTilesToSimulate(const Plan& plan) { return plan.tile_count() <= kMostTilesSimulated / 8; }

OrderedStep ChooseUpdateOrder(const ModelGraph& graph, const MachineModel& machine, UpdateOrder wanted,
                              bool thorough, Plan* plan) {
  MarkInBackward(plan, 0);
  if (!plan->trains || !plan->on_nvme) return {};
  // Where a step's version is written over that of the step before, nothing is left to make an update again
  // from.
  if (!plan->commits_every_step) wanted = UpdateOrder::kInNextForward;
  const bool free = wanted == UpdateOrder::kAuto;
  if (TooManyTilesToSimulate(*plan)) {
    if (wanted == UpdateOrder::kInNextForward) return {};
    MarkInBackward(plan, free ? EvenShare(graph, *plan) : 1);
    plan->worthwhile_replay_rate = free ? kCautiousReplayRate : 1;
    return {};
  }
  const double later = StepSeconds(graph, machine, *plan);
  if (wanted == UpdateOrder::kInNextForward || plan->on_device_share() == 1) return {later, later};
  std::vector<double> shares = {1.0};
  if (free) {
    // The ends of the walk and what is resident move the best share away from the even one.
    const double even = EvenShare(graph, *plan);
    shares = {even};
    if (thorough) shares = {even, even - 0.1, even - 0.05, even + 0.05, even + 0.1, 0.5, 1.0};
  }
  double best = std::numeric_limits<double>::max(), best_share = 0;
  for (const double share : shares) {
    if (share <= 0 || share > 1) continue;
    MarkInBackward(plan, share);
    const double seconds = StepSeconds(graph, machine, *plan);
    if (seconds < best) {
      best = seconds;
      best_share = share;
    }
  }
  // The order that never makes anything again is left for a gain that shows.
  if (free && best > later * 0.995) best_share = 0;
  MarkInBackward(plan, best_share);
  if (best_share == 0) return {later, later};
  const double replayed = best_share * (1 - plan->on_device_share()) *
                          static_cast<double>(plan->precision.UnpaddedBytes(TrainedElements(graph, *plan)));
  const double replay_seconds = machine.drive_seconds(replayed, replayed);
  plan->worthwhile_replay_rate = free ? std::clamp((later - best) / replay_seconds, 0.0, 1.0) : 1;
  return {best, plan->clips ? later : best};
}

}  // namespace penstock::tiering
