// The tier above host memory: plans of a device's memory, the programs that copy to it and from it, and how
// close to their lower bound these run in virtual time.
#include "tiering/plan/device_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <string>

#include "tests/soak.h"
#include "tests/tiering/meaning_lanes.h"
#include "tests/tiering/plans.h"
#include "tiering/advice/tier_table.h"
#include "tiering/plan/plan.h"
#include "tiering/program/program.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::device_plan_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// The least device budget, from the words of the refusal.
int64_t LeastDeviceMemory(const ModelGraph& graph, PlanOptions options) {
  options.device.budget_bytes = 1;
  const absl::StatusOr<Plan> refused = MakePlan(graph, options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(refused.status().message()).find("device memory budget"), std::string::npos);
  return LeastOf(refused.status());
}

TEST(Device, EveryOperationSeesWhatItShouldOverRandomModelsBudgetsAndMachines) {
  Counted counted;
  const auto seeds = 48 * static_cast<uint64_t>(tests::Soak());
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ModelGraph graph = RandomModel(&random);
    if (random() % 4 == 0) graph.stages.push_back(graph.stages[StageIndex(random() % graph.stages.size())]);
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.compares_policies = false;  // any plan will do
    options.precision = RandomPrecision(&random);
    options.micro_batches = 1 + static_cast<int>(random() % 3);
    options.on_nvme = random() % 3 != 0;
    options.world = std::array{1, 1, 2, 3}[seed % 4];
    options.commits_every_step = random() % 2 != 0;
    if (random() % 2 != 0) options.bounds.processor_share = 0.25 * static_cast<double>(random() % 4);
    options.device.has_own_memory = true;
    options.device.collectives = seed % 8 >= 4;
    options.device.gds = seed % 3 == 0;
    if (random() % 2 != 0) options.tile_bytes = 64 << 10;
    options.clips = random() % 4 != 0;
    options.update_order = static_cast<UpdateOrder>(random() % 3);
    const int64_t least_device = LeastDeviceMemory(graph, options);
    ASSERT_GT(least_device, 0);
    const auto more = static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 24));
    options.device.budget_bytes = least_device + (random() % 3 == 0 ? 0 : more);
    if (options.on_nvme) {
      const int64_t least = LeastHostMemory(graph, options);
      ASSERT_GT(least, 0);
      options.host_memory_budget_bytes =
          least + static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 20));
    }
    absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LE(plan->device.bytes(), options.device.budget_bytes);
    EXPECT_EQ(plan->device.ledger().total(), plan->device.bytes());
    EXPECT_EQ(plan->ledger().total(), plan->host_bytes());
    if (options.bounds.processor_share) {
      EXPECT_LE(static_cast<double>(plan->device.resident_elements),
                (1 - *options.bounds.processor_share) * static_cast<double>(graph.elements()));
    }
    EXPECT_EQ(plan->device.least_bytes, least_device);
    EXPECT_EQ(plan->accumulator_slots.empty(), options.world == 1 || options.device.collectives)
        << "what is summed on the device needs no sums here";
    EXPECT_EQ(plan->device.collectives, options.world > 1 && options.device.collectives);
    MachineModel machine;
    for (double* rate : {&machine.read_bytes_per_s, &machine.write_bytes_per_s, &machine.h2d_bytes_per_s,
                         &machine.d2h_bytes_per_s}) {
      *rate = 1e8 * static_cast<double>(1 + random() % 100);
    }
    machine.update_parameters_per_s = 1e7 * static_cast<double>(1 + random() % 100);
    machine.update_workers = 1 + static_cast<int>(random() % 3);
    if (plan->speculates && random() % 2 != 0) {
      for (const BlockIndex b : plan->blocks.indices()) {
        if (plan->on_device(b)) continue;
        BlockPlan& block = plan->blocks[b];
        for (const TileIndex t : block.tiles.indices())
          block.speculative_update[t] =
              block.updates(t) && (options.on_nvme || block.second_slot[t].valid()) && random() % 2 != 0 ? 1
                                                                                                         : 0;
      }
    }
    const Counted run = RunPasses(graph, *plan, machine, &random);
    counted.early += run.early;
    counted.replayed += run.replayed;
    counted.persisted += run.persisted;
    counted.there += run.there;
    counted.past_host += run.past_host;
    if (HasFailure()) return;
  }
  EXPECT_GT(counted.early, 100);
  EXPECT_GT(counted.replayed, 40);
  EXPECT_GT(counted.persisted, 10);
  EXPECT_GT(counted.there, 200);
  EXPECT_GT(counted.past_host, 200);
}

// Thirty-two blocks of 2 MiB, and nothing but weights on the way.
ModelGraph LongChain() {
  ModelGraph graph = Chain(32, 1 << 20);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  return graph;
}

TEST(Device, WithoutADriveUpdatesInBackwardStandBesideTheVersionsBeforeWithinTheBudget) {
  int64_t early = 0, replayed = 0, bounded = 0, there = 0;
  const auto seeds = 36 * static_cast<uint64_t>(tests::Soak());
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ModelGraph graph = RandomModel(&random);
    if (random() % 3 == 0) graph.stages.push_back(graph.stages[StageIndex(random() % graph.stages.size())]);
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.precision = RandomPrecision(&random);
    options.micro_batches = 1 + static_cast<int>(random() % 3);
    options.on_nvme = false;
    options.commits_every_step = random() % 2 != 0;
    options.clips = random() % 4 != 0;
    options.device.has_own_memory = true;
    options.bounds.processor_share = 0.5 + 0.5 * static_cast<double>(random() % 2);
    options.tile_bytes = 64 << 10;
    options.update_order = UpdateOrder::kInNextForward;
    const Plan lean = *MakePlan(graph, options);
    options.update_order = UpdateOrder::kInBackward;
    Plan plan = *MakePlan(graph, options);
    EXPECT_EQ(plan.speculates, plan.on_device_share() < 1);
    if (random() % 2 != 0) {
      options.host_memory_budget_bytes =
          lean.host_bytes() +
          static_cast<int64_t>(random() % static_cast<uint64_t>(plan.second_version_bytes() + 1));
      plan = *MakePlan(graph, options);
      EXPECT_LE(plan.host_bytes(), options.host_memory_budget_bytes);
      EXPECT_LE(plan.speculative_share(), 1);
      ++bounded;
    }
    EXPECT_EQ(plan.least_host_memory_bytes, lean.host_bytes());
    EXPECT_EQ(plan.ledger().total(), plan.host_bytes());
    MachineModel machine;
    machine.h2d_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.d2h_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.update_parameters_per_s = 1e7 * static_cast<double>(1 + random() % 100);
    machine.update_workers = 1 + static_cast<int>(random() % 3);
    for (const BlockIndex b : plan.blocks.indices()) {
      BlockPlan& block = plan.blocks[b];
      for (const TileIndex t : block.tiles.indices()) {
        EXPECT_EQ(block.speculative_update[t] != 0, block.second_slot[t].valid());
        if (random() % 4 == 0) block.speculative_update[t] = 0;
      }
    }
    const Counted run = RunPasses(graph, plan, machine, &random);
    early += run.early;
    replayed += run.replayed;
    there += run.there;
    if (HasFailure()) return;
  }
  EXPECT_GT(early, 500);
  EXPECT_GT(replayed, 100);
  EXPECT_GT(there, 20);
  EXPECT_GT(bounded, 6);
}

// Memory for second versions is taken where that makes a step shorter, and where it is there.
TEST(Device, SecondVersionsTakeMemoryForATimeThatIsWorthIt) {
  const ModelGraph graph = LongChain();
  PlanOptions options;
  options.on_nvme = false;
  options.device.has_own_memory = true;
  options.bounds.processor_share = 1;
  options.machine.update_workers = 4;
  const auto plan_with = [&](double updates_per_s) {
    options.machine.update_parameters_per_s = updates_per_s;
    return *MakePlan(graph, options);
  };
  EXPECT_EQ(plan_with(1e12).second_versions, 0) << "updates take no time";
  const Plan free = plan_with(4e7);
  EXPECT_GT(free.speculative_share(), 0.1);
  EXPECT_LT(free.speculative_share(), 0.9);
  EXPECT_THAT(free.reasons, testing::Contains(testing::HasSubstr("second versions")));
  const Prediction beside = *Predict(graph, free, options.machine);
  EXPECT_LT(beside.step_seconds, 0.97 * beside.clipped_step_seconds);
  // They begin when the step before is committed: what is in memory is its state until then.
  ProgramBuilder builder(graph, free, 1);
  builder.Append(Pass::kTrain);
  OpId id = builder.next_id(), commit = -1;
  for (const Op& op : builder.Append(Pass::kTrain)) {
    if (op.kind == OpKind::kCommit) commit = id;
    if (op.kind == OpKind::kUpdate && op.speculative_update) {
      EXPECT_THAT(op.after, testing::Contains(commit));
    }
    ++id;
  }
  EXPECT_GT(commit, 0);
  // Whatever is free without a budget, or a budget, bounds them.
  options.host_memory_to_spare_bytes = free.host_bytes() - free.second_version_bytes() / 2;
  const Plan half = plan_with(4e7);
  EXPECT_LE(half.host_bytes(), options.host_memory_to_spare_bytes);
  EXPECT_GT(half.second_versions, free.second_versions / 4);
  EXPECT_LT(half.second_versions, free.second_versions);
  options.host_memory_budget_bytes = free.least_host_memory_bytes;
  EXPECT_EQ(plan_with(4e7).second_versions, 0);
  options.update_order = UpdateOrder::kInBackward;
  EXPECT_THAT(plan_with(4e7).reasons, testing::Contains(testing::HasSubstr("no room for second versions")));
  // The processor has its own updates to make while it computes.
  options = {};
  options.on_nvme = false;
  options.update_order = UpdateOrder::kInBackward;
  EXPECT_THAT(plan_with(4e7).reasons, testing::Contains(testing::HasSubstr("without a drive only where")));
}

// The processor updates everything in the next forward; nothing stays in host memory but gradients, and of
// the device there is as little as works.
PlanOptions AllStreams(const ModelGraph& graph) {
  PlanOptions options;
  options.device.has_own_memory = true;
  options.update_order = UpdateOrder::kInNextForward;
  options.bounds.resident_elements = 0;
  options.bounds.state_fraction = 0;
  options.bounds.processor_share = 1;
  options.host_memory_budget_bytes = graph.elements() * 2 + 128 * kMiB;
  options.device.budget_bytes = LeastDeviceMemory(graph, options);
  return options;
}

// With updates in the next forward backward's weights are nobody's but the device's. The drive reads what it
// read before, but what of that host memory could keep.
TEST(Device, WeightsThatOnlyItNeedsComeFromTheDriveToIt) {
  const ModelGraph graph = LongChain();
  const int64_t elements = graph.elements();
  PlanOptions options = AllStreams(graph);
  const Plan by_way_of_host = *MakePlan(graph, options);
  options.device.gds = true;
  const Plan straight = *MakePlan(graph, options);
  const int64_t block = int64_t{2} << 20;
  const int64_t kept = static_cast<int64_t>(straight.weight_slots.size() + 1) * block;
  EXPECT_GE(straight.device.h2d_bytes, 2 * elements);
  EXPECT_LE(straight.device.h2d_bytes, 2 * elements + kept)
      << "forward's, and what host memory had for backward";
  EXPECT_LT(straight.device.h2d_bytes, by_way_of_host.device.h2d_bytes - elements);
  EXPECT_LE(straight.nvme_read_bytes, by_way_of_host.nvme_read_bytes + kept);
  EXPECT_EQ(RunPasses(graph, straight, MachineModel(), nullptr).there, 0);
  EXPECT_GT(RunPasses(graph, straight, MachineModel(), nullptr).past_host, 100);
  EXPECT_EQ(RunPasses(graph, by_way_of_host, MachineModel(), nullptr).past_host, 0);
  // A forward-only plan has no other weights.
  options.trains = false;
  options.device.budget_bytes = 0;
  const Plan forward_only = *MakePlan(graph, options);
  ProgramBuilder builder(graph, forward_only, 1);
  for (const Op& op : builder.Append(Pass::kEvaluate, 1)) EXPECT_NE(op.lane, Lane::kCopyIn);
}

TEST(Device, LeastBudgetWorksAndOneByteLessIsRefusedWithIt) {
  for (const ModelGraph& graph : {Chain(6, 1 << 20), Tied(12, 1 << 19, 1 << 22), Tied(1, 2048, 2048)}) {
    for (const int micro_batches : {1, 3}) {
      PlanOptions options;
      options.device.has_own_memory = true;
      options.micro_batches = micro_batches;
      options.device.budget_bytes = LeastDeviceMemory(graph, options);
      const absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_LE(plan->device.bytes(), options.device.budget_bytes);
      RunPasses(graph, *plan, MachineModel(), nullptr);
      --options.device.budget_bytes;
      EXPECT_EQ(LeastOf(MakePlan(graph, options).status()), options.device.budget_bytes + 1);
    }
  }
}

// LibTorch's allocator needs more than its tensors: what it needs is part of the least that works.
// What is frozen of a block takes a place for its weights there, and none for gradients or their sums.
TEST(Device, GradientsThereAreOfWhatTrains) {
  constexpr int64_t kBase = 512 * kElementAlignment, kAdapters = 8 * kElementAlignment;
  ModelGraph graph = Chain(6, kBase + kAdapters);
  for (BlockShape& block : graph.blocks) FreezeFirst(kBase, &block);
  graph.blocks[BlockIndex(5)].trains = false;
  graph.blocks[BlockIndex(5)].trained_from = 0;
  for (const bool apart : {true, false}) {
    SCOPED_TRACE(apart);
    PlanOptions options;
    options.micro_batches = 2;  // whose gradients are summed in fp32
    options.device.has_own_memory = true;
    options.frozen_apart = apart;
    options.device.budget_bytes = LeastDeviceMemory(graph, options);
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    int64_t gradients = 0, sums = 0;
    for (const Slot& slot : plan->device.gradient_slots) gradients = std::max(gradients, slot.bytes);
    for (const Slot& slot : plan->device.accumulator_slots) sums = std::max(sums, slot.bytes);
    const int64_t trained = apart ? kAdapters : kBase + kAdapters;
    EXPECT_EQ(gradients, trained * 2 + PartialSumBytes(trained));
    EXPECT_EQ(sums, trained * 4);
    RunPasses(graph, *plan, MachineModel(), nullptr);
  }
}

TEST(Device, TensorsHaveRoomForTheGapsBetweenThem) {
  const ModelGraph graph = Chain(4, 1 << 20);
  PlanOptions options;
  options.device.has_own_memory = true;
  const int64_t tight = LeastDeviceMemory(graph, options);
  options.device.budget_bytes = tight;
  const absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t tensors = plan->device.tensor_bytes;
  ASSERT_GT(tensors, 8);
  for (const int64_t gaps : {int64_t{0}, tensors / 8, tensors / 4, tensors}) {
    options.device.tensor_slack = {.fixed_bytes = 3 * kMiB, .gap_bytes = gaps};
    EXPECT_EQ(LeastDeviceMemory(graph, options), tight + 3 * kMiB + std::min(gaps, tensors / 4));
  }
}

// 2 bytes in for each of forward and backward, 2 bytes out; with every block's weights on the device only
// what was updated comes, once a step, and the drive reads 12 bytes instead of 14.
TEST(Device, BytesCopiedPerParameterFallWithItsMemory) {
  const ModelGraph graph = LongChain();
  const int64_t elements = graph.elements();
  PlanOptions options = AllStreams(graph);
  Plan plan = *MakePlan(graph, options);
  const int64_t block = int64_t{2} << 20;
  EXPECT_EQ(plan.device.weight_slots.size(), 1u);
  EXPECT_EQ(plan.device.h2d_bytes, 4 * elements - block) << "the last one stays between forward and backward";
  EXPECT_EQ(plan.device.d2h_bytes, 2 * elements + PartialSumBytes(elements));
  int64_t before = plan.device.h2d_bytes;
  for (int more = 1; more <= 32; more += 5) {
    options.device.budget_bytes += 10 * kMiB;
    plan = *MakePlan(graph, options);
    EXPECT_LE(plan.device.h2d_bytes, before);
    before = plan.device.h2d_bytes;
  }
  EXPECT_EQ(plan.device.weight_slots.size(), 32u);
  EXPECT_EQ(plan.device.h2d_bytes, 2 * elements);
  // What host memory still had of the last blocks is not read again.
  EXPECT_LE(plan.nvme_read_bytes, 12 * elements);
  EXPECT_GT(plan.nvme_read_bytes, 12 * elements - 4 * block);
  EXPECT_EQ(plan.nvme_write_bytes, 12 * elements);
}

// A rank's device takes whole runs, in one copy each, and leaves its gradients as backward left them, or
// their fp32 sums: bf16 4 + 2 bytes a parameter, or 4 + 4.
TEST(Device, RanksCopyWholeRuns) {
  ModelGraph graph = Chain(16, 1 << 20);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  for (const int micro_batches : {1, 2}) {
    PlanOptions options;
    options.device.has_own_memory = true;
    options.world = 2;
    options.micro_batches = micro_batches;
    options.device.budget_bytes = LeastDeviceMemory(graph, options);
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int64_t elements = graph.elements(), block = int64_t{2} << 20;
    EXPECT_EQ(plan->device.h2d_bytes, 4 * elements - block);
    EXPECT_EQ(plan->device.d2h_bytes, (micro_batches == 1 ? 2 : 4) * elements);
    EXPECT_EQ(plan->nvme_write_bytes * 2, 12 * elements);
    EXPECT_EQ(plan->ledger().total(), plan->host_bytes());
    RunPasses(graph, *plan, MachineModel(), nullptr);
  }
}

// Where devices exchange with each other, host memory has parts alone, each is copied in, and out comes what
// is reduced: what one rank without others copies, by as many as there are.
TEST(Device, RanksWhoseDevicesExchangeCopyTheirPartsAlone) {
  ModelGraph graph = Chain(16, 1 << 20);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  for (const int world : {2, 4}) {
    for (const int micro_batches : {1, 2}) {
      PlanOptions options;
      options.device.has_own_memory = options.device.collectives = true;
      options.world = world;
      options.micro_batches = micro_batches;
      options.device.budget_bytes = LeastDeviceMemory(graph, options);
      const absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const int64_t elements = graph.elements() / world, block = (int64_t{2} << 20) / world;
      EXPECT_EQ(plan->device.h2d_bytes, 4 * elements - block);
      EXPECT_EQ(plan->device.d2h_bytes, 2 * elements);
      EXPECT_EQ(plan->nvme_write_bytes, 12 * elements);
      EXPECT_EQ(plan->network_bytes, 0);
      EXPECT_EQ(plan->ledger().total(), plan->host_bytes());
      EXPECT_EQ(plan->device.ledger().total(), plan->device.bytes());
      RunPasses(graph, *plan, MachineModel(), nullptr);
      // In host memory less than what ranks that meet there need.
      const int64_t least = LeastHostMemory(graph, options);
      options.device.collectives = false;
      options.device.budget_bytes = LeastDeviceMemory(graph, options);
      EXPECT_LT(least, LeastHostMemory(graph, options));
    }
  }
}

TEST(Device, InputsWaitInHostMemoryWhereTheDeviceHasNoRoom) {
  ModelGraph graph = Chain(16, 1 << 18);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 8 * kMiB;
  PlanOptions options;
  options.device.has_own_memory = true;
  options.bounds.processor_share = 1;  // weights come and go
  options.micro_batches = 2;
  options.device.budget_bytes = LeastDeviceMemory(graph, options);
  EXPECT_LT(options.device.budget_bytes, 16 * 2 * 8 * kMiB / 2) << "a fraction of the inputs alone";
  const Plan lean = *MakePlan(graph, options);
  // All but the last kept ones and the batch.
  const int64_t away = (16 - lean.device.saved_activations - 1) * 2 * 8 * kMiB;
  int64_t waiting = 0;
  for (const Slot& slot : lean.input_slots) waiting += slot.bytes;
  EXPECT_EQ(waiting, away);
  EXPECT_EQ(lean.ledger().total(), lean.host_bytes());
  int64_t host = 0;
  for (const TierLine& line : TiersOf(graph, lean)) host += line.in_flight_bytes + line.resident_bytes;
  EXPECT_EQ(host, lean.host_bytes());
  EXPECT_EQ(lean.input_scratch_bytes, 0) << "nothing of them goes to the drive";
  const int64_t gradients = 2 * graph.elements() + PartialSumBytes(graph.elements());
  EXPECT_EQ(lean.device.d2h_bytes, gradients + away);
  RunPasses(graph, lean, MachineModel(), nullptr);
  options.device.budget_bytes += int64_t{1} << 30;
  const Plan roomy = *MakePlan(graph, options);
  EXPECT_TRUE(roomy.input_slots.empty());
  EXPECT_EQ(roomy.device.d2h_bytes, gradients);
}

TEST(Device, StepIsWithinFivePercentOfItsLowerBound) {
  const ModelGraph base = Chain(24, 3 << 20);
  const auto elements = static_cast<double>(base.elements());
  double worst = 1;
  // Seconds of compute and of copies (in, for both passes) to those of the drive.
  for (const double compute : {0.1, 0.6, 1.0, 3.0}) {
    for (const double copy : {0.02, 0.15, 0.3, 0.5}) {
      if (tests::Soak() == 1 && compute != 1.0 && copy > 0.02 && copy < 0.5) continue;  // make soak has all
      ModelGraph graph = base;
      const double drive_seconds = 26.0 * elements / 3e9;
      for (StageShape& stage : graph.stages) {
        stage.forward_seconds = compute * drive_seconds / 24 / 4;
        stage.backward_seconds = compute * drive_seconds / 24 * 3 / 4;
      }
      PlanOptions options;
      options.device.has_own_memory = true;
      options.machine.h2d_bytes_per_s = options.machine.d2h_bytes_per_s =
          4.0 * elements / (copy * drive_seconds);
      const int64_t least = LeastDeviceMemory(graph, options);
      for (const int blocks : {3, 12}) {  // beyond the least
        options.device.budget_bytes = least + blocks * (int64_t{6} << 20) + 6 * kMiB;
        options.host_memory_budget_bytes = base.elements() * 4;
        const absl::StatusOr<Plan> plan = MakePlan(graph, options);
        ASSERT_TRUE(plan.ok()) << plan.status();
        const absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, options.machine, /*steps=*/6);
        ASSERT_TRUE(prediction.ok()) << prediction.status();
        // A block that lives there stays where handing it to the processor gains less than 1% (planner.cc).
        const double most = plan->on_device_share() > 0 ? 1.05 / 0.99 : 1.05;
        EXPECT_LE(prediction->step_seconds, prediction->lower_bound_seconds * most)
            << "compute to drive " << compute << ", copies to drive " << copy << ", " << blocks
            << " blocks beyond the least, bound by " << prediction->bound_by << "; "
            << plan->on_device_share() << " there, " << plan->speculative_share() << " in backward";
        worst = std::max(worst, prediction->step_seconds / prediction->lower_bound_seconds);
      }
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

}  // namespace
}  // namespace penstock::tiering::device_plan_test
