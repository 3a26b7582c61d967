// When blocks are used: in the pass that is appended and, counted on, in the forward that most often follows.
// From it comes which content a slot loses first (Belady).
//
// Invariant: the uses of a block rise, so that its next one is found by halving.
#ifndef PENSTOCK_TIERING_PROGRAM_USE_ORDER_H_
#define PENSTOCK_TIERING_PROGRAM_USE_ORDER_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "tiering/plan/numbers.h"
#include "tiering/plan/slot.h"

namespace penstock::tiering {

class UseOrder {
 public:
  explicit UseOrder(size_t blocks) : uses_(blocks) {}

  void Clear();
  // The next use is one of `block`.
  void Add(BlockIndex block);

  // Of the class's slots the first empty one, or else the one whose content is most worth giving up when a
  // block is fetched for the use at `use`. `held(slot)`: the block whose content the slot has, or none.
  template <class I, class Held>
  I SlotToGiveUp(const SlotRing<I>& cls, UseIndex use, const Held& held) const {
    I victim;
    GiveUp worth;
    for (const I slot : cls.indices()) {
      const BlockIndex block = held(slot);
      if (!block.valid()) return slot;
      const GiveUp of_slot = WorthGivingUp(block, use);
      if (victim.valid() && of_slot <= worth) continue;
      victim = slot;
      worth = of_slot;
    }
    return victim;
  }

 private:
  // Whether the block is not the one that computes while that at `use` is fetched, and its next use: the
  // content that compares greatest is given up. Furthest in the future alone would keep, of two slots, the
  // one of an embedding that is used again at the other end, and leave every block to wait for the other.
  using GiveUp = std::pair<bool, UseIndex>;
  GiveUp WorthGivingUp(BlockIndex block, UseIndex use) const;

  PerBlock<std::vector<UseIndex>> uses_;
  UseIndex next_{0};
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_USE_ORDER_H_
