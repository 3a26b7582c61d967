#include "tiering/program/gradient_emitter.h"

#include "base/check.h"

namespace penstock::tiering {

GradientEmitter::GradientEmitter(const Plan& plan, OpList* ops, SlotAllocator* slots, DeviceGradients* device)
    : plan_(plan),
      ops_(*ops),
      slots_(*slots),
      device_(*device),
      final_slot_(plan.blocks.size()),
      spilled_(plan.blocks.size(), -1),
      sums_written_(plan.blocks.size(), -1),
      sums_away_(plan.blocks.size(), 0) {}

void GradientEmitter::StartBackward(bool first) {
  gradient_.assign(plan_.blocks.size(), GradientSlot());
  accumulator_.assign(plan_.blocks.size(), AccumulatorSlot());
  // Also where another builder appended the calls before, or a step that was given up.
  for (const BlockIndex b : plan_.blocks.indices()) sums_away_[b] = !first && plan_.moves_sums(b) ? 1 : 0;
  device_.StartBackward();
}

Edges GradientEmitter::TakeGradientSlot(BlockIndex block) {
  const GradientSlot slot = slots_.GradientSlotFor(block);
  gradient_[block] = slot;
  return slots_.gradient_users().Take(slot);
}

Edges GradientEmitter::TakeAccumulatorSlot(BlockIndex block) {
  const AccumulatorSlot slot = slots_.AccumulatorSlotFor(block);
  accumulator_[block] = slot;
  return slots_.accumulator_users().Take(slot);
}

Edges GradientEmitter::TakePlaces(BlockIndex block) {
  Edges users;
  if (!plan_.blocks[block].trains) return users;
  if (plan_.device.has_own_memory) {
    device_.TakePlaces(block, &users);
  } else if (plan_.needs_accumulator(block)) {
    if (!accumulator_[block].valid()) users = TakeAccumulatorSlot(block);
  } else if (!gradient_[block].valid()) {
    users = TakeGradientSlot(block);
  }
  return users;
}

Edges GradientEmitter::FetchSums(BlockIndex block, const Edges& users, int64_t step) {
  if (sums_away_[block] == 0) return users;
  sums_away_[block] = 0;
  const OpId id = ops_.next_id();
  Op& read = EmitSumsMove(OpKind::kReadSums, Lane::kRead, block, step);
  read.after = users;
  AddIf(&read.after, sums_written_[block]);
  UsedBy(block, id);
  return {id};
}

Op& GradientEmitter::EmitSumsMove(OpKind kind, Lane lane, BlockIndex block, int64_t step) {
  Op& op = ops_.Emit(kind, lane, step);
  op.block = block;
  op.gradient_slot = gradient_[block];
  op.accumulator_slot = accumulator_[block];
  op.bytes = plan_.summed_elements(block) * int64_t{sizeof(float)};
  return op;
}

OpId GradientEmitter::EmitSums(BlockIndex block, OpId last, int64_t step) {
  UsedBy(block, last);
  if (!plan_.moves_sums(block)) return last;
  const OpId id = ops_.next_id();
  EmitSumsMove(OpKind::kWriteSums, Lane::kWrite, block, step).after = {last};
  UsedBy(block, id);
  sums_written_[block] = id;
  sums_away_[block] = 1;
  // Its next use takes a place anew.
  gradient_[block] = GradientSlot();
  accumulator_[block] = AccumulatorSlot();
  return id;
}

void GradientEmitter::SetPlaces(BlockIndex block, Op* op) const {
  op->gradient_slot = gradient_[block];
  if (plan_.device.has_own_memory) {
    device_.SetPlaces(block, op);
  } else {
    op->accumulator_slot = accumulator_[block];
  }
}

void GradientEmitter::UsedBy(BlockIndex block, OpId last) {
  if (const AccumulatorSlot slot = accumulator_[block]; slot.valid())
    slots_.accumulator_users().Add(slot, last);
  if (const GradientSlot slot = gradient_[block]; slot.valid()) slots_.gradient_users().Add(slot, last);
}

OpId GradientEmitter::EmitFinal(BlockIndex block, OpId last, int64_t step) {
  const bool sums_apart = plan_.needs_accumulator(block);
  Edges wait;  // for the gradient's place
  if (sums_apart || plan_.device.has_own_memory) wait = TakeGradientSlot(block);
  const GradientSlot gradient = gradient_[block];
  PENSTOCK_CHECK(gradient.valid(), "a gradient without a place");
  if (plan_.device.has_own_memory) {
    if (plan_.device.collectives) last = device_.EmitReduce(block, last, step);
    // Otherwise over several ranks it goes to the sums, and the gradient's place waits for the reduction.
    const Edges users = sums_apart ? TakeAccumulatorSlot(block) : TakeAll(&wait);
    last = device_.EmitCopyOut(block, gradient, accumulator_[block], last, users, step);
  }
  // What makes the gradient's place final, and frees the sums: rounding, or over several ranks the reduction.
  OpId reduced = -1;
  if (plan_.world > 1 && !plan_.device.collectives) {
    reduced = ops_.next_id();
    Op& reduce = ops_.Emit(OpKind::kReduceScatter, Lane::kReduceScatter, step);
    reduce.block = block;
    reduce.gradient_slot = gradient;
    reduce.accumulator_slot = accumulator_[block];
    reduce.bytes = plan_.reduced_bytes(block);
    reduce.after = {last};
    AddAll(&reduce.after, wait);
    wait = {reduced};
  }
  const OpId final_id = ops_.next_id();
  Op& round = ops_.Emit(OpKind::kRoundGradient, Lane::kUpdate, step);
  round.block = block;
  round.gradient_slot = gradient;
  round.accumulator_slot = reduced >= 0 ? AccumulatorSlot() : accumulator_[block];
  round.after = {last};
  AddAll(&round.after, wait);
  if (sums_apart) {
    slots_.accumulator_users().Add(accumulator_[block], reduced >= 0 ? reduced : final_id);
  }
  slots_.gradient_users().Replace(gradient, {last, final_id});
  final_slot_[block] = gradient;
  spilled_[block] = -1;
  return final_id;
}

void GradientEmitter::EmitSpill(BlockIndex block, OpId final_id, int64_t step) {
  const GradientSlot gradient = final_slot(block);
  const OpId id = ops_.next_id();
  Op& write = ops_.Emit(OpKind::kWriteGradient, Lane::kWrite, step);
  write.block = block;
  write.gradient_slot = gradient;
  write.bytes = plan_.blocks[block].gradient_elements() * plan_.precision.gradient_bytes;
  write.after = {final_id};
  slots_.gradient_users().Add(gradient, id);
  spilled_[block] = id;
}

}  // namespace penstock::tiering
