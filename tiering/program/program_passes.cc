// The passes of a program: forward, backward and what goes between them, stage by stage.
#include <algorithm>
#include <utility>

#include "base/index.h"
#include "tiering/program/program.h"

namespace penstock::tiering {
Op& ProgramBuilder::EmitForStage(OpKind kind, Lane lane, int position, int micro_batch, int64_t step) {
  const int stage = stage_order_[At(position)];
  Op& op = Emit(kind, lane, step);
  op.block = graph_.stages[At(stage)].block;
  op.stage = stage;
  op.position = position;
  op.micro_batch = micro_batch;
  return op;
}

Op& ProgramBuilder::EmitInput(OpKind kind, int position, int micro_batch, int64_t step) {
  const bool leaves = kind == OpKind::kWriteInput;
  const Lane lane = plan_.device.has_own_memory ? (leaves ? Lane::kCopyOut : Lane::kCopyIn)
                                                : (leaves ? Lane::kWrite : Lane::kRead);
  Op& op = EmitForStage(kind, lane, position, micro_batch, step);
  op.bytes = graph_.stages[At(op.stage)].input_scratch_bytes;
  return op;
}

OpId ProgramBuilder::AppendForward(bool train, int micro_batches, int64_t step) {
  batch_ = next_id_;
  Emit(OpKind::kBatch, Lane::kHost, step).evaluates = !train;
  const int stages = static_cast<int>(graph_.stages.size());
  OpId last = batch_;
  input_written_.assign(At(stages), std::vector<OpId>(At(micro_batches), -1));
  for (int position = 0; position < (train ? stages - 1 : stages); ++position) {
    const StageShape& stage = graph_.stages[At(stage_order_[At(position)])];
    const Weights weights = FetchForCompute(stage.block, At(position), /*updates=*/false);
    if (plan_.device.direct && position + 1 < stages) {
      // The next one's update before this one computes: the others' new parts come meanwhile.
      const int next = graph_.stages[At(stage_order_[At(position + 1)])].block;
      if (plan_.on_device(next)) FetchOnDevice(next, At(position + 1));
    }
    for (int m = 0; m < micro_batches; ++m) {
      const OpId id = next_id_;
      Op& op = EmitForStage(OpKind::kForward, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == micro_batches;
      op.evaluates = !train;
      op.weight_slot = weights.compute_slot();
      op.device_slot = weights.device_slot;
      op.seconds = stage.forward_seconds;
      for (const OpId ready : *weights.ready) AddIf(&op.after, ready);
      AddGather(&op.after, weights.weight_slot);
      if (position == 0) op.after.push_back(batch_);
      last = id;
      if (!train) continue;
      // What it hands on must find room: inputs on their way to the drive are as many as the ring has.
      const int leaving = position + 1 - plan_.input_ring;
      if (leaving > 0 && plan_.SpillsInput(leaving)) {
        for (const OpId written : input_written_[At(leaving)]) AddIf(&op.after, written);
      }
      if (!plan_.SpillsInput(position)) continue;
      input_written_[At(position)][At(m)] = next_id_;
      EmitInput(OpKind::kWriteInput, position, m, step).after = {id};
    }
    // The compute lane runs in program order: its last operation stands for those before it.
    Used(weights, last);
  }
  if (!train) {
    Op& done = Emit(OpKind::kEvaluated, Lane::kHost, step);
    done.after = {last};
  }
  return last;
}

Edges ProgramBuilder::TakeGradientSlot(int block) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  int index = bp.gradient_slot;
  if (index < 0) {
    index = plan_.gradient_rings[At(bp.weight_class)].NextSlot(&next_gradient_slot_[At(bp.weight_class)]);
  }
  gradient_[At(block)] = index;
  return TakeAll(&gradients_[At(index)].users);
}

Edges ProgramBuilder::TakeAccumulatorSlot(int block) {
  int index = plan_.blocks[At(block)].accumulator_slot;
  if (index < 0) index = static_cast<int>(next_accumulator_++ % At(plan_.accumulator_ring));
  accumulator_[At(block)] = index;
  return TakeAll(&accumulators_[At(index)].users);
}

Edges ProgramBuilder::TakePlaces(int block) {
  Edges users;
  if (!plan_.blocks[At(block)].trains) return users;
  if (plan_.device.has_own_memory) {
    TakeDevicePlaces(block, &users);
  } else if (plan_.needs_accumulator(block)) {
    if (accumulator_[At(block)] < 0) users = TakeAccumulatorSlot(block);
  } else if (gradient_[At(block)] < 0) {
    users = TakeGradientSlot(block);
  }
  return users;
}

OpId ProgramBuilder::EmitBackward(int position, const Weights& weights, const Edges& wait, int64_t step) {
  const int stages = static_cast<int>(graph_.stages.size());
  const StageShape& stage = graph_.stages[At(stage_order_[At(position)])];
  OpId last = -1;
  for (int m = 0; m < plan_.micro_batches; ++m) {
    OpId input_read = -1;
    if (plan_.SpillsInput(position)) {
      input_read = next_id_;
      Op& read = EmitInput(OpKind::kReadInput, position, m, step);
      read.after = {input_written_[At(position)][At(m)]};
      const int freed = position + plan_.input_ring;
      if (freed < stages) read.after.push_back(input_used_[At(freed)]);
    }
    auto emit = [&](OpKind kind) -> Op& {
      Op& op = EmitForStage(kind, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == plan_.micro_batches;
      return op;
    };
    const OpId backward_id = next_id_;
    Op& backward = emit(OpKind::kBackward);
    backward.weight_slot = weights.compute_slot();
    backward.device_slot = weights.device_slot;
    backward.seconds = stage.backward_seconds;
    last = backward_id;
    for (const OpId ready : *weights.ready) AddIf(&backward.after, ready);
    AddGather(&backward.after, weights.weight_slot);
    if (stages == 1) backward.after.push_back(batch_);
    AddIf(&backward.after, input_read);
    if (!plan_.blocks[At(stage.block)].trains) continue;
    // Apart from it, because only this needs the gradient's place: it may still be in use while the block
    // computes.
    last = next_id_;
    Op& take = emit(OpKind::kAccumulateGradient);
    take.gradient_slot = gradient_[At(stage.block)];
    take.device_slot = device_gradient_[At(stage.block)];
    take.accumulator_slot =
        plan_.device.has_own_memory ? device_accumulator_[At(stage.block)] : accumulator_[At(stage.block)];
    take.after = wait;
    take.after.push_back(backward_id);
  }
  input_used_[At(position)] = last;
  return last;
}

OpId ProgramBuilder::EmitFinal(int block, OpId last, int64_t step) {
  const bool sums_apart = plan_.needs_accumulator(block);
  Edges wait;  // for the gradient's place
  if (sums_apart || plan_.device.has_own_memory) wait = TakeGradientSlot(block);
  const int gradient = gradient_[At(block)];
  if (plan_.device.has_own_memory) {
    if (plan_.device.direct) last = ReduceOnDevice(block, last, step);
    // Otherwise over several ranks it goes to the sums, and the gradient's place waits for the reduction.
    const Edges users = sums_apart ? TakeAccumulatorSlot(block) : TakeAll(&wait);
    last = EmitCopyOut(block, gradient, accumulator_[At(block)], last, users, step);
  }
  // What makes the gradient's place final, and frees the sums: rounding, or over several ranks the reduction.
  OpId reduced = -1;
  if (plan_.world > 1 && !plan_.device.direct) {
    reduced = next_id_;
    Op& reduce = Emit(OpKind::kReduceScatter, Lane::kReduceScatter, step);
    reduce.block = block;
    reduce.gradient_slot = gradient;
    reduce.accumulator_slot = accumulator_[At(block)];
    reduce.bytes = ReducedBytes(block);
    reduce.after = {last};
    AddAll(&reduce.after, wait);
    wait = {reduced};
  }
  const OpId final_id = next_id_;
  Op& finalize = Emit(OpKind::kRoundGradient, Lane::kUpdate, step);
  finalize.block = block;
  finalize.gradient_slot = gradient;
  finalize.accumulator_slot = reduced >= 0 ? -1 : accumulator_[At(block)];
  finalize.after = {last};
  AddAll(&finalize.after, wait);
  if (sums_apart) {
    accumulators_[At(accumulator_[At(block)])].users.push_back(reduced >= 0 ? reduced : final_id);
  }
  gradients_[At(gradient)].users = {last, final_id};
  gradient_of_block_[At(block)] = gradient;
  return final_id;
}

void ProgramBuilder::EmitGradientWrite(int block, OpId final_id, int64_t step) {
  const int gradient = gradient_of_block_[At(block)];
  const OpId write_id = next_id_;
  Op& write = Emit(OpKind::kWriteGradient, Lane::kWrite, step);
  write.block = block;
  write.gradient_slot = gradient;
  write.bytes = plan_.blocks[At(block)].elements * plan_.precision.gradient_bytes;
  write.after = {final_id};
  gradients_[At(gradient)].users.push_back(write_id);
  gradient_written_[At(block)] = write_id;
}

void ProgramBuilder::AppendBackward(int64_t step, bool in_backward, OpId before) {
  const int stages = static_cast<int>(graph_.stages.size());
  std::vector<int> uses_left(graph_.blocks.size());
  for (size_t b = 0; b < uses_left.size(); ++b) uses_left[b] = plan_.blocks[b].uses;
  // Deferred writes go beside the first half, so that gradients on their way out are not long behind them,
  // and the commit is over when the next forward writes.
  const size_t first_half = At(std::max(1, stages / 2));
  const size_t written_with_each = (deferred_writes_.size() + first_half - 1) / first_half;
  Edges finals;
  input_used_.assign(At(stages), -1);
  for (std::vector<int>* places : {&accumulator_, &gradient_, &device_accumulator_, &device_gradient_}) {
    places->assign(graph_.blocks.size(), -1);
  }
  for (int position = stages - 1; position >= 0; --position) {
    const int block = graph_.stages[At(stage_order_[At(position)])].block;
    const BlockPlan& bp = plan_.blocks[At(block)];
    const std::vector<char>& early = bp.in_backward;
    const auto late_tiles = std::count(early.begin(), early.end(), 0);
    const bool last_use = --uses_left[At(block)] == 0;
    const bool updates = in_backward && last_use && late_tiles < static_cast<int64_t>(early.size());
    const Weights weights = FetchForCompute(block, At(2 * stages - 2 - position), updates);
    if (!deferred_writes_.empty()) {
      EmitDeferredWrites(written_with_each, before);
      if (deferred_writes_.empty()) CommitPending();
    }
    const OpId last = EmitBackward(position, weights, TakePlaces(block), step);
    Used(weights, last);
    before = last;
    if (!bp.trains) {
      if (position == 0) finals.push_back(last);  // the step ends when it does
      continue;
    }
    if (!last_use) {
      if (const int slot = accumulator_[At(block)]; slot >= 0) accumulators_[At(slot)].users.push_back(last);
      if (const int slot = gradient_[At(block)]; slot >= 0) gradients_[At(slot)].users.push_back(last);
      continue;
    }
    const OpId final_id = EmitFinal(block, last, step);
    finals.push_back(final_id);
    gradient_written_[At(block)] = -1;
    const bool all_early = in_backward && late_tiles == 0;
    if (bp.gradient_slot < 0 && (plan_.clips || !all_early)) EmitGradientWrite(block, final_id, step);
    for (size_t t = 0; t < bp.tiles.size(); ++t) {
      due_[At(block)][t] = Due::kUpdate;
      if (!in_backward || early[t] == 0) continue;
      EmitUpdate(block, static_cast<int>(t), weights.weight_slot,
                 {.step = step, .decided = final_id, .in_backward = true});
      due_[At(block)][t] = Due::kReplay;
    }
  }
  if (plan_.world > 1) {
    const OpId exchanged = next_id_;
    Emit(OpKind::kExchange, Lane::kReduceScatter, step).after = std::move(finals);
    finals = {exchanged};
  }
  norm_ = next_id_;
  Op& norm = Emit(OpKind::kNorm, Lane::kHost, step);
  norm.after = std::move(finals);
  // A checkpoint of what is in memory begins with the commit and must see its step.
  if (plan_.world > 1 && !plan_.on_nvme) AddIf(&norm.after, last_commit_);
  pending_step_ = step;
}

std::vector<Op> ProgramBuilder::Append(Pass pass, int evaluate_micro_batches, bool in_backward) {
  out_.clear();
  computing_step_ = next_step_;
  auto block_at = [&](size_t position) { return graph_.stages[At(stage_order_[position])].block; };
  const size_t stages = graph_.stages.size();
  for (std::vector<size_t>& uses : uses_) uses.clear();
  size_t next_use = 0;
  const auto use = [&](int block) { uses_[At(block)].push_back(next_use++); };
  if (pass == Pass::kFlush || pass == Pass::kPersist) {
    for (size_t b = 0; b < graph_.blocks.size(); ++b) use(static_cast<int>(b));
  } else {
    for (size_t position = 0; position < stages; ++position) use(block_at(position));
  }
  if (pass == Pass::kTrain) {
    // The last stage runs forward and backward in one go: one use.
    for (size_t position = stages - 1; position-- > 0;) use(block_at(position));
  }
  // What comes after is most often the next forward.
  for (size_t position = 0; position < stages; ++position) use(block_at(position));

  switch (pass) {
    case Pass::kTrain: {
      const int64_t step = next_step_++;
      // A single stage has nothing to compute between its forward and the end of its backward.
      defers_writes_ = stages > 1 && (!in_backward || plan_.in_backward_share() == 0);
      deferred_due_ = 0.5;
      const OpId forward = AppendForward(true, plan_.micro_batches, step);
      const int last_block = block_at(stages - 1);
      // The last stage's block may carry the last part of the pending update; fetch it before the commit is
      // placed.
      ApplyDue(last_block, stages - 1);
      defers_writes_ = false;
      if (deferred_writes_.empty()) CommitPending();
      AppendBackward(step, in_backward, forward);
      break;
    }
    case Pass::kEvaluate:
      AppendForward(false, evaluate_micro_batches, next_step_ - 1);
      CommitPending();
      break;
    case Pass::kPersist:
      Persist();
      break;
    case Pass::kFlush:
      for (size_t b = 0; b < graph_.blocks.size(); ++b) ApplyDue(static_cast<int>(b), b);
      CommitPending();
      break;
  }
  return std::move(out_);
}

}  // namespace penstock::tiering
