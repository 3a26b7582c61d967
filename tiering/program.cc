#include "tiering/program.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace penstock::tiering {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

void AddAll(std::vector<OpId>* to, const std::vector<OpId>& ids) {
  to->insert(to->end(), ids.begin(), ids.end());
}

void AddIf(std::vector<OpId>* to, OpId id) {
  if (id >= 0) to->push_back(id);
}

size_t At(int index) { return static_cast<size_t>(index); }

}  // namespace

std::string_view LaneName(Lane lane) {
  switch (lane) {
    case Lane::kRead:
      return "read";
    case Lane::kWrite:
      return "write";
    case Lane::kCompute:
      return "compute";
    case Lane::kUpdate:
      return "update";
    case Lane::kCommit:
      return "commit";
    case Lane::kHost:
      return "host";
    case Lane::kCopyIn:
      return "copy in";
    case Lane::kCopyOut:
      return "copy out";
    case Lane::kGather:
      return "gather";
    case Lane::kReduce:
      return "reduce";
  }
  return "unknown";
}

std::string_view OpKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kReadWeights:
      return "read weights";
    case OpKind::kReadState:
      return "read state";
    case OpKind::kReadGradient:
      return "read gradient";
    case OpKind::kVerify:
      return "verify";
    case OpKind::kUpdate:
      return "update";
    case OpKind::kWriteTile:
      return "write tile";
    case OpKind::kWriteGradient:
      return "write gradient";
    case OpKind::kWriteInput:
      return "write input";
    case OpKind::kReadInput:
      return "read input";
    case OpKind::kForward:
      return "forward";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kTakeGradient:
      return "take gradient";
    case OpKind::kFinalize:
      return "finalize gradient";
    case OpKind::kNorm:
      return "norm";
    case OpKind::kSeal:
      return "seal";
    case OpKind::kCommit:
      return "commit";
    case OpKind::kBatch:
      return "batch";
    case OpKind::kEvaluated:
      return "evaluated";
    case OpKind::kCopyIn:
      return "copy in";
    case OpKind::kRoundGradient:
      return "round gradient";
    case OpKind::kCopyOut:
      return "copy out";
    case OpKind::kGather:
      return "gather weights";
    case OpKind::kReduce:
      return "reduce gradient";
    case OpKind::kExchange:
      return "exchange norms";
    case OpKind::kAgree:
      return "agree on commit";
    case OpKind::kSquareGradient:
      return "square gradient";
    case OpKind::kUpdateOnDevice:
      return "update on device";
    case OpKind::kCopyStateIn:
      return "copy state in";
    case OpKind::kCopyStateOut:
      return "copy state out";
  }
  return "unknown";
}

ProgramBuilder::ProgramBuilder(const ModelGraph& graph, const Plan& plan, int64_t first_step, OpId first_id)
    : graph_(graph),
      plan_(plan),
      stage_order_(graph.stages.size()),
      next_id_(first_id),
      next_step_(first_step),
      runs_(plan.run_slots.size()),
      tiles_(plan.tile_slots.size()),
      gradients_(plan.gradient_slots.size()),
      accumulators_(plan.accumulator_slots.size()),
      next_gradient_slot_(plan.run_classes.size(), 0),
      gradient_written_(graph.blocks.size(), -1),
      gradient_of_block_(graph.blocks.size(), -1),
      loaded_(graph.blocks.size(), 0),
      device_runs_(plan.device.run_slots.size()),
      device_gradients_(plan.device.gradient_slots.size()),
      device_accumulators_(plan.device.accumulator_slots.size()),
      next_device_gradient_(plan.device.run_classes.size(), 0) {
  std::iota(stage_order_.begin(), stage_order_.end(), 0);
  last_write_.reserve(plan.blocks.size());
  for (const BlockPlan& block : plan.blocks) {
    last_write_.emplace_back(block.tiles.size(), -1);
    due_.emplace_back(block.tiles.size(), Due::kNothing);
    version_.emplace_back(block.tiles.size(), 0);
  }
  for (const BlockPlan& block : plan.blocks) {
    if (block.private_run_slot >= 0) SizeRun(block.private_run_slot, block);
  }
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
      DeviceRun& run = device_runs_[At(plan.device.blocks[b].run_slot)];
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
  for (size_t i = position + 1; i < order_.size(); ++i) {
    if (order_[i] == block) return i;
  }
  return kNever;
}

int ProgramBuilder::AcquireRun(int block, size_t position) {
  const RunClass& cls = plan_.run_classes[At(plan_.blocks[At(block)].run_class)];
  int victim = -1;
  size_t victim_use = 0;
  for (int slot = cls.first_slot; slot < cls.first_slot + cls.slots; ++slot) {
    const int held = runs_[At(slot)].block;
    if (held < 0) return slot;
    const size_t use = NextUse(held, position);
    if (victim < 0 || use > victim_use) {
      victim = slot;
      victim_use = use;
    }
  }
  return victim;
}

std::vector<OpId> ProgramBuilder::GiveUpRun(int slot) {
  RunSlot& run = runs_[At(slot)];
  std::vector<OpId> former;
  for (const std::vector<OpId>* ids : {&run.ready, &run.writes, &run.copies}) {
    for (const OpId id : *ids) AddIf(&former, id);
  }
  AddIf(&former, run.last_compute);
  AddIf(&former, run.gather);
  run = RunSlot();
  return former;
}

int ProgramBuilder::Fetch(int block, size_t position) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  const bool is_private = bp.private_run_slot >= 0;
  int slot = bp.private_run_slot;
  bool present = is_private && loaded_[At(block)] != 0;
  if (!is_private) {
    const RunClass& cls = plan_.run_classes[At(bp.run_class)];
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
    RunSlot& run = runs_[At(slot)];
    const std::vector<OpId> former = GiveUpRun(slot);
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
      read.run_slot = slot;
      read.bytes = bp.tiles[t].elements * plan_.precision.weight_bytes();
      read.after = former;
      AddIf(&read.after, last_write_[At(block)][t]);
      if (updates) continue;
      run.ready[t] = next_id_;
      Op& verify = Emit(OpKind::kVerify, Lane::kUpdate, computing_step_);
      verify.block = block;
      verify.tile = static_cast<int>(t);
      verify.run_slot = slot;
      verify.after = {reads[t]};
    }
  }
  for (size_t t = 0; t < bp.tiles.size(); ++t) {
    if (due[t] == Due::kNothing) continue;
    // Whoever used the content before this update is done by the time of the norm, on which it waits.
    const Update update{.step = pending_step_,
                        .decided = norm_,
                        .weights_read = due[t] == Due::kUpdate ? reads[t] : -1,
                        .redo = due[t] == Due::kRedo};
    EmitUpdate(block, static_cast<int>(t), slot, update);
    due[t] = Due::kNothing;
  }
  return slot;
}

void ProgramBuilder::Gather(int block, int run_slot) {
  if (plan_.world == 1) return;
  RunSlot& run = runs_[At(run_slot)];
  if (run.whole) return;
  const OpId id = next_id_;
  Op& gather = Emit(OpKind::kGather, Lane::kGather, computing_step_);
  gather.block = block;
  gather.run_slot = run_slot;
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

void ProgramBuilder::AddGather(std::vector<OpId>* after, int run_slot) const {
  // A device apart waits for its copy, which has waited for the gather.
  if (plan_.world > 1 && !plan_.device.apart) AddIf(after, runs_[At(run_slot)].gather);
}

void ProgramBuilder::SizeRun(int slot, const BlockPlan& block) {
  runs_[At(slot)].ready.assign(block.tiles.size(), -1);
  runs_[At(slot)].writes.assign(block.tiles.size(), -1);
  runs_[At(slot)].copies.assign(block.tiles.size(), -1);
}

void ProgramBuilder::EmitUpdate(int block, int tile, int run_slot, const Update& of) {
  const BlockPlan& bp = plan_.blocks[At(block)];
  const int64_t elements = bp.tiles[At(tile)].elements;
  RunSlot& run = runs_[At(run_slot)];
  const OpId last_write = last_write_[At(block)][At(tile)];
  auto emit = [&](OpKind kind, Lane lane, int64_t bytes) -> Op& {
    Op& op = Emit(kind, lane, of.step);
    op.block = block;
    op.tile = tile;
    op.in_backward = of.in_backward;
    op.redo = of.redo;
    op.bytes = bytes;
    return op;
  };
  int slot_index = bp.private_tile_slot[At(tile)];
  if (slot_index < 0) {
    slot_index = of.redo ? plan_.tile_ring - 1 : NextTileSlot();
  }
  TileSlot& slot = tiles_[At(slot_index)];
  const std::vector<OpId> former = std::move(slot.users);
  slot.users.clear();

  OpId weights_read = of.weights_read;
  if (of.redo) {
    weights_read = next_id_;
    Op& read = emit(OpKind::kReadWeights, Lane::kRead, elements * plan_.precision.weight_bytes());
    read.run_slot = run_slot;
    read.after = {of.decided};
    AddIf(&read.after, run.ready[At(tile)]);
    AddIf(&read.after, run.gather);
    AddIf(&read.after, last_write);
  }
  OpId state_read = -1;
  const int64_t state_bytes = plan_.precision.StateBytes(elements);
  if (state_bytes > 0 && (of.redo || slot.block != block || slot.tile != tile)) {
    state_read = next_id_;
    Op& read = emit(OpKind::kReadState, Lane::kRead, state_bytes);
    read.tile_slot = slot_index;
    read.after = former;
    AddIf(&read.after, last_write);
    if (of.redo) read.after.push_back(of.decided);
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
    if (of.redo) read.after.push_back(of.decided);
    slot.users.push_back(gradient_read);
  }
  const OpId update_id = next_id_;
  Op& update = emit(OpKind::kUpdate, Lane::kUpdate, 0);
  update.run_slot = run_slot;
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
  if (plan_.written_late(block, tile)) {
    pending_writes_.push_back(update_id);
    return;
  }
  EmitTileWrite(block, tile, run_slot, slot_index, of, update_id);
}

void ProgramBuilder::EmitTileWrite(int block, int tile, int run_slot, int tile_slot, const Update& of,
                                   OpId ready) {
  const OpId write_id = next_id_;
  Op& write = Emit(OpKind::kWriteTile, Lane::kWrite, of.step);
  write.block = block;
  write.tile = tile;
  write.in_backward = of.in_backward;
  write.redo = of.redo;
  write.bytes = plan_.precision.TotalBytes(plan_.blocks[At(block)].tiles[At(tile)].elements);
  write.run_slot = run_slot;
  write.tile_slot = tile_slot;
  write.after = {ready};
  // The slot that is overwritten holds the version before the last one: free once the last one is committed.
  AddIf(&write.after, last_commit_);
  tiles_[At(tile_slot)].users.push_back(write_id);
  runs_[At(run_slot)].writes[At(tile)] = write_id;
  last_write_[At(block)][At(tile)] = write_id;
  pending_writes_.push_back(write_id);
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
  for (std::vector<Due>& block : due_) std::replace(block.begin(), block.end(), Due::kRedo, Due::kNothing);
}

void ProgramBuilder::CommitPending() {
  if (pending_step_ == 0) return;
  const OpId id = next_id_;
  Op& commit = Emit(OpKind::kCommit, Lane::kCommit, pending_step_);
  commit.after = std::move(pending_writes_);
  AddIf(&commit.after, norm_);
  AddIf(&commit.after, last_commit_);
  commit.durable = plan_.commits_every_step;
  pending_writes_.clear();
  last_commit_ = id;
  unsaved_step_ = plan_.on_nvme && !plan_.commits_every_step ? pending_step_ : 0;
  if (plan_.world > 1) {
    last_commit_ = next_id_;
    Op& agree = Emit(OpKind::kAgree, Lane::kCommit, pending_step_);
    agree.durable = plan_.commits_every_step;
    agree.after = {id};
  }
  pending_step_ = 0;
}

Op& ProgramBuilder::EmitInput(OpKind kind, int position, int micro_batch, int64_t step) {
  const int stage = stage_order_[At(position)];
  const bool leaves = kind == OpKind::kWriteInput;
  const Lane lane =
      plan_.device.apart ? (leaves ? Lane::kCopyOut : Lane::kCopyIn) : (leaves ? Lane::kWrite : Lane::kRead);
  Op& op = Emit(kind, lane, step);
  op.block = graph_.stages[At(stage)].block;
  op.stage = stage;
  op.position = position;
  op.micro_batch = micro_batch;
  op.bytes = graph_.stages[At(stage)].input_scratch_bytes;
  return op;
}

void ProgramBuilder::AppendForward(bool train, int micro_batches, int64_t step) {
  batch_ = next_id_;
  Emit(OpKind::kBatch, Lane::kHost, step).evaluates = !train;
  const int stages = static_cast<int>(graph_.stages.size());
  OpId last = batch_;
  input_written_.assign(At(stages), std::vector<OpId>(At(micro_batches), -1));
  for (int position = 0; position < (train ? stages - 1 : stages); ++position) {
    const int s = stage_order_[At(position)];
    const StageShape& stage = graph_.stages[At(s)];
    const Weights weights = FetchForCompute(stage.block, At(position), /*updates=*/false);
    if (plan_.device.direct && position + 1 < stages) {
      // The next one's update before this one computes: the others' new parts come meanwhile.
      const int next = graph_.stages[At(stage_order_[At(position + 1)])].block;
      if (plan_.on_device(next)) FetchOnDevice(next, At(position + 1));
    }
    for (int m = 0; m < micro_batches; ++m) {
      const OpId id = next_id_;
      Op& op = Emit(OpKind::kForward, Lane::kCompute, step);
      op.block = stage.block;
      op.stage = s;
      op.position = position;
      op.micro_batch = m;
      op.last_micro_batch = m + 1 == micro_batches;
      op.evaluates = !train;
      op.run_slot = weights.compute_slot();
      op.device_slot = weights.device_slot;
      op.seconds = stage.forward_seconds;
      for (const OpId ready : *weights.ready) AddIf(&op.after, ready);
      AddGather(&op.after, weights.run_slot);
      if (position == 0) op.after.push_back(batch_);
      last = id;
      if (!train) continue;
      // What it hands on must find room: inputs on their way to the drive are as many as the ring has.
      const int leaving = position + 1 - plan_.input_ring;
      if (leaving > 0 && plan_.SpillsInput(leaving)) AddAll(&op.after, input_written_[At(leaving)]);
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
}

void ProgramBuilder::AppendBackward(int64_t step, bool in_backward) {
  const int stages = static_cast<int>(graph_.stages.size());
  std::vector<int> uses_left(graph_.blocks.size());
  for (size_t b = 0; b < uses_left.size(); ++b) uses_left[b] = plan_.blocks[b].uses;
  std::vector<int> accumulator(graph_.blocks.size(), -1);
  std::vector<int> gradient(graph_.blocks.size(), -1);
  std::vector<OpId> finals;
  input_used_.assign(At(stages), -1);
  device_gradient_.assign(graph_.blocks.size(), -1);
  device_accumulator_.assign(graph_.blocks.size(), -1);
  for (int position = stages - 1; position >= 0; --position) {
    const int s = stage_order_[At(position)];
    const StageShape& stage = graph_.stages[At(s)];
    const int block = stage.block;
    const BlockPlan& bp = plan_.blocks[At(block)];
    const std::vector<char>& early = bp.in_backward;
    const bool updates = in_backward && uses_left[At(block)] == 1 &&
                         std::count(early.begin(), early.end(), 0) < static_cast<int64_t>(early.size());
    const Weights weights = FetchForCompute(block, At(2 * stages - 2 - position), updates);
    const int slot = weights.run_slot;
    const bool sums_apart = plan_.needs_accumulator(block);

    std::vector<OpId> wait;  // for the place that the gradient goes to
    auto take_gradient_slot = [&] {
      int index = bp.gradient_slot;
      if (index < 0) {
        const RunClass& ring = plan_.gradient_rings[At(bp.run_class)];
        index = ring.first_slot + static_cast<int>(next_gradient_slot_[At(bp.run_class)]++ % At(ring.slots));
      }
      gradient[At(block)] = index;
      AddAll(&wait, gradients_[At(index)].users);
      gradients_[At(index)].users.clear();
    };
    auto take_accumulator_slot = [&] {
      int index = bp.accumulator_slot;
      if (index < 0) index = static_cast<int>(next_accumulator_++ % At(plan_.accumulator_ring));
      accumulator[At(block)] = index;
      return std::exchange(accumulators_[At(index)].users, {});
    };
    if (plan_.device.apart) {
      TakeDevicePlaces(block, &wait);
    } else if (sums_apart && accumulator[At(block)] < 0) {
      wait = take_accumulator_slot();
    } else if (!sums_apart && gradient[At(block)] < 0) {
      take_gradient_slot();
    }

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
        Op& op = Emit(kind, Lane::kCompute, step);
        op.block = block;
        op.stage = s;
        op.position = position;
        op.micro_batch = m;
        op.last_micro_batch = m + 1 == plan_.micro_batches;
        return op;
      };
      const OpId backward_id = next_id_;
      Op& backward = emit(OpKind::kBackward);
      backward.run_slot = weights.compute_slot();
      backward.device_slot = weights.device_slot;
      backward.seconds = stage.backward_seconds;
      for (const OpId ready : *weights.ready) AddIf(&backward.after, ready);
      AddGather(&backward.after, slot);
      if (stages == 1) backward.after.push_back(batch_);
      AddIf(&backward.after, input_read);
      // Apart from it, because only this needs the gradient's place: it may still be in use while the block
      // computes.
      last = next_id_;
      Op& take = emit(OpKind::kTakeGradient);
      take.gradient_slot = gradient[At(block)];
      take.device_slot = device_gradient_[At(block)];
      take.accumulator_slot = plan_.device.apart ? device_accumulator_[At(block)] : accumulator[At(block)];
      take.after = wait;
      take.after.push_back(backward_id);
    }
    Used(weights, last);
    input_used_[At(position)] = last;
    if (--uses_left[At(block)] > 0) {
      if (accumulator[At(block)] >= 0) accumulators_[At(accumulator[At(block)])].users.push_back(last);
      if (gradient[At(block)] >= 0) gradients_[At(gradient[At(block)])].users.push_back(last);
      continue;
    }
    wait.clear();
    if (sums_apart || plan_.device.apart) take_gradient_slot();
    if (plan_.device.apart) {
      if (plan_.device.direct) last = ReduceOnDevice(block, last, step);
      // Otherwise over several ranks it goes to the sums, and the gradient's place waits for the reduction.
      const std::vector<OpId> users = sums_apart ? take_accumulator_slot() : std::exchange(wait, {});
      last = EmitCopyOut(block, gradient[At(block)], accumulator[At(block)], last, users, step);
    }
    // What makes the gradient's place final, and frees the sums: rounding, or over several ranks the
    // reduction.
    OpId reduced = -1;
    if (plan_.world > 1 && !plan_.device.direct) {
      reduced = next_id_;
      Op& reduce = Emit(OpKind::kReduce, Lane::kReduce, step);
      reduce.block = block;
      reduce.gradient_slot = gradient[At(block)];
      reduce.accumulator_slot = accumulator[At(block)];
      reduce.bytes = ReducedBytes(block);
      reduce.after = {last};
      AddAll(&reduce.after, wait);
      wait = {reduced};
    }
    const OpId final_id = next_id_;
    Op& finalize = Emit(OpKind::kFinalize, Lane::kUpdate, step);
    finalize.block = block;
    finalize.gradient_slot = gradient[At(block)];
    finalize.accumulator_slot = reduced >= 0 ? -1 : accumulator[At(block)];
    finalize.after = {last};
    AddAll(&finalize.after, wait);
    finals.push_back(final_id);
    if (sums_apart) {
      accumulators_[At(accumulator[At(block)])].users.push_back(reduced >= 0 ? reduced : final_id);
    }
    gradients_[At(gradient[At(block)])].users = {last, final_id};
    gradient_of_block_[At(block)] = gradient[At(block)];
    const bool all_early = in_backward && std::count(early.begin(), early.end(), 0) == 0;
    gradient_written_[At(block)] = -1;
    if (bp.gradient_slot < 0 && (plan_.clips || !all_early)) {
      const OpId write_id = next_id_;
      Op& write = Emit(OpKind::kWriteGradient, Lane::kWrite, step);
      write.block = block;
      write.gradient_slot = gradient[At(block)];
      write.bytes = bp.elements * plan_.precision.gradient_bytes;
      write.after = {final_id};
      gradients_[At(gradient[At(block)])].users.push_back(write_id);
      gradient_written_[At(block)] = write_id;
    }
    for (size_t t = 0; t < bp.tiles.size(); ++t) {
      due_[At(block)][t] = Due::kUpdate;
      if (!in_backward || early[t] == 0) continue;
      EmitUpdate(block, static_cast<int>(t), slot, {.step = step, .decided = final_id, .in_backward = true});
      due_[At(block)][t] = Due::kRedo;
    }
  }
  if (plan_.world > 1) {
    const OpId exchanged = next_id_;
    Emit(OpKind::kExchange, Lane::kReduce, step).after = std::move(finals);
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
  order_.clear();
  computing_step_ = next_step_;
  auto block_at = [&](size_t position) { return graph_.stages[At(stage_order_[position])].block; };
  const size_t stages = graph_.stages.size();
  for (size_t position = 0; position < stages; ++position) order_.push_back(block_at(position));
  if (pass == Pass::kTrain) {
    // The last stage runs forward and backward in one go: one use.
    for (size_t position = stages - 1; position-- > 0;) order_.push_back(block_at(position));
  }
  if (pass == Pass::kFlush || pass == Pass::kPersist) {
    order_.clear();
    for (size_t b = 0; b < graph_.blocks.size(); ++b) order_.push_back(static_cast<int>(b));
  }
  // What comes after is most often the next forward.
  for (size_t position = 0; position < stages; ++position) order_.push_back(block_at(position));

  switch (pass) {
    case Pass::kTrain: {
      const int64_t step = next_step_++;
      AppendForward(true, plan_.micro_batches, step);
      const int last_block = block_at(stages - 1);
      // The last stage's block may carry the last part of the pending update; fetch it before the commit is
      // placed.
      ApplyDue(last_block, stages - 1);
      CommitPending();
      AppendBackward(step, in_backward);
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
