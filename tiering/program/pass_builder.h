// Forward and backward of a pass, stage by stage and micro-batch by micro-batch.
//
// Invariants:
//   a stage computes when its block's weights are where it reads them, as new as they can be.
//   an input that backward needs stays in memory, or goes to the drive and comes back through a ring: an
//   operation that fills the ring waits for the one that freed its place.
//   the compute lane runs in program order: its last operation stands for those before it.
#ifndef PENSTOCK_TIERING_PROGRAM_PASS_BUILDER_H_
#define PENSTOCK_TIERING_PROGRAM_PASS_BUILDER_H_

#include <cstdint>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/device_weights.h"
#include "tiering/program/gradient_emitter.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"
#include "tiering/program/tile_writer.h"
#include "tiering/program/update_emitter.h"
#include "tiering/program/weight_fetcher.h"

namespace penstock::tiering {

// Which of the calls that make a step.
struct CallOfStep {
  bool first = true, last = true;
};

class PassBuilder {
 public:
  // What it works with; all of it outlives it.
  struct Parts {
    OpList& ops;
    SlotAllocator& slots;
    GradientEmitter& gradients;
    TileWriter& writer;
    UpdateEmitter& updates;
    WeightFetcher& fetcher;
    DeviceWeights& device;
  };
  PassBuilder(const ModelGraph& graph, const Plan& plan, const Parts& parts);

  // The order in which the stages run: a permutation of 0..S-1.
  void SetOrder(const std::vector<int>& stages);
  BlockIndex block_at(Position position) const { return stage_at(position).block; }
  IndexRange<Position> positions() const { return stage_order_.indices(); }
  Position last_position() const { return stage_order_.end_index() - 1; }
  // Where backward ends (ModelGraph::first_trained, in this order).
  Position first_trained() const { return first_trained_; }
  // Of its weights.
  static UseIndex UseInForward(Position position) { return UseIndex(position.value()); }
  UseIndex UseInBackward(Position position) const {
    return UseIndex(2 * last_position().value() - position.value());
  }
  // With Plan::tensor_norms, behind backward.
  UseIndex UseForNorms(BlockIndex block) const { return UseInBackward(first_trained_) + (1 + block.value()); }

  // All stages, or in training all but the last, which has only a backward. Returns the last operation that
  // computes, or the batch.
  OpId AppendForward(bool train, int micro_batches, int64_t step);
  // `call`: which of its step's. `speculates`: the tiles that the plan updates in backward are; otherwise
  // none. `before`: the last operation of forward. Afterwards, if that was the last call, the step is
  // pending.
  void AppendBackward(int64_t step, const CallOfStep& call, bool speculates, OpId before);
  // Commits the pending step, if all of it is on its way to the drive.
  void CommitIfWritten();
  // Makes what is due of the block's update, outside of a use by compute.
  void ApplyDue(BlockIndex block, UseIndex use);

 private:
  // Where compute finds a block's weights.
  struct Weights {
    WeightSlot weight_slot;        // in host memory; none: not needed there
    DeviceWeightSlot device_slot;  // none: the device is the host
  };

  const StageShape& stage_at(Position position) const { return graph_.stages[stage_order_[position]]; }
  void FindFirstTrained();
  // Of an input that backward wants.
  bool SpillsInput(Position position) const {
    return position >= first_trained_ && plan_.SpillsInput(position);
  }
  // `updates`: an update in backward will need them in host memory.
  Weights FetchForCompute(BlockIndex block, UseIndex use, bool updates);
  // `op` computes with them, where they are, when they are there.
  void SetWeights(const Weights& weights, Op* op) const;
  // `last` is the last operation that computes with them in this use.
  void ComputedWith(const Weights& weights, OpId last);
  Op& EmitForStage(OpKind kind, Lane lane, Position position, int micro_batch, int64_t step);
  // The write or read of the input at a position that does not stay in memory.
  Op& EmitInput(OpKind kind, Position position, int micro_batch, int64_t step);
  OpId EmitInputRead(Position position, int micro_batch, int64_t step);
  // One stage, all micro-batches; `wait`: who still uses the gradient's place. Returns the last operation.
  OpId EmitBackward(Position position, const Weights& weights, const Edges& wait, int64_t step);
  // The block's gradient is final: spills it if it must, and makes the updates that are made in backward.
  void EmitUpdates(BlockIndex block, const Weights& weights, OpId final_id, int64_t step, bool speculates);
  // Once more over all that has an update due, for the norms that these updates need.
  void EmitUpdateNorms();
  // The norm, when `finals` are done.
  void EmitNorm(Edges finals, int64_t step);

  const ModelGraph& graph_;
  const Plan& plan_;
  OpList& ops_;
  SlotAllocator& slots_;
  GradientEmitter& gradients_;
  TileWriter& writer_;
  UpdateEmitter& updates_;
  WeightFetcher& fetcher_;
  DeviceWeights& device_;
  PerPosition<StageIndex> stage_order_;
  Position first_trained_;
  OpId batch_ = -1;                               // kBatch of the pass
  PerPosition<std::vector<OpId>> input_written_;  // [micro_batch] of this pass, -1
  PerPosition<OpId> input_used_;                  // last backward of this pass, -1
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_PASS_BUILDER_H_
