#include "tiering/program/update_emitter.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace penstock::tiering {

UpdateEmitter::UpdateEmitter(const Plan& plan, OpList* ops, SlotAllocator* slots, TileWriter* writer,
                             const GradientEmitter& gradients)
    : plan_(plan), ops_(*ops), slots_(*slots), writer_(*writer), gradients_(gradients) {
  for (const BlockPlan& block : plan.blocks) {
    due_.emplace_back(block.tiles.size(), Due::kNothing);
    versions_.emplace_back(block.tiles.size(), 0);
  }
}

void UpdateEmitter::GradientIsFinal(BlockIndex block) {
  PerTile<Due>& due = due_[block];
  PENSTOCK_CHECK(!IsDue(block), "a gradient over one that no update has used");
  for (const TileIndex t : due.indices()) {
    if (plan_.blocks[block].updates(t)) due[t] = Due::kUpdate;
  }
}

void UpdateEmitter::EmitSpeculative(const TilePlace& at, OpId final_id, int64_t step) {
  Due& due = due_[at.block][at.tile];
  PENSTOCK_CHECK(due == Due::kUpdate, "an update in backward without a gradient");
  Emit({.at = at, .cause = {.step = step, .speculative_update = true}, .decided = final_id});
  due = Due::kReplay;
}

void UpdateEmitter::StartPending(int64_t step, OpId norm) {
  PENSTOCK_CHECK(pending_step_ == 0, "a step over one that is not committed");
  pending_step_ = step;
  norm_ = norm;
}

void UpdateEmitter::EmitDue(BlockIndex block, WeightSlot weight_slot, const PerTile<OpId>& reads) {
  PerTile<Due>& due = due_[block];
  for (const TileIndex t : due.indices()) {
    if (due[t] == Due::kNothing) continue;
    if (norms_) {
      EmitNorms({.at = {.block = block, .tile = t, .weight_slot = weight_slot},
                 .cause = {.step = pending_step_},
                 .decided = norm_,
                 .weights_read = reads[t]});
      continue;
    }
    const bool previews = due[t] == Due::kUpdate && Previews(block, t);
    // Whoever used the content before this update is done by the time of the norm, on which it waits.
    Emit({.at = {.block = block, .tile = t, .weight_slot = weight_slot},
          .cause = {.step = pending_step_,
                    .preview = previews,
                    .again = due[t] == Due::kAgain,
                    .replay = due[t] == Due::kReplay},
          .decided = norm_,
          .weights_read = due[t] == Due::kReplay ? -1 : reads[t]});
    if (due[t] == Due::kAgain) --previewed_;
    if (previews) ++previewed_;
    due[t] = previews ? Due::kAgain : Due::kNothing;
  }
}

void UpdateEmitter::EmitNorms(const Update& wanted) {
  Update of = wanted;
  TilePlace& at = of.at;
  PENSTOCK_CHECK(due_[at.block][at.tile] == Due::kUpdate, "norms of an update that is not due");
  at.tile_slot = slots_.TileSlotFor(at.block, at.tile, /*replays=*/false);
  const Edges former = slots_.tile_users().Take(at.tile_slot);
  const OpId state_read = EmitStateRead(of, former);
  const OpId gradient_read = EmitGradientRead(of, former);
  const SlotAllocator::Weights& weights = slots_.weights(at.weight_slot);
  PENSTOCK_CHECK(weights.block == at.block, "norms of weights that are not there");
  const OpId id = ops_.next_id();
  Op& norms = EmitPart(of, OpKind::kUpdateNorms, Lane::kUpdate, 0);
  norms.weight_slot = at.weight_slot;
  norms.tile_slot = at.tile_slot;
  norms.gradient_slot = plan_.blocks[at.block].gradient_slot;
  norms.checks_weights = of.weights_read >= 0;
  norms.checks_state = state_read >= 0;
  norms.after = former;
  AddIf(&norms.after, of.weights_read);
  AddIf(&norms.after, state_read);
  AddIf(&norms.after, gradient_read);
  AddIf(&norms.after, of.decided);
  if (of.weights_read < 0) AddIf(&norms.after, weights.ready[at.tile]);
  slots_.tile_users().Add(at.tile_slot, id);
  // Whoever takes the slot waits for this, too.
  slots_.WeightsReady(at.weight_slot, at.tile, id);
  writer_.Checks(at.block, at.tile, id);  // the next read of the tile is for its update
  if (norms.gradient_slot.valid()) slots_.gradient_users().Add(norms.gradient_slot, id);
  of_norms_.push_back(id);
}

void UpdateEmitter::DecideByNorms() {
  PENSTOCK_CHECK(norms_ && pending_step_ != 0, "norms of no step");
  norms_ = false;
  Edges after = TakeAll(&of_norms_);
  after.push_back(norm_);
  if (plan_.world > 1) {
    const OpId exchanged = ops_.next_id();
    ops_.Emit(OpKind::kExchangeNorms, Lane::kReduceScatter, pending_step_).after = std::move(after);
    after = {exchanged};
  }
  norm_ = ops_.next_id();
  ops_.Emit(OpKind::kTrust, Lane::kHost, pending_step_).after = std::move(after);
}

bool UpdateEmitter::Previews(BlockIndex block, TileIndex tile) const {
  const BlockPlan& bp = plan_.blocks[block];
  if (!previews_ || bp.previews[tile] == 0) return false;
  PENSTOCK_CHECK(bp.uses == 1 && !bp.private_tile_slot[tile].valid(),
                 "a preview of what forward uses twice, or of state that stays");
  return true;
}

void UpdateEmitter::UpdatedOnDevice(BlockIndex block, OpId update) {
  for (int64_t& version : versions_[block]) ++version;
  std::fill(due_[block].begin(), due_[block].end(), Due::kNothing);
  writer_.Await(update);
}

void UpdateEmitter::AssumptionHeld() {
  for (PerTile<Due>& block : due_) std::replace(block.begin(), block.end(), Due::kReplay, Due::kNothing);
}

void UpdateEmitter::CommitPending() {
  if (pending_step_ == 0) return;
  writer_.Commit(pending_step_, plan_.commits_every_step, norm_);
  unsaved_step_ = plan_.on_nvme && !plan_.commits_every_step ? pending_step_ : 0;
  pending_step_ = 0;
}

int64_t UpdateEmitter::TakeUnsavedStep() { return std::exchange(unsaved_step_, 0); }

bool UpdateEmitter::IsDue(BlockIndex block) const {
  const PerTile<Due>& due = due_[block];
  return std::any_of(due.begin(), due.end(), [](Due tile) { return tile != Due::kNothing; });
}

bool UpdateEmitter::ReplaysAreDue() const {
  return std::any_of(due_.begin(), due_.end(), [](const PerTile<Due>& block) {
    return std::find(block.begin(), block.end(), Due::kReplay) != block.end();
  });
}

Op& UpdateEmitter::EmitPart(const Update& update, OpKind kind, Lane lane, int64_t bytes) {
  Op& op = ops_.Emit(kind, lane, update.cause.step);
  op.block = update.at.block;
  op.tile = update.at.tile;
  op.speculative_update = update.cause.speculative_update;
  op.preview = update.cause.preview;
  op.replay = update.cause.replay;
  op.bytes = bytes;
  return op;
}

OpId UpdateEmitter::EmitWeightsRead(const Update& update, const Edges& former) {
  const TilePlace& at = update.at;
  const SlotAllocator::Weights& weights = slots_.weights(at.weight_slot);
  const int64_t elements = plan_.blocks[at.block].tiles[at.tile].elements;
  const OpId id = ops_.next_id();
  Op& read = EmitPart(update, OpKind::kReadWeights, Lane::kRead, elements * plan_.precision.weight_bytes());
  read.weight_slot = at.weight_slot;
  read.after = {update.decided};
  AddIf(&read.after, weights.ready[at.tile]);
  AddIf(&read.after, weights.gather);
  // Not long before the rest of the tile: forward needs the drive.
  if (update.cause.again) {
    AddIf(&read.after, weights.last_compute);
    AddAll(&read.after, former);
  }
  AddIf(&read.after, writer_.last_write(at.block, at.tile));
  AddIf(&read.after, writer_.last_check(at.block, at.tile));
  return id;
}

OpId UpdateEmitter::EmitStateRead(const Update& update, const Edges& former) {
  const TilePlace& at = update.at;
  const BlockPlan& block = plan_.blocks[at.block];
  const int64_t bytes = plan_.precision.StateBytes(block.tiles[at.tile].elements);
  // Without a drive the version that a replay goes back to is in memory.
  const bool reads = plan_.on_nvme && update.cause.replay;
  if (bytes == 0 || (!reads && slots_.HoldsState(at.tile_slot, at.block, at.tile))) return -1;
  const OpId id = ops_.next_id();
  Op& read = EmitPart(update, OpKind::kReadState, Lane::kRead, bytes);
  read.tile_slot = at.tile_slot;
  read.after = former;
  AddIf(&read.after, writer_.last_write(at.block, at.tile));
  if (update.cause.again || plan_.tensor_norms) AddIf(&read.after, writer_.last_check(at.block, at.tile));
  if (update.cause.replay) read.after.push_back(update.decided);
  slots_.tile_users().Add(at.tile_slot, id);
  if (block.private_tile_slot[at.tile].valid()) slots_.KeepState(at.tile_slot, at.block, at.tile);
  return id;
}

// In backward a gradient that will be spilled is still in memory. One that nothing spilled is not needed: the
// update is made again only to leave the tile as it was.
OpId UpdateEmitter::EmitGradientRead(const Update& update, const Edges& former) {
  const TilePlace& at = update.at;
  const BlockPlan& block = plan_.blocks[at.block];
  const OpId spilled = gradients_.spilled(at.block);
  if (block.gradient_slot.valid() || update.cause.speculative_update || spilled < 0) return -1;
  const int64_t elements = block.tiles[at.tile].elements;
  const OpId id = ops_.next_id();
  Op& read = EmitPart(update, OpKind::kReadGradient, Lane::kRead, elements * plan_.precision.gradient_bytes);
  read.tile_slot = at.tile_slot;
  read.after = former;
  read.after.push_back(spilled);
  if (update.cause.again || plan_.tensor_norms) AddIf(&read.after, writer_.last_check(at.block, at.tile));
  if (update.cause.replay) read.after.push_back(update.decided);
  slots_.tile_users().Add(at.tile_slot, id);
  return id;
}

void UpdateEmitter::Emit(const Update& wanted) {
  Update of = wanted;
  TilePlace& at = of.at;
  at.tile_slot = slots_.TileSlotFor(at.block, at.tile, of.cause.replay);
  const Edges former = slots_.tile_users().Take(at.tile_slot);
  const OpId last_write = writer_.last_write(at.block, at.tile);
  const bool rereads = plan_.on_nvme && (of.cause.replay || (of.cause.again && of.weights_read < 0));
  const OpId weights_read = rereads ? EmitWeightsRead(of, former) : of.weights_read;
  const OpId state_read = EmitStateRead(of, former);
  const OpId gradient_read = EmitGradientRead(of, former);
  const SlotAllocator::Weights& weights = slots_.weights(at.weight_slot);
  PENSTOCK_CHECK(weights.block == at.block, "an update of weights that are not there");
  const OpId id = ops_.next_id();
  Op& update = EmitPart(of, OpKind::kUpdate, Lane::kUpdate, 0);
  update.weight_slot = at.weight_slot;
  update.tile_slot = at.tile_slot;
  update.gradient_slot =
      of.cause.speculative_update ? gradients_.final_slot(at.block) : plan_.blocks[at.block].gradient_slot;
  update.checks_weights = weights_read >= 0;
  update.checks_state = state_read >= 0;
  update.after = former;
  AddIf(&update.after, weights_read);
  AddIf(&update.after, state_read);
  AddIf(&update.after, gradient_read);
  AddIf(&update.after, of.decided);
  AddIf(&update.after, last_write);
  AddIf(&update.after, weights.gather);
  if (of.weights_read < 0) AddIf(&update.after, weights.ready[at.tile]);
  // What is in memory is the commit before, until that is over.
  if (!plan_.on_nvme && of.cause.speculative_update) AddIf(&update.after, writer_.last_commit());
  slots_.tile_users().Add(at.tile_slot, id);
  slots_.WeightsUpdated(at.weight_slot, at.tile, id);
  if (!of.cause.again) ++versions_[at.block][at.tile];
  if (update.gradient_slot.valid()) slots_.gradient_users().Add(update.gradient_slot, id);
  if (of.cause.preview) {
    writer_.Checks(at.block, at.tile, id);  // the next read of the tile is for the update that follows
    return;
  }
  if (!plan_.on_nvme || plan_.written_at_checkpoint(at.block, at.tile)) {
    writer_.Await(id);
  } else {
    writer_.WriteUpdated(at, of.cause, id);
  }
}

}  // namespace penstock::tiering
