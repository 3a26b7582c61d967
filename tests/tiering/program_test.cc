// Programs are held against what they mean (tests/tiering/meaning_lanes.h), plans against their budgets.
#include "tiering/program/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "tests/soak.h"
#include "tests/tiering/meaning_lanes.h"
#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "tiering/simulate/sim_lanes.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::program_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(Program, EveryOperationSeesWhatItShouldOverRandomModelsBudgetsAndMachines) {
  Counted counted;
  int late = 0;  // plans with tiles that are written late
  const auto seeds = 59 * static_cast<uint64_t>(tests::Soak());
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const int layers = 1 + static_cast<int>(random() % 9);
    ModelGraph graph = random() % 2 != 0
                           ? Tied(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 200)),
                                  kElementAlignment * (1 + static_cast<int64_t>(random() % 400)))
                           : Chain(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 200)));
    if (random() % 3 == 0) {
      for (BlockShape& block : graph.blocks)
        block.elements = kElementAlignment * (1 + static_cast<int64_t>(random() % 300));
    }
    if (random() % 4 == 0) graph.stages.push_back(graph.stages[StageIndex(random() % graph.stages.size())]);
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.compares_policies = false;  // any plan will do
    const Precision precisions[] = {Precision::Bf16(), Precision::Fp32(), Precision::Fp16(),
                                    Precision::Bf16().WithMoments(1), kStateless};
    options.precision = precisions[random() % std::size(precisions)];
    options.micro_batches = 1 + static_cast<int>(random() % 3);
    options.on_nvme = random() % 8 != 0;
    if (random() % 2 != 0) options.tile_bytes = 64 << 10;
    options.clips = random() % 4 != 0;
    options.world = std::array{1, 1, 2, 3}[seed % 4];
    options.commits_every_step = !options.on_nvme || options.world > 1 || random() % 3 != 0;
    options.update_order = static_cast<UpdateOrder>(random() % 3);
    options.tensor_norms = seed % 60 > 50;
    absl::StatusOr<Plan> roomy = MakePlan(graph, options);
    ASSERT_TRUE(roomy.ok()) << roomy.status();
    if (options.on_nvme) {
      const int64_t least = roomy->least_host_memory_bytes;
      options.host_memory_budget_bytes =
          least + static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 20));
    }
    absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    MachineModel machine;
    machine.read_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.write_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.update_parameters_per_s = 1e7 * static_cast<double>(1 + random() % 100);
    machine.update_workers = 1 + static_cast<int>(random() % 3);
    if (plan->speculates && random() % 2 != 0) {
      // Any tile of any block may be the one that is updated in backward.
      for (BlockPlan& block : plan->blocks) {
        for (const TileIndex t : block.tiles.indices())
          block.speculative_update[t] = random() % 2 != 0 && block.updates(t) ? 1 : 0;
      }
    }
    if (options.on_nvme && options.commits_every_step && options.world == 1 && !options.tensor_norms) {
      std::mt19937_64 which(seed);
      for (BlockPlan& block : plan->blocks) {
        for (const TileIndex t : block.tiles.indices()) {
          const bool may = block.uses == 1 && block.updates(t) && !block.private_tile_slot[t].valid();
          block.previews[t] = may && which() % 2 != 0 ? 1 : 0;
        }
      }
    }
    const Counted run = RunPasses(graph, *plan, machine, &random);
    counted.early += run.early;
    counted.previewed += run.previewed;
    counted.replayed += run.replayed;
    counted.persisted += run.persisted;
    counted.in_parts += run.in_parts;
    counted.norms += run.norms;
    EXPECT_EQ(run.norms > 0, options.tensor_norms);
    late += plan->late_write_bytes > 0 ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(counted.early, 1'000);
  EXPECT_GT(counted.replayed, 300);
  EXPECT_GT(counted.persisted, 20);
  EXPECT_GT(counted.previewed, 200);
  EXPECT_GT(counted.in_parts, 200);
  EXPECT_GT(counted.norms, 300);
  EXPECT_GT(late, 4);
}

// What a step reads for norms of whole parameters is what its updates read, once more; nothing else changes.
TEST(Program, NormsOfWholeParametersReadTheStateOnceMore) {
  const ModelGraph graph = Chain(6, kElementAlignment * 100);
  PlanOptions options;
  options.update_order = UpdateOrder::kInNextForward;
  options.host_memory_budget_bytes = 64 * kMiB;
  options.bounds.placement = Placement::kCpu;  // nothing stays
  absl::StatusOr<Plan> once = MakePlan(graph, options);
  ASSERT_TRUE(once.ok()) << once.status();
  options.tensor_norms = true;
  absl::StatusOr<Plan> twice = MakePlan(graph, options);
  ASSERT_TRUE(twice.ok()) << twice.status();
  EXPECT_EQ(twice->nvme_write_bytes, once->nvme_write_bytes);
  const int64_t state =
      once->precision.UnpaddedBytes(graph.elements()) - graph.elements() * once->precision.weight_bytes();
  const int64_t more = twice->nvme_read_bytes - once->nvme_read_bytes;
  EXPECT_GE(more, state);
  EXPECT_LE(more, state + 2 * graph.elements() * once->precision.weight_bytes() +
                      graph.elements() * once->precision.gradient_bytes);
  EXPECT_THAT(twice->reasons, testing::Contains(testing::HasSubstr("once more: LAMB's trust ratio")));
  EXPECT_EQ(twice->speculative_share(), 0);
}

// Sums wait for the calls behind them in memory, or on the drive, and are final with the last.
TEST(Program, EachCallOfAStepAddsToWhatThoseBeforeHaveLeft) {
  int64_t read = 0;
  const auto seeds = 24 * static_cast<uint64_t>(tests::Soak());
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const int layers = 1 + static_cast<int>(random() % 7);
    ModelGraph graph = random() % 2 != 0
                           ? Tied(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 100)),
                                  kElementAlignment * (1 + static_cast<int64_t>(random() % 200)))
                           : Chain(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 100)));
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.compares_policies = false;
    const Precision precisions[] = {Precision::Bf16(), Precision::Fp32(), Precision::Fp16()};
    options.precision = precisions[random() % std::size(precisions)];
    options.micro_batches = 1 + static_cast<int>(random() % 2);
    options.calls = 2 + static_cast<int>(random() % 2);
    options.on_nvme = random() % 4 != 0;
    options.clips = random() % 2 != 0;
    options.commits_every_step = !options.on_nvme || random() % 3 != 0;
    options.update_order = static_cast<UpdateOrder>(random() % 3);
    absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    if (options.on_nvme && random() % 4 != 0) {
      options.host_memory_budget_bytes =
          plan->least_host_memory_bytes +
          static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 8));
      plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
    }
    const Counted run = RunPasses(graph, *plan, MachineModel(), &random);
    EXPECT_TRUE(options.on_nvme || run.sums_read == 0);
    read += run.sums_read;
    if (HasFailure()) return;
  }
  EXPECT_GT(read, 200);
}

TEST(Ranks, EachMovesItsShareOfTheBytes) {
  const ModelGraph graph = Chain(8, 24 * kPartAlignment);
  for (const Precision& precision : {Precision::Bf16(), Precision::Fp32(), Precision::Fp16()}) {
    int64_t read = 0, written = 0;
    for (const int world : {1, 2, 3, 4}) {
      PlanOptions options;
      options.precision = precision;
      options.world = world;
      options.host_memory_budget_bytes = 64 * kMiB;
      options.bounds.placement = Placement::kCpu;  // all state streams
      const absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      if (world == 1) {
        read = plan->nvme_read_bytes;
        written = plan->nvme_write_bytes;
      }
      EXPECT_EQ(plan->nvme_read_bytes * world, read) << world;
      EXPECT_EQ(plan->nvme_write_bytes * world, written) << world;
    }
  }
}

// Gathering and reducing go on beside compute and the drive, whichever of them is the slowest.
TEST(Ranks, TheNetworkIsOneMoreLane) {
  const ModelGraph graph = Chain(12, 1 << 20, /*forward=*/5e-3);
  for (const double network : {1e8, 4e8, 4e9}) {
    PlanOptions options;
    options.world = 4;
    options.bounds.placement = Placement::kCpu;  // all weights are gathered for each use
    options.host_memory_budget_bytes = 192 * kMiB;
    options.machine.network_bytes_per_s = network;
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, options.machine);
    ASSERT_TRUE(prediction.ok()) << prediction.status();
    // Three quarters of the weights are gathered twice a step and of the gradients reduced once; the last
    // block of forward is the first of backward.
    const double bytes = 2.0 * (1 << 20) * 3 / 4 * (12 + 11 + 12);
    EXPECT_NEAR(prediction->network_seconds, bytes / network, 1e-9 + 0.1 * bytes / network);
    EXPECT_EQ(prediction->bound_by == "network", network == 1e8) << prediction->bound_by;
    EXPECT_LE(prediction->step_seconds, 1.10 * prediction->lower_bound_seconds) << network;
  }
}

// What comes in codes takes its share of the bytes and of the network's time, and the memory that it arrives
// in.
TEST(Ranks, CodedExchangesTakeAQuarterAndHalfOfTheBytes) {
  const ModelGraph graph = Chain(12, 1 << 20, /*forward=*/5e-3);
  for (const int world : {2, 3, 4}) {
    for (const Precision& precision : {Precision::Bf16(), Precision::Fp16(), Precision::Fp32()}) {
      PlanOptions options;
      options.precision = precision;
      options.world = world;
      options.bounds.placement = Placement::kCpu;
      options.host_memory_budget_bytes = 512 * kMiB;
      options.machine.network_bytes_per_s = 1e8;
      const absl::StatusOr<Plan> whole = MakePlan(graph, options);
      options.codes = {.weights = true, .gradients = true};
      const absl::StatusOr<Plan> coded = MakePlan(graph, options);
      ASSERT_TRUE(whole.ok() && coded.ok()) << whole.status() << coded.status();
      EXPECT_EQ(whole->gathered.bytes, whole->gathered.whole_bytes);
      EXPECT_EQ(whole->reduced.bytes, whole->reduced.whole_bytes);
      EXPECT_EQ(coded->gathered.whole_bytes, whole->gathered.bytes);
      EXPECT_EQ(coded->reduced.whole_bytes, whole->reduced.bytes);
      const double width = precision.weight_bytes(), addend = precision.addend_bytes();
      EXPECT_DOUBLE_EQ(static_cast<double>(coded->gathered.bytes) * width,
                       static_cast<double>(whole->gathered.bytes) * (1 + 2.0 / 128));
      EXPECT_DOUBLE_EQ(static_cast<double>(coded->reduced.bytes) * addend,
                       static_cast<double>(whole->reduced.bytes) * (0.5 + 2.0 / 128));
      EXPECT_LE(static_cast<double>(coded->reduced.bytes), 0.3 * static_cast<double>(whole->reduced.bytes));
      EXPECT_EQ(coded->network_bytes - whole->network_bytes, GatherBytes(world, kNetworkPiece));
      const absl::StatusOr<Prediction> slow = Simulate(graph, *whole, options.machine);
      const absl::StatusOr<Prediction> fast = Simulate(graph, *coded, options.machine);
      ASSERT_TRUE(slow.ok() && fast.ok());
      EXPECT_DOUBLE_EQ(fast->network_seconds / slow->network_seconds,
                       static_cast<double>(coded->gathered.bytes + coded->reduced.bytes) /
                           static_cast<double>(whole->gathered.bytes + whole->reduced.bytes));
      EXPECT_LT(fast->step_seconds, 0.7 * slow->step_seconds);
    }
  }
}

// A block that several stages use has fp32 sums from its first use on: they wait in memory where there is
// room, and else on the drive.
TEST(Program, SumsLeaveMemoryBetweenTheUsesOfABlockUnderATightBudget) {
  for (const Precision& precision : {Precision::Bf16(), Precision::Fp32(), Precision::Fp16()}) {
    for (const int micro_batches : {1, 3}) {
      SCOPED_TRACE(testing::Message() << precision.name << ", " << micro_batches << " micro-batches");
      // Two tied blocks, as a vocabulary in tiles has them.
      ModelGraph graph = Tied(3, kMiB / 2, kMiB / 2);
      graph.blocks.push_back(graph.blocks[BlockIndex(0)]);
      PerStage<StageShape> stages;
      for (const StageShape& stage : graph.stages) {
        for (int tile = stage.block == BlockIndex(0) ? 0 : 1; tile < 2; ++tile) stages.push_back(stage);
        if (stage.block == BlockIndex(0)) stages[stages.end_index() - 1].block = graph.blocks.end_index() - 1;
      }
      graph.stages = stages;
      PlanOptions options;
      options.precision = precision;
      options.micro_batches = micro_batches;
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::mt19937_64 random(static_cast<uint64_t>(micro_batches));
      EXPECT_EQ(RunPasses(graph, *plan, MachineModel(), &random).sums_read, 0);
      options.host_memory_budget_bytes = plan->least_host_memory_bytes;
      plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_TRUE(plan->moves_sums(BlockIndex(0)));
      EXPECT_FALSE(plan->moves_sums(BlockIndex(1)));
      EXPECT_GT(RunPasses(graph, *plan, MachineModel(), &random).sums_read, 0);
      // Those of both blocks go once a step and come back once.
      ProgramBuilder builder(graph, *plan, 1);
      std::map<OpKind, int64_t> bytes;
      for (const Op& op : builder.Append(Pass::kTrain)) bytes[op.kind] += op.bytes;
      EXPECT_EQ(bytes[OpKind::kWriteSums], 2 * (kMiB / 2) * 4);
      EXPECT_EQ(bytes[OpKind::kReadSums], 2 * (kMiB / 2) * 4);
    }
  }
}

TEST(Planner, LeastBudgetWorksAndOneByteLessIsRefusedWithIt) {
  for (const ModelGraph& graph : {Chain(6, 1 << 20), Tied(12, 1 << 19, 1 << 22), Tied(1, 2048, 2048)}) {
    for (const Precision& precision : {Precision::Bf16(), Precision::Fp32(), Precision::Fp16(),
                                       Precision::Bf16().WithMoments(1), kStateless}) {
      PlanOptions options;
      options.precision = precision;
      options.compares_policies = false;  // any plan will do
      options.host_memory_budget_bytes = 1;
      absl::StatusOr<Plan> refused = MakePlan(graph, options);
      ASSERT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
      const int64_t least = LeastOf(refused.status());
      options.host_memory_budget_bytes = least;
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_LE(plan->host_bytes(), least);
      EXPECT_EQ(plan->least_host_memory_bytes, least);
      RunPasses(graph, *plan, MachineModel(), nullptr);
      options.host_memory_budget_bytes = least - 1;
      EXPECT_FALSE(MakePlan(graph, options).ok());
    }
  }
}

TEST(Planner, NeverExceedsTheBudgetAndIsNoSlowerWithMoreMemory) {
  for (const double forward : {1e-4, 1e-3, 1e-2}) {
    ModelGraph graph = Tied(16, 1 << 20, 1 << 20);
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = forward;
      stage.backward_seconds = 3 * forward;
    }
    PlanOptions options;
    options.compares_policies = false;
    const int64_t least = LeastHostMemory(graph, options);
    double fastest = 1e9;
    int64_t bytes = 0;
    const int64_t more = (tests::Soak() > 1 ? 5 : 40) * kMiB;
    for (int64_t budget = least; budget < 400 * kMiB; budget += more) {
      options.host_memory_budget_bytes = budget;
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok());
      EXPECT_LE(plan->host_bytes(), budget);
      EXPECT_EQ(plan->ledger().total(), plan->host_bytes());
      absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, MachineModel());
      ASSERT_TRUE(prediction.ok());
      EXPECT_LE(prediction->step_seconds, fastest * 1.05) << "budget " << budget << ", forward " << forward;
      fastest = std::min(fastest, prediction->step_seconds);
      bytes = plan->nvme_read_bytes + plan->nvme_write_bytes;
    }
    EXPECT_EQ(bytes, 12 * graph.elements()) << "with everything resident only the durable writes are left";
  }
}

TEST(Planner, ObeysTheUsersUpperBounds) {
  const ModelGraph graph = Chain(12, 1 << 20);
  PlanOptions options;
  options.host_memory_budget_bytes = int64_t{1} << 30;
  auto shared_slots = [](const Plan& plan) { return plan.weight_classes.front().slots; };
  const Plan free = *MakePlan(graph, options);
  EXPECT_EQ(shared_slots(free), 3);
  EXPECT_GT(ResidentElements(free), 0);
  options.bounds.live_elements = 2 << 20;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 2);
  options.bounds = {};
  options.bounds.prefetch_elements = 0;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 1);
  options.bounds = {};
  options.bounds.weight_slots = 2;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 2);
  options.bounds = {};
  options.bounds.resident_elements = 3 << 20;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 3 << 20);
  options.bounds.resident_elements = 0;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 0);
}

TEST(Planner, SlotsDoNotOverlapAndLieInTheArena) {
  const ModelGraph graph = Tied(8, 3 * kElementAlignment * 50, 1 << 20);
  PlanOptions options;
  options.micro_batches = 2;
  options.host_memory_budget_bytes = 64 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  int64_t end = 0;
  const auto check = [&end](const auto& slots) {
    for (const Slot& slot : slots) {
      EXPECT_GE(slot.offset, end);
      EXPECT_EQ(slot.offset % kPage, 0);
      end = slot.offset + slot.bytes;
    }
  };
  check(plan->weight_slots);
  check(plan->tile_slots);
  check(plan->gradient_slots);
  check(plan->accumulator_slots);
  EXPECT_LE(end, plan->arena_bytes);
}

TEST(Program, BytesPerParameterAreThoseOfThePrecision) {
  ModelGraph graph = Chain(64, 1 << 20);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  for (const auto& [precision, most] : {std::pair{Precision::Bf16(), 26.0},
                                        {Precision::Fp32(), 28.0},
                                        {Precision::Fp16(), 30.0},
                                        {Precision::Bf16().WithMoments(1), 14.25}}) {
    PlanOptions options;
    options.precision = precision;
    options.compares_policies = false;
    // Enough for every gradient and the comfortable working set; weights and state stream.
    options.bounds.resident_elements = 0;
    options.bounds.state_fraction = 0;
    const int64_t gradients = graph.elements() * precision.gradient_bytes;
    options.host_memory_budget_bytes = gradients + 128 * kMiB;
    auto per_parameter = [&] {
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      EXPECT_TRUE(plan.ok()) << plan.status();
      return static_cast<double>(plan->nvme_read_bytes + plan->nvme_write_bytes) /
             static_cast<double>(graph.elements());
    };
    for (const UpdateOrder order : {UpdateOrder::kInNextForward, UpdateOrder::kInBackward}) {
      options.update_order = order;
      EXPECT_LE(per_parameter(), most);
      EXPECT_GT(per_parameter(), most - 2.1);  // the ends of the walk are read once less
    }
    // Gradients on the drive cost one write and one read of them; one that is used in backward is read again
    // only when clipping asks for it, and without clipping it is never needed again.
    options.host_memory_budget_bytes = LeastHostMemory(graph, options) + 8 * kMiB;
    const double bytes = precision.gradient_bytes;
    for (const auto& [order, clips, spilled] : {std::tuple{UpdateOrder::kInNextForward, true, 2 * bytes},
                                                {UpdateOrder::kInBackward, true, bytes},
                                                {UpdateOrder::kInBackward, false, 0.0}}) {
      options.update_order = order;
      options.clips = clips;
      EXPECT_LE(per_parameter(), most + spilled);
      EXPECT_GT(per_parameter(), most + spilled - 2.1);
    }
  }
}

// Of a frozen block the weights are read, and nothing is written; it has no gradient in memory.
TEST(Program, AFrozenBlockCostsNoMoreThanItsWeights) {
  constexpr int64_t kElements = 64 * kElementAlignment;
  ModelGraph graph = Chain(12, kElements);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  PlanOptions options;
  options.bounds.placement = Placement::kCpu;
  options.host_memory_budget_bytes = MakePlan(graph, options)->least_host_memory_bytes;
  const absl::StatusOr<Plan> all = MakePlan(graph, options);
  ASSERT_TRUE(all.ok()) << all.status();
  for (int b = 1; b < 11; ++b) graph.blocks[BlockIndex(b)].trains = false;
  const absl::StatusOr<Plan> few = MakePlan(graph, options);
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_LE(few->least_host_memory_bytes, all->least_host_memory_bytes);
  EXPECT_LE(few->nvme_write_bytes, 2 * kElements * (12 + 2));
  EXPECT_LE(few->nvme_read_bytes, 2 * kElements * (12 + 4) + 10 * kElements * 4);
  EXPECT_LT(3 * few->nvme_write_bytes, all->nvme_write_bytes);
  for (BlockShape& block : graph.blocks) block.trains = false;
  EXPECT_THAT(MakePlan(graph, options).status().message(), testing::HasSubstr("nothing to train"));
  options.trains = false;
  EXPECT_TRUE(MakePlan(graph, options).ok());
}

// What comes before the first block that trains is computed forward: read once, and no input of it is kept.
TEST(Program, BackwardEndsAtTheFirstBlockThatTrains) {
  constexpr int kLayers = 12, kFrozen = 8;
  ModelGraph graph = Chain(kLayers, 64 * kElementAlignment);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = kMiB;
  PlanOptions options;
  options.bounds.placement = Placement::kCpu;
  const auto plan_for = [&] {
    options.host_memory_budget_bytes = 0;
    options.host_memory_budget_bytes = MakePlan(graph, options)->least_host_memory_bytes;
    return *MakePlan(graph, options);
  };
  const Plan all = plan_for();
  for (int b = 0; b < kFrozen; ++b) graph.blocks[BlockIndex(b)].trains = false;
  const Plan plan = plan_for();
  ASSERT_TRUE(plan.SpillsInput(Position(kFrozen)));
  EXPECT_LE(plan.least_host_memory_bytes, all.least_host_memory_bytes);
  ProgramBuilder builder(graph, plan, 1);
  // By position: operations of backward, and transfers of inputs. By block: bytes of weights read.
  const auto count = [&](int frozen) {
    std::vector<int> backward(kLayers), inputs(kLayers);
    std::vector<int64_t> read(kLayers);
    for (const Op& op : builder.Append(Pass::kTrain)) {
      if (op.kind == OpKind::kBackward) ++backward[At(op.position)];
      if (op.kind == OpKind::kWriteInput || op.kind == OpKind::kReadInput) ++inputs[At(op.position)];
      if (op.kind == OpKind::kReadWeights) read[At(op.block)] += op.bytes;
    }
    for (int i = 0; i < kLayers; ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(backward[At(i)], i < frozen ? 0 : 1);
      EXPECT_EQ(inputs[At(i)], i < std::max(1, frozen) || !plan.SpillsInput(Position(i)) ? 0 : 2);
      if (i < frozen) {
        EXPECT_LE(read[At(i)], graph.blocks[BlockIndex(i)].elements * 2);
      }
    }
  };
  builder.Append(Pass::kTrain);
  count(kFrozen);
  std::vector<int> order(kLayers);
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + kFrozen, order.end() - 1);  // one that trains comes first
  builder.SetOrder(order);
  count(0);
  EXPECT_LT(plan.nvme_read_bytes, all.nvme_read_bytes - kFrozen * 64 * kElementAlignment * 2 * 2);
  RunPasses(graph, plan, MachineModel(), nullptr);
}

// A large base that is frozen and a small part beside it that trains, as with LoRA: the base is read for
// forward and for backward, and that is all; memory for state and gradients is that of the small part.
TEST(Program, WhatIsFrozenBesideWhatTrainsCostsItsTwoReadsAlone) {
  constexpr int64_t kBase = 512 * kElementAlignment, kAdapters = 8 * kElementAlignment;
  constexpr int kLayers = 12;
  const ModelGraph whole = Chain(kLayers, kBase + kAdapters), small = Chain(kLayers, kAdapters);
  ModelGraph graph = whole;
  for (BlockShape& block : graph.blocks) FreezeFirst(kBase, &block);
  for (const UpdateOrder order : {UpdateOrder::kInNextForward, UpdateOrder::kInBackward}) {
    SCOPED_TRACE(static_cast<int>(order));
    PlanOptions options;
    options.update_order = order;
    options.bounds.placement = Placement::kCpu;
    options.host_memory_budget_bytes = MakePlan(graph, options)->least_host_memory_bytes;
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LE(plan->nvme_write_bytes, kLayers * kAdapters * (12 + 2) + kLayers * kMiB / 4);
    EXPECT_LE(plan->nvme_read_bytes,
              kLayers * (2 * kBase * 2 + kAdapters * (12 + 2 + 2)) + kLayers * kMiB / 4);
    EXPECT_GT(plan->nvme_read_bytes, (2 * kLayers - 3) * kBase * 2);  // the ends of the walk stay
    PlanOptions of_whole = options;
    of_whole.host_memory_budget_bytes = 0;
    of_whole.host_memory_budget_bytes = MakePlan(whole, of_whole)->least_host_memory_bytes;
    EXPECT_LT(options.host_memory_budget_bytes, of_whole.host_memory_budget_bytes);
    EXPECT_LT(12 * plan->nvme_write_bytes, MakePlan(whole, of_whole)->nvme_write_bytes);
    const Plan of_small = *MakePlan(small, options);
    EXPECT_LE(plan->tile_state_bytes, of_small.tile_state_bytes);
    for (const Slot& slot : plan->gradient_slots) EXPECT_LE(slot.bytes, kAdapters * 2);
    RunPasses(graph, *plan, MachineModel(), nullptr);
  }
  // Where everything is in memory, state is that of the small part.
  PlanOptions in_memory;
  in_memory.on_nvme = false;
  const Plan plan = *MakePlan(graph, in_memory);
  int64_t state = 0, gradients = 0;
  for (const Slot& slot : plan.tile_slots) state += slot.bytes;
  for (const Slot& slot : plan.gradient_slots) gradients += slot.bytes;
  EXPECT_EQ(state, kLayers * kAdapters * 10);
  EXPECT_EQ(gradients, kLayers * kAdapters * 2);
}

// Over several ranks what is frozen of a block has a part in every shard, and state as it always had.
TEST(Program, OverSeveralRanksAPartOfABlockIsNotFrozenApart) {
  const ModelGraph whole = Chain(6, 64 * kElementAlignment);
  ModelGraph graph = whole;
  for (BlockShape& block : graph.blocks) FreezeFirst(40 * kElementAlignment, &block);
  PlanOptions options;
  options.world = 2;
  const Plan in_part = *MakePlan(graph, options), all = *MakePlan(whole, options);
  EXPECT_EQ(in_part.nvme_write_bytes, all.nvme_write_bytes);
  EXPECT_EQ(in_part.host_bytes(), all.host_bytes());
}

// A block that is frozen whole has its weights alone there too: state and gradients are those of the others.
TEST(Program, OverSeveralRanksAFrozenBlockHasItsWeightsAlone) {
  constexpr int kLayers = 12;
  constexpr int64_t kBase = 512 * kElementAlignment, kAdapters = 64 * kElementAlignment;
  ModelGraph graph = Chain(kLayers + 1, kBase);
  graph.blocks[BlockIndex(0)].elements = kAdapters;
  for (int b = 1; b <= kLayers; ++b) graph.blocks[BlockIndex(b)].trains = false;
  for (const int world : {2, 3}) {
    SCOPED_TRACE(world);
    PlanOptions options;
    options.world = world;
    options.bounds.placement = Placement::kCpu;
    options.host_memory_budget_bytes = MakePlan(graph, options)->least_host_memory_bytes;
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const BlockIndex b : graph.blocks.indices()) EXPECT_EQ(plan->blocks[b].frozen_alone, b.value() > 0);
    // Of a rank.
    const int64_t base = ShardElements(kBase, world) * kLayers, adapters = ShardElements(kAdapters, world);
    const int64_t inputs = kLayers * kMiB / 4;  // of stages, on their way
    EXPECT_LE(plan->nvme_write_bytes, adapters * (12 + 2) + inputs);
    EXPECT_LE(plan->nvme_read_bytes, 2 * base * 2 + adapters * (12 + 2 + 2) + inputs);
    for (const Slot& slot : plan->gradient_slots) EXPECT_LE(slot.bytes, adapters * 2);
    RunPasses(graph, *plan, MachineModel(), nullptr);
  }
}

TEST(Planner, TilesThatAreGivenAreCutWhereTheFrozenPartEnds) {
  ModelGraph graph = Chain(2, 8 * kElementAlignment);
  FreezeFirst(4 * kElementAlignment, &graph.blocks[BlockIndex(0)]);
  PlanOptions options;
  options.fixed_tiles.push_back({6 * kElementAlignment, 2 * kElementAlignment});
  options.fixed_tiles.push_back({8 * kElementAlignment});
  EXPECT_THAT(MakePlan(graph, options).status().message(), testing::HasSubstr("not cut at element 8192"));
  options.frozen_apart = false;
  EXPECT_TRUE(MakePlan(graph, options).ok());
  options.frozen_apart = true;
  options.fixed_tiles[BlockIndex(0)] = {4 * kElementAlignment, 4 * kElementAlignment};
  EXPECT_TRUE(MakePlan(graph, options).ok());
  graph.blocks[BlockIndex(0)].trained_from = kElementAlignment;
  EXPECT_THAT(MakePlan(graph, options).status().message(), testing::HasSubstr("not a multiple of 4096"));
}

// Where all updates wait for the next forward, it reads 10 bytes of a parameter whose weights stay in memory
// and writes 10; the weights' 2 go to the drive while backward computes, beside its first half.
TEST(Program, WhatStaysInMemoryIsWrittenWhileBackwardComputes) {
  ModelGraph graph = Chain(24, 3 << 20, 1e-9);
  const MachineModel machine;
  const auto elements = static_cast<double>(graph.elements());
  const double backward = 20 * elements / machine.read_bytes_per_s;
  for (StageShape& stage : graph.stages) stage.backward_seconds = backward / 24;
  PlanOptions options;
  options.update_order = UpdateOrder::kInNextForward;
  options.host_memory_budget_bytes = int64_t{4} << 30;
  options.bounds.placement = Placement::kCuda;
  for (const double of_state : {0.0, 1.0}) {
    options.bounds.state_fraction = of_state;
    const Plan plan = *MakePlan(graph, options);
    ProgramBuilder builder(graph, plan, 1);
    builder.Append(Pass::kTrain);
    const std::vector<Op> ops = builder.Append(Pass::kTrain);
    const OpId first = builder.next_id() - static_cast<OpId>(ops.size());
    const auto computes_at = [&](OpId id) {  // its position, if that is an operation which computes
      const Op* op = id >= first ? &ops[static_cast<size_t>(id - first)] : nullptr;
      return op != nullptr && op->lane == Lane::kCompute ? op->position : Position();
    };
    int64_t at_once = 0, later = 0;
    std::set<OpId> writes;
    for (size_t i = 0; i < ops.size(); ++i) {
      const Op& op = ops[i];
      if (IsTileWrite(op.kind)) {
        writes.insert(first + static_cast<OpId>(i));
        Position position;
        for (const OpId id : op.after) position = std::max(position, computes_at(id));
        EXPECT_TRUE(!position.valid() || position > Position(12)) << position;
        (position.valid() ? later : at_once) += op.bytes;
      }
      if (op.kind != OpKind::kCommit) continue;
      for (const OpId id : op.after) writes.erase(id);
    }
    EXPECT_TRUE(writes.empty()) << "the commit waits for every write of its step";
    EXPECT_EQ(at_once, of_state > 0 ? 0 : graph.elements() * 10);
    EXPECT_EQ(later, graph.elements() * (of_state > 0 ? 12 : 2));
    if (of_state > 0) continue;
    const double step = Simulate(graph, plan, machine, /*steps=*/4)->step_seconds;
    EXPECT_LT(step, backward + machine.drive_seconds(10 * elements, 10 * elements) * 1.02);
  }
  // What is updated in backward has to be committed first: nothing waits then.
  options.update_order = UpdateOrder::kInBackward;
  const Plan plan = *MakePlan(graph, options);
  for (const bool speculative_update : {true, false}) {
    ProgramBuilder builder(graph, plan, 1);
    builder.Append(Pass::kTrain, 0, /*speculative_update=*/false);
    const std::vector<Op> ops = builder.Append(Pass::kTrain, 0, speculative_update);
    const auto commit =
        std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::kCommit; });
    const auto backward_begins =
        std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::kBackward; });
    ASSERT_TRUE(commit != ops.end() && backward_begins != ops.end());
    EXPECT_EQ(commit < backward_begins, speculative_update);
  }
  // Where nothing else moves, forward has its part of the writes.
  options = PlanOptions();
  options.update_order = UpdateOrder::kInNextForward;
  options.host_memory_budget_bytes = int64_t{4} << 30;
  for (const double compute : {0.1, 0.5, 1.0, 2.0}) {
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = compute * 12 * elements / machine.write_bytes_per_s / 24 / 4;
      stage.backward_seconds = 3 * stage.forward_seconds;
    }
    const Plan everything = *MakePlan(graph, options);
    EXPECT_EQ(everything.nvme_read_bytes, 0);
    MachineModel fast_updates = machine;
    fast_updates.update_parameters_per_s = 20e9;
    const Prediction step = *Simulate(graph, everything, fast_updates, /*steps=*/6);
    EXPECT_LT(step.step_seconds, 1.05 * step.lower_bound_seconds) << compute;
  }
  // A single stage has nothing left to compute beside them.
  const ModelGraph single = Chain(1, 3 << 20);
  options.update_order = UpdateOrder::kInNextForward;
  const Plan whole = *MakePlan(single, options);
  ProgramBuilder builder(single, whole, 1);
  builder.Append(Pass::kTrain);
  for (const Op& op : builder.Append(Pass::kTrain)) EXPECT_NE(op.kind, OpKind::kWriteWeights);
}

// A previewed tile is read and updated twice and written once, in the order of the pass: for forward, then
// for the drive, before its block's backward; the commit waits for it.
TEST(Program, APreviewedTileIsUpdatedForForwardAndAgainBeforeBackward) {
  const ModelGraph graph = Chain(6, 1 << 20);
  for (const Placement placement : {Placement::kCpu, Placement::kCuda}) {
    SCOPED_TRACE(PlacementName(placement));
    PlanOptions options;
    options.update_order = UpdateOrder::kInNextForward;
    options.host_memory_budget_bytes = int64_t{1} << 30;
    options.tile_bytes = 1 << 20;
    options.bounds.placement = placement;
    options.bounds.state_fraction = 0;
    const Plan once = *MakePlan(graph, options);
    options.prefer = Prefer::kTime;
    options.bounds.previewed_share = 1;
    const Plan plan = *MakePlan(graph, options);
    EXPECT_EQ(once.previewed_share(), 0);
    // All but those of the last block, whose forward and backward are one.
    EXPECT_NEAR(plan.previewed_share(), 5.0 / 6, 1e-9);
    EXPECT_EQ(plan.least_host_memory_bytes, once.least_host_memory_bytes);
    EXPECT_EQ(plan.nvme_write_bytes, once.nvme_write_bytes);
    const int64_t again = 5 * graph.blocks.front().elements;
    EXPECT_GE(plan.clipped_read_bytes, once.clipped_read_bytes + again * 10);
    EXPECT_LE(plan.clipped_read_bytes, once.clipped_read_bytes + again * 12);
    ProgramBuilder builder(graph, plan, 1);
    builder.Append(Pass::kTrain);
    const std::vector<Op> ops = builder.Append(Pass::kTrain);
    const OpId first = builder.next_id() - static_cast<OpId>(ops.size());
    std::map<std::pair<BlockIndex, TileIndex>, std::vector<OpId>> updates;
    std::set<OpId> writes;
    std::map<BlockIndex, OpId> forward, backward;
    for (size_t i = 0; i < ops.size(); ++i) {
      const Op& op = ops[i];
      const OpId id = first + static_cast<OpId>(i);
      if (op.kind == OpKind::kUpdate) updates[{op.block, op.tile}].push_back(id);
      if (op.kind == OpKind::kForward) forward[op.block] = id;
      if (op.kind == OpKind::kBackward) backward[op.block] = id;
      if (IsTileWrite(op.kind)) writes.insert(id);
      if (op.kind != OpKind::kCommit) continue;
      for (const OpId before : op.after) writes.erase(before);
      EXPECT_TRUE(writes.empty()) << "a commit without all of its step";
    }
    for (const auto& [tile, made] : updates) {
      const BlockIndex block = tile.first;
      if (block == BlockIndex(5)) {
        EXPECT_EQ(made.size(), 1u);
        continue;
      }
      ASSERT_EQ(made.size(), 2u);
      EXPECT_LT(made[0], forward[block]);
      EXPECT_GT(made[1], forward[block]);
      EXPECT_LT(made[1], backward[block]);
      EXPECT_TRUE(ops[static_cast<size_t>(made[0] - first)].preview);
      EXPECT_FALSE(ops[static_cast<size_t>(made[1] - first)].preview);
    }
    EXPECT_EQ(updates.size(), static_cast<size_t>(plan.trained_tiles()));
    // A pass that updates in backward has nothing of it.
    options.update_order = UpdateOrder::kInBackward;
    const Plan early = *MakePlan(graph, options);
    EXPECT_GT(early.previewed_share(), 0);
    ProgramBuilder other(graph, early, 1);
    other.Append(Pass::kTrain);
    for (const Op& op : other.Append(Pass::kTrain)) EXPECT_FALSE(op.preview);
  }
}

// From the least budget with which two blocks fit to one that keeps everything.
TEST(Planner, InputsGoToTheDriveWhereTheBudgetAsksForIt) {
  ModelGraph graph = Chain(32, 1 << 18);
  for (StageShape& stage : graph.stages) {
    stage.input_bytes = 8 * kMiB;
    stage.input_scratch_bytes = 8 * kMiB;
  }
  PlanOptions options;
  options.host_memory_budget_bytes = int64_t{1} << 40;
  options.compares_policies = false;
  const Plan roomy = *MakePlan(graph, options);
  EXPECT_EQ(roomy.input_scratch_bytes, 0);
  EXPECT_LT(roomy.least_host_memory_bytes, 32 * 8 * kMiB / 4) << "a fraction of the inputs alone";
  int64_t moved = std::numeric_limits<int64_t>::max();
  for (int64_t budget = roomy.least_host_memory_bytes; budget < 400 * kMiB; budget += 48 * kMiB) {
    options.host_memory_budget_bytes = budget;
    const Plan plan = *MakePlan(graph, options);
    EXPECT_LE(plan.host_bytes(), budget);
    EXPECT_LE(plan.nvme_read_bytes + plan.nvme_write_bytes, moved);
    moved = plan.nvme_read_bytes + plan.nvme_write_bytes;
    RunPasses(graph, plan, MachineModel(), nullptr);
  }
}

TEST(Simulate, StepIsWithinFivePercentOfItsLowerBound) {
  const ModelGraph base = Chain(24, 3 << 20);
  double worst = 1;
  for (const double ratio : {0.1, 0.6, 1.0, 3.0}) {  // lower_bound_test.cc has more, beside sharper bounds
    ModelGraph graph = base;
    const double drive_seconds = 26.0 * static_cast<double>(graph.elements()) / 3e9;
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = ratio * drive_seconds / 24 / 4;
      stage.backward_seconds = ratio * drive_seconds / 24 * 3 / 4;
    }
    PlanOptions options;
    const int64_t least = LeastHostMemory(graph, options);
    for (const double share : {0.02, 0.15, 0.6}) {
      // `make soak` has every cell; here a share for each ratio, and all of them where drive and compute are
      // even.
      if (tests::Soak() == 1 && ratio != 1.0 && (share < 0.1 || share > 0.3)) continue;
      const int64_t state = graph.elements() * 14;
      options.host_memory_budget_bytes = least + static_cast<int64_t>(share * static_cast<double>(state));
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, MachineModel(), /*steps=*/6);
      ASSERT_TRUE(prediction.ok());
      EXPECT_LE(prediction->step_seconds, prediction->lower_bound_seconds * 1.05)
          << "compute to drive " << ratio << ", memory beyond the least " << share << " of the state";
      worst = std::max(worst, prediction->step_seconds / prediction->lower_bound_seconds);
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST(Executor, AnErrorEndsTheRunWithNothingInFlight) {
  const ModelGraph graph = Chain(4, 1 << 18);
  PlanOptions options;
  options.host_memory_budget_bytes = 16 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int fail_at = 0; fail_at < 50; fail_at += 7) {
    ProgramBuilder builder(graph, *plan, 1);
    SimLanes lanes(*plan, MachineModel());
    int started = 0;
    lanes.set_fault(
        [&](const Op&) { return started++ == fail_at ? absl::DataLossError("injected") : absl::OkStatus(); });
    Executor executor(&lanes);
    executor.Append(builder.Append(Pass::kTrain));
    executor.Append(builder.Append(Pass::kFlush));
    executor.OpenGate(1);
    EXPECT_EQ(executor.RunUntilIdle().code(), absl::StatusCode::kDataLoss) << fail_at;
    EXPECT_EQ(executor.in_flight(), 0u);
    EXPECT_EQ(executor.RunUntil(builder.next_id() - 1).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(Executor, AMachineThatStandsStillIsAnErrorNotAHang) {
  const ModelGraph graph = Chain(4, 1 << 18, 1e-3);
  PlanOptions options;
  options.host_memory_budget_bytes = 16 * kMiB;
  const absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const double rate : {0.0, std::numeric_limits<double>::quiet_NaN()}) {
    for (double MachineModel::*const of : {&MachineModel::read_bytes_per_s, &MachineModel::write_bytes_per_s,
                                           &MachineModel::verify_bytes_per_s}) {
      MachineModel machine;
      machine.*of = rate;
      EXPECT_EQ(Simulate(graph, *plan, machine).status().code(), absl::StatusCode::kInvalidArgument) << rate;
    }
  }
}

// Whatever the machine: what the compute lane did, and what it waited for, is all of its time.
TEST(Executor, BusyAndStalledIsAllTheTime) {
  const ModelGraph graph = Chain(12, 1 << 20, 1e-3);
  PlanOptions options;
  options.host_memory_budget_bytes = graph.elements() * 2 + 90 * kMiB;
  const absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const double bandwidth : {1e8, 1e9, 1e10}) {
    MachineModel machine;
    machine.read_bytes_per_s = machine.write_bytes_per_s = bandwidth;
    SimLanes lanes(*plan, machine);
    Executor executor(&lanes);
    double first = -1, last = 0, busy = 0, waited = 0, waited_until = 0;
    executor.set_observer([&](OpId, const Op& op, double start, double end) {
      if (op.lane != Lane::kCompute) return;
      if (first < 0) first = start;
      last = std::max(last, end);
      busy += end - start;
    });
    executor.set_stall_observer([&](Stall cause, double start, double end) {
      EXPECT_NE(cause, Stall::kNone);
      EXPECT_GE(start, waited_until) << "waits overlap";
      EXPECT_GT(end, start);
      waited += end - start;
      waited_until = end;
    });
    ProgramBuilder builder(graph, *plan, 1);
    OpId norm = -1;
    for (int step = 1; step <= 3; ++step) {
      executor.Append(builder.Append(Pass::kTrain));
      norm = builder.next_id() - 1;
      executor.OpenGate(step);
      ASSERT_TRUE(executor.RunUntil(norm).ok());
    }
    const Usage usage = executor.TakeUsage();
    const double stalled = std::accumulate(usage.stall_seconds.begin(), usage.stall_seconds.end(), 0.0);
    EXPECT_NEAR(stalled, waited, 1e-9);
    EXPECT_NEAR(busy + stalled, last, 1e-9 * last) << "from when there was something to compute, at 0";
    EXPECT_GT(first, 0) << "the first reads";
  }
}

TEST(Executor, StallsAreNamedByCause) {
  const ModelGraph graph = Chain(12, 1 << 20, 1e-5);
  PlanOptions options;
  options.host_memory_budget_bytes = graph.elements() * 2 + 90 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  MachineModel slow_reads;
  slow_reads.read_bytes_per_s = 1e8;
  absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, slow_reads);
  ASSERT_TRUE(prediction.ok());
  const auto& stalls = prediction->usage.stall_seconds;
  EXPECT_GT(stalls[static_cast<size_t>(Stall::kRead)], 0.8 * 2 * prediction->step_seconds);
  EXPECT_EQ(prediction->bound_by, "read");
  MachineModel slow_update;
  slow_update.update_parameters_per_s = 1e6;
  prediction = Simulate(graph, *plan, slow_update);
  ASSERT_TRUE(prediction.ok());
  EXPECT_GT(prediction->usage.stall_seconds[static_cast<size_t>(Stall::kUpdate)],
            0.8 * 2 * prediction->step_seconds);
  EXPECT_EQ(prediction->bound_by, "optimizer");
}

}  // namespace
}  // namespace penstock::tiering::program_test
