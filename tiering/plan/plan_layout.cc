#include "tiering/plan/plan_layout.h"

#include <algorithm>

#include "base/index.h"
#include "tiering/plan/working_set.h"

namespace penstock::tiering {
namespace {

// What is no part of the store is cut anew.
PerTile<Tile> FixedTiles(const BlockPlan& block, const std::vector<int64_t>& elements,
                         int64_t tile_elements) {
  PerTile<Tile> tiles;
  if (block.elsewhere_to > 0) tiles = CutTiles(block.elsewhere_to, tile_elements);
  int64_t offset = block.elsewhere_to;
  for (const int64_t each : elements) {
    tiles.push_back({offset, each});
    offset += each;
  }
  return tiles;
}

int64_t AccumulatorBytes(const Plan& plan, BlockIndex block) {
  return plan.summed_elements(block) * plan.accumulator_bytes(block);
}

// What is frozen and what trains are cut apart.
PerTile<Tile> TilesOfBlock(const BlockPlan& block, int64_t tile_elements, int64_t adapter_tile_elements) {
  if (block.trained_from == 0) return CutTiles(block.elements, tile_elements);
  PerTile<Tile> tiles = CutTiles(block.trained_from, tile_elements);
  for (Tile tile : CutTiles(block.gradient_elements(), adapter_tile_elements)) {
    tile.offset += block.trained_from;
    tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace

PerTile<Tile> CutTiles(int64_t elements, int64_t tile_elements) {
  const int64_t count = (elements + tile_elements - 1) / tile_elements;
  const int64_t each = AlignUp((elements + count - 1) / count, kElementAlignment);
  PerTile<Tile> tiles;
  for (int64_t offset = 0; offset < elements; offset += each) {
    tiles.push_back({offset, std::min(each, elements - offset)});
  }
  return tiles;
}

// The level within the user's bounds; one block in flight is the least.
Level PlanLayout::Bounded(Level level) const {
  int64_t largest = 1;
  for (const BlockShape& block : graph_.blocks) largest = std::max(largest, block.elements);
  int64_t runs = level.runs;
  const PlanBounds& bounds = options_.bounds;
  if (bounds.live_elements) runs = std::min(runs, *bounds.live_elements / largest);
  if (bounds.prefetch_elements) runs = std::min(runs, 1 + *bounds.prefetch_elements / largest);
  if (bounds.weight_slots) runs = std::min(runs, *bounds.weight_slots);
  level.runs = static_cast<int>(std::max<int64_t>(runs, 1));
  return level;
}

Plan PlanLayout::Build(const Level& wanted, int resident_gradients, int64_t budget) const {
  const Level level = Bounded(wanted);
  Plan plan;
  plan.precision = options_.precision;
  plan.world = options_.world;
  plan.micro_batches = options_.micro_batches;
  plan.calls = options_.calls;
  plan.on_nvme = options_.on_nvme;
  plan.trains = options_.trains;
  plan.commits_every_step = options_.commits_every_step;
  plan.clips = options_.clips;
  plan.tensor_norms = options_.tensor_norms && options_.trains;
  plan.host_memory_budget_bytes = options_.host_memory_budget_bytes;
  if (options_.trains) plan.codes = options_.codes;  // what evaluates has all bits

  int64_t tile_elements = level.tile_elements;
  if (options_.tile_bytes > 0) {
    // The bytes are nearly proportional; only the padding of a segment to pages is not.
    tile_elements = std::min(tile_elements, options_.tile_bytes * kElementAlignment /
                                                plan.precision.UnpaddedBytes(kElementAlignment));
  }
  tile_elements = std::max(tile_elements / kElementAlignment * kElementAlignment, kElementAlignment);
  while (options_.tile_bytes > 0 && tile_elements > kElementAlignment &&
         plan.precision.TotalBytes(tile_elements) > options_.tile_bytes) {
    tile_elements -= kElementAlignment;
  }

  const int64_t adapter_tile_elements =
      level.adapter_tile_elements > 0 ? std::min(tile_elements, level.adapter_tile_elements) : tile_elements;

  PerBlock<int> uses(graph_.blocks.size(), 0);
  for (const StageShape& stage : graph_.stages) ++uses[stage.block];
  PerBlock<int64_t> sizes;
  for (const BlockShape& block : graph_.blocks)
    sizes.push_back(ShardElements(block.elements, options_.world));
  const std::vector<int64_t> classes = ClassSizes(sizes.values(), level.runs);
  std::vector<int> members(classes.size(), 0);
  int64_t tiles = 0;
  for (const BlockIndex b : graph_.blocks.indices()) {
    BlockPlan& block = plan.blocks.emplace_back();
    block.elements = sizes[b];
    block.trains = graph_.blocks[b].trains;
    if (block.trains && options_.keeps_frozen_apart()) block.trained_from = graph_.blocks[b].trained_from;
    block.frozen_alone = options_.keeps_block_alone(b, block.trains);
    if (options_.frozen_elsewhere) {
      block.elsewhere_to = block.trains ? block.trained_from : block.elements;
      block.elsewhere_bytes = graph_.blocks[b].elsewhere_bytes;
    }
    block.tiles = options_.fixed_tiles.empty() ? TilesOfBlock(block, tile_elements, adapter_tile_elements)
                                               : FixedTiles(block, options_.fixed_tiles[b], tile_elements);
    block.private_tile_slot.assign(block.tiles.size(), TileSlot());
    block.speculative_update.assign(block.tiles.size(), 0);
    block.previews.assign(block.tiles.size(), 0);
    block.second_slot.assign(block.tiles.size(), TileSlot());
    block.uses = uses[b];
    while (classes[At(block.weight_class)] < block.elements) ++block.weight_class;
    ++members[At(block.weight_class)];
    for (const TileIndex t : block.tiles.indices()) {
      const int64_t elements = block.tiles[t].elements;
      plan.tile_elements = std::max(plan.tile_elements, elements);
      if (block.weights_alone(t)) continue;
      plan.state_tile_elements = std::max(plan.state_tile_elements, elements);
      ++tiles;
    }
  }
  plan.positions = static_cast<int>(graph_.stages.size());
  plan.device = device_;
  KeepInputs(&plan, device_.has_own_memory ? device_.saved_activations : plan.positions);
  for (size_t c = 0; c < classes.size(); ++c) {
    WeightClass cls;
    cls.bytes = classes[c] * plan.shards_in_memory() * plan.precision.weight_bytes();
    cls.slots = std::min(level.runs, members[c]);
    plan.weight_classes.push_back(cls);
  }
  if (plan.trains) {
    // SGD without momentum has no state beside fp32 weights.
    const int64_t tile_bytes = std::max(plan.precision.StateBytes(plan.state_tile_elements), kPage);
    plan.tile_ring =
        static_cast<int>(std::clamp<int64_t>(level.ring_bytes / tile_bytes, level.least_ring, 64));
    plan.tile_ring = static_cast<int>(std::min<int64_t>(plan.tile_ring, tiles));
    int64_t most = options_.bounds.tile_slots.value_or(plan.tile_ring);
    if (options_.bounds.state_bytes) most = std::min(most, *options_.bounds.state_bytes / tile_bytes);
    plan.tile_ring = static_cast<int>(std::clamp<int64_t>(most, 1, plan.tile_ring));
  }
  PlaceGradients(&plan, level, resident_gradients);
  LayOut(&plan);
  if (plan.trains && options_.on_nvme && !device_.has_own_memory)
    SpillInputs(&plan, resident_gradients, budget);
  return plan;
}

// Inputs of the last `kept` stages stay where they are made.
void PlanLayout::KeepInputs(Plan* plan, int kept) const {
  plan->saved_activations = kept;
  plan->input_ring = kInputRing;
  int64_t largest = 0, scratch = 0;
  for (const StageShape& stage : graph_.stages) largest = std::max(largest, stage.input_scratch_bytes);
  plan->input_slots.clear();
  for (const Position position : plan->all_positions()) {
    if (!plan->SpillsInput(position)) continue;
    scratch += AlignUp(largest, kPage) * plan->micro_batches;
    if (device_.has_own_memory)
      for (int m = 0; m < plan->micro_batches; ++m) plan->input_slots.push_back({0, largest});
  }
  const int64_t initial =
      plan->trains ? InitialTensorBytes(graph_, plan->tile_elements)
                   : LookedAtTensorBytes(graph_, plan->tile_elements * plan->precision.weight_bytes());
  if (device_.has_own_memory) {
    // What the host holds for the device: a pass's batch, as its caller made it.
    plan->evaluate_micro_batches = device_.evaluate_micro_batches;
    plan->tensor_bytes = std::max(initial, HostTensorBytes(graph_, plan->micro_batches));
    return;
  }
  plan->input_scratch_bytes = scratch;
  plan->tensor_bytes = std::max(initial, ComputeTensorBytes(graph_, plan->micro_batches, plan->trains, kept,
                                                            &plan->evaluate_micro_batches));
}

// Sends as few inputs to the drive as the budget asks for, unless all are to go: like a gradient, one costs a
// write and a read of itself, and gradients go first.
void PlanLayout::SpillInputs(Plan* plan, int resident_gradients, int64_t budget) const {
  if (options_.saved_activations == SavedActivations::kMemory || plan->positions <= kInputRing) return;
  if (graph_.saved_activation_bytes(plan->positions) == 0) return;  // whoever computes keeps them itself
  if (options_.saved_activations == SavedActivations::kDrive) return KeepInputs(plan, kInputRing);
  if (resident_gradients > 0 || budget == 0 || plan->host_bytes() <= budget) return;
  // The fewer are kept the less memory they take: the most that fit, or the least that is kept at all.
  int least = kInputRing, most = plan->positions - 1;
  while (least < most) {
    const int kept = least + (most - least + 1) / 2;
    KeepInputs(plan, kept);
    if (plan->host_bytes() <= budget) {
      least = kept;
    } else {
      most = kept - 1;
    }
  }
  KeepInputs(plan, least);
}

// Of a gradient of the class that is spilled: where a block is frozen, or a part of it, the largest that
// there is.
int64_t PlanLayout::GradientElements(const Plan& plan, size_t weight_class) {
  int64_t largest = 0;
  bool frozen = false;
  for (const BlockPlan& block : plan.blocks) {
    if (At(block.weight_class) != weight_class) continue;
    frozen |= !block.trains || block.trained_from > 0;
    if (!block.trains) continue;
    if (!block.gradient_slot.valid()) largest = std::max(largest, block.gradient_elements());
  }
  if (frozen) return largest;
  return plan.weight_classes[weight_class].bytes / plan.shards_in_memory() / plan.precision.weight_bytes();
}

// Over ranks and on a device with its own memory they stay.
int64_t PlanLayout::SumsThatMayLeave() const {
  if (!options_.on_nvme || !options_.trains || options_.world > 1 || device_.has_own_memory) return 0;
  PerBlock<int> uses(graph_.blocks.size(), 0);
  for (const StageShape& stage : graph_.stages) ++uses[stage.block];
  int64_t bytes = 0;
  for (const BlockIndex b : graph_.blocks.indices()) {
    const BlockShape& block = graph_.blocks[b];
    if (!block.trains || uses[b] < 2) continue;
    const int64_t frozen = options_.keeps_frozen_apart() ? block.trained_from : 0;
    bytes += (block.elements - frozen) * int64_t{sizeof(float)};
  }
  return bytes;
}

void PlanLayout::PlaceGradients(Plan* plan, const Level& level, int resident_gradients) const {
  plan->gradient_rings.resize(plan->weight_classes.size());
  if (!plan->trains) return;
  int resident = 0;
  std::vector<int> spilled(plan->weight_classes.size(), 0);
  // What is summed elsewhere comes when it is complete, and needs no place from the first use to the last.
  // Nor one from a step's first call to its last, where the drive has one.
  const bool stays = plan->calls > 1 && !plan->on_nvme;
  const bool leaves = level.sums_leave && SumsThatMayLeave() > 0;
  const auto shares = [this, stays, leaves](const BlockPlan& block) {
    return ((block.uses == 1 || leaves) && !stays) || device_.has_own_memory;
  };
  bool shares_accumulator = false;
  for (const BlockIndex b : plan->blocks.indices()) {
    BlockPlan& block = plan->blocks[b];
    if (!block.trains) continue;
    if (plan->on_device(b)) {
      block.gradient_slot = plan->gradient_slots.end_index();
      plan->gradient_slots.push_back({0, plan->gradient_place_bytes(b)});
      continue;
    }
    // fp32 gradients are summed where they wait; one that several stages add to stays in its place, or goes
    // between them.
    const bool must_stay =
        !device_.has_own_memory && block.uses > 1 && !leaves && !plan->needs_accumulator(b);
    if (must_stay || resident < resident_gradients) {
      block.gradient_slot = plan->gradient_slots.end_index();
      plan->gradient_slots.push_back({0, plan->gradient_place_bytes(b)});
      ++resident;
    } else {
      ++spilled[At(block.weight_class)];
    }
    if (!plan->needs_accumulator(b)) continue;
    if (shares(block)) shares_accumulator = true;
  }
  for (size_t c = 0; c < spilled.size(); ++c) {
    GradientRing& ring = plan->gradient_rings[c];
    const int64_t elements = GradientElements(*plan, c);
    ring.bytes = elements * plan->precision.gradient_bytes;
    if (plan->squares_on_device()) ring.bytes += PartialSumBytes(elements);
    ring.slots = std::min(level.gradient_ring, spilled[c]);
    ring.first_slot = plan->gradient_slots.end_index();
    for (int i = 0; i < ring.slots; ++i) plan->gradient_slots.push_back({0, ring.bytes});
  }
  if (shares_accumulator) {
    int64_t largest = 0;
    for (const BlockIndex b : plan->blocks.indices()) {
      if (plan->blocks[b].trains && shares(plan->blocks[b]) && plan->needs_accumulator(b))
        largest = std::max(largest, AccumulatorBytes(*plan, b));
    }
    plan->accumulator_ring = std::min(level.gradient_ring, Count());
    for (int i = 0; i < plan->accumulator_ring; ++i) plan->accumulator_slots.push_back({0, largest});
  }
  for (const BlockIndex b : plan->blocks.indices()) {
    BlockPlan& block = plan->blocks[b];
    if (block.trains && !shares(block) && plan->needs_accumulator(b)) {
      block.accumulator_slot = plan->accumulator_slots.end_index();
      plan->accumulator_slots.push_back({0, AccumulatorBytes(*plan, b)});
    }
  }
}

void PlanLayout::LayOut(Plan* plan) const {
  plan->weight_slots.clear();
  for (WeightClass& cls : plan->weight_classes) {
    cls.first_slot = plan->weight_slots.end_index();
    for (int i = 0; i < cls.slots; ++i) plan->weight_slots.push_back({0, cls.bytes});
  }
  for (BlockPlan& block : plan->blocks) {
    if (!block.private_weight_slot.valid()) continue;
    block.private_weight_slot = plan->weight_slots.end_index();
    plan->weight_slots.push_back(
        {0, block.elements * plan->shards_in_memory() * plan->precision.weight_bytes()});
  }
  plan->tile_slots.clear();
  bool spills = false;
  for (const GradientRing& ring : plan->gradient_rings) spills |= ring.slots > 0;
  plan->tile_state_bytes = StateBytes(*plan, plan->state_tile_elements);
  plan->tile_gradient_offset = plan->tile_state_bytes;
  const int64_t ring_bytes =
      plan->tile_state_bytes +
      (spills ? AlignUp(plan->state_tile_elements * plan->precision.gradient_bytes, kPage) : 0);
  for (int i = 0; i < plan->tile_ring; ++i) plan->tile_slots.push_back({0, ring_bytes});
  for (BlockPlan& block : plan->blocks) {
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.private_tile_slot[t].valid()) continue;
      block.private_tile_slot[t] = plan->tile_slots.end_index();
      // A spilled gradient is read beside the state, also where the state stays.
      const int64_t extra =
          block.trains && !block.gradient_slot.valid() ? ring_bytes - plan->tile_state_bytes : 0;
      plan->tile_slots.push_back({0, extra > 0 ? ring_bytes : StateBytes(*plan, block.tiles[t].elements)});
    }
  }
  plan->second_versions = 0;
  for (BlockPlan& block : plan->blocks) {
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.second_slot[t].valid()) continue;
      block.second_slot[t] = plan->tile_slots.end_index();
      plan->tile_slots.push_back({0, plan->precision.TotalBytes(block.tiles[t].elements)});
      ++plan->second_versions;
    }
  }
  int64_t offset = 0;
  const auto place = [&offset](auto& slots) {
    for (Slot& slot : slots) {
      slot.offset = offset;
      offset += AlignUp(slot.bytes, kPage);
    }
  };
  place(plan->weight_slots);
  place(plan->tile_slots);
  place(plan->gradient_slots);
  place(plan->accumulator_slots);
  place(plan->input_slots);
  plan->slot_bytes = offset;
  if (plan->on_nvme ? options_.copies_checkpoints : plan->device.resident_elements > 0) {
    plan->checkpoint_bytes =
        AlignUp(plan->tile_elements * plan->precision.weight_bytes(), kPage) + plan->tile_state_bytes;
  }
  plan->network_bytes = plan->trains ? NetworkBytes(plan->shards_in_memory()) : 0;
  if (plan->codes.weights) plan->network_bytes += GatherBytes(plan->shards_in_memory(), kNetworkPiece);
  plan->arena_bytes = AlignUp(offset + plan->checkpoint_bytes + plan->network_bytes, kHugePage);
}

int64_t PlanLayout::StateBytes(const Plan& plan, int64_t elements) {
  return plan.state_segment_offset(static_cast<int>(plan.precision.segment_bytes.size()), elements);
}

void PlanLayout::MakeAllPrivate(Plan* plan) {
  for (const BlockIndex b : plan->blocks.indices()) {
    if (plan->on_device(b)) continue;
    BlockPlan& block = plan->blocks[b];
    block.private_weight_slot = WeightSlot(0);  // numbered by LayOut
    for (const TileIndex t : block.tiles.indices()) {
      if (plan->trains && !block.weights_alone(t)) block.private_tile_slot[t] = TileSlot(0);
    }
  }
  for (WeightClass& cls : plan->weight_classes) cls.slots = 0;
  plan->tile_ring = 0;
}

}  // namespace penstock::tiering
