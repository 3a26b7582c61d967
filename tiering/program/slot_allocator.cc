#include "tiering/program/slot_allocator.h"

#include <algorithm>

#include "base/check.h"
#include "base/index.h"

namespace penstock::tiering {

SlotAllocator::SlotAllocator(const Plan& plan, const UseOrder& uses)
    : plan_(plan),
      uses_(uses),
      weights_(plan.weight_slots.size()),
      states_(plan.tile_slots.size()),
      tile_users_(plan.tile_slots.size()),
      gradient_users_(plan.gradient_slots.size()),
      accumulator_users_(plan.accumulator_slots.size()),
      next_gradient_slot_(plan.weight_classes.size(), 0) {
  std::vector<int> sharing(plan.weight_classes.size(), 0);
  for (const BlockPlan& block : plan.blocks) {
    // Those that live on a device count: theirs pass through the shared slots on their way.
    if (!block.private_weight_slot.valid()) ++sharing[At(block.weight_class)];
  }
  for (const BlockIndex b : plan.blocks.indices()) {
    const BlockPlan& block = plan.blocks[b];
    const size_t c = At(block.weight_class);
    stays_.push_back(block.private_weight_slot.valid() || sharing[c] <= plan.weight_classes[c].slots ? 1 : 0);
    if (!block.private_weight_slot.valid()) continue;
    Weights& own = Held(block.private_weight_slot);
    for (PerTile<OpId>* ids : {&own.ready, &own.writes, &own.copies}) ids->assign(block.tiles.size(), -1);
    // Without a drive everything is in place before the first pass.
    if (!plan.on_nvme) own.block = b;
  }
  ReserveForReplays(false);
  for (const BlockIndex b : plan.blocks.indices()) {
    if (plan.on_nvme) break;
    const PerTile<TileSlot>& own = plan.blocks[b].private_tile_slot;
    for (const TileIndex t : own.indices()) {
      if (own[t].valid()) KeepState(own[t], b, t);
    }
  }
}

const SlotAllocator::Weights& SlotAllocator::weights(WeightSlot slot) const { return weights_[slot]; }

SlotAllocator::Weights& SlotAllocator::Held(WeightSlot slot) { return weights_[slot]; }

WeightSlot SlotAllocator::FindWeights(BlockIndex block) const {
  const BlockPlan& bp = plan_.blocks[block];
  if (bp.private_weight_slot.valid()) {
    return weights_[bp.private_weight_slot].block == block ? bp.private_weight_slot : WeightSlot();
  }
  const WeightClass& cls = plan_.weight_classes[At(bp.weight_class)];
  for (const WeightSlot slot : cls.indices()) {
    if (weights_[slot].block == block) return slot;
  }
  return WeightSlot();
}

WeightSlot SlotAllocator::TakeWeightSlot(BlockIndex block, UseIndex use, Edges* former) {
  PENSTOCK_CHECK(!FindWeights(block).valid(), "a second slot for the same weights");
  const BlockPlan& bp = plan_.blocks[block];
  WeightSlot slot = bp.private_weight_slot;
  if (!slot.valid()) {
    slot = uses_.SlotToGiveUp(plan_.weight_classes[At(bp.weight_class)], use,
                              [this](WeightSlot of) { return weights_[of].block; });
  }
  Weights& held = Held(slot);
  for (PerTile<OpId>* ids : {&held.ready, &held.writes, &held.copies}) {
    for (const OpId id : *ids) AddIf(former, id);
    ids->assign(bp.tiles.size(), -1);
  }
  AddIf(former, held.last_compute);
  AddIf(former, held.gather);
  held.last_compute = held.gather = -1;
  held.whole = false;
  held.block = block;
  return slot;
}

void SlotAllocator::WeightsUpdated(WeightSlot slot, TileIndex tile, OpId id) {
  WeightsReady(slot, tile, id);
  Held(slot).whole = false;
}

void SlotAllocator::WeightsCopiedWhole(WeightSlot slot, OpId id) {
  PerTile<OpId>& copies = Held(slot).copies;
  std::fill(copies.begin(), copies.end(), -1);
  copies.front() = id;  // stands for all
}

void SlotAllocator::WeightsGathered(WeightSlot slot, OpId id) {
  Held(slot).gather = id;
  Held(slot).whole = true;
}

void SlotAllocator::WeightsComputedWith(WeightSlot slot, OpId id) {
  PENSTOCK_CHECK(Held(slot).last_compute < id, "compute that is recorded out of its order");
  Held(slot).last_compute = id;
}

TileSlot SlotAllocator::TileSlotFor(BlockIndex block, TileIndex tile, bool replays) {
  const TileSlot own = plan_.blocks[block].private_tile_slot[tile];
  if (own.valid()) return own;
  return replays ? TileSlot(plan_.tile_ring - 1) : NextTileSlot();
}

bool SlotAllocator::HoldsState(TileSlot slot, BlockIndex block, TileIndex tile) const {
  return states_[slot].block == block && states_[slot].tile == tile;
}

void SlotAllocator::KeepState(TileSlot slot, BlockIndex block, TileIndex tile) {
  PENSTOCK_CHECK(plan_.blocks[block].private_tile_slot[tile] == slot, "state that stays in the ring");
  states_[slot] = {block, tile};
}

GradientSlot SlotAllocator::GradientSlotFor(BlockIndex block) {
  const BlockPlan& bp = plan_.blocks[block];
  if (bp.gradient_slot.valid()) return bp.gradient_slot;
  return plan_.gradient_rings[At(bp.weight_class)].NextSlot(&next_gradient_slot_[At(bp.weight_class)]);
}

AccumulatorSlot SlotAllocator::AccumulatorSlotFor(BlockIndex block) {
  const AccumulatorSlot own = plan_.blocks[block].accumulator_slot;
  return own.valid() ? own : AccumulatorSlot(next_accumulator_++ % At(plan_.accumulator_ring));
}

}  // namespace penstock::tiering
