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
  std::iota(stage_order_.begin(), stage_order_.end(), 0);
}

void PassBuilder::SetOrder(std::vector<int> stages) {
  PENSTOCK_CHECK(stages.size() == graph_.stages.size(), "an order of other stages than the model's");
  stage_order_ = std::move(stages);
}

PassBuilder::Weights PassBuilder::FetchForCompute(int block, size_t position, bool updates) {
  Weights weights;
  if (plan_.device.has_own_memory) {
    weights.device_slot = device_.FetchForCompute(block, position, updates, &weights.weight_slot);
  } else {
    weights.weight_slot = fetcher_.Fetch(block, position);
    fetcher_.Gather(block, weights.weight_slot);
  }
  return weights;
}

void PassBuilder::SetWeights(const Weights& weights, Op* op) const {
  const auto add = [&](const std::vector<OpId>& ready) {
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

void PassBuilder::ApplyDue(int block, size_t position) {
  if (!updates_.IsDue(block)) return;
  if (plan_.on_device(block)) {
    device_.Update(block, position);
  } else {
    fetcher_.Fetch(block, position);
  }
}

Op& PassBuilder::EmitForStage(OpKind kind, Lane lane, int position, int micro_batch, int64_t step) {
  Op& op = ops_.Emit(kind, lane, step);
  op.block = block_at(position);
  op.stage = stage_order_[At(position)];
  op.position = position;
  op.micro_batch = micro_batch;
  return op;
}

Op& PassBuilder::EmitInput(OpKind kind, int position, int micro_batch, int64_t step) {
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
  const int stages = positions();
  OpId last = batch_;
  input_written_.assign(At(stages), std::vector<OpId>(At(micro_batches), -1));
  for (int position = 0; position < (train ? stages - 1 : stages); ++position) {
    const Weights weights = FetchForCompute(block_at(position), At(position), /*updates=*/false);
    if (plan_.device.collectives && position + 1 < stages) {
      // The next one's update before this one computes: the others' new shards come meanwhile.
      const int next = block_at(position + 1);
      if (plan_.on_device(next)) device_.FetchResident(next, At(position + 1));
    }
    for (int m = 0; m < micro_batches; ++m) {
      const OpId id = ops_.next_id();
      Op& op = EmitForStage(OpKind::kForward, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == micro_batches;
      op.evaluates = !train;
      op.seconds = stage_at(position).forward_seconds;
      SetWeights(weights, &op);
      if (position == 0) op.after.push_back(batch_);
      last = id;
      if (!train) continue;
      // What it hands on must find room: inputs on their way to the drive are as many as the ring has.
      const int leaving = position + 1 - plan_.input_ring;
      if (leaving > 0 && plan_.SpillsInput(leaving)) {
        for (const OpId written : input_written_[At(leaving)]) AddIf(&op.after, written);
      }
      if (!plan_.SpillsInput(position)) continue;
      input_written_[At(position)][At(m)] = ops_.next_id();
      EmitInput(OpKind::kWriteInput, position, m, step).after = {id};
    }
    ComputedWith(weights, last);
  }
  if (!train) ops_.Emit(OpKind::kEvaluated, Lane::kHost, step).after = {last};
  return last;
}

OpId PassBuilder::EmitInputRead(int position, int micro_batch, int64_t step) {
  const OpId id = ops_.next_id();
  Op& read = EmitInput(OpKind::kReadInput, position, micro_batch, step);
  read.after = {input_written_[At(position)][At(micro_batch)]};
  const int freed = position + plan_.input_ring;
  if (freed < positions()) read.after.push_back(input_used_[At(freed)]);
  return id;
}

OpId PassBuilder::EmitBackward(int position, const Weights& weights, const Edges& wait, int64_t step) {
  const StageShape& stage = stage_at(position);
  OpId last = -1;
  for (int m = 0; m < plan_.micro_batches; ++m) {
    const OpId input_read = plan_.SpillsInput(position) ? EmitInputRead(position, m, step) : -1;
    const auto emit = [&](OpKind kind) -> Op& {
      last = ops_.next_id();
      Op& op = EmitForStage(kind, Lane::kCompute, position, m, step);
      op.last_micro_batch = m + 1 == plan_.micro_batches;
      return op;
    };
    Op& backward = emit(OpKind::kBackward);
    backward.seconds = stage.backward_seconds;
    SetWeights(weights, &backward);
    if (positions() == 1) backward.after.push_back(batch_);
    AddIf(&backward.after, input_read);
    if (!plan_.blocks[At(stage.block)].trains) continue;
    // Apart from it, because only this needs the gradient's place: it may still be in use while the block
    // computes.
    const OpId computed = last;
    Op& take = emit(OpKind::kAccumulateGradient);
    gradients_.SetPlaces(stage.block, &take);
    take.after = wait;
    take.after.push_back(computed);
  }
  input_used_[At(position)] = last;
  return last;
}

void PassBuilder::EmitUpdates(int block, const Weights& weights, OpId final_id, int64_t step,
                              bool speculates) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  const std::vector<char>& early = bp.in_backward;
  const bool all_early = speculates && std::count(early.begin(), early.end(), 0) == 0;
  if (!bp.gradient_slot.valid() && (plan_.clips || !all_early)) gradients_.EmitSpill(block, final_id, step);
  updates_.GradientIsFinal(block);
  for (size_t t = 0; t < early.size() && speculates; ++t) {
    if (early[t] == 0) continue;
    updates_.EmitSpeculative(
        {.block = block, .tile = static_cast<int>(t), .weight_slot = weights.weight_slot}, final_id, step);
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

void PassBuilder::AppendBackward(int64_t step, bool speculates, OpId before) {
  const int stages = positions();
  std::vector<int> uses_left(graph_.blocks.size());
  for (size_t b = 0; b < uses_left.size(); ++b) uses_left[b] = plan_.blocks[b].uses;
  // Deferred writes go beside the first half, so that gradients on their way out are not long behind them,
  // and the commit is over when the next forward writes.
  const size_t first_half = At(std::max(1, stages / 2));
  const size_t written_with_each = (writer_.deferred() + first_half - 1) / first_half;
  Edges finals;
  input_used_.assign(At(stages), -1);
  gradients_.StartBackward();
  for (int position = stages - 1; position >= 0; --position) {
    const int block = block_at(position);
    const BlockPlan& bp = plan_.blocks[At(block)];
    const bool last_use = --uses_left[At(block)] == 0;
    const bool updates =
        speculates && last_use &&
        std::any_of(bp.in_backward.begin(), bp.in_backward.end(), [](char early) { return early != 0; });
    const Weights weights = FetchForCompute(block, At(2 * stages - 2 - position), updates);
    if (writer_.deferred() > 0) {
      writer_.EmitDeferred(written_with_each, before);
      if (writer_.deferred() == 0) updates_.CommitPending();
    }
    const OpId last = EmitBackward(position, weights, gradients_.TakePlaces(block), step);
    ComputedWith(weights, last);
    before = last;
    if (!bp.trains) {
      if (position == 0) finals.push_back(last);  // the step ends when it does
      continue;
    }
    if (!last_use) {
      gradients_.UsedBy(block, last);
      continue;
    }
    finals.push_back(gradients_.EmitFinal(block, last, step));
    EmitUpdates(block, weights, finals.back(), step, speculates);
  }
  EmitNorm(std::move(finals), step);
}

}  // namespace penstock::tiering
