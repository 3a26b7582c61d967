// A block's gradient, from what backward leaves to what waits for the update: summed, reduced over ranks,
// rounded once, and spilled where it does not wait in memory.
//
// Invariants:
//   a gradient has one place in a pass, from its first addend on; nobody of the pass before uses it by then.
//   what makes it final waits for its last addend.
#ifndef PENSTOCK_TIERING_PROGRAM_GRADIENT_EMITTER_H_
#define PENSTOCK_TIERING_PROGRAM_GRADIENT_EMITTER_H_

#include <cstdint>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/device_gradients.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"

namespace penstock::tiering {

class GradientEmitter {
 public:
  GradientEmitter(const Plan& plan, OpList* ops, SlotAllocator* slots, DeviceGradients* device);

  // No block has a place in the backward that begins. `first`: of its step.
  void StartBackward(bool first);
  // The places in this pass where a block's gradient is summed, or goes to where it is not, unless an earlier
  // use has taken them; returns who still uses them.
  Edges TakePlaces(BlockIndex block);
  // After `users`, the sums of the step's calls and of the block's uses before come there, if they did not
  // stay. Returns what the first addend waits for.
  Edges FetchSums(BlockIndex block, const Edges& users, int64_t step);
  // Those places, as an operation's.
  void SetPlaces(BlockIndex block, Op* op) const;
  // When `last`, its last addend, is taken: from there to a gradient that waits for the norm; returns what
  // makes it final.
  OpId EmitFinal(BlockIndex block, OpId last, int64_t step);
  // When `last`, its last addend of this use, is taken, and more uses or calls of the step come: its sums
  // stay, or go to the drive. Returns what they are safe after.
  OpId EmitSums(BlockIndex block, OpId last, int64_t step);
  // And, of one that does not wait in memory, its way to the drive.
  void EmitSpill(BlockIndex block, OpId final_id, int64_t step);

  // Where the block's final gradient is, for its update: in memory until that is over, unless it is spilled.
  GradientSlot final_slot(BlockIndex block) const { return final_slot_[block]; }
  OpId spilled(BlockIndex block) const {
    return spilled_[block];
  }  // its way to the drive; -1: there was none

 private:
  // `last` is the last operation so far that uses its places.
  void UsedBy(BlockIndex block, OpId last);
  Op& EmitSumsMove(OpKind kind, Lane lane, BlockIndex block, int64_t step);
  Edges TakeGradientSlot(BlockIndex block);
  Edges TakeAccumulatorSlot(BlockIndex block);

  const Plan& plan_;
  OpList& ops_;
  SlotAllocator& slots_;
  DeviceGradients& device_;
  PerBlock<GradientSlot> gradient_;  // its places in this pass, or none
  PerBlock<AccumulatorSlot> accumulator_;
  PerBlock<GradientSlot> final_slot_;
  PerBlock<OpId> spilled_;
  PerBlock<OpId> sums_written_;  // the last time, -1
  PerBlock<char> sums_away_;     // they are on the drive, or on their way there
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_GRADIENT_EMITTER_H_
