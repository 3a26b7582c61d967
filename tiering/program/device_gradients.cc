#include "tiering/program/device_gradients.h"

#include "base/check.h"
#include "base/index.h"

namespace penstock::tiering {

DeviceGradients::DeviceGradients(const ModelGraph& graph, const Plan& plan, OpList* ops)
    : graph_(graph),
      plan_(plan),
      ops_(*ops),
      gradient_users_(plan.device.gradient_slots.size()),
      accumulator_users_(plan.device.accumulator_slots.size()),
      next_gradient_(plan.device.weight_classes.size(), 0) {}

void DeviceGradients::StartBackward() {
  gradient_.assign(plan_.blocks.size(), DeviceGradientSlot());
  accumulator_.assign(plan_.blocks.size(), DeviceAccumulatorSlot());
}

DeviceGradientSlot DeviceGradients::NextGradientSlot(const DevicePlan::Block& places) {
  const size_t cls = At(places.weight_class);
  return plan_.device.gradient_rings[cls].NextSlot(&next_gradient_[cls]);
}

void DeviceGradients::TakePlaces(BlockIndex block, Edges* wait) {
  const DevicePlan& device = plan_.device;
  const DevicePlan::Block& places = device.blocks[block];
  if (gradient_[block].valid() || accumulator_[block].valid()) return;  // taken by an earlier use
  if (places.sums_apart) {
    DeviceAccumulatorSlot slot = places.accumulator_slot;
    if (!slot.valid()) slot = DeviceAccumulatorSlot(next_accumulator_++ % At(device.accumulator_ring));
    accumulator_[block] = slot;
    AddAll(wait, accumulator_users_.Take(slot));
    return;
  }
  // That of a block which lives here has room for what it is reduced to.
  DeviceGradientSlot slot;
  if (!device.collectives || !plan_.on_device(block)) slot = places.gradient_slot;
  if (!slot.valid()) slot = NextGradientSlot(places);
  gradient_[block] = slot;
  AddAll(wait, gradient_users_.Take(slot));
}

void DeviceGradients::SetPlaces(BlockIndex block, Op* op) const {
  op->device_gradient_slot = gradient_[block];
  op->device_accumulator_slot = accumulator_[block];
}

OpId DeviceGradients::EmitReduce(BlockIndex block, OpId last, int64_t step) {
  const OpId id = ops_.next_id();
  Op& reduce = ops_.Emit(OpKind::kReduceScatter, Lane::kReduceScatter, step);
  reduce.block = block;
  SetPlaces(block, &reduce);
  reduce.bytes = plan_.reduced_bytes(block);
  reduce.after = {last};
  if (!plan_.on_device(block)) return id;
  // To where it waits for the update; what it was reduced from is free.
  if (reduce.device_accumulator_slot.valid()) {
    accumulator_users_.Replace(reduce.device_accumulator_slot, {id});
  } else {
    gradient_users_.Replace(reduce.device_gradient_slot, {id});
  }
  const DeviceGradientSlot gradient = plan_.device.blocks[block].gradient_slot;
  AddAll(&reduce.after, gradient_users_.Take(gradient));
  gradient_[block] = gradient;
  return id;
}

OpId DeviceGradients::EmitCopyOut(BlockIndex block, GradientSlot gradient_slot,
                                  AccumulatorSlot host_accumulator, OpId last, const Edges& wait,
                                  int64_t step) {
  const DevicePlan::Block& places = plan_.device.blocks[block];
  const bool ranks = plan_.world > 1 && !plan_.device.collectives;
  if (places.sums_apart && plan_.world == 1) {
    const DeviceGradientSlot slot =
        places.gradient_slot.valid() ? places.gradient_slot : NextGradientSlot(places);
    gradient_[block] = slot;
    const OpId id = ops_.next_id();
    Op& round = ops_.Emit(OpKind::kRoundOnDevice, Lane::kCompute, step);
    round.block = block;
    SetPlaces(block, &round);
    // Behind its last addend on the same lane, which keeps its order: nobody waits for news of that.
    AddAll(&round.after, gradient_users_.Take(slot));
    accumulator_users_.Replace(round.device_accumulator_slot, {id});
    last = id;
  }
  if (plan_.squares_on_device()) {  // else, of a block that lives there, by the reduction
    const OpId squared = ops_.next_id();
    Op& square = ops_.Emit(OpKind::kSquareGradient, Lane::kCompute, step);
    square.block = block;
    square.device_gradient_slot = gradient_[block];
    last = squared;
  }
  const OpId id = ops_.next_id();
  Op& copy = ops_.Emit(OpKind::kCopyOut, Lane::kCopyOut, step);
  copy.block = block;
  if (ranks) {
    copy.accumulator_slot = host_accumulator;
    copy.bytes = graph_.blocks[block].elements * plan_.accumulator_bytes(block);
  } else {
    copy.gradient_slot = gradient_slot;
    copy.bytes = plan_.gradient_place_bytes(block);
  }
  copy.after = wait;
  copy.after.push_back(last);
  if (plan_.world > 1 && places.sums_apart && !plan_.on_device(block)) {
    copy.device_accumulator_slot = accumulator_[block];
    accumulator_users_.Replace(copy.device_accumulator_slot, {id});
  } else {
    copy.device_gradient_slot = gradient_[block];
    gradient_users_.Replace(copy.device_gradient_slot, {id});
  }
  return id;
}

void DeviceGradients::UpdatedBy(BlockIndex block, OpId update) {
  PENSTOCK_CHECK(plan_.on_device(block), "an update on the device of a block that does not live there");
  gradient_users_.Add(plan_.device.blocks[block].gradient_slot, update);
}

}  // namespace penstock::tiering
