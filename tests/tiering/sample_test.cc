// What stands for more than itself: a tile for those that are like it, where a step's bytes are counted, and
// a share of a large plan's tiles, where its step is predicted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "tests/tiering/plans.h"
#include "tiering/program/program.h"
#include "tiering/program/step_ops.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::sample_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Bytes {
  std::array<int64_t, kLanes> of_lane{};
  int64_t clipped_read = 0;
  bool operator==(const Bytes&) const = default;
};

// Tile by tile, of the third step, and of one that follows another without updates in backward.
Bytes Counted(const ModelGraph& graph, const Plan& plan) {
  Bytes bytes;
  ProgramBuilder builder(graph, plan, 1);
  builder.Append(Pass::kTrain);
  builder.Append(Pass::kTrain);
  for (const Op& op : builder.Append(Pass::kTrain)) {
    if (!op.replay) bytes.of_lane[static_cast<size_t>(op.lane)] += op.bytes;
  }
  builder.Append(Pass::kTrain, 0, /*speculative_update=*/false);
  for (const Op& op : builder.Append(Pass::kTrain, 0, /*speculative_update=*/false))
    bytes.clipped_read += op.lane == Lane::kRead && !op.replay ? op.bytes : 0;
  return bytes;
}

Bytes CountedByKind(const ModelGraph& graph, const Plan& plan) {
  Bytes bytes;
  const CondensedPlan condensed(plan);
  ForStepOps(graph, condensed.plan(), /*speculative_update=*/true, [&](const Op& op) {
    bytes.of_lane[static_cast<size_t>(op.lane)] += op.bytes * condensed.times(op);
  });
  ForStepOps(graph, condensed.plan(), /*speculative_update=*/false, [&](const Op& op) {
    if (op.lane == Lane::kRead) bytes.clipped_read += op.bytes * condensed.times(op);
  });
  return bytes;
}

TEST(StepOps, ATileStandsForAllThatAreLikeItToTheByte) {
  int condensed = 0, elsewhere = 0, on_device = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ModelGraph graph = RandomModel(&random);
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.compares_policies = false;
    options.precision = RandomPrecision(&random);
    options.micro_batches = 1 + static_cast<int>(random() % 3);
    options.tile_bytes = 64 << 10;
    options.clips = random() % 4 != 0;
    options.commits_every_step = random() % 3 != 0;
    options.world = std::array{1, 1, 2, 3}[seed % 4];
    options.prefer = random() % 2 != 0 ? Prefer::kTime : Prefer::kWear;
    if (options.world == 1 && random() % 3 == 0) {
      options.frozen_elsewhere = true;
      for (BlockShape& block : graph.blocks)
        block.elsewhere_bytes = (block.trains ? block.trained_from : block.elements) * 2;
    } else if (random() % 3 == 0) {
      options.device.has_own_memory = true;
    }
    options.host_memory_budget_bytes = int64_t{1} << 40;
    const absl::StatusOr<Plan> roomy = MakePlan(graph, options);
    ASSERT_TRUE(roomy.ok()) << roomy.status();
    options.host_memory_budget_bytes =
        roomy->least_host_memory_bytes +
        static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 20));
    absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Bytes bytes = Counted(graph, *plan);
    EXPECT_EQ(CountedByKind(graph, *plan), bytes);
    EXPECT_EQ(plan->nvme_read_bytes, bytes.of_lane[static_cast<size_t>(Lane::kRead)]);
    EXPECT_EQ(plan->nvme_write_bytes, bytes.of_lane[static_cast<size_t>(Lane::kWrite)]);
    EXPECT_EQ(plan->clipped_read_bytes, bytes.clipped_read);
    // Any tile may be updated in backward, whatever its neighbours are.
    if (plan->speculates) {
      for (BlockPlan& block : plan->blocks) {
        for (const TileIndex t : block.tiles.indices())
          block.speculative_update[t] = random() % 2 != 0 && block.updates(t) ? 1 : 0;
      }
      EXPECT_EQ(CountedByKind(graph, *plan), Counted(graph, *plan));
    }
    condensed += CondensedPlan(*plan).plan().tile_count() < plan->tile_count() / 2 ? 1 : 0;
    elsewhere += options.frozen_elsewhere ? 1 : 0;
    on_device += options.device.has_own_memory ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(condensed, 25);
  EXPECT_GT(elsewhere, 5);
  EXPECT_GT(on_device, 5);
}

// Layers of many tiles, between an embedding and a head of as many.
ModelGraph Deep(int layers, int64_t elements, double forward) {
  ModelGraph graph = Chain(layers + 2, elements, forward);
  for (const int end : {0, layers + 1}) {
    graph.blocks[BlockIndex(end)].elements = elements * 5 / 4;
    graph.stages[StageIndex(end)].forward_seconds = forward / 4;
    graph.stages[StageIndex(end)].backward_seconds = forward;
  }
  return graph;
}

struct Case {
  const char* name;
  int layers;
  int64_t elements;     // of a layer
  double compute;       // to drive
  double share;         // of everything, beyond the least memory
  bool frozen = false;  // but for a hundredth of each layer
  int micro_batches = 1;
};

class Sample : public testing::TestWithParam<Case> {};

// The whole step is simulated, tile by tile, and what a few tiles of each block tell is held against it.
TEST_P(Sample, TellsTheStepOfTheWholePlan) {
  const Case& of = GetParam();
  ModelGraph graph = Deep(of.layers, of.elements, 1);
  PlanOptions options;
  options.micro_batches = of.micro_batches;
  options.machine.update_workers = 2;
  if (of.frozen) {
    for (BlockShape& block : graph.blocks) FreezeFirst(block.elements / 100 * 99, &block);
    options.frozen_elsewhere = true;
    for (BlockShape& block : graph.blocks) block.elsewhere_bytes = block.trained_from * 2;
  }
  const auto elements = static_cast<double>(graph.elements());
  const double drive_seconds = (of.frozen ? 4 : 26) * elements / options.machine.read_bytes_per_s;
  for (StageShape& stage : graph.stages) {
    stage.forward_seconds *= of.compute * drive_seconds / (of.layers * 4 * of.micro_batches);
    stage.backward_seconds *= of.compute * drive_seconds / (of.layers * 4 * of.micro_batches);
  }
  options.host_memory_budget_bytes = int64_t{1} << 50;
  const absl::StatusOr<Plan> ample = MakePlan(graph, options);
  ASSERT_TRUE(ample.ok()) << ample.status();
  options.host_memory_budget_bytes =
      ample->least_host_memory_bytes + static_cast<int64_t>(of.share * 12 * elements);
  const absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_GT(plan->tile_count(), kMostTilesSimulated);
  Plan clipped = *plan;
  for (BlockPlan& block : clipped.blocks)
    std::fill(block.speculative_update.begin(), block.speculative_update.end(), 0);
  for (const Plan& each : {*plan, clipped}) {
    const absl::StatusOr<Prediction> whole = Simulate(graph, each, options.machine);
    const absl::StatusOr<Prediction> told = PredictStep(graph, each, options.machine);
    ASSERT_TRUE(whole.ok() && told.ok()) << whole.status() << told.status();
    std::printf("%s: %d tiles, %.1f s, told %.1f s, %.3f of it; lower bound %.1f s\n", of.name,
                static_cast<int>(each.tile_count()), whole->step_seconds, told->step_seconds,
                told->step_seconds / whole->step_seconds, whole->lower_bound_seconds);
    EXPECT_NEAR(told->step_seconds / whole->step_seconds, 1, 0.02);
    EXPECT_NEAR(told->lower_bound_seconds / whole->lower_bound_seconds, 1, 1e-9);
    EXPECT_NEAR(told->read_seconds / whole->read_seconds, 1, 1e-9);
    EXPECT_NEAR(told->write_seconds / whole->write_seconds, 1, 1e-9);
    EXPECT_NEAR(told->compute_seconds / whole->compute_seconds, 1, 1e-9);
    EXPECT_NEAR(told->update_seconds / whole->update_seconds, 1, 1e-9);
    EXPECT_EQ(told->bound_by, whole->bound_by);
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, Sample,
                         testing::Values(Case{"drive_bound_at_the_least", 12, 200 * kMiB, 0.3, 0},
                                         Case{"drive_bound_with_some_memory", 40, 128 * kMiB, 0.3, 0.1},
                                         Case{"drive_bound_with_half_of_it", 40, 128 * kMiB, 0.5, 0.5},
                                         Case{"even", 40, 128 * kMiB, 1, 0.1},
                                         Case{"even_with_half_of_it", 40, 128 * kMiB, 1, 0.5},
                                         Case{"compute_bound", 40, 128 * kMiB, 3, 0.1},
                                         Case{"adapters", 40, 128 * kMiB, 0.7, 0.02, true},
                                         Case{"micro_batches", 40, 128 * kMiB, 0.5, 0.05, false, 4}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace penstock::tiering::sample_test
