// Who holds which slot of host memory, since when, and who still uses what it holds.
//
// Invariants:
//   a slot is given up together with all operations that still use its content: those that read it from the
//   drive, wrote it there, copied it, gathered into it or computed with it. Its next filling waits for them.
//   a block's weights are in one slot at most, in its own one or in one of its class.
//   what is recorded of a slot's content is recorded of what the slot holds, in the order of the program.
#ifndef PENSTOCK_TIERING_PROGRAM_SLOT_ALLOCATOR_H_
#define PENSTOCK_TIERING_PROGRAM_SLOT_ALLOCATOR_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "tiering/program/slot_users.h"
#include "tiering/program/use_order.h"

namespace penstock::tiering {

class SlotAllocator {
 public:
  SlotAllocator(const Plan& plan, const UseOrder& uses);

  // What a weight slot holds.
  struct Weights {
    BlockIndex block;        // whose weights it holds or will hold
    PerTile<OpId> ready;     // complete when the content is there: verified or updated
    PerTile<OpId> writes;    // that read the content to the drive, -1: none
    PerTile<OpId> copies;    // the last that reads the content to the device, -1: none
    OpId last_compute = -1;  // the compute lane runs in order: its last use stands for all
    OpId gather = -1;        // the last of this content, -1: none
    bool whole = false;      // no shard has changed since
  };
  const Weights& weights(WeightSlot slot) const;

  // The slot that has the block's weights, or none.
  WeightSlot FindWeights(BlockIndex block) const;
  // Nothing but its first use ever brings the block's weights: no other block takes their slot.
  bool stays(BlockIndex block) const { return stays_[block] != 0; }
  // Gives the block a slot for the use: its own, an empty one, or the one most worth giving up.
  // `former`: who uses it until then.
  WeightSlot TakeWeightSlot(BlockIndex block, UseIndex use, Edges* former);
  // What was gathered is gathered again before it is computed with.
  void ForgetGathered() {
    for (Weights& held : weights_) held.whole = false;
  }
  // What the slot holds is nobody's: its next content is the next block's that asks.
  void ForgetWeights(WeightSlot slot) { Held(slot).block = BlockIndex(); }

  // What happens to the weights in a slot.
  void WeightsReady(WeightSlot slot, TileIndex tile, OpId id) { Held(slot).ready[tile] = id; }
  void WeightsUpdated(WeightSlot slot, TileIndex tile, OpId id);
  void WeightsWritten(WeightSlot slot, TileIndex tile, OpId id) { Held(slot).writes[tile] = id; }
  void WeightsCopied(WeightSlot slot, TileIndex tile, OpId id) { Held(slot).copies[tile] = id; }
  void WeightsCopiedWhole(WeightSlot slot, OpId id);
  void WeightsGathered(WeightSlot slot, OpId id);
  void WeightsComputedWith(WeightSlot slot, OpId id);

  // The slot for a tile's update: its own, or one of the ring. Updates that are replayed have the last one of
  // the ring to themselves: they wait for the norm, and what is read ahead of it must not wait with them. In
  // a pass that has none, the ring turns with all its slots.
  void ReserveForReplays(bool there_are) { rotating_tile_slots_ = ring_without(there_are ? 1 : 0); }
  TileSlot TileSlotFor(BlockIndex block, TileIndex tile, bool replays);
  TileSlot NextTileSlot() { return TileSlot(next_tile_slot_++ % rotating_tile_slots_); }
  bool HoldsState(TileSlot slot, BlockIndex block, TileIndex tile) const;
  // The state stays there; only in the tile's own slot.
  void KeepState(TileSlot slot, BlockIndex block, TileIndex tile);
  SlotUsers<TileSlot>& tile_users() { return tile_users_; }

  // The slot for a block's gradient, or for its sums: its own, or the next of the ring.
  GradientSlot GradientSlotFor(BlockIndex block);
  AccumulatorSlot AccumulatorSlotFor(BlockIndex block);
  SlotUsers<GradientSlot>& gradient_users() { return gradient_users_; }
  SlotUsers<AccumulatorSlot>& accumulator_users() { return accumulator_users_; }

 private:
  struct State {
    BlockIndex block;
    TileIndex tile;
  };

  Weights& Held(WeightSlot slot);
  size_t ring_without(int slots) const { return static_cast<size_t>(std::max(1, plan_.tile_ring - slots)); }

  const Plan& plan_;
  const UseOrder& uses_;
  IndexedVector<WeightSlot, Weights> weights_;
  PerBlock<char> stays_;
  IndexedVector<TileSlot, State> states_;  // what it keeps
  SlotUsers<TileSlot> tile_users_;
  SlotUsers<GradientSlot> gradient_users_;
  SlotUsers<AccumulatorSlot> accumulator_users_;
  size_t next_tile_slot_ = 0;
  size_t rotating_tile_slots_ = 1;
  std::vector<size_t> next_gradient_slot_;  // [weight class]
  size_t next_accumulator_ = 0;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_SLOT_ALLOCATOR_H_
