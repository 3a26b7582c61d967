// What a program has more where a device computes in memory of its own (tiering/plan/device_plan.h): copies
// of weights to it and of gradients from it, each an operation that waits for what it reads and for whoever
// still uses the place that it fills.
#include <algorithm>
#include <utility>

#include "base/index.h"
#include "tiering/program/program.h"

namespace penstock::tiering {
namespace {

// Weights come to the device at most so many uses ahead: with many slots there would be room for more, but
// reads of weights go before those of state, and what is read long before its use keeps updates waiting.
constexpr size_t kUsesAhead = 2;

int64_t StateElementBytes(const Precision& precision, int64_t elements) {
  return precision.UnpaddedBytes(elements) - precision.SegmentBytes(0, elements);
}

void Move(Edges* from, Edges* to) {
  to->insert(to->end(), from->begin(), from->end());
  from->clear();
}

}  // namespace

ProgramBuilder::Weights ProgramBuilder::FetchForCompute(int block, size_t position, bool updates) {
  Weights weights;
  if (!plan_.device.has_own_memory) {
    weights.weight_slot = Fetch(block, position);
    Gather(block, weights.weight_slot);
    WeightSlot& run = runs_[At(weights.weight_slot)];
    weights.ready = &run.ready;
    weights.last_compute = &run.last_compute;
    return weights;
  }
  if (plan_.on_device(block)) {
    weights.device_slot = FetchOnDevice(block, position);
  } else if (!updates && !IsDue(block) && IsOnDevice(block, &weights.device_slot)) {
    // as new as it can be
  } else if (plan_.device.gds && !updates && !IsDue(block) && !IsInHostMemory(block)) {
    weights.device_slot = ReadToDevice(block, position);
  } else {
    weights.weight_slot = Fetch(block, position);
    if (!plan_.device.direct && !IsOnDevice(block, &weights.device_slot)) Gather(block, weights.weight_slot);
    weights.device_slot = CopyToDevice(block, position, weights.weight_slot);
  }
  DeviceRun& run = device_runs_[At(weights.device_slot)];
  weights.ready = &run.ready;
  weights.last_compute = &run.last_compute;
  return weights;
}

void ProgramBuilder::Used(const Weights& weights, OpId last) {
  *weights.last_compute = last;
  used_.push_back(last);
  if (used_.size() > kUsesAhead) used_.pop_front();
}

bool ProgramBuilder::IsOnDevice(int block, int* device_slot) const {
  const WeightClass& cls = plan_.device.weight_classes[At(plan_.device.blocks[At(block)].weight_class)];
  for (int slot = cls.first_slot; slot < cls.first_slot + cls.slots; ++slot) {
    if (device_runs_[At(slot)].block != block) continue;
    *device_slot = slot;
    return device_runs_[At(slot)].version == version_[At(block)];
  }
  return false;
}

int ProgramBuilder::FetchOnDevice(int block, size_t position) {
  const int slot = plan_.device.blocks[At(block)].weight_slot;
  if (device_runs_[At(slot)].block != block) LoadOnDevice(block, position);
  if (IsDue(block)) UpdateOnDevice(block, position);
  if (plan_.device.direct && !device_runs_[At(slot)].whole) GatherOnDevice(block, slot);
  return slot;
}

// By way of a run and the tile slots, whose content nobody looks for afterwards: what host memory has of the
// block is old after its first update.
void ProgramBuilder::LoadOnDevice(int block, size_t position) {
  const int weight_slot = Fetch(block, position);
  DeviceRun& run = device_runs_[At(CopyToDevice(block, position, weight_slot))];
  run.made.clear();
  for (const OpId copied : run.ready) AddIf(&run.made, copied);
  const std::vector<Tile>& tiles = plan_.blocks[At(block)].tiles;
  for (size_t t = 0; t < tiles.size(); ++t) {
    const int64_t bytes = plan_.precision.StateBytes(tiles[t].elements);
    if (bytes == 0) continue;
    const int tile_slot = NextTileSlot();
    TileSlot& slot = tiles_[At(tile_slot)];
    OpId last = -1;
    auto emit = [&](OpKind kind, Lane lane, int64_t of_bytes) -> Op& {
      const OpId before = std::exchange(last, next_id_);
      Op& op = Emit(kind, lane, computing_step_);
      op.block = block;
      op.tile = static_cast<int>(t);
      op.tile_slot = tile_slot;
      op.bytes = of_bytes;
      AddIf(&op.after, before);
      return op;
    };
    Op& read = emit(OpKind::kReadState, Lane::kRead, bytes);
    Move(&slot.users, &read.after);
    AddIf(&read.after, last_write_[At(block)][t]);
    emit(OpKind::kVerify, Lane::kUpdate, 0).checks_state = true;
    emit(OpKind::kCopyStateIn, Lane::kCopyIn, StateElementBytes(plan_.precision, tiles[t].elements));
    slot.users = {last};
    run.made.push_back(last);
  }
  runs_[At(weight_slot)].block = -1;
}

void ProgramBuilder::UpdateOnDevice(int block, size_t position) {
  const DevicePlan::Block& places = plan_.device.blocks[At(block)];
  DeviceRun& run = device_runs_[At(places.weight_slot)];
  const OpId id = next_id_;
  Op& update = Emit(OpKind::kUpdateOnDevice, Lane::kCompute, pending_step_);
  update.block = block;
  update.device_slot = places.weight_slot;
  update.after = {norm_};
  Move(&run.made, &update.after);
  Move(&run.copies, &update.after);
  // Who computes with the weights comes later on the same lane, and need not wait until this is known to be
  // over.
  run.made = {id};
  run.last_compute = id;
  run.whole = false;
  device_gradients_[At(places.gradient_slot)].users.push_back(id);
  pending_writes_.push_back(id);
  for (size_t t = 0; t < run.version.size(); ++t) run.version[t] = ++version_[At(block)][t];
  std::fill(due_[At(block)].begin(), due_[At(block)].end(), Due::kNothing);
  if (plan_.on_nvme && plan_.commits_every_step) WriteFromDevice(block, position, pending_step_);
}

// By way of a run that holds nothing else till all of the block is written, and the ring's slots.
void ProgramBuilder::WriteFromDevice(int block, size_t position, int64_t step) {
  const std::vector<Tile>& tiles = plan_.blocks[At(block)].tiles;
  const int weight_slot = AcquireRun(block, position);
  const Edges former = GiveUpRun(weight_slot);
  SizeRun(weight_slot, plan_.blocks[At(block)]);
  for (size_t t = 0; t < tiles.size(); ++t) {
    const auto tile = static_cast<int>(t);
    const int tile_slot = EmitStateOut(block, tile, weight_slot, former, step);
    EmitSealedWrite(block, tile, weight_slot, tile_slot, step);
  }
}

int ProgramBuilder::EmitStateOut(int block, int tile, int weight_slot, const Edges& former, int64_t step) {
  const int tile_slot = NextTileSlot();
  DeviceRun& run = device_runs_[At(plan_.device.blocks[At(block)].weight_slot)];
  const int64_t elements = plan_.blocks[At(block)].tiles[At(tile)].elements;
  const OpId id = next_id_;
  Op& copy = Emit(OpKind::kCopyStateOut, Lane::kCopyOut, step);
  copy.block = block;
  copy.tile = tile;
  copy.weight_slot = weight_slot;
  copy.tile_slot = tile_slot;
  copy.bytes = plan_.precision.UnpaddedBytes(elements);
  copy.after = former;
  Move(&tiles_[At(tile_slot)].users, &copy.after);
  AddAll(&copy.after, run.made);
  tiles_[At(tile_slot)].users = {id};
  runs_[At(weight_slot)].ready[At(tile)] = id;
  run.copies.push_back(id);
  return tile_slot;
}

bool ProgramBuilder::IsInHostMemory(int block) const {
  const BlockPlan& bp = plan_.blocks[At(block)];
  if (bp.private_run_slot >= 0) return true;  // from its first use on
  const WeightClass& cls = plan_.weight_classes[At(bp.weight_class)];
  const auto first = runs_.begin() + cls.first_slot;
  return std::any_of(first, first + cls.slots, [&](const WeightSlot& run) { return run.block == block; });
}

int ProgramBuilder::AcquireDeviceRun(int block, size_t position) {
  const bool lives_there = plan_.on_device(block);
  int slot = lives_there ? plan_.device.blocks[At(block)].weight_slot : -1;
  if (!lives_there && !IsOnDevice(block, &slot) && slot < 0) {
    const WeightClass& cls = plan_.device.weight_classes[At(plan_.device.blocks[At(block)].weight_class)];
    GiveUp worth;
    for (int s = cls.first_slot; s < cls.first_slot + cls.slots; ++s) {
      const int held = device_runs_[At(s)].block;
      const GiveUp of_slot = held < 0 ? GiveUp() : WorthGivingUp(held, position);
      if (held >= 0 && slot >= 0 && of_slot <= worth) continue;
      slot = s;
      worth = of_slot;
      if (held < 0) break;
    }
  }
  DeviceRun& run = device_runs_[At(slot)];
  if (run.block != block) {
    const size_t tiles = plan_.blocks[At(block)].tiles.size();
    run.block = block;
    run.ready.assign(tiles, -1);
    run.version.assign(tiles, -1);
  }
  return slot;
}

// Every content was computed with, and the compute lane keeps its order.
void ProgramBuilder::AddUsers(Edges* after, const DeviceRun& run) const {
  AddIf(after, run.last_compute);
  if (used_.size() == kUsesAhead) after->push_back(used_.front());
}

int ProgramBuilder::ReadToDevice(int block, size_t position) {
  const int slot = AcquireDeviceRun(block, position);
  DeviceRun& run = device_runs_[At(slot)];
  const auto emit = [&](OpKind kind, Lane lane, size_t tile) -> Op& {
    run.ready[tile] = next_id_;
    Op& op = Emit(kind, lane, computing_step_);
    op.block = block;
    op.tile = static_cast<int>(tile);
    op.device_slot = slot;
    return op;
  };
  const std::vector<Tile>& tiles = plan_.blocks[At(block)].tiles;
  for (size_t t = 0; t < tiles.size(); ++t) {
    if (run.version[t] == version_[At(block)][t]) continue;
    Op& read = emit(OpKind::kReadWeights, Lane::kRead, t);
    read.bytes = tiles[t].elements * plan_.precision.weight_bytes();
    AddUsers(&read.after, run);
    AddIf(&read.after, last_write_[At(block)][t]);
    const OpId arrived = run.ready[t];
    emit(OpKind::kVerify, Lane::kUpdate, t).after = {arrived};
    run.version[t] = version_[At(block)][t];
  }
  run.whole = plan_.world == 1;
  if (plan_.device.direct) GatherOnDevice(block, slot);
  return slot;
}

int ProgramBuilder::CopyToDevice(int block, size_t position, int weight_slot) {
  const bool lives_there = plan_.on_device(block);
  const int slot = AcquireDeviceRun(block, position);
  DeviceRun& run = device_runs_[At(slot)];
  const std::vector<Tile>& tiles = plan_.blocks[At(block)].tiles;
  if (run.version == version_[At(block)]) return slot;
  WeightSlot& host = runs_[At(weight_slot)];
  const auto emit = [&](int tile, int64_t elements) -> Op& {
    Op& copy = Emit(OpKind::kCopyIn, Lane::kCopyIn, computing_step_);
    copy.block = block;
    copy.tile = tile;
    copy.weight_slot = weight_slot;
    copy.device_slot = slot;
    copy.bytes = elements * plan_.precision.weight_bytes();
    AddUsers(&copy.after, run);
    return copy;
  };
  if (plan_.world > 1 && !plan_.device.direct) {
    const OpId id = next_id_;
    emit(-1, graph_.blocks[At(block)].elements).after.push_back(host.gather);
    host.copies.assign(tiles.size(), -1);  // the first stands for all
    run.ready.assign(tiles.size(), -1);
    host.copies.front() = run.ready.front() = id;
    run.version = version_[At(block)];
    return slot;
  }
  for (size_t t = 0; t < tiles.size(); ++t) {
    if (run.version[t] == version_[At(block)][t]) continue;
    const OpId id = next_id_;
    Op& copy = emit(static_cast<int>(t), tiles[t].elements);
    AddIf(&copy.after, host.ready[t]);
    host.copies[t] = id;
    run.ready[t] = id;
    run.version[t] = version_[At(block)][t];
  }
  run.whole = plan_.world == 1;
  if (plan_.device.direct && !lives_there) GatherOnDevice(block, slot);
  return slot;
}

// The other ranks' parts behind or before this one's, which has just been copied there. Whoever computed with
// the former content was done before that.
void ProgramBuilder::GatherOnDevice(int block, int device_slot) {
  DeviceRun& run = device_runs_[At(device_slot)];
  const OpId id = next_id_;
  Op& gather = Emit(OpKind::kAllGather, Lane::kAllGather, computing_step_);
  gather.block = block;
  gather.device_slot = device_slot;
  gather.bytes = GatheredBytes(block);
  for (const OpId ready : run.ready) AddIf(&gather.after, ready);
  AddIf(&gather.after, run.last_compute);
  run.ready.assign(run.ready.size(), -1);
  run.ready.front() = id;  // stands for all
  run.whole = true;
}

OpId ProgramBuilder::ReduceOnDevice(int block, OpId last, int64_t step) {
  const OpId id = next_id_;
  Op& reduce = Emit(OpKind::kReduceScatter, Lane::kReduceScatter, step);
  reduce.block = block;
  reduce.accumulator_slot = device_accumulator_[At(block)];
  reduce.device_slot = device_gradient_[At(block)];
  reduce.bytes = ReducedBytes(block);
  reduce.after = {last};
  if (!plan_.on_device(block)) return id;
  // To where it waits for the update; what it was reduced from is free.
  if (reduce.accumulator_slot >= 0) {
    device_accumulators_[At(reduce.accumulator_slot)].users = {id};
  } else {
    device_gradients_[At(reduce.device_slot)].users = {id};
  }
  const int gradient = plan_.device.blocks[At(block)].gradient_slot;
  Move(&device_gradients_[At(gradient)].users, &reduce.after);
  device_gradient_[At(block)] = gradient;
  return id;
}

void ProgramBuilder::TakeDevicePlaces(int block, Edges* wait) {
  const DevicePlan& device = plan_.device;
  const DevicePlan::Block& places = device.blocks[At(block)];
  if (device_gradient_[At(block)] >= 0 || device_accumulator_[At(block)] >= 0)
    return;  // taken by an earlier use
  if (places.sums_apart) {
    int slot = places.accumulator_slot;
    if (slot < 0) slot = static_cast<int>(next_device_accumulator_++ % At(device.accumulator_ring));
    device_accumulator_[At(block)] = slot;
    Move(&device_accumulators_[At(slot)].users, wait);
    return;
  }
  // That of a block which lives here has room for what it is reduced to.
  int slot = device.direct && plan_.on_device(block) ? -1 : places.gradient_slot;
  if (slot < 0) {
    slot = device.gradient_rings[At(places.weight_class)].NextSlot(
        &next_device_gradient_[At(places.weight_class)]);
  }
  device_gradient_[At(block)] = slot;
  Move(&device_gradients_[At(slot)].users, wait);
}

OpId ProgramBuilder::EmitCopyOut(int block, int gradient_slot, int host_accumulator, OpId last,
                                 const Edges& wait, int64_t step) {
  const DevicePlan::Block& places = plan_.device.blocks[At(block)];
  const bool ranks = plan_.world > 1 && !plan_.device.direct;
  if (places.sums_apart && plan_.world == 1) {
    int slot = places.gradient_slot;
    if (slot < 0) {
      slot = plan_.device.gradient_rings[At(places.weight_class)].NextSlot(
          &next_device_gradient_[At(places.weight_class)]);
    }
    device_gradient_[At(block)] = slot;
    const OpId id = next_id_;
    Op& round = Emit(OpKind::kRoundOnDevice, Lane::kCompute, step);
    round.block = block;
    round.device_slot = slot;
    round.accumulator_slot = device_accumulator_[At(block)];
    round.after = {last};
    Move(&device_gradients_[At(slot)].users, &round.after);
    device_accumulators_[At(round.accumulator_slot)].users = {id};
    last = id;
  }
  int64_t bytes = plan_.blocks[At(block)].elements * plan_.precision.gradient_bytes;
  if (plan_.on_device(block)) {
    if (!plan_.device.direct) {  // else by the reduction
      const OpId squared = next_id_;
      Op& square = Emit(OpKind::kSquareGradient, Lane::kCompute, step);
      square.block = block;
      square.device_slot = device_gradient_[At(block)];
      square.after = {last};
      last = squared;
    }
    bytes = PartialSumBytes(plan_.blocks[At(block)].elements);
  }
  const OpId id = next_id_;
  Op& copy = Emit(OpKind::kCopyOut, Lane::kCopyOut, step);
  copy.block = block;
  if (ranks) {
    copy.host_accumulator_slot = host_accumulator;
    copy.bytes = graph_.blocks[At(block)].elements * plan_.accumulator_bytes(block);
  } else {
    copy.gradient_slot = gradient_slot;
    copy.bytes = bytes;
  }
  copy.after = wait;
  copy.after.push_back(last);
  if (plan_.world > 1 && places.sums_apart && !plan_.on_device(block)) {
    copy.accumulator_slot = device_accumulator_[At(block)];
    device_accumulators_[At(copy.accumulator_slot)].users = {id};
  } else {
    copy.device_slot = device_gradient_[At(block)];
    device_gradients_[At(copy.device_slot)].users = {id};
  }
  return id;
}

}  // namespace penstock::tiering
