// New versions of tiles on their way to the drive, and the commits that make them count.
//
// Invariants:
//   a write waits for the last commit: the place that it overwrites holds the version before the last one.
//   a commit waits for every write of its step, and for the commit before it.
//   a tile's writes are in the order of its versions.
#ifndef PENSTOCK_TIERING_PROGRAM_TILE_WRITER_H_
#define PENSTOCK_TIERING_PROGRAM_TILE_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"

namespace penstock::tiering {

// A tile, and where it is in memory.
struct TilePlace {
  BlockIndex block;
  TileIndex tile;
  WeightSlot weight_slot = {};
  TileSlot tile_slot = {};  // none: its state is not there
};

// Why a tile gets a new version: the step whose gradient it is of, and in which order it is updated.
struct UpdateCause {
  int64_t step = 0;
  bool speculative_update = false;
  bool preview = false;
  bool again = false;  // after a preview
  bool replay = false;
};

class TileWriter {
 public:
  TileWriter(const ModelGraph& graph, const Plan& plan, OpList* ops, SlotAllocator* slots);

  // Of a tile that `update` has made: what has to go to the drive at once, and what can wait.
  void WriteUpdated(const TilePlace& at, const UpdateCause& cause, OpId update);
  // Of a tile that was not updated here: its checksums first.
  void WriteChecksummed(const TilePlace& at, int64_t step);
  // `change`, which nothing writes, belongs to the next commit too.
  void Await(OpId change) { awaited_.push_back(change); }
  void Await(const Edges& changes) { AddAll(&awaited_, changes); }
  // What the next commit would wait for, which is left to a later one.
  Edges TakeAwaited() { return TakeAll(&awaited_); }

  // In the forward that is appended, writes of what stays in memory until the next update are deferred, as
  // many of them as gives the drive's work the proportions of compute. (Plan::written_at_checkpoint is
  // another matter: tiles that not every step writes.)
  void StartDeferring();
  void StopDeferring() { defers_ = false; }
  // The oldest `most` of them, to be started when `after` is done.
  void EmitDeferred(size_t most, OpId after);
  size_t deferred() const { return deferred_.size(); }

  // Of `step`, when what it awaits is done, and `decided` (-1: nothing more). Over several ranks all of them
  // agree on it.
  void Commit(int64_t step, bool durable, OpId decided = -1);

  OpId last_write(BlockIndex block, TileIndex tile) const { return last_write_[block][tile]; }  // -1: none
  // The last check of weights that compute has read: a tile is read by one transfer at a time, to be checked
  // by what that one knows, so that the next read follows it, wherever the weights go. -1: none.
  OpId last_check(BlockIndex block, TileIndex tile) const { return last_check_[block][tile]; }
  void Checks(BlockIndex block, TileIndex tile, OpId check) { last_check_[block][tile] = check; }
  OpId last_commit() const { return last_commit_; }

 private:
  struct Deferred {
    OpKind kind;
    TilePlace at;
    int64_t step;
    OpId ready;  // the update or, where only the weights stay, the write of the state
  };

  // The share of tiles whose writes are deferred, among those that can be.
  double DeferredShare(const ModelGraph& graph) const;
  // kWriteTile, or a part of it, when `ready` is done. It holds until the next operation.
  Op& EmitWrite(OpKind kind, const TilePlace& at, const UpdateCause& cause, OpId ready);

  const Plan& plan_;
  OpList& ops_;
  SlotAllocator& slots_;
  PerBlock<PerTile<OpId>> last_write_, last_check_;
  OpId last_commit_ = -1;
  Edges awaited_;  // by the next commit
  bool defers_ = false;
  double deferred_share_ = 0;
  double deferred_due_ = 0;         // of the next one; from 1 on it is deferred
  std::vector<Deferred> deferred_;  // oldest first
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_TILE_WRITER_H_
