#include "tiering/program/program.h"

#include <utility>

#include "base/check.h"
#include "base/index.h"
#include "tiering/program/device_gradients.h"
#include "tiering/program/device_weights.h"
#include "tiering/program/gradient_emitter.h"
#include "tiering/program/op_list.h"
#include "tiering/program/pass_builder.h"
#include "tiering/program/slot_allocator.h"
#include "tiering/program/tile_writer.h"
#include "tiering/program/update_emitter.h"
#include "tiering/program/use_order.h"
#include "tiering/program/weight_fetcher.h"

namespace penstock::tiering {

namespace {

// Of a training pass: each tile is read, verified, updated and written, and there is more to do by stage.
size_t LikelyOps(const Plan& plan) {
  constexpr int64_t kOfTile = 6, kOfStage = 4;
  return static_cast<size_t>(kOfTile * plan.tile_count() + kOfStage * plan.positions * plan.micro_batches);
}

}  // namespace

// Each knows those before it only.
struct ProgramBuilder::Parts {
  Parts(const ModelGraph& model, const Plan& of, int64_t first_step, OpId first_id)
      : graph(model),
        plan(of),
        next_step(first_step),
        ops(first_id, LikelyOps(of)),
        uses(model.blocks.size()),
        slots(of, uses),
        device_gradients(model, of, &ops),
        gradients(of, &ops, &slots, &device_gradients),
        writer(model, of, &ops, &slots),
        updates(of, &ops, &slots, &writer, gradients),
        fetcher(of, &ops, &slots, &updates, &writer),
        device(model, of, {uses, ops, slots, writer, updates, fetcher, device_gradients}),
        passes(model, of, {ops, slots, gradients, writer, updates, fetcher, device}) {}

  void StartPass(Pass pass);
  void CountUses(Pass pass);
  void Train(int64_t step, const CallOfStep& call, bool speculative_update);
  void Persist();

  const ModelGraph& graph;
  const Plan& plan;
  int64_t next_step;
  bool holds_coded = true;  // what slots have gathered, where training gathers in fewer bits
  OpList ops;
  UseOrder uses;
  SlotAllocator slots;
  DeviceGradients device_gradients;
  GradientEmitter gradients;
  TileWriter writer;
  UpdateEmitter updates;
  WeightFetcher fetcher;
  DeviceWeights device;
  PassBuilder passes;
};

ProgramBuilder::ProgramBuilder(const ModelGraph& graph, const Plan& plan, int64_t first_step, OpId first_id)
    : parts_(std::make_unique<Parts>(graph, plan, first_step, first_id)) {}

ProgramBuilder::~ProgramBuilder() = default;

void ProgramBuilder::SetOrder(const std::vector<int>& stages) { parts_->passes.SetOrder(stages); }
void ProgramBuilder::AssumptionHeld() { parts_->updates.AssumptionHeld(); }
OpId ProgramBuilder::next_id() const { return parts_->ops.next_id(); }
int64_t ProgramBuilder::next_step() const { return parts_->next_step; }
bool ProgramBuilder::has_pending_update() const { return parts_->updates.pending_step() != 0; }
int64_t ProgramBuilder::unsaved_step() const { return parts_->updates.unsaved_step(); }
void ProgramBuilder::SetBackUnsavedStep(int64_t step) { parts_->updates.SetBackUnsavedStep(step); }

// An evaluation computes with all bits of the weights, so that all ranks come to one loss, and a step with
// codes, so that its bits do not depend on what a slot has kept from an evaluation.
void ProgramBuilder::Parts::StartPass(Pass pass) {
  const bool trains = pass != Pass::kEvaluate;
  ops.StartPass(next_step, trains);
  if (!plan.codes.weights || trains == holds_coded) return;
  holds_coded = trains;
  slots.ForgetGathered();
  device.ForgetGathered();
}

void ProgramBuilder::Parts::CountUses(Pass pass) {
  uses.Clear();
  if (pass == Pass::kFlush || pass == Pass::kPersist) {
    for (const BlockIndex b : graph.blocks.indices()) uses.Add(b);
  } else {
    for (const Position position : passes.positions()) uses.Add(passes.block_at(position));
  }
  if (pass == Pass::kTrain || pass == Pass::kSum) {
    // The last stage runs forward and backward in one go: one use.
    const Position first = passes.first_trained();
    for (Position position = passes.last_position() - 1; position >= first; --position) {
      uses.Add(passes.block_at(position));
    }
  }
  if (pass == Pass::kTrain && plan.tensor_norms) {
    for (const BlockIndex b : graph.blocks.indices()) uses.Add(b);
  }
  // What comes after is most often the next forward.
  for (const Position position : passes.positions()) uses.Add(passes.block_at(position));
}

void ProgramBuilder::Parts::Train(int64_t step, const CallOfStep& call, bool speculative_update) {
  const Position last = passes.last_position();
  // A single stage has nothing to compute between its forward and the end of its backward.
  if (last > Position(0) && (!speculative_update || plan.speculative_share() == 0)) {
    writer.StartDeferring();
    updates.StartPreviews();
  }
  const OpId forward = passes.AppendForward(true, plan.micro_batches, step);
  updates.StopPreviews();
  // The last stage's block may carry the last part of the pending update; fetch it before the commit is
  // placed.
  passes.ApplyDue(passes.block_at(last), PassBuilder::UseInForward(last));
  writer.StopDeferring();
  passes.CommitIfWritten();
  passes.AppendBackward(step, call, speculative_update, forward);
}

// What makes the unsaved step one that a restart finds.
void ProgramBuilder::Parts::Persist() {
  if (updates.unsaved_step() == 0) return;
  const int64_t step = updates.TakeUnsavedStep();
  const Edges pending = writer.TakeAwaited();  // of the pending step: for a commit of its own
  for (const BlockIndex b : plan.blocks.indices()) {
    const BlockPlan& block = plan.blocks[b];
    if (!block.trains) continue;
    if (plan.on_device(b)) {
      device.WriteBlock(b, UseIndex(b.value()), step);
      continue;
    }
    for (const TileIndex t : block.tiles.indices()) {
      if (!plan.written_at_checkpoint(b, t)) continue;
      writer.WriteChecksummed({b, t, block.private_weight_slot, block.private_tile_slot[t]}, step);
    }
  }
  writer.Commit(step, /*durable=*/true);
  writer.Await(pending);
}

std::vector<Op> ProgramBuilder::Append(Pass pass, int evaluate_micro_batches, bool speculative_update,
                                       bool continues) {
  Parts& parts = *parts_;
  parts.StartPass(pass);
  parts.CountUses(pass);
  parts.slots.ReserveForReplays(parts.updates.ReplaysAreDue());
  switch (pass) {
    case Pass::kTrain:
      parts.Train(parts.next_step++, {.first = !continues, .last = true}, speculative_update);
      break;
    case Pass::kSum:
      parts.Train(parts.next_step, {.first = !continues, .last = false}, /*speculative_update=*/false);
      break;
    case Pass::kEvaluate:
      parts.passes.AppendForward(false, evaluate_micro_batches, parts.next_step - 1);
      parts.updates.CommitPending();
      break;
    case Pass::kPersist:
      parts.Persist();
      break;
    case Pass::kFlush:
      for (const BlockIndex b : parts.graph.blocks.indices()) parts.passes.ApplyDue(b, UseIndex(b.value()));
      parts.updates.CommitPending();
      break;
  }
  return parts.ops.Take();
}

}  // namespace penstock::tiering
