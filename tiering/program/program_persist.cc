// The pass that makes a step one that a restart finds, where not every step is.
#include <utility>

#include "tiering/program/program.h"

namespace penstock::tiering {

void ProgramBuilder::EmitSealedWrite(int block, int tile, int weight_slot, int tile_slot, int64_t step) {
  TileSlot& slot = tiles_[static_cast<size_t>(tile_slot)];
  const OpId seal_id = next_id_;
  Op& seal = Emit(OpKind::kChecksumTile, Lane::kUpdate, step);
  seal.block = block;
  seal.tile = tile;
  seal.weight_slot = weight_slot;
  seal.tile_slot = tile_slot;
  seal.after = slot.users;
  AddIf(&seal.after, runs_[static_cast<size_t>(weight_slot)].ready[static_cast<size_t>(tile)]);
  // Its checksums are the ones of the last write until that is over.
  AddIf(&seal.after, last_write_[static_cast<size_t>(block)][static_cast<size_t>(tile)]);
  slot.users.push_back(seal_id);
  EmitTileWrite(OpKind::kWriteTile, block, tile, weight_slot, tile_slot, {.step = step}, seal_id);
}

void ProgramBuilder::Persist() {
  if (unsaved_step_ == 0) return;
  // Those of the pending step go into a commit of their own.
  const Edges pending = TakeAll(&pending_writes_);
  for (size_t b = 0; b < plan_.blocks.size(); ++b) {
    const BlockPlan& block = plan_.blocks[b];
    const auto number = static_cast<int>(b);
    if (!block.trains) continue;
    if (plan_.on_device(number)) {
      WriteFromDevice(number, b, unsaved_step_);
      continue;
    }
    for (size_t t = 0; t < block.tiles.size(); ++t) {
      const auto tile = static_cast<int>(t);
      if (!plan_.written_at_checkpoint(number, tile)) continue;
      EmitSealedWrite(number, tile, block.private_run_slot, block.private_tile_slot[t], unsaved_step_);
    }
  }
  EmitCommit(unsaved_step_, /*durable=*/true, TakeAll(&pending_writes_));
  pending_writes_ = pending;
  unsaved_step_ = 0;
}

}  // namespace penstock::tiering
