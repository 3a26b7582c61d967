// A step in virtual time against its lower bound, over compute to drive from 0.1 to 10 and budgets from the
// least to one that keeps everything, in every precision, for a chain of blocks and for a GPT that uses its
// first block at both ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/soak.h"
#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::lower_bound_test {
namespace {

struct Case {
  const char* name;
  Precision precision;
  double bytes;  // that an element moves in a step when all of it streams
  bool tied;
};

// The busiest part, or the drive with what it cannot do beside anything: nothing can be updated before the
// first gradient of backward is final, when what forward updates has been, so it can but fill the ring; and
// the first tile on its way in, the last on its way out, and the commit.
double LowerBoundOf(const ModelGraph& graph, const Plan& plan, const Prediction& prediction,
                    const MachineModel& machine) {
  const auto tile = static_cast<double>(plan.tile_state_bytes);
  double turn = 0;
  PerBlock<int> uses(graph.blocks.size(), 0);
  for (const StageShape& stage : graph.stages) ++uses[stage.block];
  for (StageIndex s = graph.stages.end_index() - 1; s.valid(); --s) {
    turn += graph.stages[s].backward_seconds;
    if (--uses[graph.stages[s].block] == 0) break;
  }
  const double filled = tile * plan.tile_ring / machine.read_bytes_per_s;
  const double ends = tile / machine.read_bytes_per_s + tile / machine.write_bytes_per_s +
                      static_cast<double>(plan.tile_elements) / machine.update_parameters_per_s +
                      2 * machine.io_latency_seconds + machine.commit_seconds;
  return std::max(prediction.lower_bound_seconds,
                  prediction.drive_seconds + std::max(0.0, turn - filled) + ends);
}

class StepAndLowerBound : public testing::TestWithParam<Case> {};

TEST_P(StepAndLowerBound, AreWithinFivePercent) {
  const Case& of = GetParam();
  ModelGraph graph = of.tied ? Tied(23, 3 << 20, 1 << 20) : Chain(24, 3 << 20);
  const auto elements = static_cast<double>(graph.elements());
  PlanOptions options;
  options.precision = of.precision;
  options.machine.update_workers = 2;  // updates bound nothing
  const MachineModel& machine = options.machine;
  const double drive_seconds = of.bytes * elements / machine.read_bytes_per_s;
  double worst = 1, worst_clipped = 1, worst_previewed = 1;
  // The ends and the middle of the grid for a chain in bf16, and its middle where the bytes or the last tile
  // alone differ; the whole of it, in every precision, in `make soak`.
  const bool whole = tests::Soak() > 1, more = of.bytes == 26 && !of.tied;
  const std::vector<double> ratios = whole  ? std::vector{0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 10.0}
                                     : more ? std::vector{0.1, 1.0, 10.0}
                                            : std::vector{1.0};
  const std::vector<double> shares = whole  ? std::vector{0.0, 0.05, 0.15, 0.6, 1.2}
                                     : more ? std::vector{0.0, 0.05, 1.2}
                                            : std::vector{0.0, 0.15};
  for (const double ratio : ratios) {
    const double stage_seconds = ratio * drive_seconds / static_cast<double>(graph.stages.size());
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = stage_seconds / 4;
      stage.backward_seconds = stage_seconds * 3 / 4;
    }
    const auto least = static_cast<double>(LeastHostMemory(graph, options));
    constexpr int64_t kSample = 1 << 20;
    const double everything = elements * static_cast<double>(of.precision.UnpaddedBytes(kSample)) / kSample +
                              elements * of.precision.gradient_bytes;
    for (const double share : shares) {
      SCOPED_TRACE(testing::Message() << "compute to drive " << ratio << ", memory beyond the least " << share
                                      << " of everything");
      options.host_memory_budget_bytes = static_cast<int64_t>(least + share * everything);
      const absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const absl::StatusOr<Prediction> step = Simulate(graph, *plan, machine, /*steps=*/6);
      ASSERT_TRUE(step.ok());
      const double bound = LowerBoundOf(graph, *plan, *step, machine);
      EXPECT_LE(step->step_seconds, bound * 1.05);
      EXPECT_LE(step->step_seconds, step->lower_bound_seconds * 1.09) << "the busiest part alone";
      worst = std::max(worst, step->step_seconds / bound);
      // A bound of needless bytes would be none: all of it streams, spilled gradients too, at the most.
      const auto moved = static_cast<double>(plan->nvme_read_bytes + plan->nvme_write_bytes);
      EXPECT_LE(moved, (of.bytes + 2 * of.precision.gradient_bytes) * elements * 1.01);
      // While every step is clipped, most of what the drive moves waits for a quarter of the compute.
      const absl::StatusOr<Prediction> predicted = Predict(graph, *plan, machine);
      ASSERT_TRUE(predicted.ok());
      EXPECT_LE(predicted->clipped_step_seconds, bound * 1.65);
      worst_clipped = std::max(worst_clipped, predicted->clipped_step_seconds / bound);
      if (ratio < 0.5 || ratio > 1.2 || share > 0) continue;
      // Unless reading some of it twice is worth it.
      options.prefer = Prefer::kTime;
      const absl::StatusOr<Plan> again = MakePlan(graph, options);
      options.prefer = Prefer::kWear;
      ASSERT_TRUE(again.ok()) << again.status();
      const absl::StatusOr<Prediction> previewed = Predict(graph, *again, machine);
      ASSERT_TRUE(previewed.ok());
      EXPECT_LE(previewed->step_seconds, predicted->step_seconds * 1.006);
      EXPECT_LE(previewed->clipped_step_seconds, predicted->clipped_step_seconds * 1.001);
      EXPECT_LE(previewed->clipped_step_seconds, bound * 1.4);
      worst_previewed = std::max(worst_previewed, previewed->clipped_step_seconds / bound);
    }
  }
  RecordProperty("worst", std::to_string(worst));
  RecordProperty("worst_clipped", std::to_string(worst_clipped));
  RecordProperty("worst_previewed", std::to_string(worst_previewed));
  std::printf("%s: %.4f of the lower bound at most, %.3f while every step is clipped, %.3f with previews\n",
              of.name, worst, worst_clipped, worst_previewed);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, StepAndLowerBound,
    testing::Values(
        Case{"bf16_chain", Precision::Bf16(), 26, false}, Case{"bf16_tied", Precision::Bf16(), 26, true},
        Case{"fp16_chain", Precision::Fp16(), 30, false}, Case{"fp16_tied", Precision::Fp16(), 30, true},
        Case{"fp32_chain", Precision::Fp32(), 28, false}, Case{"fp32_tied", Precision::Fp32(), 28, true},
        Case{"moments_of_8_bit_chain", Precision::Bf16().WithMoments(1), 14, false},
        Case{"moments_of_8_bit_tied", Precision::Bf16().WithMoments(1), 14, true}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace penstock::tiering::lower_bound_test
