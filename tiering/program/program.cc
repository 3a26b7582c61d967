#include "tiering/program/program.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/index.h"

namespace penstock::tiering {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

}  // namespace

ProgramBuilder::ProgramBuilder(const ModelGraph& graph, const Plan& plan, int64_t first_step, OpId first_id)
    : graph_(graph),
      plan_(plan),
      stage_order_(graph.stages.size()),
      next_id_(first_id),
      next_step_(first_step),
      runs_(plan.weight_slots.size()),
      tiles_(plan.tile_slots.size()),
      gradients_(plan.gradient_slots.size()),
      accumulators_(plan.accumulator_slots.size()),
      next_gradient_slot_(plan.weight_classes.size(), 0),
      gradient_written_(graph.blocks.size(), -1),
      gradient_of_block_(graph.blocks.size(), -1),
      loaded_(graph.blocks.size(), 0),
      device_runs_(plan.device.weight_slots.size()),
      device_gradients_(plan.device.gradient_slots.size()),
      device_accumulators_(plan.device.accumulator_slots.size()),
      next_device_gradient_(plan.device.weight_classes.size(), 0),
      uses_(graph.blocks.size()) {
  std::iota(stage_order_.begin(), stage_order_.end(), 0);
  last_write_.reserve(plan.blocks.size());
  for (const BlockPlan& block : plan.blocks) {
    last_write_.emplace_back(block.tiles.size(), -1);
    due_.emplace_back(block.tiles.size(), Due::kNothing);
    version_.emplace_back(block.tiles.size(), 0);
  }
  std::vector<int> sharing(plan.weight_classes.size(), 0);
  for (const BlockPlan& block : plan.blocks) {
    if (block.private_run_slot >= 0) {
      SizeRun(block.private_run_slot, block);
    } else {
      ++sharing[At(block.weight_class)];
    }
  }
  // Those that live on a device count: theirs pass through the shared slots on their way.
  for (const BlockPlan& block : plan.blocks) {
    const size_t c = At(block.weight_class);
    stays_.push_back(block.private_run_slot >= 0 || sharing[c] <= plan.weight_classes[c].slots ? 1 : 0);
  }
  deferred_share_ = DeferredShare();
  // Updates that are made again have the last slot of the ring to themselves: they wait for the norm, and
  // what is read ahead of it must not wait with them.
  rotating_tile_slots_ = At(std::max(1, plan.tile_ring - (plan.speculates ? 1 : 0)));
  if (!plan.on_nvme) {
    // Without a drive everything is in place before the first pass.
    std::fill(loaded_.begin(), loaded_.end(), 1);
    for (size_t b = 0; b < plan.blocks.size(); ++b) {
      const BlockPlan& block = plan.blocks[b];
      for (size_t t = 0; t < block.private_tile_slot.size(); ++t) {
        if (block.private_tile_slot[t] < 0) continue;
        TileSlot& slot = tiles_[At(block.private_tile_slot[t])];
        slot.block = static_cast<int>(b);
        slot.tile = static_cast<int>(t);
      }
      if (!plan.on_device(static_cast<int>(b))) continue;
      DeviceRun& run = device_runs_[At(plan.device.blocks[b].weight_slot)];
      run.block = static_cast<int>(b);
      run.ready.assign(block.tiles.size(), -1);
      run.version.assign(block.tiles.size(), 0);
    }
  }
}

Op& ProgramBuilder::Emit(OpKind kind, Lane lane, int64_t step) {
  Op& op = out_.emplace_back();
  op.kind = kind;
  op.lane = lane;
  op.step = step;
  ++next_id_;
  return op;
}

size_t ProgramBuilder::NextUse(int block, size_t position) const {
  const std::vector<size_t>& uses = uses_[At(block)];
  const auto next = std::upper_bound(uses.begin(), uses.end(), position);
  return next != uses.end() ? *next : kNever;
}

int ProgramBuilder::AcquireRun(int block, size_t position) {
  const WeightClass& cls = plan_.weight_classes[At(plan_.blocks[At(block)].weight_class)];
  int victim = -1;
  GiveUp worth;
  for (int slot = cls.first_slot; slot < cls.first_slot + cls.slots; ++slot) {
    const int held = runs_[At(slot)].block;
    if (held < 0) return slot;
    const GiveUp of_slot = WorthGivingUp(held, position);
    if (victim >= 0 && of_slot <= worth) continue;
    victim = slot;
    worth = of_slot;
  }
  return victim;
}

ProgramBuilder::GiveUp ProgramBuilder::WorthGivingUp(int block, size_t position) const {
  const std::vector<size_t>& uses = uses_[At(block)];
  const bool computes = position > 0 && std::binary_search(uses.begin(), uses.end(), position - 1);
  return {!computes, NextUse(block, position)};
}

Edges ProgramBuilder::GiveUpRun(int slot) {
  WeightSlot& run = runs_[At(slot)];
  Edges former;
  for (const std::vector<OpId>* ids : {&run.ready, &run.writes, &run.copies}) {
    for (const OpId id : *ids) AddIf(&former, id);
  }
  AddIf(&former, run.last_compute);
  AddIf(&former, run.gather);
  run = WeightSlot();
  return former;
}

int ProgramBuilder::Fetch(int block, size_t position) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  const bool is_private = bp.private_run_slot >= 0;
  int slot = bp.private_run_slot;
  bool present = is_private && loaded_[At(block)] != 0;
  if (!is_private) {
    const WeightClass& cls = plan_.weight_classes[At(bp.weight_class)];
    for (int s = cls.first_slot; s < cls.first_slot + cls.slots && !present; ++s) {
      if (runs_[At(s)].block == block) {
        slot = s;
        present = true;
      }
    }
  }
  std::vector<Due>& due = due_[At(block)];
  std::vector<OpId> reads(bp.tiles.size(), -1);
  if (!present) {
    if (!is_private) slot = AcquireRun(block, position);
    WeightSlot& run = runs_[At(slot)];
    const Edges former = GiveUpRun(slot);
    run.block = block;
    SizeRun(slot, bp);
    loaded_[At(block)] = is_private ? 1 : 0;
    for (size_t t = 0; t < bp.tiles.size(); ++t) {
      const bool updates = due[t] == Due::kUpdate;
      reads[t] = next_id_;
      // Weights that an update needs belong to its step; those that only compute needs, to the step that
      // computes.
      Op& read = Emit(OpKind::kReadWeights, Lane::kRead, updates ? pending_step_ : computing_step_);
      read.block = block;
      read.tile = static_cast<int>(t);
      read.weight_slot = slot;
      read.bytes = bp.tiles[t].elements * plan_.precision.weight_bytes();
      read.after = former;
      AddIf(&read.after, last_write_[At(block)][t]);
      if (updates) continue;
      run.ready[t] = next_id_;
      Op& verify = Emit(OpKind::kVerify, Lane::kUpdate, computing_step_);
      verify.block = block;
      verify.tile = static_cast<int>(t);
      verify.weight_slot = slot;
      verify.after = {reads[t]};
    }
  }
  for (size_t t = 0; t < bp.tiles.size(); ++t) {
    if (due[t] == Due::kNothing) continue;
    // Whoever used the content before this update is done by the time of the norm, on which it waits.
    const Update update{.step = pending_step_,
                        .decided = norm_,
                        .weights_read = due[t] == Due::kUpdate ? reads[t] : -1,
                        .replay = due[t] == Due::kReplay};
    EmitUpdate(block, static_cast<int>(t), slot, update);
    due[t] = Due::kNothing;
  }
  return slot;
}

void ProgramBuilder::Gather(int block, int weight_slot) {
  if (plan_.world == 1) return;
  WeightSlot& run = runs_[At(weight_slot)];
  if (run.whole) return;
  const OpId id = next_id_;
  Op& gather = Emit(OpKind::kAllGather, Lane::kAllGather, computing_step_);
  gather.block = block;
  gather.weight_slot = weight_slot;
  gather.bytes = GatheredBytes(block);
  // Whoever used the slot before is done by the time that this rank's part was read, where it was.
  for (const OpId ready : run.ready) AddIf(&gather.after, ready);
  for (const OpId copy : run.copies) AddIf(&gather.after, copy);
  AddIf(&gather.after, run.last_compute);
  run.gather = id;
  run.whole = true;
}

int64_t ProgramBuilder::GatheredBytes(int block) const {
  return plan_.blocks[At(block)].elements * plan_.precision.weight_bytes() * (plan_.world - 1);
}

int64_t ProgramBuilder::ReducedBytes(int block) const {
  return plan_.blocks[At(block)].elements * plan_.accumulator_bytes(block) * (plan_.world - 1);
}

void ProgramBuilder::AddGather(Edges* after, int weight_slot) const {
  // A device apart waits for its copy, which has waited for the gather.
  if (plan_.world > 1 && !plan_.device.has_own_memory) AddIf(after, runs_[At(weight_slot)].gather);
}

void ProgramBuilder::SizeRun(int slot, const BlockPlan& block) {
  runs_[At(slot)].ready.assign(block.tiles.size(), -1);
  runs_[At(slot)].writes.assign(block.tiles.size(), -1);
  runs_[At(slot)].copies.assign(block.tiles.size(), -1);
}

void ProgramBuilder::EmitUpdate(int block, int tile, int weight_slot, const Update& of) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  const int64_t elements = bp.tiles[At(tile)].elements;
  WeightSlot& run = runs_[At(weight_slot)];
  const OpId last_write = last_write_[At(block)][At(tile)];
  auto emit = [&](OpKind kind, Lane lane, int64_t bytes) -> Op& {
    Op& op = Emit(kind, lane, of.step);
    op.block = block;
    op.tile = tile;
    op.in_backward = of.in_backward;
    op.replay = of.replay;
    op.bytes = bytes;
    return op;
  };
  int slot_index = bp.private_tile_slot[At(tile)];
  if (slot_index < 0) {
    slot_index = of.replay ? plan_.tile_ring - 1 : NextTileSlot();
  }
  TileSlot& slot = tiles_[At(slot_index)];
  const Edges former = TakeAll(&slot.users);

  OpId weights_read = of.weights_read;
  if (of.replay) {
    weights_read = next_id_;
    Op& read = emit(OpKind::kReadWeights, Lane::kRead, elements * plan_.precision.weight_bytes());
    read.weight_slot = weight_slot;
    read.after = {of.decided};
    AddIf(&read.after, run.ready[At(tile)]);
    AddIf(&read.after, run.gather);
    AddIf(&read.after, last_write);
  }
  OpId state_read = -1;
  const int64_t state_bytes = plan_.precision.StateBytes(elements);
  if (state_bytes > 0 && (of.replay || slot.block != block || slot.tile != tile)) {
    state_read = next_id_;
    Op& read = emit(OpKind::kReadState, Lane::kRead, state_bytes);
    read.tile_slot = slot_index;
    read.after = former;
    AddIf(&read.after, last_write);
    if (of.replay) read.after.push_back(of.decided);
    slot.users.push_back(state_read);
    if (bp.private_tile_slot[At(tile)] >= 0) {
      slot.block = block;
      slot.tile = tile;
    }
  }
  // In backward a gradient that will be spilled is still in memory. One that nothing spilled is not needed:
  // the update is made again only to leave the tile as it was.
  const bool spilled = bp.gradient_slot < 0;
  OpId gradient_read = -1;
  if (spilled && !of.in_backward && gradient_written_[At(block)] >= 0) {
    gradient_read = next_id_;
    Op& read = emit(OpKind::kReadGradient, Lane::kRead, elements * plan_.precision.gradient_bytes);
    read.tile_slot = slot_index;
    read.after = former;
    AddIf(&read.after, gradient_written_[At(block)]);
    if (of.replay) read.after.push_back(of.decided);
    slot.users.push_back(gradient_read);
  }
  const OpId update_id = next_id_;
  Op& update = emit(OpKind::kUpdate, Lane::kUpdate, 0);
  update.weight_slot = weight_slot;
  update.tile_slot = slot_index;
  update.gradient_slot = of.in_backward ? gradient_of_block_[At(block)] : bp.gradient_slot;
  update.checks_weights = weights_read >= 0;
  update.checks_state = state_read >= 0;
  update.after = former;
  AddIf(&update.after, weights_read);
  AddIf(&update.after, state_read);
  AddIf(&update.after, gradient_read);
  AddIf(&update.after, of.decided);
  AddIf(&update.after, last_write);
  AddIf(&update.after, run.gather);
  run.whole = false;
  if (of.weights_read < 0) AddIf(&update.after, run.ready[At(tile)]);
  slot.users.push_back(update_id);
  run.ready[At(tile)] = update_id;
  ++version_[At(block)][At(tile)];
  if (update.gradient_slot >= 0) gradients_[At(update.gradient_slot)].users.push_back(update_id);
  if (!plan_.on_nvme) {
    pending_writes_.push_back(update_id);
    return;
  }
  if (plan_.written_at_checkpoint(block, tile)) {
    pending_writes_.push_back(update_id);
    return;
  }
  WriteUpdated(block, tile, weight_slot, slot_index, of, update_id);
}

double ProgramBuilder::DeferredShare() const {
  double forward_seconds = 0, backward_seconds = 0;
  for (const StageShape& stage : graph_.stages) {
    forward_seconds += stage.forward_seconds;
    backward_seconds += stage.backward_seconds;
  }
  double forward = 0, backward = 0, either = 0;  // bytes of the drive
  for (size_t b = 0; b < plan_.blocks.size(); ++b) {
    const BlockPlan& block = plan_.blocks[b];
    if (plan_.on_device(static_cast<int>(b))) continue;
    const auto weights = static_cast<double>(block.elements * plan_.precision.weight_bytes());
    const auto gradient = static_cast<double>(block.elements * plan_.precision.gradient_bytes);
    for (double* pass : {&forward, &backward}) {
      if (stays_[b] == 0) *pass += weights;
      if (block.trains && block.gradient_slot < 0) *pass += gradient;
    }
    for (size_t t = 0; block.trains && t < block.tiles.size(); ++t) {
      if (plan_.written_at_checkpoint(static_cast<int>(b), static_cast<int>(t))) continue;
      const auto state = static_cast<double>(plan_.precision.StateBytes(block.tiles[t].elements));
      double& write = stays_[b] != 0 ? either : forward;
      write += static_cast<double>(block.tiles[t].elements * plan_.precision.weight_bytes());
      if (block.private_tile_slot[t] >= 0) {
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

void ProgramBuilder::WriteUpdated(int block, int tile, int weight_slot, int tile_slot, const Update& of,
                                  OpId update) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  bool defers = defers_writes_ && !of.replay && stays_[At(block)] != 0;
  if (defers) {
    deferred_due_ += deferred_share_;
    defers = deferred_due_ >= 1;
    if (defers) deferred_due_ -= 1;
  }
  if (!defers) {
    EmitTileWrite(OpKind::kWriteTile, block, tile, weight_slot, tile_slot, of, update);
    return;
  }
  const bool state_streams =
      bp.private_tile_slot[At(tile)] < 0 && plan_.precision.StateBytes(bp.tiles[At(tile)].elements) > 0;
  if (!state_streams) {
    // Of a tile without state the slot of the ring is free: only its weights are written.
    deferred_writes_.push_back(
        {OpKind::kWriteTile, block, tile, weight_slot, bp.private_tile_slot[At(tile)], of.step, update});
    return;
  }
  const OpId state = EmitTileWrite(OpKind::kWriteState, block, tile, weight_slot, tile_slot, of, update);
  deferred_writes_.push_back({OpKind::kWriteWeights, block, tile, weight_slot, -1, of.step, state});
}

void ProgramBuilder::EmitDeferredWrites(size_t most, OpId after) {
  const size_t count = std::min(most, deferred_writes_.size());
  for (size_t i = 0; i < count; ++i) {
    const DeferredWrite& deferred = deferred_writes_[i];
    EmitTileWrite(deferred.kind, deferred.block, deferred.tile, deferred.weight_slot, deferred.tile_slot,
                  {.step = deferred.step}, deferred.ready);
    out_.back().after.push_back(after);
  }
  deferred_writes_.erase(deferred_writes_.begin(), deferred_writes_.begin() + static_cast<ptrdiff_t>(count));
}

OpId ProgramBuilder::EmitTileWrite(OpKind kind, int block, int tile, int weight_slot, int tile_slot,
                                   const Update& of, OpId ready) {
  const int64_t elements = plan_.blocks[At(block)].tiles[At(tile)].elements;
  const Precision& precision = plan_.precision;
  const OpId write_id = next_id_;
  Op& write = Emit(kind, Lane::kWrite, of.step);
  write.block = block;
  write.tile = tile;
  write.in_backward = of.in_backward;
  write.replay = of.replay;
  write.bytes = kind == OpKind::kWriteTile    ? precision.TotalBytes(elements)
                : kind == OpKind::kWriteState ? precision.StateBytes(elements)
                                              : elements * precision.weight_bytes();
  write.weight_slot = weight_slot;
  write.tile_slot = tile_slot;
  write.after = {ready};
  // The slot that is overwritten holds the version before the last one: free once the last one is committed.
  AddIf(&write.after, last_commit_);
  if (tile_slot >= 0) tiles_[At(tile_slot)].users.push_back(write_id);
  runs_[At(weight_slot)].writes[At(tile)] = write_id;
  last_write_[At(block)][At(tile)] = write_id;
  pending_writes_.push_back(write_id);
  return write_id;
}

bool ProgramBuilder::IsDue(int block) const {
  const std::vector<Due>& due = due_[At(block)];
  return std::any_of(due.begin(), due.end(), [](Due tile) { return tile != Due::kNothing; });
}

void ProgramBuilder::ApplyDue(int block, size_t position) {
  if (!IsDue(block)) return;
  if (plan_.on_device(block)) {
    UpdateOnDevice(block, position);
  } else {
    Fetch(block, position);
  }
}

void ProgramBuilder::AssumptionHeld() {
  for (std::vector<Due>& block : due_) std::replace(block.begin(), block.end(), Due::kReplay, Due::kNothing);
}

void ProgramBuilder::EmitCommit(int64_t step, bool durable, Edges after) {
  const auto emit = [&](OpKind kind) -> Op& {
    last_commit_ = next_id_;
    Op& op = Emit(kind, Lane::kCommit, step);
    op.durable = durable;
    return op;
  };
  AddIf(&after, last_commit_);
  Op& commit = emit(OpKind::kCommit);
  commit.after = std::move(after);
  if (plan_.world == 1) return;
  const OpId committed = last_commit_;
  emit(OpKind::kAgree).after = {committed};
}

void ProgramBuilder::CommitPending() {
  if (pending_step_ == 0) return;
  Edges after = TakeAll(&pending_writes_);
  AddIf(&after, norm_);
  EmitCommit(pending_step_, plan_.commits_every_step, std::move(after));
  unsaved_step_ = plan_.on_nvme && !plan_.commits_every_step ? pending_step_ : 0;
  pending_step_ = 0;
}

}  // namespace penstock::tiering
