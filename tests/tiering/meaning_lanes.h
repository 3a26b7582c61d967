// Lanes that know what every operation means: they keep, for every slot and every place on the drive, whose
// content of which version it holds, and fail the test when an operation would see anything else.
#ifndef PENSTOCK_TESTS_TIERING_MEANING_LANES_H_
#define PENSTOCK_TESTS_TIERING_MEANING_LANES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "tiering/program/program.h"
#include "tiering/simulate/sim_lanes.h"

namespace penstock::tiering {

// Content of a slot: whose, and after how many updates; a slot being filled or changed has an owner in
// flight. A version is twice the number of updates, and one more where the last was made in backward on an
// assumption that will turn out wrong.
class MeaningLanes : public Lanes {
 public:
  using Replayed = std::function<bool(int64_t step)>;
  using TileOfBlock = std::pair<BlockIndex, TileIndex>;
  using OfBlockAt = std::pair<BlockIndex, int64_t>;  // whose, and its version or step

  MeaningLanes(const Plan& plan, const MachineModel& machine, Replayed replayed);

  bool HasRoom(Lane lane) const override { return sim_.HasRoom(lane); }
  bool Skips(const Op& op) const override {
    // Whether the assumption held is known when these operations can start, not before.
    EXPECT_TRUE(!op.replay || norms_ >= op.step);
    return sim_.Skips(op);
  }
  double Now() const override { return sim_.Now(); }
  void Start(OpId id, const Op& op) override;
  absl::Status Decide(const Op& op) override;
  void Wait(std::vector<Completion>* completions) override;

  int64_t norms() const { return norms_; }
  int64_t commits() const { return commits_; }
  int64_t persisted() const { return persisted_; }
  int64_t sums_read() const { return sums_read_; }
  int64_t early_updates() const { return early_updates_; }
  int64_t replayed_updates() const { return replayed_updates_; }
  int64_t previewed_updates() const { return previewed_updates_; }
  int64_t tensor_norms() const { return tensor_norms_; }
  int64_t updates_there() const { return updates_there_; }
  int64_t reads_past_host() const { return reads_past_host_; }
  int64_t writes_in_parts() const { return writes_in_parts_; }
  const std::map<TileOfBlock, int64_t>& drive() const { return drive_; }

 private:
  // Ranks gather and reduce in host memory, not on their devices.
  bool RanksMeetInMemory() const { return plan_.world > 1 && !plan_.device.collectives; }
  // Of one tile there.
  static bool OfTile(const Op& op) { return op.kind == OpKind::kReadWeights || op.kind == OpKind::kVerify; }
  // Where a tile's weights are read to and checked.
  OfBlockAt& Run(const Op& op) {
    return op.device_weight_slot.valid() ? device_run_[{op.device_weight_slot, op.tile}]
                                         : run_[{op.weight_slot, op.tile}];
  }
  // What a copy to the device copies: one tile, or over several ranks the whole run.
  std::vector<TileIndex> TilesOf(const Op& op) const {
    if (op.tile.valid()) return {op.tile};
    std::vector<TileIndex> tiles(plan_.blocks[op.block].tiles.size());
    std::iota(tiles.begin(), tiles.end(), TileIndex(0));
    return tiles;
  }
  // A block's fp32 sums: {block, step}, and how many addends they have.
  struct Sums {
    OfBlockAt of;
    int addends = 0;
  };
  // Where backward adds: on the device or, where there is none, in host memory.
  bool HasSums(const Op& op) const {
    return plan_.device.has_own_memory ? op.device_accumulator_slot.valid() : op.accumulator_slot.valid();
  }
  Sums& SumsOf(const Op& op) {
    return plan_.device.has_own_memory ? device_sums_[op.device_accumulator_slot]
                                       : sums_[op.accumulator_slot];
  }
  // They are complete.
  void CheckSums(const Op& op) {
    EXPECT_EQ(SumsOf(op).of, (OfBlockAt{op.block, op.step}));
    EXPECT_EQ(SumsOf(op).addends, AddendsOf(op.block) * (calls_ + 1));
  }
  // Of one call.
  int AddendsOf(BlockIndex block) const { return plan_.blocks[block].uses * plan_.micro_batches; }
  // fp32 gradients are summed where they wait.
  Sums& SummedAt(const Op& op) { return HasSums(op) ? SumsOf(op) : sums_in_place_[op.gradient_slot]; }

  // ---- before an operation starts: what it will see is what it must see ----

  void Check(const Op& op);
  // Nothing in flight may touch what this operation changes, nor change what it reads.
  static void CheckHostWeights(const Op& op, const Op& other);
  static void CheckDeviceSlots(const Op& op, const Op& other);
  void CheckCopyOutAgainst(const Op& op, const Op& other) const;
  static void CheckTiles(const Op& op, const Op& other);
  // By kind.
  void CheckMeaning(const Op& op);
  void GoBack(const Op& op);
  void CheckUpdate(const Op& op);
  void CheckCompute(const Op& op);
  void CheckAllGather(const Op& op);
  void CheckReduceScatter(const Op& op);
  void CheckCopyIn(const Op& op);
  void Accumulate(const Op& op);
  void CheckUpdateOnDevice(const Op& op);
  void CheckCopyOut(const Op& op);
  void CheckRoundGradient(const Op& op);
  void CheckReadSums(const Op& op);
  void CheckTileWrite(const Op& op);
  // What the operation puts into a slot of host memory has room there.
  void CheckRoom(const Op& op) const;

  // ---- when it has ended: what its slots hold from now on ----

  void Apply(const Op& op);
  void ApplyReadWeights(const Op& op);
  void ApplyUpdate(const Op& op);
  void ApplyUpdateOnDevice(const Op& op);
  void ApplyCopyOut(const Op& op);
  void ApplyRoundGradient(const Op& op);
  void ApplyAllGather(const Op& op);
  void ApplyReduceScatter(const Op& op);
  void ApplyCommit(const Op& op);
  void Keep(Position position, int micro_batch);

  int64_t VersionAfter(const Op& op) const {
    return 2 * op.step + (op.speculative_update && replayed_ && replayed_(op.step) ? 1 : 0);
  }
  // An update that is made again starts from what is committed.
  int64_t OnDrive(const Op& op) const { return (op.replay ? committed_ : drive_).at({op.block, op.tile}); }

  size_t TrainedBlocks() const {
    return static_cast<size_t>(std::count_if(plan_.blocks.begin(), plan_.blocks.end(),
                                             [](const BlockPlan& block) { return block.trains; }));
  }
  // Of so many updates that were made, those that a tile had: a frozen one has none.
  int64_t UpdatesOf(BlockIndex block, TileIndex tile, int64_t updates) const {
    return plan_.blocks[block].updates(tile) ? updates : 0;
  }
  // Updates that weights must have seen when a forward of this pass uses them.
  int64_t Updates(const Op& op) const {
    return op.kind == OpKind::kForward && norms_ < op.step ? op.step - 1 : norms_;
  }

  const Plan& plan_;
  SimLanes sim_;
  const Replayed replayed_;
  std::map<OpId, Op> in_flight_;
  std::map<std::pair<WeightSlot, TileIndex>, OfBlockAt> run_;  // {slot, tile} -> {block, version}
  std::map<TileSlot, std::pair<TileOfBlock, int64_t>> state_;  // slot -> {tile, version}
  std::map<GradientSlot, OfBlockAt> gradient_;                 // slot -> {block, step}
  std::map<TileSlot, OfBlockAt> spilled_read_;                 // the same
  // Run slot, in memory or on the device -> {block, version} of the other ranks' parts.
  std::map<WeightSlot, OfBlockAt> gathered_;
  std::map<DeviceWeightSlot, OfBlockAt> device_gathered_;
  std::map<BlockIndex, int64_t> reduced_;  // block -> step whose sum over ranks is on the device
  std::map<Lane, OpId> last_started_ = {{Lane::kAllGather, -1}, {Lane::kReduceScatter, -1}};
  int64_t agreed_ = 0;
  std::map<AccumulatorSlot, Sums> sums_;
  std::map<DeviceAccumulatorSlot, Sums> device_sums_;
  // What a device with its own memory leaves of its sums to other ranks.
  std::map<AccumulatorSlot, OfBlockAt> host_sums_;
  std::map<std::pair<DeviceWeightSlot, TileIndex>, OfBlockAt> device_run_;
  std::map<DeviceGradientSlot, OfBlockAt> device_gradient_;
  std::map<TileOfBlock, int64_t> device_state_;  // of blocks that live there: version by tile
  std::map<BlockIndex, int64_t> squared_;        // and the step whose squares are there, by block
  std::map<BlockIndex, int64_t> spilled_;
  std::map<TileOfBlock, int64_t> drive_, committed_;
  std::map<TileOfBlock, int64_t> before_;         // version, of tiles with a second one
  std::map<TileOfBlock, int64_t> state_written_;  // {block, tile} -> version, maybe ahead of drive_
  std::set<std::pair<Position, int>> inputs_,
      written_inputs_;  // {position, micro-batch} in memory, on the drive
  int64_t early_updates_ = 0, replayed_updates_ = 0, previewed_updates_ = 0, updates_there_ = 0,
          reads_past_host_ = 0, writes_in_parts_ = 0;
  size_t finalized_ = 0;
  int calls_ = 0;  // of the step under way that are over
  int64_t sums_read_ = 0;
  std::map<GradientSlot, Sums> sums_in_place_;
  std::map<BlockIndex, Sums> written_sums_;
  std::map<BlockIndex, int> added_;  // to each block's gradient in this step, so far
  std::set<TileOfBlock> unchecked_;  // weights that were read, by the transfer that every tile has
  int64_t norms_ = 0;
  int64_t trusts_ = 0, tensor_norms_ = 0;
  std::set<TileOfBlock> measured_;  // whose norms of the step are there
  int64_t commits_ = 0, persisted_ = 0;
};

// What happened to updates in backward, and how many commits were asked for where not every step is one.
struct Counted {
  int64_t early = 0;
  int64_t replayed = 0;
  int64_t persisted = 0;
  int64_t there = 0;      // updates of tiles on a device
  int64_t past_host = 0;  // tiles' weights read to a device past host memory
  int64_t in_parts = 0;   // tiles written in two parts
  int64_t sums_read = 0;  // blocks' sums, from the drive
  int64_t previewed = 0;  // tiles
  int64_t norms = 0;      // tiles' norms of updates
};

// Some passes of every kind, in a random order unless `random` is null: training only.
Counted RunPasses(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                  std::mt19937_64* random);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TESTS_TIERING_MEANING_LANES_H_
