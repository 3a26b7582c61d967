// The device's places for gradients, where a device has memory of its own (tiering/plan/device_plan.h): what
// sums, rounds and reduces them there, and what copies them to host memory.
//
// Invariants:
//   a block's gradient or its sums have one place on the device in a pass, from the first addend on.
//   a place is filled again only after the operation that took the former content away.
#ifndef PENSTOCK_TIERING_PROGRAM_DEVICE_GRADIENTS_H_
#define PENSTOCK_TIERING_PROGRAM_DEVICE_GRADIENTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_users.h"

namespace penstock::tiering {

class DeviceGradients {
 public:
  DeviceGradients(const ModelGraph& graph, const Plan& plan, OpList* ops);

  // No block has a place in the backward that begins.
  void StartBackward();
  // The places for a block's gradient while it is summed, unless an earlier use has taken them; what still
  // uses them goes to `wait`.
  void TakePlaces(BlockIndex block, Edges* wait);
  void SetPlaces(BlockIndex block, Op* op) const;
  // Among devices that exchange with each other: reduces what backward left there, when `last` is taken.
  OpId EmitReduce(BlockIndex block, OpId last, int64_t step);
  // When `last`, its last addend, is taken: rounds sums and copies the gradient to its slot in host memory;
  // where several ranks reduce in host memory copies what there is to `host_accumulator`. `wait`: who still
  // uses that place.
  OpId EmitCopyOut(BlockIndex block, GradientSlot gradient_slot, AccumulatorSlot host_accumulator, OpId last,
                   const Edges& wait, int64_t step);
  // The device updates the block, which lives there, with its gradient.
  void UpdatedBy(BlockIndex block, OpId update);

 private:
  // The next of the ring of the block's class.
  DeviceGradientSlot NextGradientSlot(const DevicePlan::Block& places);

  const ModelGraph& graph_;
  const Plan& plan_;
  OpList& ops_;
  SlotUsers<DeviceGradientSlot> gradient_users_;
  SlotUsers<DeviceAccumulatorSlot> accumulator_users_;
  std::vector<size_t> next_gradient_;  // [weight class]
  size_t next_accumulator_ = 0;
  PerBlock<DeviceGradientSlot> gradient_;  // its places in this pass, or none
  PerBlock<DeviceAccumulatorSlot> accumulator_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_DEVICE_GRADIENTS_H_
