#include "tiering/planner/update_order.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "tiering/plan/plan_layout.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering {
namespace {

constexpr int64_t kSample = 1 << 20;  // elements, to tell bytes per element by
// Of a gain that was computed and not tried, no more than this share of steps may be replayed.
constexpr double kCautiousReplayRate = 0.2;
// Previews read more: not for less than this is worth.
constexpr double kWorthPreviewing = 0.98;
// Of previews the first blocks have more than the last, whose second update would come right behind the
// first.
constexpr double kTilt = 1.2;
// Second versions take host memory: not for less than this is worth.
constexpr double kWorthSecondVersions = 0.97;
// And where all steps are clipped, all of their updates in backward are for nothing.
constexpr double kMostReplayed = 0.9;

void MarkSpeculative(Plan* plan, double share) {
  double sum = 0;
  bool any = false;
  for (const BlockIndex b : plan->blocks.indices()) {
    // A device updates what lives there when the norm is known.
    const bool here = plan->blocks[b].trains && !plan->on_device(b);
    for (const TileIndex t : plan->blocks[b].tiles.indices()) {
      char& early = plan->blocks[b].speculative_update[t];
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

// Of the blocks that backward comes to.
int64_t ElementsInBackward(const ModelGraph& graph) {
  const PerBlock<char> comes = graph.in_backward();
  int64_t elements = 0;
  for (const BlockIndex b : comes.indices()) elements += comes[b] != 0 ? graph.blocks[b].elements : 0;
  return elements;
}

// The share of tiles whose update in backward gives the drive as much to do in backward as the processor has.
double EvenShare(const ModelGraph& graph, const Plan& plan) {
  const auto [forward, backward] = graph.pass_seconds();
  if (forward + backward <= 0) return 0;
  const double weights = plan.precision.weight_bytes();
  const double update = 2.0 * static_cast<double>(plan.precision.UnpaddedBytes(kSample)) / kSample;
  // Of what is frozen the weights are read in both, where backward comes to it.
  const auto elements = static_cast<double>(graph.elements());
  const double trained = static_cast<double>(TrainedElements(graph, plan)) / elements;
  const double in_backward = static_cast<double>(ElementsInBackward(graph)) / elements;
  // What a device writes of its own updates falls into forward, and is borne by the others' tiles.
  const double there = plan.on_device_share();
  const double written_there = there < 1 ? there * update / 2 / (1 - there) : 0;
  const double all = trained * (update + written_there) + (1 + in_backward - trained) * weights;
  const double of_backward = all * backward / (forward + backward);
  return std::clamp((of_backward - in_backward * weights) / (trained * (update - weights)), 0.0, 1.0);
}

// The tile may be previewed in such a plan: it is read for forward and written, and forward has it once.
bool TileMayBe(const ModelGraph& graph, const Plan& plan, BlockIndex block, TileIndex tile) {
  const BlockPlan& of = plan.blocks[block];
  return of.updates(tile) && of.uses == 1 && !of.private_tile_slot[tile].valid() &&
         plan.precision.StateBytes(of.tiles[tile].elements) > 0 && graph.stages.back().block != block;
}

// About `share` of the tiles that may be, and in the first blocks by half of `tilt` more than in the midst.
void MarkPreviews(const ModelGraph& graph, double share, double tilt, Plan* plan) {
  double sum = 0;
  for (const BlockIndex b : plan->blocks.indices()) {
    const double at = (b.value() + 0.5) / static_cast<double>(plan->blocks.size());
    const double of_block = std::clamp(share + tilt * (0.5 - at), 0.0, 1.0);
    for (const TileIndex t : plan->blocks[b].tiles.indices()) {
      char& previews = plan->blocks[b].previews[t];
      const double of_tile = TileMayBe(graph, *plan, b, t) ? of_block : 0;
      sum += of_tile;
      previews = of_tile > 0 && sum >= 1 - 1e-9 ? 1 : 0;
      if (previews != 0) sum -= 1;
    }
  }
}

// The share of previews with which backward has as much to move as it has time for, or forward no more.
double EvenPreviews(const ModelGraph& graph, const MachineModel& machine, const Plan& plan) {
  const auto [forward_seconds, backward_seconds] = graph.pass_seconds();
  double forward = 0, backward = 0, less = 0, more = 0;  // bytes, and what previews change
  const PerBlock<char> in_backward = graph.in_backward();
  for (const BlockIndex b : plan.blocks.indices()) {
    const BlockPlan& of = plan.blocks[b];
    const bool stays = of.private_weight_slot.valid();
    for (const TileIndex t : of.tiles.indices()) {
      const int64_t elements = of.tiles[t].elements;
      const auto weights = static_cast<double>(elements * plan.precision.weight_bytes());
      const bool spills = of.updates(t) && !of.gradient_slot.valid();
      const double gradient =
          spills ? static_cast<double>(elements) * static_cast<double>(plan.precision.gradient_bytes) : 0;
      const double state = of.updates(t) ? static_cast<double>(plan.precision.StateBytes(elements)) : 0;
      const bool state_stays = of.private_tile_slot[t].valid();
      forward += gradient + (stays ? 0 : weights) + (state_stays ? 0 : 2 * state);
      backward += gradient + (in_backward[b] != 0 ? weights : 0) + (state_stays ? state : 0);
      if (of.updates(t) && !stays) forward += weights;  // written
      if (!TileMayBe(graph, plan, b, t)) continue;
      less += state + (stays ? 0 : weights);
      more += 2 * state + gradient + weights;
    }
  }
  if (more <= 0 || less <= 0) return 0;
  const double rate = 1 / machine.drive_seconds(0.5, 0.5);
  return std::clamp(
      std::min((backward_seconds * rate - backward) / more, (forward - forward_seconds * rate) / less), 0.0,
      1.0);
}

// The plan's tiles are all updated in the next forward; marks those that are previewed there. `before`:
// seconds without any. Returns them with the marks.
double ChoosePreviews(const ModelGraph& graph, const PlanOptions& options, bool thorough, double before,
                      Plan* plan) {
  const MachineModel& machine = options.machine;
  if (const auto& share = options.bounds.previewed_share; share.has_value()) {
    MarkPreviews(graph, *share, /*tilt=*/0, plan);
    return StepSeconds(graph, machine, *plan);
  }
  const double even = EvenPreviews(graph, machine, *plan);
  using Spread = std::pair<double, double>;  // share and tilt
  std::vector<Spread> spreads = {{even, kTilt}};
  if (thorough)
    spreads = {{even, kTilt}, {even - 0.1, kTilt}, {even + 0.1, kTilt}, {even, 0}, {even - 0.1, 0}, {1, 0}};
  double best = before * kWorthPreviewing;
  Spread chosen = {0, 0};
  for (const auto& [share, tilt] : spreads) {
    if (share <= 0 || share > 1) continue;
    MarkPreviews(graph, share, tilt, plan);
    const double seconds = StepSeconds(graph, machine, *plan);
    if (seconds >= best) continue;
    best = seconds;
    chosen = {share, tilt};
  }
  MarkPreviews(graph, chosen.first, chosen.second, plan);
  return chosen.first == 0 ? before : best;
}

// The processor has updates of `elements` to make, and backward to make some of them in.
double ShareInBackward(const ModelGraph& graph, const MachineModel& machine, double elements) {
  const double backward = graph.pass_seconds().backward;
  const double updated = backward * machine.update_parameters_per_s * std::max(1, machine.update_workers);
  return std::clamp(updated / elements, 0.0, 1.0);
}

// Without a drive a tile that is updated in backward takes memory for a second version: those that the
// host's holds, as many as make the step the shortest.
OrderedStep ChooseSecondVersions(const ModelGraph& graph, const PlanOptions& options, Plan* plan) {
  const MachineModel& machine = options.machine;
  int64_t bytes = 0, elements = 0;
  for (const BlockIndex b : plan->blocks.indices()) {
    const BlockPlan& block = plan->blocks[b];
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.updates(t) || plan->on_device(b)) continue;
      bytes += AlignUp(plan->precision.TotalBytes(block.tiles[t].elements), kPage);
      elements += block.tiles[t].elements;
    }
  }
  if (elements == 0 || options.update_order == UpdateOrder::kInNextForward) return {};
  const bool free = options.update_order == UpdateOrder::kAuto;
  const double most =
      std::min(1.0, static_cast<double>(RoomForSecondVersions(options, *plan)) / static_cast<double>(bytes));
  const double even = ShareInBackward(graph, machine, static_cast<double>(elements));
  if (TooManyTilesToSimulate(*plan)) {
    MarkSpeculative(plan, std::min(most, free ? even : 1.0));
    plan->worthwhile_replay_rate = free ? kCautiousReplayRate : 1;
    return {};
  }
  const double later = StepSeconds(graph, machine, *plan);
  std::vector<double> shares = {1.0};
  if (free) shares = {0.6 * even, 0.75 * even, 0.9 * even, even, 0.5 + 0.5 * even};
  double best = std::numeric_limits<double>::max(), best_share = 0;
  for (const double wanted : shares) {
    const double share = std::min(wanted, most);
    if (share <= 0) continue;
    MarkSpeculative(plan, share);
    const double seconds = StepSeconds(graph, machine, *plan);
    if (seconds >= best) continue;
    best = seconds;
    best_share = share;
  }
  if (free && best > later * kWorthSecondVersions) best_share = 0;
  MarkSpeculative(plan, best_share);
  if (best_share == 0) return {later, later};
  const double replay_seconds = best_share * static_cast<double>(elements) /
                                (machine.update_parameters_per_s * std::max(1, machine.update_workers));
  plan->worthwhile_replay_rate = free ? std::clamp((later - best) / replay_seconds, 0.0, kMostReplayed) : 1;
  return {best, plan->clips ? later : best};
}

}  // namespace

int64_t RoomForSecondVersions(const PlanOptions& options, const Plan& plan) {
  const int64_t bound = options.host_memory_budget_bytes > 0 ? options.host_memory_budget_bytes
                                                             : options.host_memory_to_spare_bytes;
  if (bound == 0) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(0, bound - plan.host_bytes() - kHugePage);  // in which an arena is rounded
}

bool TooManyTilesToSimulate(const Plan& plan) { return plan.tile_count() > kMostTilesSimulated; }
bool MayPreview(const PlanOptions& options) {
  return options.on_nvme && options.trains && options.clips && options.commits_every_step &&
         options.world == 1 && !options.device.has_own_memory && !options.tensor_norms;
}
bool FewTilesToSimulate(const Plan& plan) { return plan.tile_count() <= kMostTilesSimulated / 8; }

OrderedStep ChooseUpdateOrder(const ModelGraph& graph, const PlanOptions& options, bool thorough,
                              Plan* plan) {
  const MachineModel& machine = options.machine;
  UpdateOrder wanted = options.update_order;
  MarkSpeculative(plan, 0);
  MarkPreviews(graph, /*share=*/0, /*tilt=*/0, plan);
  if (!plan->trains) return {};
  if (!plan->on_nvme)
    return plan->keeps_second_versions() ? ChooseSecondVersions(graph, options, plan) : OrderedStep();
  // Where a step's version is written over that of the step before, nothing is left to make an update again
  // from.
  if (!plan->commits_every_step || plan->tensor_norms) wanted = UpdateOrder::kInNextForward;
  const bool free = wanted == UpdateOrder::kAuto;
  const bool previews = options.prefer == Prefer::kTime && MayPreview(options);
  if (TooManyTilesToSimulate(*plan)) {
    if (previews) MarkPreviews(graph, EvenPreviews(graph, machine, *plan), /*tilt=*/0, plan);
    if (wanted == UpdateOrder::kInNextForward) return {};
    MarkSpeculative(plan, free ? EvenShare(graph, *plan) : 1);
    plan->worthwhile_replay_rate = free ? kCautiousReplayRate : 1;
    return {};
  }
  double later = StepSeconds(graph, machine, *plan);
  if (previews) later = ChoosePreviews(graph, options, thorough, later, plan);
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
    MarkSpeculative(plan, share);
    const double seconds = StepSeconds(graph, machine, *plan);
    if (seconds < best) {
      best = seconds;
      best_share = share;
    }
  }
  // The order that never makes anything again is left for a gain that shows.
  if (free && best > later * 0.995) best_share = 0;
  MarkSpeculative(plan, best_share);
  if (best_share == 0) return {later, later};
  const double replayed = best_share * (1 - plan->on_device_share()) *
                          static_cast<double>(plan->precision.UnpaddedBytes(TrainedElements(graph, *plan)));
  const double replay_seconds = machine.drive_seconds(replayed, replayed);
  plan->worthwhile_replay_rate = free ? std::clamp((later - best) / replay_seconds, 0.0, 1.0) : 1;
  return {best, plan->clips ? later : best};
}

}  // namespace penstock::tiering
