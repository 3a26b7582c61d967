// Plans of models with very many blocks and tiles. (How long planning takes: tests/bars/planner_bars.cc.)
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/tiering/plans.h"
#include "tiering/advice/what_if.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::large_models_test {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(Planner, AThousandBlocksArePlanned) {
  PlanOptions options;
  options.host_memory_budget_bytes = 2 * kGiB;
  const absl::StatusOr<Plan> plan = MakePlan(Chain(1000, 3 << 18, 1e-3), options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LE(plan->host_bytes(), options.host_memory_budget_bytes);
}

TEST(Planner, SeventyBillionParametersArePlannedAndPredicted) {
  const ModelGraph graph = Llama70B();
  PlanOptions options;
  options.host_memory_budget_bytes = 10 * kGiB;
  const absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_GT(plan->tile_count(), 60'000);
  EXPECT_LE(plan->host_bytes(), options.host_memory_budget_bytes);
  const absl::StatusOr<Prediction> prediction = Predict(graph, *plan, options.machine);
  ASSERT_TRUE(prediction.ok()) << prediction.status();
  EXPECT_GT(prediction->step_seconds, 0);
  for (const WhatIf& each : AskWhatIf(graph, options, *prediction, 1))
    EXPECT_EQ(each.error, "") << each.change;
}

}  // namespace
}  // namespace penstock::tiering::large_models_test
