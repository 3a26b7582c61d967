// Places in a tier's memory, as a plan lays them out.
#ifndef PENSTOCK_TIERING_PLAN_SLOT_H_
#define PENSTOCK_TIERING_PLAN_SLOT_H_

#include <cstddef>
#include <cstdint>

namespace penstock::tiering {

// A place in an arena: the host's, or a device's.
struct Slot {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// Blocks whose runs have similar sizes share slots; a class has its own, numbered
// first_slot..first_slot+slots-1.
struct WeightClass {
  int64_t bytes = 0;
  int first_slot = 0;
  int slots = 0;

  // Its slots one after the other, round and round; `turn` counts.
  int NextSlot(size_t* turn) const {
    return first_slot + static_cast<int>((*turn)++ % static_cast<size_t>(slots));
  }
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_SLOT_H_
