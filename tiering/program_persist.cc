// The pass that makes a step one that a restart finds, where not every step is.
#include <utility>

#include "tiering/program.h"

namespace penstock::tiering {

void ProgramBuilder::Persist() {
  if (unsaved_step_ == 0) return;
  const Update of{.step = unsaved_step_};
  // Those of the pending step go into a commit of their own.
  std::vector<OpId> pending = std::exchange(pending_writes_, {});
  int passing_run = -1;
  std::vector<OpId> former;  // who used it before
  for (size_t b = 0; b < plan_.blocks.size(); ++b) {
    const BlockPlan& block = plan_.blocks[b];
    for (size_t t = 0; t < block.tiles.size(); ++t) {
      const int number = static_cast<int>(b), tile = static_cast<int>(t);
      if (!plan_.written_late(number, tile)) continue;
      int run_slot = block.private_run_slot, tile_slot = block.private_tile_slot[t];
      if (plan_.on_device(number)) {
        // By way of a run that holds nothing else till all of the block is written.
        if (t == 0) {
          passing_run = AcquireRun(number, b);
          former = GiveUpRun(passing_run);
          SizeRun(passing_run, block);
        }
        run_slot = passing_run;
        tile_slot = EmitStateOut(number, tile, run_slot, former, of.step);
      }
      TileSlot& slot = tiles_[static_cast<size_t>(tile_slot)];
      const OpId seal_id = next_id_;
      Op& seal = Emit(OpKind::kSeal, Lane::kUpdate, of.step);
      seal.block = number;
      seal.tile = tile;
      seal.run_slot = run_slot;
      seal.tile_slot = tile_slot;
      seal.after = slot.users;
      if (const OpId updated = runs_[static_cast<size_t>(run_slot)].ready[t]; updated >= 0) {
        seal.after.push_back(updated);
      }
      slot.users.push_back(seal_id);
      EmitTileWrite(number, tile, run_slot, tile_slot, of, seal_id);
    }
  }
  const OpId id = next_id_;
  Op& commit = Emit(OpKind::kCommit, Lane::kCommit, of.step);
  commit.durable = true;
  commit.after = std::exchange(pending_writes_, std::move(pending));
  if (last_commit_ >= 0) commit.after.push_back(last_commit_);
  last_commit_ = id;
  if (plan_.world > 1) {
    last_commit_ = next_id_;
    Op& agree = Emit(OpKind::kAgree, Lane::kCommit, of.step);
    agree.durable = true;
    agree.after = {id};
  }
  unsaved_step_ = 0;
}

}  // namespace penstock::tiering
