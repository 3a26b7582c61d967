#include "tiering/program/tile_writer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace penstock::tiering {

TileWriter::TileWriter(const ModelGraph& graph, const Plan& plan, OpList* ops, SlotAllocator* slots)
    : plan_(plan), ops_(*ops), slots_(*slots) {
  last_write_.reserve(plan.blocks.size());
  for (const BlockPlan& block : plan.blocks) last_write_.emplace_back(block.tiles.size(), -1);
  last_check_ = last_write_;
  deferred_share_ = DeferredShare(graph);
}

double TileWriter::DeferredShare(const ModelGraph& graph) const {
  const auto [forward_seconds, backward_seconds] = graph.pass_seconds();
  double forward = 0, backward = 0, either = 0;  // bytes of the drive
  const PerBlock<char> in_backward = graph.in_backward();
  for (const BlockIndex b : plan_.blocks.indices()) {
    const BlockPlan& block = plan_.blocks[b];
    if (plan_.on_device(b)) continue;
    const bool stays = slots_.stays(b);
    const auto weights = static_cast<double>(block.elements * plan_.precision.weight_bytes());
    const auto gradient = static_cast<double>(block.gradient_elements() * plan_.precision.gradient_bytes);
    for (double* pass : {&forward, &backward}) {
      if (!stays && (pass == &forward || in_backward[b] != 0)) *pass += weights;
      if (block.trains && !block.gradient_slot.valid()) *pass += gradient;
    }
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.updates(t) || plan_.written_at_checkpoint(b, t)) continue;
      const auto state = static_cast<double>(plan_.precision.StateBytes(block.tiles[t].elements));
      const auto of_tile = static_cast<double>(block.tiles[t].elements * plan_.precision.weight_bytes());
      double& write = block.previews[t] != 0 ? backward : stays ? either : forward;
      write += of_tile;
      if (block.previews[t] != 0) {
        forward += state;
        backward += 2 * state + (stays ? of_tile : 0);
        if (!block.gradient_slot.valid())
          backward += static_cast<double>(block.tiles[t].elements * int64_t{plan_.precision.gradient_bytes});
      } else if (block.private_tile_slot[t].valid()) {
        write += state;
      } else {
        forward += 2 * state;  // read, and written
      }
    }
  }
  if (either == 0 || forward_seconds + backward_seconds <= 0) return either > 0 ? 1 : 0;
  const double all = forward + backward + either;
  return std::clamp((all * backward_seconds / (forward_seconds + backward_seconds) - backward) / either, 0.0,
                    1.0);
}

void TileWriter::StartDeferring() {
  PENSTOCK_CHECK(deferred_.empty(), "writes that are deferred beyond their step");
  defers_ = true;
  deferred_due_ = 0.5;
}

void TileWriter::WriteUpdated(const TilePlace& at, const UpdateCause& cause, OpId update) {
  const BlockPlan& bp = plan_.blocks[at.block];
  bool defers = defers_ && !cause.replay && slots_.stays(at.block);
  if (defers) {
    deferred_due_ += deferred_share_;
    defers = deferred_due_ >= 1;
    if (defers) deferred_due_ -= 1;
  }
  if (!defers) {
    EmitWrite(OpKind::kWriteTile, at, cause, update);
    return;
  }
  TilePlace later = at;
  later.tile_slot = bp.private_tile_slot[at.tile];
  const bool state_streams =
      !later.tile_slot.valid() && plan_.precision.StateBytes(bp.tiles[at.tile].elements) > 0;
  if (!state_streams) {
    // Of a tile without state the slot of the ring is free: only its weights are written.
    deferred_.push_back({OpKind::kWriteTile, later, cause.step, update});
    return;
  }
  const OpId state = ops_.next_id();
  EmitWrite(OpKind::kWriteState, at, cause, update);
  deferred_.push_back({OpKind::kWriteWeights, later, cause.step, state});
}

void TileWriter::WriteChecksummed(const TilePlace& at, int64_t step) {
  const OpId id = ops_.next_id();
  Op& checksum = ops_.Emit(OpKind::kChecksumTile, Lane::kUpdate, step);
  checksum.block = at.block;
  checksum.tile = at.tile;
  checksum.weight_slot = at.weight_slot;
  checksum.tile_slot = at.tile_slot;
  checksum.after = slots_.tile_users().of(at.tile_slot);
  AddIf(&checksum.after, slots_.weights(at.weight_slot).ready[at.tile]);
  // Its checksums are the ones of the last write until that is over.
  AddIf(&checksum.after, last_write(at.block, at.tile));
  slots_.tile_users().Add(at.tile_slot, id);
  EmitWrite(OpKind::kWriteTile, at, {.step = step}, id);
}

void TileWriter::EmitDeferred(size_t most, OpId after) {
  const size_t count = std::min(most, deferred_.size());
  for (size_t i = 0; i < count; ++i) {
    const Deferred& deferred = deferred_[i];
    EmitWrite(deferred.kind, deferred.at, {.step = deferred.step}, deferred.ready).after.push_back(after);
  }
  deferred_.erase(deferred_.begin(), deferred_.begin() + static_cast<ptrdiff_t>(count));
}

Op& TileWriter::EmitWrite(OpKind kind, const TilePlace& at, const UpdateCause& cause, OpId ready) {
  const int64_t elements = plan_.blocks[at.block].tiles[at.tile].elements;
  const Precision& precision = plan_.precision;
  const OpId id = ops_.next_id();
  Op& write = ops_.Emit(kind, Lane::kWrite, cause.step);
  write.block = at.block;
  write.tile = at.tile;
  write.speculative_update = cause.speculative_update;
  write.replay = cause.replay;
  write.bytes = kind == OpKind::kWriteTile    ? precision.TotalBytes(elements)
                : kind == OpKind::kWriteState ? precision.StateBytes(elements)
                                              : elements * precision.weight_bytes();
  write.weight_slot = at.weight_slot;
  write.tile_slot = at.tile_slot;
  write.after = {ready};
  AddIf(&write.after, last_commit_);
  if (at.tile_slot.valid()) slots_.tile_users().Add(at.tile_slot, id);
  slots_.WeightsWritten(at.weight_slot, at.tile, id);
  last_write_[at.block][at.tile] = id;
  awaited_.push_back(id);
  return write;
}

void TileWriter::Commit(int64_t step, bool durable, OpId decided) {
  PENSTOCK_CHECK(deferred_.empty(), "a commit without all writes of its step");
  Edges after = TakeAwaited();
  AddIf(&after, decided);
  AddIf(&after, last_commit_);
  const auto emit = [&](OpKind kind) -> Op& {
    last_commit_ = ops_.next_id();
    Op& op = ops_.Emit(kind, Lane::kCommit, step);
    op.durable = durable;
    return op;
  };
  emit(OpKind::kCommit).after = std::move(after);
  if (plan_.world == 1) return;
  const OpId committed = last_commit_;
  emit(OpKind::kAgree).after = {committed};
}

}  // namespace penstock::tiering
