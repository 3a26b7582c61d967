// Places in a tier's memory, as a plan lays them out.
#ifndef PENSTOCK_TIERING_PLAN_SLOT_H_
#define PENSTOCK_TIERING_PLAN_SLOT_H_

#include <cstddef>
#include <cstdint>

#include "base/index.h"

namespace penstock::tiering {

// A place in an arena: the host's, or a device's.
struct Slot {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// The slots of each kind are numbered for themselves. In host memory:
using WeightSlot = Index<struct WeightSlotTag>;  // a block's run
using TileSlot = Index<struct TileSlotTag>;      // a tile's state
using GradientSlot = Index<struct GradientSlotTag>;
using AccumulatorSlot = Index<struct AccumulatorSlotTag>;  // a block's fp32 sums
using InputSlot = Index<struct InputSlotTag>;              // what waits for a device with its own memory
// On a device with its own memory:
using DeviceWeightSlot = Index<struct DeviceWeightSlotTag>;
using DeviceGradientSlot = Index<struct DeviceGradientSlotTag>;
using DeviceAccumulatorSlot = Index<struct DeviceAccumulatorSlotTag>;
using DeviceStateSlot = Index<struct DeviceStateSlotTag>;

// Slots of one size that are used in turn, numbered from first_slot on.
template <class I>
struct SlotRing {
  int64_t bytes = 0;
  I first_slot{0};
  int slots = 0;

  IndexRange<I> indices() const { return {first_slot, first_slot + slots}; }
  // Its slots one after the other, round and round; `turn` counts.
  I NextSlot(size_t* turn) const {
    return first_slot + static_cast<int>((*turn)++ % static_cast<size_t>(slots));
  }
};
// Blocks whose runs have similar sizes share slots; a class has its own.
using WeightClass = SlotRing<WeightSlot>;
using GradientRing = SlotRing<GradientSlot>;
using DeviceWeightClass = SlotRing<DeviceWeightSlot>;
using DeviceGradientRing = SlotRing<DeviceGradientSlot>;

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_SLOT_H_
