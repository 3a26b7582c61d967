// Brings a block's weights into host memory, as new as they can be: with what is due of its update made.
//
// Invariants:
//   weights that are read from the drive are checked before anyone uses them: by the update that is due, or
//   by an operation of their own. over several ranks the weights in a slot are whole before anyone computes
//   with them or copies them whole.
#ifndef PENSTOCK_TIERING_PROGRAM_WEIGHT_FETCHER_H_
#define PENSTOCK_TIERING_PROGRAM_WEIGHT_FETCHER_H_

#include <cstddef>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"
#include "tiering/program/tile_writer.h"
#include "tiering/program/update_emitter.h"

namespace penstock::tiering {

class WeightFetcher {
 public:
  WeightFetcher(const Plan& plan, OpList* ops, SlotAllocator* slots, UpdateEmitter* updates,
                TileWriter* writer);

  // Returns the weight slot.
  WeightSlot Fetch(BlockIndex block, UseIndex use);
  // Over several ranks, for a use by compute: gathers what is not there or has changed.
  void Gather(BlockIndex block, WeightSlot weight_slot);

 private:
  // Into a slot that it is given.
  WeightSlot Read(BlockIndex block, UseIndex use, PerTile<OpId>* reads);

  const Plan& plan_;
  OpList& ops_;
  SlotAllocator& slots_;
  UpdateEmitter& updates_;
  TileWriter& writer_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_WEIGHT_FETCHER_H_
