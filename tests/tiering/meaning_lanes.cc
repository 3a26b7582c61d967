#include "tests/tiering/meaning_lanes.h"

#include <algorithm>
#include <utility>

namespace penstock::tiering {

MeaningLanes::MeaningLanes(const Plan& plan, const MachineModel& machine, Replayed replayed)
    : plan_(plan), sim_(plan, machine), replayed_(replayed) {
  sim_.set_replayed(std::move(replayed));
  for (const BlockIndex b : plan.blocks.indices()) {
    for (const TileIndex t : plan.blocks[b].tiles.indices()) {
      const TileOfBlock tile{b, t};
      drive_[tile] = 0;
      committed_[tile] = 0;
      if (plan.on_nvme) continue;
      if (plan.on_device(tile.first)) {
        device_run_[{plan.device.blocks[b].weight_slot, tile.second}] = {tile.first, 0};
        device_state_[tile] = 0;
        continue;
      }
      run_[{plan.blocks[b].private_weight_slot, tile.second}] = {tile.first, 0};
      if (plan.trains && !plan.blocks[b].weights_alone(t))
        state_[plan.blocks[b].private_tile_slot[t]] = {tile, 0};
    }
  }
}

void MeaningLanes::Start(OpId id, const Op& op) {
  if (op.kind == OpKind::kUpdate && op.replay && !plan_.on_nvme) GoBack(op);
  Check(op);
  if (op.lane == Lane::kAllGather || op.lane == Lane::kReduceScatter) {
    // All ranks come to the network in one order: that of the program.
    EXPECT_GT(id, last_started_[op.lane]);
    last_started_[op.lane] = id;
  }
  in_flight_.emplace(id, op);
  if (op.kind == OpKind::kReadWeights) {
    Run(op) = {};
    EXPECT_TRUE(unchecked_.insert({op.block, op.tile}).second)
        << "two reads of weights, tile " << op.tile << " of block " << op.block << ", by one transfer";
  }
  if (op.kind == OpKind::kReadState) state_[op.tile_slot] = {};
  if (op.kind == OpKind::kCopyStateOut) {
    run_[{op.weight_slot, op.tile}] = {};
    state_[op.tile_slot] = {};
  }
  if (op.kind == OpKind::kCopyStateIn) device_state_[{op.block, op.tile}] = -1;
  if (op.kind == OpKind::kUpdateOnDevice) {
    // Who computes comes behind it on its lane, and may start before it is over.
    for (const TileIndex t : plan_.blocks[op.block].tiles.indices()) {
      device_run_[{op.device_weight_slot, t}].second = 2 * op.step;
      device_state_[{op.block, t}] = 2 * op.step;
    }
  }
  if (op.kind == OpKind::kCopyIn) {
    for (const TileIndex tile : TilesOf(op)) device_run_[{op.device_weight_slot, tile}] = {};
  }
  if (op.kind == OpKind::kCopyOut) {
    (RanksMeetInMemory() ? host_sums_[op.accumulator_slot] : gradient_[op.gradient_slot]) = {};
  }
  sim_.Start(id, op);
}

absl::Status MeaningLanes::Decide(const Op& op) {
  if (op.kind == OpKind::kNorm) {
    EXPECT_EQ(finalized_, TrainedBlocks()) << "norm before every gradient was final";
    finalized_ = 0;
    calls_ = 0;
    ++norms_;
    measured_.clear();
  }
  if (op.kind == OpKind::kTrust) {
    for (const auto& [tile, version] : drive_)
      EXPECT_EQ(measured_.contains(tile), plan_.blocks[tile.first].updates(tile.second))
          << "trust without norms";
    trusts_ = op.step;
  }
  if (op.kind == OpKind::kSummed) {
    EXPECT_EQ(finalized_, 0U) << "a gradient that is final before the step's last call";
    ++calls_;
  }
  return absl::OkStatus();
}

void MeaningLanes::Wait(std::vector<Completion>* completions) {
  sim_.Wait(completions);
  for (const Completion& completion : *completions) {
    const Op op = in_flight_.at(completion.id);
    in_flight_.erase(completion.id);
    Apply(op);
  }
}

// ---- before an operation starts

void MeaningLanes::Check(const Op& op) {
  for (const auto& [id, other] : in_flight_) {
    CheckHostWeights(op, other);
    CheckDeviceSlots(op, other);
    CheckCopyOutAgainst(op, other);
    CheckTiles(op, other);
  }
  CheckMeaning(op);
  CheckRoom(op);
}

void MeaningLanes::CheckHostWeights(const Op& op, const Op& other) {
  const auto changes = [](const Op& one) {
    return one.kind == OpKind::kReadWeights || one.kind == OpKind::kUpdate ||
           one.kind == OpKind::kAllGather || one.kind == OpKind::kCopyStateOut;
  };
  // A gather, and a checksum or a write of a tile, all read this rank's part.
  const auto reads_part = [](const Op& one) {
    return IsTileWrite(one.kind) || one.kind == OpKind::kChecksumTile;
  };
  const bool both_read = (op.kind == OpKind::kAllGather && reads_part(other)) ||
                         (reads_part(op) && other.kind == OpKind::kAllGather);
  const bool changes_run = changes(op) && !both_read;
  const bool other_changes_run = changes(other) && !both_read;
  if (op.weight_slot.valid() && op.weight_slot == other.weight_slot && (changes_run || other_changes_run)) {
    // Two tiles of one block may be filled at once.
    EXPECT_TRUE(op.block == other.block && op.tile != other.tile && op.tile.valid() && other.tile.valid())
        << OpKindName(op.kind) << " against " << OpKindName(other.kind) << " on weight slot "
        << op.weight_slot;
  }
}

void MeaningLanes::CheckDeviceSlots(const Op& op, const Op& other) {
  const bool two_tiles = OfTile(op) && OfTile(other) && op.block == other.block && op.tile != other.tile;
  if (op.device_weight_slot.valid() && op.device_weight_slot == other.device_weight_slot &&
      op.lane != other.lane && !two_tiles) {
    ADD_FAILURE() << OpKindName(op.kind) << " against " << OpKindName(other.kind)
                  << " on the device's weight slot " << op.device_weight_slot;
  }
  if (op.device_gradient_slot.valid() && op.device_gradient_slot == other.device_gradient_slot &&
      op.lane != other.lane) {
    ADD_FAILURE() << OpKindName(op.kind) << " against " << OpKindName(other.kind)
                  << " on the device's gradient slot " << op.device_gradient_slot;
  }
  const auto copies_state = [](const Op& one) {
    return one.kind == OpKind::kCopyStateIn || one.kind == OpKind::kCopyStateOut;
  };
  if (op.block == other.block && ((op.kind == OpKind::kUpdateOnDevice && copies_state(other)) ||
                                  (other.kind == OpKind::kUpdateOnDevice && copies_state(op)))) {
    ADD_FAILURE() << OpKindName(op.kind) << " against " << OpKindName(other.kind) << " on the device";
  }
}

void MeaningLanes::CheckCopyOutAgainst(const Op& op, const Op& other) const {
  if (op.kind != OpKind::kCopyOut && other.kind != OpKind::kCopyOut) return;
  EXPECT_TRUE(op.lane == other.lane || !op.gradient_slot.valid() || op.gradient_slot != other.gradient_slot)
      << OpKindName(op.kind) << " against " << OpKindName(other.kind) << " on gradient slot";
  const Op& copy = op.kind == OpKind::kCopyOut ? op : other;
  const Op& reduce = op.kind == OpKind::kCopyOut ? other : op;
  // Sums are copied to where they are reduced, or from there.
  const bool meet = plan_.device.collectives
                        ? copy.device_accumulator_slot.valid() &&
                              copy.device_accumulator_slot == reduce.device_accumulator_slot
                        : copy.accumulator_slot.valid() && copy.accumulator_slot == reduce.accumulator_slot;
  EXPECT_FALSE(reduce.kind == OpKind::kReduceScatter && meet) << "copied while it is reduced";
}

void MeaningLanes::CheckTiles(const Op& op, const Op& other) {
  const bool same_tile = op.block == other.block && op.tile == other.tile;
  if (op.tile_slot.valid() && op.tile_slot == other.tile_slot) {
    const bool both_read_in =
        same_tile && op.kind != other.kind && op.lane == Lane::kRead && other.lane == Lane::kRead;
    EXPECT_TRUE(both_read_in) << OpKindName(op.kind) << " against " << OpKindName(other.kind)
                              << " on tile slot";
  }
  // A spilled gradient has a place of its own beside the tile.
  if (op.lane == Lane::kRead && op.kind != OpKind::kReadGradient && IsTileWrite(other.kind)) {
    EXPECT_FALSE(same_tile) << "read under a write";
  }
  if ((op.kind == OpKind::kChecksumTile || op.kind == OpKind::kUpdate) && IsTileWrite(other.kind)) {
    EXPECT_FALSE(same_tile) << "its checksums made under a write, which is noted with these checksums";
  }
  if (IsTileWrite(op.kind) && IsTileWrite(other.kind)) {
    EXPECT_FALSE(same_tile) << "two parts at once";
  }
}

void MeaningLanes::CheckMeaning(const Op& op) {
  switch (op.kind) {
    case OpKind::kVerify:
    case OpKind::kUpdate:
    case OpKind::kUpdateNorms:
      return CheckUpdate(op);
    case OpKind::kForward:
    case OpKind::kBackward:
      return CheckCompute(op);
    case OpKind::kAllGather:
      return CheckAllGather(op);
    case OpKind::kReduceScatter:
      return CheckReduceScatter(op);
    case OpKind::kExchange:
      EXPECT_EQ(finalized_, TrainedBlocks()) << "exchange before every gradient was final";
      return;
    case OpKind::kAgree:
      EXPECT_EQ(commits_, op.step) << "agreed on what is not committed";
      return;
    case OpKind::kCopyIn:
      return CheckCopyIn(op);
    case OpKind::kAccumulateGradient:
      return Accumulate(op);
    case OpKind::kRoundOnDevice:
      EXPECT_EQ(plan_.world, 1) << "rounded before those of the other ranks are added";
      CheckSums(op);
      return;
    case OpKind::kSquareGradient:
      EXPECT_TRUE(plan_.squares_on_device()) << "ranks square what they have reduced";
      return;
    case OpKind::kUpdateOnDevice:
      return CheckUpdateOnDevice(op);
    case OpKind::kCopyStateIn:
      EXPECT_EQ(state_[op.tile_slot].first, (TileOfBlock{op.block, op.tile}));
      return;
    case OpKind::kCopyOut:
      return CheckCopyOut(op);
    case OpKind::kRoundGradient:
      return CheckRoundGradient(op);
    case OpKind::kWriteSums:
      EXPECT_EQ(SummedAt(op).of, (OfBlockAt{op.block, op.step}));
      EXPECT_EQ(SummedAt(op).addends, added_[op.block]);
      EXPECT_TRUE(plan_.moves_sums(op.block));
      return;
    case OpKind::kReadSums:
      return CheckReadSums(op);
    case OpKind::kWriteInput:
      EXPECT_EQ(inputs_.count({op.position, op.micro_batch}), 1u);
      return;
    case OpKind::kReadInput:
      EXPECT_EQ(written_inputs_.count({op.position, op.micro_batch}), 1u) << "read before it was written";
      Keep(op.position, op.micro_batch);
      return;
    case OpKind::kChecksumTile:
      EXPECT_TRUE(plan_.written_at_checkpoint(op.block, op.tile) || plan_.on_device(op.block));
      EXPECT_EQ((run_[{op.weight_slot, op.tile}]), (OfBlockAt{op.block, 2 * op.step}));
      return;
    case OpKind::kWriteTile:
    case OpKind::kWriteState:
    case OpKind::kWriteWeights:
      return CheckTileWrite(op);
    case OpKind::kWriteGradient:
      EXPECT_EQ(gradient_[op.gradient_slot], (OfBlockAt{op.block, op.step}));
      EXPECT_EQ(op.bytes, plan_.blocks[op.block].gradient_elements() * plan_.precision.gradient_bytes);
      return;
    default:
      return;
  }
}

// Without a drive the version before an update in backward stands in the tile's other place.
void MeaningLanes::GoBack(const Op& op) {
  const TileOfBlock tile{op.block, op.tile};
  const auto before = before_.find(tile);
  ASSERT_TRUE(before != before_.end()) << "an update made again that was not made in backward";
  run_[{op.weight_slot, op.tile}].second = before->second;
  state_[op.tile_slot].second = before->second;
  drive_.at(tile) = before->second;
  before_.erase(before);
}

// What is verified or updated is what the operation says, of the version before it.
void MeaningLanes::CheckUpdate(const Op& op) {
  EXPECT_TRUE(op.kind == OpKind::kVerify || plan_.blocks[op.block].updates(op.tile))
      << "update of what is frozen";
  if (op.kind == OpKind::kVerify && op.checks_state) {
    EXPECT_EQ(state_[op.tile_slot].first, (TileOfBlock{op.block, op.tile}));
    return;
  }
  EXPECT_FALSE(op.kind != OpKind::kVerify && plan_.on_device(op.block));
  const auto held = Run(op);
  EXPECT_EQ(held.first, op.block) << OpKindName(op.kind);
  if (op.kind == OpKind::kVerify) {
    // Possibly ahead of the norm, after an update in backward that may have to be made again.
    EXPECT_EQ(held.second / 2, UpdatesOf(op.block, op.tile, op.step - 1)) << OpKindName(op.kind);
    return;
  }
  EXPECT_EQ(held.second, 2 * (op.step - 1));
  if (plan_.precision.segment_bytes.size() > 1) {
    EXPECT_EQ(state_[op.tile_slot].first, (TileOfBlock{op.block, op.tile}));
    EXPECT_EQ(state_[op.tile_slot].second, 2 * (op.step - 1));
  }
  EXPECT_TRUE(op.speculative_update || norms_ == op.step) << "update before the norm of its step";
  if (op.kind == OpKind::kUpdate && plan_.tensor_norms) {
    EXPECT_EQ(trusts_, op.step) << "update before the trust ratios of its step";
  }
  if (op.gradient_slot.valid()) {
    EXPECT_EQ(gradient_[op.gradient_slot], (OfBlockAt{op.block, op.step}));
  } else {
    EXPECT_EQ(spilled_read_[op.tile_slot], (OfBlockAt{op.block, op.step}));
  }
}

// The weights have seen the updates that they must have seen, of all ranks.
void MeaningLanes::CheckCompute(const Op& op) {
  EXPECT_EQ(plan_.device.has_own_memory, op.device_weight_slot.valid());
  for (const TileIndex t : plan_.blocks[op.block].tiles.indices()) {
    const auto held =
        plan_.device.has_own_memory ? device_run_[{op.device_weight_slot, t}] : run_[{op.weight_slot, t}];
    EXPECT_EQ(held.first, op.block) << OpKindName(op.kind);
    const int64_t updates = op.kind == OpKind::kBackward ? op.step - 1 : Updates(op);
    EXPECT_EQ(held.second, 2 * UpdatesOf(op.block, t, updates)) << OpKindName(op.kind);
    // The other ranks' parts are as new as this one's.
    if (plan_.world > 1 && !plan_.device.has_own_memory) {
      EXPECT_EQ(gathered_[op.weight_slot], held) << OpKindName(op.kind);
    }
    if (plan_.device.collectives) {
      EXPECT_EQ(device_gathered_[op.device_weight_slot], held) << OpKindName(op.kind);
    }
  }
}

void MeaningLanes::CheckAllGather(const Op& op) {
  EXPECT_EQ(plan_.device.collectives, op.device_weight_slot.valid());
  for (const TileIndex t : plan_.blocks[op.block].tiles.indices()) {
    if (plan_.device.collectives) {
      EXPECT_EQ((device_run_[{op.device_weight_slot, t}]).first, op.block);
      EXPECT_EQ((device_run_[{op.device_weight_slot, t}]),
                (device_run_[{op.device_weight_slot, TileIndex(0)}]))
          << "tiles of two versions";
      continue;
    }
    EXPECT_EQ((run_[{op.weight_slot, t}]), (run_[{op.weight_slot, TileIndex(0)}])) << "tiles of two versions";
  }
}

// The sums are complete, where the ranks meet.
void MeaningLanes::CheckReduceScatter(const Op& op) {
  if (plan_.device.collectives) {
    EXPECT_FALSE(op.gradient_slot.valid());
    if (HasSums(op)) {
      CheckSums(op);
    } else {
      EXPECT_EQ(device_gradient_[op.device_gradient_slot], (OfBlockAt{op.block, op.step}));
    }
    return;
  }
  if (plan_.device.has_own_memory) {
    EXPECT_EQ(host_sums_[op.accumulator_slot], (OfBlockAt{op.block, op.step}));
  } else {
    CheckSums(op);
  }
  for (const auto& [id, other] : in_flight_) {
    EXPECT_FALSE(other.gradient_slot == op.gradient_slot && other.kind != OpKind::kAccumulateGradient)
        << "reduced into a place that " << OpKindName(other.kind) << " uses";
  }
}

void MeaningLanes::CheckCopyIn(const Op& op) {
  // Also of weights that were updated on an assumption which may turn out wrong: never, it is made good
  // before.
  EXPECT_EQ(!op.tile.valid(), RanksMeetInMemory());
  for (const TileIndex tile : TilesOf(op)) {
    const auto held = run_[{op.weight_slot, tile}];
    EXPECT_EQ(held.first, op.block) << OpKindName(op.kind);
    EXPECT_EQ(held.second % 2, 0) << "weights that are yet to be made again went to the device";
    if (RanksMeetInMemory()) {
      EXPECT_EQ(gathered_[op.weight_slot], held) << OpKindName(op.kind);
    }
  }
}

// One addend more.
void MeaningLanes::Accumulate(const Op& op) {
  ++added_[op.block];
  if (plan_.device.has_own_memory && !HasSums(op)) {
    device_gradient_[op.device_gradient_slot] = {op.block, op.step};
  } else if (HasSums(op)) {
    Sums& sums = SumsOf(op);
    if (sums.of != OfBlockAt(op.block, op.step)) {
      EXPECT_EQ(sums.addends, 0) << "sums taken while another block still adds";
      sums.of = {op.block, op.step};
    }
    ++sums.addends;
  } else {
    Sums& sums = sums_in_place_[op.gradient_slot];
    if (sums.of != OfBlockAt(op.block, op.step)) sums = {{op.block, op.step}, 0};
    ++sums.addends;
    gradient_[op.gradient_slot] = {op.block, op.step};
  }
}

void MeaningLanes::CheckUpdateOnDevice(const Op& op) {
  const DevicePlan::Block& places = plan_.device.blocks[op.block];
  EXPECT_TRUE(plan_.on_device(op.block));
  EXPECT_EQ(op.device_weight_slot, places.weight_slot);
  EXPECT_EQ(norms_, op.step) << "update before the norm of its step";
  EXPECT_EQ(device_gradient_[places.gradient_slot], (OfBlockAt{op.block, op.step}));
  for (const TileIndex t : plan_.blocks[op.block].tiles.indices()) {
    const auto tile = t;
    EXPECT_EQ((device_run_[{op.device_weight_slot, tile}]), (OfBlockAt{op.block, 2 * (op.step - 1)}));
    EXPECT_EQ((device_state_[{op.block, tile}]), 2 * (op.step - 1));
  }
}

void MeaningLanes::CheckCopyOut(const Op& op) {
  const int64_t elements = plan_.blocks[op.block].gradient_elements();
  const int64_t of_gradient = elements * plan_.precision.gradient_bytes;
  if (plan_.world == 1 || plan_.on_device(op.block)) {
    EXPECT_EQ(squared_[op.block], op.step) << "it leaves without its squares";
    EXPECT_EQ(op.bytes, PartialSumBytes(elements) + (plan_.on_device(op.block) ? 0 : of_gradient));
    if (!plan_.on_device(op.block)) {
      EXPECT_LE(op.bytes, plan_.device.gradient_slots[op.device_gradient_slot].bytes);
      EXPECT_LE(op.bytes, plan_.gradient_slots[op.gradient_slot].bytes);
    }
  }
  EXPECT_EQ(RanksMeetInMemory(), op.accumulator_slot.valid());
  if (plan_.device.collectives && !plan_.on_device(op.block)) {
    EXPECT_EQ(reduced_[op.block], op.step) << "a part that is not yet the sum of all ranks'";
    EXPECT_EQ(op.bytes, plan_.blocks[op.block].elements * plan_.precision.gradient_bytes);
  }
  if (HasSums(op)) {
    CheckSums(op);
  } else {
    EXPECT_EQ(device_gradient_[op.device_gradient_slot], (OfBlockAt{op.block, op.step}));
  }
}

void MeaningLanes::CheckRoundGradient(const Op& op) {
  if (HasSums(op)) {
    CheckSums(op);
  } else {
    EXPECT_EQ(gradient_[op.gradient_slot], (OfBlockAt{op.block, op.step}));
    if (plan_.world == 1 && !plan_.device.has_own_memory) {
      EXPECT_EQ(SummedAt(op).addends, AddendsOf(op.block) * (calls_ + 1));
    }
  }
}

void MeaningLanes::CheckReadSums(const Op& op) {
  EXPECT_EQ(written_sums_[op.block].of, (OfBlockAt{op.block, op.step}));
  // Maybe before the call that wrote them is over, in which other blocks still compute.
  EXPECT_EQ(written_sums_[op.block].addends, added_[op.block]);
  EXPECT_GT(added_[op.block], 0);
  SummedAt(op) = {};
}

// What is written is of this step, and no slot is overwritten that recovery may need.
void MeaningLanes::CheckTileWrite(const Op& op) {
  EXPECT_TRUE(plan_.blocks[op.block].updates(op.tile)) << "a write of what is frozen";
  EXPECT_EQ((run_[{op.weight_slot, op.tile}]), (OfBlockAt{op.block, VersionAfter(op)}));
  if (op.kind == OpKind::kWriteWeights) {
    EXPECT_EQ((state_written_[{op.block, op.tile}]), VersionAfter(op)) << "weights before the state";
    EXPECT_FALSE(op.tile_slot.valid());
  } else if (plan_.precision.segment_bytes.size() > 1) {
    EXPECT_EQ(state_[op.tile_slot], (std::pair{std::pair{op.block, op.tile}, VersionAfter(op)}));
  }
  // What became of their step is known as long as the next but one has no norm.
  if (!plan_.on_device(op.block)) {
    EXPECT_LT(norms_, op.step + 2) << "written by another step's decision";
  }
  // Those that are written late follow the updates of their step, to be part of a commit of it.
  const bool late = plan_.written_at_checkpoint(op.block, op.tile);
  EXPECT_EQ(commits_, late ? op.step : op.step - 1) << "a slot of the committed version overwritten";
  if (plan_.world > 1) {
    EXPECT_EQ(agreed_, late ? op.step : op.step - 1) << "overwritten before all ranks had committed";
  }
}

void MeaningLanes::CheckRoom(const Op& op) const {
  const BlockPlan& block = plan_.blocks[BlockIndex(std::max(0, op.block.value()))];
  if (op.tile_slot.valid()) {
    const int64_t elements = block.tiles[op.tile].elements;
    const int64_t bytes =
        op.kind == OpKind::kReadGradient
            ? plan_.tile_gradient_offset + elements * plan_.precision.gradient_bytes
            : plan_.state_segment_offset(static_cast<int>(plan_.precision.segment_bytes.size()), elements);
    EXPECT_LE(bytes, plan_.tile_slots[op.tile_slot].bytes) << OpKindName(op.kind);
  }
  if (op.gradient_slot.valid() && !plan_.on_device(op.block)) {
    EXPECT_LE(block.gradient_elements() * plan_.precision.gradient_bytes,
              plan_.gradient_slots[op.gradient_slot].bytes)
        << OpKindName(op.kind);
  }
  if (op.accumulator_slot.valid()) {
    EXPECT_LE(plan_.summed_elements(op.block) * plan_.accumulator_bytes(op.block),
              plan_.accumulator_slots[op.accumulator_slot].bytes)
        << OpKindName(op.kind);
  }
}

// ---- when it has ended

void MeaningLanes::Apply(const Op& op) {
  switch (op.kind) {
    case OpKind::kReadWeights:
      return ApplyReadWeights(op);
    case OpKind::kReadState:
      state_[op.tile_slot] = {{op.block, op.tile}, OnDrive(op)};
      return;
    case OpKind::kReadGradient:
      spilled_read_[op.tile_slot] = {op.block, spilled_.at(op.block)};
      return;
    case OpKind::kVerify:
      unchecked_.erase({op.block, op.tile});
      return;
    case OpKind::kUpdate:
      return ApplyUpdate(op);
    case OpKind::kUpdateNorms:
      if (op.checks_weights) unchecked_.erase({op.block, op.tile});
      EXPECT_TRUE(measured_.insert({op.block, op.tile}).second) << "norms of a tile twice";
      ++tensor_norms_;
      return;
    case OpKind::kWriteState:
      state_written_[{op.block, op.tile}] = VersionAfter(op);
      return;
    case OpKind::kWriteTile:
    case OpKind::kWriteWeights:
      drive_.at({op.block, op.tile}) = VersionAfter(op);
      writes_in_parts_ += op.kind == OpKind::kWriteWeights ? 1 : 0;
      return;
    case OpKind::kWriteGradient:
      spilled_[op.block] = op.step;
      return;
    case OpKind::kCopyIn:
      for (const TileIndex tile : TilesOf(op))
        device_run_[{op.device_weight_slot, tile}] = run_[{op.weight_slot, tile}];
      return;
    case OpKind::kSquareGradient:
      // It may have been enqueued before what it is behind on its lane was over.
      EXPECT_EQ(device_gradient_[op.device_gradient_slot], (OfBlockAt{op.block, op.step}));
      squared_[op.block] = op.step;
      return;
    case OpKind::kUpdateOnDevice:
      return ApplyUpdateOnDevice(op);
    case OpKind::kCopyStateIn:
      device_state_[{op.block, op.tile}] = state_[op.tile_slot].second;
      return;
    case OpKind::kCopyStateOut:
      run_[{op.weight_slot, op.tile}] = device_run_[{plan_.device.blocks[op.block].weight_slot, op.tile}];
      state_[op.tile_slot] = {{op.block, op.tile}, device_state_[{op.block, op.tile}]};
      return;
    case OpKind::kRoundOnDevice:
      SumsOf(op).addends = 0;
      device_gradient_[op.device_gradient_slot] = {op.block, op.step};
      return;
    case OpKind::kCopyOut:
      return ApplyCopyOut(op);
    case OpKind::kForward:
      if (op.evaluates) return;
      EXPECT_TRUE(op.position == Position(0) || inputs_.count({op.position, op.micro_batch}) == 1)
          << op.position;
      if (op.position < op.first_trained) inputs_.erase({op.position, op.micro_batch});
      Keep(op.position + 1, op.micro_batch);
      return;
    case OpKind::kBackward:
      EXPECT_GE(op.position, op.first_trained) << "backward of what no gradient is wanted of";
      EXPECT_TRUE(op.position == Position(0) || inputs_.count({op.position, op.micro_batch}) == 1)
          << op.position;
      inputs_.erase({op.position, op.micro_batch});
      return;
    case OpKind::kWriteSums:
      written_sums_[op.block] = std::exchange(SummedAt(op), {});
      return;
    case OpKind::kReadSums:
      SummedAt(op) = written_sums_[op.block];
      ++sums_read_;
      return;
    case OpKind::kWriteInput:
      written_inputs_.insert({op.position, op.micro_batch});
      inputs_.erase({op.position, op.micro_batch});
      return;
    case OpKind::kReadInput:
      written_inputs_.erase({op.position, op.micro_batch});
      return;
    case OpKind::kRoundGradient:
      return ApplyRoundGradient(op);
    case OpKind::kAllGather:
      return ApplyAllGather(op);
    case OpKind::kReduceScatter:
      return ApplyReduceScatter(op);
    case OpKind::kAgree:
      agreed_ = op.step;
      return;
    case OpKind::kCommit:
      return ApplyCommit(op);
    default:
      return;
  }
}

void MeaningLanes::ApplyReadWeights(const Op& op) {
  Run(op) = {op.block, OnDrive(op)};
  if (op.device_weight_slot.valid()) {
    EXPECT_TRUE(plan_.device.gds);
    EXPECT_EQ(OnDrive(op) % 2, 0) << "weights that are yet to be made again went to the device";
    ++reads_past_host_;
  }
}

void MeaningLanes::ApplyUpdate(const Op& op) {
  if (op.checks_weights) unchecked_.erase({op.block, op.tile});
  if (op.speculative_update && !plan_.on_nvme) {
    EXPECT_EQ(commits_, op.step - 1) << "of what is not committed yet";
    const TileSlot second = plan_.blocks[op.block].second_slot[op.tile];
    ASSERT_TRUE(second.valid()) << "an update in backward over the only version";
    EXPECT_GE(plan_.tile_slots[second].bytes,
              plan_.precision.TotalBytes(plan_.blocks[op.block].tiles[op.tile].elements));
    before_[{op.block, op.tile}] = run_[{op.weight_slot, op.tile}].second;
  }
  run_[{op.weight_slot, op.tile}].second = VersionAfter(op);
  state_[op.tile_slot].second = VersionAfter(op);
  if (!plan_.on_nvme) drive_.at({op.block, op.tile}) = VersionAfter(op);
  early_updates_ += op.speculative_update ? 1 : 0;
  replayed_updates_ += op.replay ? 1 : 0;
  previewed_updates_ += op.preview ? 1 : 0;
}

void MeaningLanes::ApplyUpdateOnDevice(const Op& op) {
  for (const TileIndex t : plan_.blocks[op.block].tiles.indices()) {
    const TileOfBlock tile{op.block, t};
    if (!plan_.on_nvme) drive_.at(tile) = 2 * op.step;
    ++updates_there_;
  }
}

void MeaningLanes::ApplyCopyOut(const Op& op) {
  if (HasSums(op)) SumsOf(op).addends = 0;
  if (RanksMeetInMemory()) {
    host_sums_[op.accumulator_slot] = {op.block, op.step};
  } else if (plan_.device.collectives) {
    gradient_[op.gradient_slot] = {op.block, op.step};
  } else {
    gradient_[op.gradient_slot] = device_gradient_[op.device_gradient_slot];
  }
}

void MeaningLanes::ApplyRoundGradient(const Op& op) {
  if (HasSums(op)) {
    SumsOf(op).addends = 0;
    gradient_[op.gradient_slot] = {op.block, op.step};
  }
  added_[op.block] = 0;
  ++finalized_;
}

void MeaningLanes::ApplyAllGather(const Op& op) {
  if (plan_.device.collectives) {
    device_gathered_[op.device_weight_slot] = device_run_[{op.device_weight_slot, TileIndex(0)}];
  } else {
    gathered_[op.weight_slot] = run_[{op.weight_slot, TileIndex(0)}];
  }
}

void MeaningLanes::ApplyReduceScatter(const Op& op) {
  if (plan_.device.collectives) {
    reduced_[op.block] = op.step;
    if (!plan_.on_device(op.block)) return;
    if (HasSums(op)) SumsOf(op).addends = 0;
    squared_[op.block] = op.step;
    device_gradient_[plan_.device.blocks[op.block].gradient_slot] = {op.block, op.step};
    return;
  }
  if (!plan_.device.has_own_memory) SumsOf(op).addends = 0;
  gradient_[op.gradient_slot] = {op.block, op.step};
}

// A commit is of a whole step.
void MeaningLanes::ApplyCommit(const Op& op) {
  for (const auto& [tile, version] : drive_) {
    const bool comes_later = !op.durable && plan_.written_at_checkpoint(tile.first, tile.second);
    EXPECT_TRUE(comes_later || version == 2 * UpdatesOf(tile.first, tile.second, op.step))
        << "commit of a partial step";
  }
  if (op.durable || !plan_.on_nvme) committed_ = drive_;
  if (op.durable && !plan_.commits_every_step) {
    EXPECT_EQ(commits_, op.step) << "persisted in the midst of another step's updates";
    ++persisted_;
    return;
  }
  EXPECT_EQ(op.durable, plan_.commits_every_step);
  EXPECT_EQ(commits_, op.step - 1);
  ++commits_;
}

void MeaningLanes::Keep(Position position, int micro_batch) {
  inputs_.insert({position, micro_batch});
  std::set<Position> positions;
  for (const auto& [at, m] : inputs_) positions.insert(at);
  EXPECT_LE(static_cast<int>(positions.size()), plan_.saved_activations)
      << "more inputs in memory than planned";
}

Counted RunPasses(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                  std::mt19937_64* random) {
  ProgramBuilder builder(graph, plan, 1);
  // Without clipping an update is made again only to leave its tile as it was; the engine's tests do that.
  const uint64_t failures = random == nullptr || !plan.clips ? 0 : (*random)();
  auto replayed = [failures](int64_t step) { return (failures >> step & 1) != 0; };
  MeaningLanes lanes(plan, machine, replayed);
  Executor executor(&lanes);
  int gates = 0;
  int64_t steps = 0;
  for (int pass = 0; pass < 8; ++pass) {
    if (random != nullptr && (*random)() % 3 == 0) {
      std::vector<int> order(graph.stages.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end() - 1, *random);
      builder.SetOrder(order);
    }
    const int kind = pass == 7 ? 2 : (random == nullptr ? 0 : static_cast<int>((*random)() % 4));
    if (kind == 1) {
      executor.Append(builder.Append(Pass::kEvaluate, 1 + pass % 3));
      ++gates;
    } else if (kind == 2) {
      executor.Append(builder.Append(Pass::kFlush));
    } else {
      const bool speculative_update = random == nullptr || (*random)() % 4 != 0;
      for (int call = 1; call < plan.calls; ++call) {
        executor.Append(builder.Append(Pass::kSum, 0, speculative_update, /*continues=*/call > 1));
        ++gates;
        if (random == nullptr || (*random)() % 3 != 0) continue;
        executor.Append(builder.Append(Pass::kEvaluate, 1));
        ++gates;
      }
      executor.Append(builder.Append(Pass::kTrain, 0, speculative_update, /*continues=*/plan.calls > 1));
      ++gates;
      ++steps;
    }
    // Now and then a step is to be found by a restart.
    if (random != nullptr && (*random)() % 3 == 0) {
      executor.Append(builder.Append(Pass::kPersist));
      EXPECT_EQ(builder.unsaved_step(), 0);
    }
    executor.OpenGate(gates);
    // Sometimes the next pass is appended while this one runs.
    if (random != nullptr && (*random)() % 2 == 0) continue;
    EXPECT_TRUE(executor.RunUntil(builder.next_id() - 1).ok());
    if (steps > 0 && !replayed(steps) && failures % 3 == 0) builder.AssumptionHeld();
  }
  executor.Append(builder.Append(Pass::kPersist));
  EXPECT_TRUE(executor.RunUntilIdle().ok());
  EXPECT_TRUE(executor.complete(builder.next_id() - 1));
  EXPECT_EQ(lanes.norms(), steps);
  EXPECT_EQ(lanes.commits(), steps);
  for (const auto& [tile, version] : lanes.drive())
    EXPECT_EQ(version, plan.blocks[tile.first].updates(tile.second) ? 2 * steps : 0);
  return {lanes.early_updates(), lanes.replayed_updates(),  lanes.persisted(),
          lanes.updates_there(), lanes.reads_past_host(),   lanes.writes_in_parts(),
          lanes.sums_read(),     lanes.previewed_updates(), lanes.tensor_norms()};
}

}  // namespace penstock::tiering
