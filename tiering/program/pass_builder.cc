#include "tiering/program/pass_builder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace penstock::tiering {

PassBuilder::PassBuilder(const ModelGraph& graph, const Plan& plan, const Parts& parts)
    : graph_(graph),
      plan_(plan),
      ops_(parts.ops),
      slots_(parts.slots),
      gradients_(parts.gradients),
      writer_(parts.writer),
      updates_(parts.updates),
      fetcher_(parts.fetcher),
      device_(parts.device),
      stage_order_(graph.stages.size()) {
  std::iota(stage_order_.begin(), stage_order_.end(), StageIndex(0));
  FindFirstTrained();
}

void PassBuilder::FindFirstTrained() {
  first_trained_ = Position(0);
  if (graph_.input_gradients) return;
  while (first_trained_ < last_position() && !graph_.blocks[block_at(first_trained_)].trains)
    ++first_trained_;
}

void PassBuilder::SetOrder(const std::vector<int>& stages) {
  PENSTOCK_CHECK(stages.size() == graph_.stages.size(), "an order of other stages than the model's");
  for (const Position position : positions()) stage_order_[position] = StageIndex(stages[At(position)]);
  FindFirstTrained();
}

PassBuilder::Weights PassBuilder::FetchForCompute(BlockIndex block, UseIndex use, bool updates) {
  Weights weights;
  if (plan_.device.has_own_memory) {
    weights.device_slot = device_.FetchForCompute(block, use, updates, &weights.weight_slot);
  } else {
    weights.weight_slot = fetcher_.Fetch(block, use);
    fetcher_.Gather(block, weights.weight_slot);
  }
  return weights;
}

void PassBuilder::SetWeights(const Weights& weights, Op* op) const {
  const auto add = [&](const PerTile<OpId>& ready) {
    for (const OpId id : ready) AddIf(&op->after, id);
  };
  if (weights.device_slot.valid()) {
    op->device_weight_slot = weights.device_slot;
    add(device_.ready(weights.device_slot));
    return;
  }
  const SlotAllocator::Weights& held = slots_.weights(weights.weight_slot);
  op->weight_slot = weights.weight_slot;
  add(held.ready);
  AddIf(&op->after, held.gather);
}

void PassBuilder::ComputedWith(const Weights& weights, OpId last) {
  if (weights.device_slot.valid()) {
    device_.ComputedWith(weights.device_slot, last);
  } else {
    slots_.WeightsComputedWith(weights.weight_slot, last);
  }
}

void PassBuilder::ApplyDue(BlockIndex block, UseIndex use) {
  if (!updates_.IsDue(block)) return;
  if (plan_.on_device(block)) {
    device_.Update(block, use);
  } else {
    fetcher_.Fetch(block, use);
  }
}

void PassBuilder::CommitIfWritten() {
  if (writer_.deferred() == 0 && updates_.previewed() == 0) updates_.CommitPending();
}

Op& PassBuilder::EmitForStage(OpKind kind, Lane lane, Position position, int micro_batch, int64_t step) {
  Op& op = ops_.Emit(kind, lane, step);
  op.block = block_at(position);
  op.stage = stage_order_[position];
  op.position = position;
  op.first_trained = first_trained_;
  op.micro_batch = micro_batch;
  return op;
}

Op& PassBuilder::EmitInput(OpKind kind, Position position, int micro_batch, int64_t step) {
  const bool leaves = kind == OpKind::kWriteInput;
  const Lane lane = plan_.device.has_own_memory ? (leaves ? Lane::kCopyOut : Lane::kCopyIn)
                                                : (leaves ? Lane::kWrite : Lane::kRead);
  Op& op = EmitForStage(kind, lane, position, micro_batch, step);
  op.bytes = stage_at(position).input_scratch_bytes;
  return op;
}

OpId PassBuilder::AppendForward(bool train, int micro_batches, int64_t step) {
  batch_ = ops_.next_id();
  ops_.Emit(OpKind::kBatch, Lane::kHost, step).evaluates = !train;
  OpId last = batch_;
  input_written_.assign(stage_order_.size(), std::vector<OpId>(At(micro_batches), -1));
  for (const Position position : positions()) {
    if (train && position == last_position()) break;
    const Weights weights = FetchForCompute(block_at(position), UseInForward(position), /*updates=*/false);
    if (plan_.device.collectives && position < last_position()) {
      // The next one's update before this one computes: the others' new shards come meanwhile.
      const BlockIndex next = block_at(position + 1);
      if (plan_.on_device(next)) device_.FetchResident(next, UseInForward(position + 1));
    }
    for (int m = 0; m < micro_batches; ++m) {
      const OpId id = ops_.next_id();
      Op& op = EmitForStage(OpKind::kForward, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == micro_batches;
      op.evaluates = !train;
      op.seconds = stage_at(position).forward_seconds;
      SetWeights(weights, &op);
      if (position == Position(0)) op.after.push_back(batch_);
      last = id;
      if (!train) continue;
      // What it hands on must find room: inputs on their way to the drive are as many as the ring has.
      const Position leaving = position + (1 - plan_.input_ring);
      if (SpillsInput(leaving)) {
        for (const OpId written : input_written_[leaving]) AddIf(&op.after, written);
      }
      if (!SpillsInput(position)) continue;
      input_written_[position][At(m)] = ops_.next_id();
      EmitInput(OpKind::kWriteInput, position, m, step).after = {id};
    }
    ComputedWith(weights, last);
  }
  if (!train) ops_.Emit(OpKind::kEvaluated, Lane::kHost, step).after = {last};
  return last;
}

OpId PassBuilder::EmitInputRead(Position position, int micro_batch, int64_t step) {
  const OpId id = ops_.next_id();
  Op& read = EmitInput(OpKind::kReadInput, position, micro_batch, step);
  read.after = {input_written_[position][At(micro_batch)]};
  const Position freed = position + plan_.input_ring;
  if (freed <= last_position()) read.after.push_back(input_used_[freed]);
  return id;
}

OpId PassBuilder::EmitBackward(Position position, const Weights& weights, const Edges& wait, int64_t step) {
  const StageShape& stage = stage_at(position);
  OpId last = -1;
  for (int m = 0; m < plan_.micro_batches; ++m) {
    const OpId input_read = SpillsInput(position) ? EmitInputRead(position, m, step) : -1;
    const auto emit = [&](OpKind kind) -> Op& {
      last = ops_.next_id();
      Op& op = EmitForStage(kind, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == plan_.micro_batches;
      return op;
    };
    Op& backward = emit(OpKind::kBackward);
    backward.seconds = stage.backward_seconds;
    SetWeights(weights, &backward);
    if (stage_order_.size() == 1) backward.after.push_back(batch_);
    AddIf(&backward.after, input_read);
    if (!plan_.blocks[stage.block].trains) continue;
    // Apart from it, because only this needs the gradient's place: it may still be in use while the block
    // computes.
    const OpId computed = last;
    Op& take = emit(OpKind::kAccumulateGradient);
    gradients_.SetPlaces(stage.block, &take);
    take.after = wait;
    // A device is given it behind backward, in the order of this lane, before that is known to be over.
    if (!plan_.device.has_own_memory) take.after.push_back(computed);
  }
  input_used_[position] = last;
  return last;
}

void PassBuilder::EmitUpdates(BlockIndex block, const Weights& weights, OpId final_id, int64_t step,
                              bool speculates) {
  const BlockPlan& bp = plan_.blocks[block];
  const PerTile<char>& early = bp.speculative_update;
  const bool all_early = speculates && bp.all_speculative();
  if (!bp.gradient_slot.valid() && (plan_.clips || !all_early)) gradients_.EmitSpill(block, final_id, step);
  updates_.GradientIsFinal(block);
  for (const TileIndex tile : early.indices()) {
    if (!speculates || early[tile] == 0) continue;
    updates_.EmitSpeculative({.block = block, .tile = tile, .weight_slot = weights.weight_slot}, final_id,
                             step);
  }
}

void PassBuilder::EmitNorm(Edges finals, int64_t step) {
  if (plan_.world > 1) {
    const OpId exchanged = ops_.next_id();
    ops_.Emit(OpKind::kExchange, Lane::kReduceScatter, step).after = std::move(finals);
    finals = {exchanged};
  }
  const OpId id = ops_.next_id();
  Op& norm = ops_.Emit(OpKind::kNorm, Lane::kHost, step);
  norm.after = std::move(finals);
  // A checkpoint of what is in memory begins with the commit and must see its step.
  if (plan_.world > 1 && !plan_.on_nvme) AddIf(&norm.after, writer_.last_commit());
  updates_.StartPending(step, id);
}

void PassBuilder::EmitUpdateNorms() {
  updates_.StartNorms();
  for (const BlockIndex block : plan_.blocks.indices()) ApplyDue(block, UseForNorms(block));
  updates_.DecideByNorms();
}

void PassBuilder::AppendBackward(int64_t step, const CallOfStep& call, bool speculates, OpId before) {
  PerBlock<int> uses_left(graph_.blocks.size());
  for (const BlockIndex b : uses_left.indices()) uses_left[b] = plan_.blocks[b].uses;
  // Deferred writes go beside the first half, so that gradients on their way out are not long behind them,
  // and the commit is over when the next forward writes.
  const size_t first_half = std::max<size_t>(1, (stage_order_.size() - At(first_trained_)) / 2);
  const size_t written_with_each = (writer_.deferred() + first_half - 1) / first_half;
  Edges finals;
  input_used_.assign(stage_order_.size(), -1);
  gradients_.StartBackward(call.first);
  for (Position position = last_position(); position >= first_trained_; --position) {
    const BlockIndex block = block_at(position);
    const BlockPlan& bp = plan_.blocks[block];
    const bool last_use = --uses_left[block] == 0;
    const bool updates = speculates && last_use &&
                         std::any_of(bp.speculative_update.begin(), bp.speculative_update.end(),
                                     [](char early) { return early != 0; });
    const Weights weights = FetchForCompute(block, UseInBackward(position), updates);
    writer_.EmitDeferred(written_with_each, before);
    CommitIfWritten();
    const Edges wait = gradients_.FetchSums(block, gradients_.TakePlaces(block), step);
    const OpId last = EmitBackward(position, weights, wait, step);
    ComputedWith(weights, last);
    before = last;
    if (!bp.trains) {
      if (position == first_trained_) finals.push_back(last);  // the step ends when it does
      continue;
    }
    if (!last_use) {
      gradients_.EmitSums(block, last, step);
      continue;
    }
    if (!call.last) {
      finals.push_back(gradients_.EmitSums(block, last, step));
      continue;
    }
    finals.push_back(gradients_.EmitFinal(block, last, step));
    EmitUpdates(block, weights, finals.back(), step, speculates);
  }
  if (call.last) {
    EmitNorm(std::move(finals), step);
    if (plan_.tensor_norms) EmitUpdateNorms();
  } else {
    ops_.Emit(OpKind::kSummed, Lane::kHost, step).after = std::move(finals);
  }
}

}  // namespace penstock::tiering
