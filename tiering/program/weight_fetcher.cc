#include "tiering/program/weight_fetcher.h"

#include "base/check.h"
#include "base/index.h"

namespace penstock::tiering {

WeightFetcher::WeightFetcher(const Plan& plan, OpList* ops, SlotAllocator* slots, UpdateEmitter* updates,
                             TileWriter* writer)
    : plan_(plan), ops_(*ops), slots_(*slots), updates_(*updates), writer_(*writer) {}

WeightSlot WeightFetcher::Fetch(BlockIndex block, UseIndex use) {
  PerTile<OpId> reads(plan_.blocks[block].tiles.size(), -1);
  WeightSlot slot = slots_.FindWeights(block);
  if (!slot.valid()) slot = Read(block, use, &reads);
  updates_.EmitDue(block, slot, reads);
  return slot;
}

WeightSlot WeightFetcher::Read(BlockIndex block, UseIndex use, PerTile<OpId>* reads) {
  Edges former;
  const WeightSlot slot = slots_.TakeWeightSlot(block, use, &former);
  const PerTile<Tile>& tiles = plan_.blocks[block].tiles;
  for (const TileIndex tile : tiles.indices()) {
    const Due due = updates_.due(block, tile);
    const bool updates = due == Due::kUpdate || due == Due::kAgain;
    (*reads)[tile] = ops_.next_id();
    // Weights that an update needs belong to its step; those that only compute needs, to the step that
    // computes.
    Op& read = ops_.Emit(OpKind::kReadWeights, Lane::kRead,
                         updates ? updates_.pending_step() : ops_.computing_step());
    read.block = block;
    read.tile = tile;
    read.weight_slot = slot;
    read.bytes = plan_.blocks[block].read_bytes(tile, plan_.precision.weight_bytes());
    read.after = former;
    AddIf(&read.after, writer_.last_write(block, tile));
    AddIf(&read.after, writer_.last_check(block, tile));
    if (updates) continue;
    writer_.Checks(block, tile, ops_.next_id());
    slots_.WeightsReady(slot, tile, ops_.next_id());
    Op& verify = ops_.Emit(OpKind::kVerify, Lane::kUpdate, ops_.computing_step());
    verify.block = block;
    verify.tile = tile;
    verify.weight_slot = slot;
    verify.after = {(*reads)[tile]};
  }
  return slot;
}

void WeightFetcher::Gather(BlockIndex block, WeightSlot weight_slot) {
  if (plan_.world == 1) return;
  const SlotAllocator::Weights& weights = slots_.weights(weight_slot);
  if (weights.whole) return;
  PENSTOCK_CHECK(weights.block == block, "a gather of weights that are not there");
  const OpId id = ops_.next_id();
  Op& gather = ops_.Emit(OpKind::kAllGather, Lane::kAllGather, ops_.computing_step());
  gather.block = block;
  gather.weight_slot = weight_slot;
  gather.evaluates = !ops_.trains();
  gather.bytes = gather.evaluates ? plan_.whole_gathered_bytes(block) : plan_.gathered_bytes(block);
  // Whoever used the slot before is done by the time that this rank's shard was read, where it was.
  for (const OpId ready : weights.ready) AddIf(&gather.after, ready);
  for (const OpId copy : weights.copies) AddIf(&gather.after, copy);
  AddIf(&gather.after, weights.last_compute);
  slots_.WeightsGathered(weight_slot, id);
}

}  // namespace penstock::tiering
