#include "tiering/program/device_weights.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace penstock::tiering {
namespace {

// Weights come to the device at most so many uses ahead: with many slots there would be room for more, but
// reads of weights go before those of state, and what is read long before its use keeps updates waiting.
constexpr size_t kUsesAhead = 2;

int64_t StateElementBytes(const Precision& precision, int64_t elements) {
  return precision.UnpaddedBytes(elements) - precision.SegmentBytes(0, elements);
}

}  // namespace

DeviceWeights::DeviceWeights(const ModelGraph& graph, const Plan& plan, const Parts& parts)
    : graph_(graph),
      plan_(plan),
      uses_(parts.uses),
      ops_(parts.ops),
      slots_(parts.slots),
      writer_(parts.writer),
      updates_(parts.updates),
      fetcher_(parts.fetcher),
      gradients_(parts.gradients),
      held_(plan.device.weight_slots.size()) {
  // Without a drive everything is in place before the first pass.
  for (const BlockIndex b : plan.blocks.indices()) {
    if (plan.on_nvme || !plan.on_device(b)) continue;
    Held& held = held_[plan.device.blocks[b].weight_slot];
    held.block = b;
    held.ready.assign(plan.blocks[b].tiles.size(), -1);
    held.version.assign(plan.blocks[b].tiles.size(), 0);
  }
}

DeviceWeightSlot DeviceWeights::FetchForCompute(BlockIndex block, UseIndex use, bool updates,
                                                WeightSlot* weight_slot) {
  *weight_slot = WeightSlot();
  if (plan_.on_device(block)) return FetchResident(block, use);
  const DeviceWeightSlot there = Find(block);
  const bool as_new_in_memory = !updates && !updates_.IsDue(block);
  if (as_new_in_memory && there.valid() && IsCurrent(block, there)) return there;
  if (as_new_in_memory && plan_.device.gds && !IsInHostMemory(block)) return ReadPastHost(block, use);
  *weight_slot = fetcher_.Fetch(block, use);
  if (!plan_.device.collectives && (!there.valid() || !IsCurrent(block, there)))
    fetcher_.Gather(block, *weight_slot);
  return CopyIn(block, use, *weight_slot);
}

void DeviceWeights::ComputedWith(DeviceWeightSlot device_slot, OpId last) {
  Held& held = held_[device_slot];
  PENSTOCK_CHECK(held.last_compute < last, "compute that is recorded out of its order");
  held.last_compute = last;
  used_.push_back(last);
  if (used_.size() > kUsesAhead) used_.pop_front();
}

void DeviceWeights::ForgetGathered() {
  for (Held& held : held_) {
    held.whole = false;
    const bool comes_and_goes = held.block.valid() && !plan_.on_device(held.block);
    if (comes_and_goes) std::fill(held.version.begin(), held.version.end(), -1);
  }
}

DeviceWeightSlot DeviceWeights::Find(BlockIndex block) const {
  const DeviceWeightClass& cls = plan_.device.weight_classes[At(plan_.device.blocks[block].weight_class)];
  for (const DeviceWeightSlot slot : cls.indices()) {
    if (held_[slot].block == block) return slot;
  }
  return DeviceWeightSlot();
}

bool DeviceWeights::IsCurrent(BlockIndex block, DeviceWeightSlot device_slot) const {
  return held_[device_slot].version == updates_.versions(block);
}

bool DeviceWeights::IsInHostMemory(BlockIndex block) const {
  // A place of its own has them from their first use on.
  return plan_.blocks[block].private_weight_slot.valid() || slots_.FindWeights(block).valid();
}

DeviceWeightSlot DeviceWeights::FetchResident(BlockIndex block, UseIndex use) {
  const DeviceWeightSlot slot = plan_.device.blocks[block].weight_slot;
  if (held_[slot].block != block) Load(block, use);
  if (updates_.IsDue(block)) Update(block, use);
  if (plan_.device.collectives && !held_[slot].whole) Gather(block, slot);
  return slot;
}

// By way of a weight slot and the tile slots, whose content nobody looks for afterwards: what host memory has
// of the block is old after its first update.
void DeviceWeights::Load(BlockIndex block, UseIndex use) {
  const WeightSlot weight_slot = fetcher_.Fetch(block, use);
  Held& held = held_[CopyIn(block, use, weight_slot)];
  held.made.clear();
  for (const OpId copied : held.ready) AddIf(&held.made, copied);
  const PerTile<Tile>& tiles = plan_.blocks[block].tiles;
  for (const TileIndex t : tiles.indices()) {
    if (plan_.precision.StateBytes(tiles[t].elements) == 0) continue;
    held.made.push_back(LoadState(block, t));
  }
  slots_.ForgetWeights(weight_slot);
}

OpId DeviceWeights::LoadState(BlockIndex block, TileIndex tile) {
  const int64_t elements = plan_.blocks[block].tiles[tile].elements;
  const TileSlot tile_slot = slots_.NextTileSlot();
  OpId last = -1;
  const auto emit = [&](OpKind kind, Lane lane, int64_t bytes) -> Op& {
    const OpId before = std::exchange(last, ops_.next_id());
    Op& op = ops_.Emit(kind, lane, ops_.computing_step());
    op.block = block;
    op.tile = tile;
    op.tile_slot = tile_slot;
    op.bytes = bytes;
    AddIf(&op.after, before);
    return op;
  };
  Op& read = emit(OpKind::kReadState, Lane::kRead, plan_.precision.StateBytes(elements));
  AddAll(&read.after, slots_.tile_users().Take(tile_slot));
  AddIf(&read.after, writer_.last_write(block, tile));
  emit(OpKind::kVerify, Lane::kUpdate, 0).checks_state = true;
  emit(OpKind::kCopyStateIn, Lane::kCopyIn, StateElementBytes(plan_.precision, elements));
  slots_.tile_users().Add(tile_slot, last);
  return last;
}

void DeviceWeights::Update(BlockIndex block, UseIndex use) {
  const DeviceWeightSlot slot = plan_.device.blocks[block].weight_slot;
  Held& held = held_[slot];
  const int64_t step = updates_.pending_step();
  PENSTOCK_CHECK(held.block == block, "an update of weights that are not on the device");
  const OpId id = ops_.next_id();
  Op& update = ops_.Emit(OpKind::kUpdateOnDevice, Lane::kCompute, step);
  update.block = block;
  update.device_weight_slot = slot;
  update.after = {updates_.norm()};
  AddAll(&update.after, TakeAll(&held.made));
  AddAll(&update.after, TakeAll(&held.copies));
  // Who computes with the weights comes later on the same lane, and need not wait until this is known to be
  // over.
  held.made = {id};
  held.last_compute = id;
  held.whole = false;
  gradients_.UpdatedBy(block, id);
  updates_.UpdatedOnDevice(block, id);
  held.version = updates_.versions(block);
  if (plan_.on_nvme && plan_.commits_every_step) WriteBlock(block, use, step);
}

// By way of a weight slot that holds nothing else till all of the block is written, and the ring's slots.
void DeviceWeights::WriteBlock(BlockIndex block, UseIndex use, int64_t step) {
  Edges former;
  const WeightSlot weight_slot = slots_.TakeWeightSlot(block, use, &former);
  slots_.ForgetWeights(weight_slot);
  for (const TileIndex tile : plan_.blocks[block].tiles.indices()) {
    const TileSlot tile_slot = EmitStateOut(block, tile, weight_slot, former, step);
    writer_.WriteChecksummed({block, tile, weight_slot, tile_slot}, step);
  }
}

TileSlot DeviceWeights::EmitStateOut(BlockIndex block, TileIndex tile, WeightSlot weight_slot,
                                     const Edges& former, int64_t step) {
  const TileSlot tile_slot = slots_.NextTileSlot();
  Held& held = held_[plan_.device.blocks[block].weight_slot];
  const OpId id = ops_.next_id();
  Op& copy = ops_.Emit(OpKind::kCopyStateOut, Lane::kCopyOut, step);
  copy.block = block;
  copy.tile = tile;
  copy.weight_slot = weight_slot;
  copy.tile_slot = tile_slot;
  copy.bytes = plan_.precision.UnpaddedBytes(plan_.blocks[block].tiles[tile].elements);
  copy.after = former;
  AddAll(&copy.after, slots_.tile_users().Take(tile_slot));
  AddAll(&copy.after, held.made);
  slots_.tile_users().Add(tile_slot, id);
  slots_.WeightsReady(weight_slot, tile, id);
  held.copies.push_back(id);
  return tile_slot;
}

DeviceWeightSlot DeviceWeights::Acquire(BlockIndex block, UseIndex use) {
  DeviceWeightSlot slot = plan_.on_device(block) ? plan_.device.blocks[block].weight_slot : Find(block);
  if (!slot.valid()) {
    slot = uses_.SlotToGiveUp(plan_.device.weight_classes[At(plan_.device.blocks[block].weight_class)], use,
                              [this](DeviceWeightSlot of) { return held_[of].block; });
  }
  Held& held = held_[slot];
  if (held.block != block) {
    const size_t tiles = plan_.blocks[block].tiles.size();
    held.block = block;
    held.ready.assign(tiles, -1);
    held.version.assign(tiles, -1);
  }
  return slot;
}

// Every content was computed with, and the compute lane keeps its order.
void DeviceWeights::AddUsers(Edges* after, const Held& held) const {
  AddIf(after, held.last_compute);
  if (used_.size() == kUsesAhead) after->push_back(used_.front());
}

DeviceWeightSlot DeviceWeights::ReadPastHost(BlockIndex block, UseIndex use) {
  const DeviceWeightSlot slot = Acquire(block, use);
  Held& held = held_[slot];
  const PerTile<int64_t>& versions = updates_.versions(block);
  const PerTile<Tile>& tiles = plan_.blocks[block].tiles;
  const auto emit = [&](OpKind kind, Lane lane, TileIndex tile) -> Op& {
    held.ready[tile] = ops_.next_id();
    Op& op = ops_.Emit(kind, lane, ops_.computing_step());
    op.block = block;
    op.tile = tile;
    op.device_weight_slot = slot;
    return op;
  };
  for (const TileIndex t : tiles.indices()) {
    if (held.version[t] == versions[t]) continue;
    Op& read = emit(OpKind::kReadWeights, Lane::kRead, t);
    read.bytes = tiles[t].elements * plan_.precision.weight_bytes();
    AddUsers(&read.after, held);
    AddIf(&read.after, writer_.last_write(block, t));
    AddIf(&read.after, writer_.last_check(block, t));
    const OpId arrived = held.ready[t];
    emit(OpKind::kVerify, Lane::kUpdate, t).after = {arrived};
    writer_.Checks(block, t, held.ready[t]);
    held.version[t] = versions[t];
  }
  held.whole = plan_.world == 1;
  if (plan_.device.collectives) Gather(block, slot);
  return slot;
}

DeviceWeightSlot DeviceWeights::CopyIn(BlockIndex block, UseIndex use, WeightSlot weight_slot) {
  const DeviceWeightSlot slot = Acquire(block, use);
  Held& held = held_[slot];
  const PerTile<int64_t>& versions = updates_.versions(block);
  if (held.version == versions) return slot;
  const SlotAllocator::Weights& host = slots_.weights(weight_slot);
  PENSTOCK_CHECK(host.block == block, "a copy of weights that are not in host memory");
  const auto emit = [&](TileIndex tile, int64_t elements) -> Op& {
    Op& copy = ops_.Emit(OpKind::kCopyIn, Lane::kCopyIn, ops_.computing_step());
    copy.block = block;
    copy.tile = tile;
    copy.weight_slot = weight_slot;
    copy.device_weight_slot = slot;
    copy.bytes = elements * plan_.precision.weight_bytes();
    AddUsers(&copy.after, held);
    return copy;
  };
  const PerTile<Tile>& tiles = plan_.blocks[block].tiles;
  if (plan_.world > 1 && !plan_.device.collectives) {
    PENSTOCK_CHECK(host.whole, "a copy of weights that were not gathered");
    const OpId id = ops_.next_id();
    emit(TileIndex(), graph_.blocks[block].elements).after.push_back(host.gather);
    slots_.WeightsCopiedWhole(weight_slot, id);
    held.ready.assign(tiles.size(), -1);
    held.ready.front() = id;  // stands for all
    held.version = versions;
    return slot;
  }
  for (const TileIndex t : tiles.indices()) {
    if (held.version[t] == versions[t]) continue;
    const OpId id = ops_.next_id();
    AddIf(&emit(t, tiles[t].elements).after, host.ready[t]);
    slots_.WeightsCopied(weight_slot, t, id);
    held.ready[t] = id;
    held.version[t] = versions[t];
  }
  held.whole = plan_.world == 1;
  if (plan_.device.collectives && !plan_.on_device(block)) Gather(block, slot);
  return slot;
}

// The other ranks' shards behind or before this one's, which has just been copied there. Whoever computed
// with the former content was done before that.
void DeviceWeights::Gather(BlockIndex block, DeviceWeightSlot device_slot) {
  Held& held = held_[device_slot];
  const OpId id = ops_.next_id();
  Op& gather = ops_.Emit(OpKind::kAllGather, Lane::kAllGather, ops_.computing_step());
  gather.block = block;
  gather.device_weight_slot = device_slot;
  gather.evaluates = !ops_.trains();
  gather.bytes = gather.evaluates ? plan_.whole_gathered_bytes(block) : plan_.gathered_bytes(block);
  for (const OpId ready : held.ready) AddIf(&gather.after, ready);
  AddIf(&gather.after, held.last_compute);
  held.ready.assign(held.ready.size(), -1);
  held.ready.front() = id;  // stands for all
  held.whole = true;
}

}  // namespace penstock::tiering
