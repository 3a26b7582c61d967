#include "tiering/advice/tier_table.h"

#include <limits>

#include "tiering/plan/working_set.h"
#include "tiering/program/step_ops.h"

namespace penstock::tiering {
namespace {

template <class Slots>
int64_t Sum(const Slots& slots, size_t from, size_t to) {
  int64_t bytes = 0;
  for (size_t i = from; i < to; ++i) bytes += AlignUp(slots.begin()[static_cast<ptrdiff_t>(i)].bytes, kPage);
  return bytes;
}

}  // namespace

std::vector<TierLine> TiersOf(const ModelGraph& graph, const Plan& plan, const OnDrives& drives) {
  std::vector<TierLine> lines(6);
  TierLine &weights = lines[0], &state = lines[1], &gradients = lines[2], &inputs = lines[3],
           &tensors = lines[4], &rest = lines[5];
  weights.what = "weights";
  state.what = "optimizer state";
  gradients.what = "gradients";
  inputs.what = "saved activations";
  tensors.what = "tensors while computing";
  rest.what = "records and rounding";

  size_t shared_weight_slots = 0, ring_gradients = 0;
  for (const WeightClass& cls : plan.weight_classes) shared_weight_slots += static_cast<size_t>(cls.slots);
  for (const GradientRing& ring : plan.gradient_rings) ring_gradients += static_cast<size_t>(ring.slots);
  const auto ring_tiles = static_cast<size_t>(plan.tile_ring);
  const size_t kept_gradients = plan.gradient_slots.size() - ring_gradients;
  weights.in_flight_bytes = Sum(plan.weight_slots, 0, shared_weight_slots);
  weights.resident_bytes = Sum(plan.weight_slots, shared_weight_slots, plan.weight_slots.size());
  state.in_flight_bytes = Sum(plan.tile_slots, 0, ring_tiles);
  state.resident_bytes = Sum(plan.tile_slots, ring_tiles, plan.tile_slots.size());
  gradients.resident_bytes = Sum(plan.gradient_slots, 0, kept_gradients);
  gradients.in_flight_bytes = Sum(plan.gradient_slots, kept_gradients, plan.gradient_slots.size()) +
                              Sum(plan.accumulator_slots, 0, plan.accumulator_slots.size());
  if (plan.device.has_own_memory) {
    inputs.resident_bytes = Sum(plan.input_slots, 0, plan.input_slots.size());
    tensors.in_flight_bytes = plan.tensor_bytes;
  } else {
    if (plan.trains)
      inputs.resident_bytes = plan.micro_batches * KeptInputBytes(graph, plan.saved_activations);
    tensors.in_flight_bytes = plan.tensor_bytes - inputs.resident_bytes;
  }
  rest.resident_bytes = plan.arena_bytes - plan.slot_bytes;
  if (!plan.on_nvme) return lines;

  for (const BlockPlan& block : plan.blocks) {
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.in_store(t)) continue;
      const Tile& tile = block.tiles[t];
      const int64_t of_weights = plan.precision.SegmentBytes(0, tile.elements);
      weights.nvme_bytes += drives.versions * of_weights;
      if (block.weights_alone(t)) continue;
      state.nvme_bytes += drives.versions * (plan.precision.UnpaddedBytes(tile.elements) - of_weights);
      // A place for each, whether it spills or not.
      gradients.nvme_bytes += tile.elements * plan.precision.gradient_bytes;
    }
  }
  inputs.nvme_bytes = plan.input_scratch_bytes;
  if (drives.bytes > 0) {
    rest.nvme_bytes =
        drives.bytes - weights.nvme_bytes - state.nvme_bytes - gradients.nvme_bytes - inputs.nvme_bytes;
  }
  if (!plan.trains) return lines;
  const CondensedPlan condensed(plan);
  ForStepOps(graph, condensed.plan(), /*speculative_update=*/true, [&](const Op& op) {
    const int64_t times = condensed.times(op), bytes = op.bytes * times;
    switch (op.kind) {
      case OpKind::kReadWeights:
        weights.read_bytes += bytes;
        break;
      case OpKind::kReadState:
        state.read_bytes += bytes;
        break;
      case OpKind::kReadGradient:
        gradients.read_bytes += bytes;
        break;
      case OpKind::kWriteGradient:
        gradients.written_bytes += bytes;
        break;
      case OpKind::kReadInput:
        if (op.lane == Lane::kRead) inputs.read_bytes += bytes;
        break;
      case OpKind::kWriteInput:
        if (op.lane == Lane::kWrite) inputs.written_bytes += bytes;
        break;
      case OpKind::kWriteState:
        state.written_bytes += bytes;
        break;
      case OpKind::kWriteWeights:
        weights.written_bytes += bytes;
        break;
      case OpKind::kWriteTile: {
        const Tile& tile = condensed.plan().blocks[op.block].tiles[op.tile];
        const int64_t of_weights = times * tile.elements * plan.precision.weight_bytes();
        weights.written_bytes += of_weights;
        state.written_bytes += bytes - of_weights;
        break;
      }
      default:
        break;
    }
  });
  return lines;
}

Wear WearOf(int64_t written_bytes_per_step, double step_seconds, double rated_bytes) {
  Wear wear;
  wear.days_to_rating = std::numeric_limits<double>::infinity();
  if (written_bytes_per_step <= 0 || !(step_seconds > 0)) return wear;
  wear.bytes_per_day = static_cast<double>(written_bytes_per_step) / step_seconds * 86400;
  wear.days_to_rating = rated_bytes / wear.bytes_per_day;
  return wear;
}

}  // namespace penstock::tiering
