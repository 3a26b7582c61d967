// From gradients to state to weights: the updates of a step, tile by tile, in either order.
//
// Invariants:
//   a tile is updated once with each gradient; what is still due of that is known tile by tile. Only a replay
//   makes an update again, from the committed version.
//   an update waits for what decided it: the norm, or in backward its block's final gradient.
//   what is previewed in a forward is made again in the backward of the same pass, from the drive, before the
//   block's next gradient has a place.
//   a step is committed when nothing of its updates is due.
#ifndef PENSTOCK_TIERING_PROGRAM_UPDATE_EMITTER_H_
#define PENSTOCK_TIERING_PROGRAM_UPDATE_EMITTER_H_

#include <cstdint>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/gradient_emitter.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"
#include "tiering/program/tile_writer.h"

namespace penstock::tiering {

// What is still to be appended of a tile's update. kAgain: the forward that is being appended has it, and no
// one else (BlockPlan::previews).
enum class Due : uint8_t { kNothing, kUpdate, kReplay, kAgain };

class UpdateEmitter {
 public:
  UpdateEmitter(const Plan& plan, OpList* ops, SlotAllocator* slots, TileWriter* writer,
                const GradientEmitter& gradients);

  // The block's gradient is final: its tiles are due with it.
  void GradientIsFinal(BlockIndex block);
  // Updates a tile in backward, with the gradient that `final_id` made final. A replay is due then.
  void EmitSpeculative(const TilePlace& at, OpId final_id, int64_t step);
  // What was due of `step` is pending from now on, and `norm` decides it.
  void StartPending(int64_t step, OpId norm);
  // Makes what is due of the block, whose weights are in `weight_slot`. `reads`: of its weights, to be
  // checked by an update; -1: they were in memory.
  void EmitDue(BlockIndex block, WeightSlot weight_slot, const PerTile<OpId>& reads);
  // Until DecideByNorms, EmitDue appends norms of updates (Plan::tensor_norms), which leave all due, instead.
  void StartNorms() { norms_ = true; }
  // The updates of the pending step wait for what these norms, of all ranks, come to.
  void DecideByNorms();
  // In the forward that is appended, the tiles that the plan previews are.
  void StartPreviews() { previews_ = true; }
  void StopPreviews() { previews_ = false; }
  // Tiles that were, and are still to be updated for good.
  size_t previewed() const { return previewed_; }
  // The device makes what is due of a block that lives there. It waits for the norm by itself.
  void UpdatedOnDevice(BlockIndex block, OpId update);
  // No update will have to be made again.
  void AssumptionHeld();
  // Commits the pending step, if there is one.
  void CommitPending();
  // What a restart would not find is going to be written.
  int64_t TakeUnsavedStep();

  bool IsDue(BlockIndex block) const;
  bool ReplaysAreDue() const;
  Due due(BlockIndex block, TileIndex tile) const { return due_[block][tile]; }
  // Updates appended: the versions of the block's weights.
  const PerTile<int64_t>& versions(BlockIndex block) const { return versions_[block]; }
  int64_t pending_step() const { return pending_step_; }  // 0: none
  OpId norm() const { return norm_; }                     // of the pending step
  int64_t unsaved_step() const { return unsaved_step_; }
  void SetBackUnsavedStep(int64_t step) { unsaved_step_ = step; }

 private:
  // One tile's. Reads what is not in memory, updates, and writes.
  struct Update {
    TilePlace at;  // its tile slot is found here
    UpdateCause cause;
    OpId decided = -1;       // the norm, or in backward the final gradient
    OpId weights_read = -1;  // to be checked first; -1: they were in memory
  };
  void Emit(const Update& update);
  // What an update of the tile reads, but neither it nor a write.
  void EmitNorms(const Update& update);
  // A part of it.
  Op& EmitPart(const Update& update, OpKind kind, Lane lane, int64_t bytes);
  bool Previews(BlockIndex block, TileIndex tile) const;
  // Of weights that are in memory, but newer than those on the drive, from which the update is made again.
  // `former`: who uses its tile slot until then.
  OpId EmitWeightsRead(const Update& update, const Edges& former);
  OpId EmitStateRead(const Update& update, const Edges& former);
  OpId EmitGradientRead(const Update& update, const Edges& former);

  const Plan& plan_;
  OpList& ops_;
  SlotAllocator& slots_;
  TileWriter& writer_;
  const GradientEmitter& gradients_;
  PerBlock<PerTile<Due>> due_;
  bool previews_ = false;
  size_t previewed_ = 0;
  bool norms_ = false;
  Edges of_norms_;  // those that were appended
  PerBlock<PerTile<int64_t>> versions_;
  int64_t pending_step_ = 0;
  OpId norm_ = -1;
  int64_t unsaved_step_ = 0;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_UPDATE_EMITTER_H_
