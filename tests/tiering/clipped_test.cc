// A step while every step is clipped. Nothing can be updated before the norm is known, when backward is over:
// so it has a lower bound of its own, which two presets are held against, and which previews come below.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::clipped_test {
namespace {

// A GPT over bytes, of which a step takes so many seconds of compute.
ModelGraph Gpt(int layers, int64_t width, int64_t tokens, double compute_seconds) {
  const int64_t layer = AlignUp(12 * width * width + 13 * width, kElementAlignment);
  const int64_t embedding = AlignUp((256 + 1024 + 2) * width, kElementAlignment);
  ModelGraph graph = Tied(layers, layer, embedding);
  const int64_t input = tokens * width * 2;
  const double forward = compute_seconds / 4 / (layers + 0.5);
  for (StageShape& stage : graph.stages) {
    const bool layers_own = stage.block != BlockIndex(0);
    if (stage.input_bytes > 0) stage.input_bytes = stage.input_scratch_bytes = input;
    stage.forward_peak_bytes = 8 * input;
    stage.backward_peak_bytes = 40 * input;
    stage.forward_seconds = layers_own ? forward : forward / 4;
    stage.backward_seconds = 3 * stage.forward_seconds;
  }
  return graph;
}

// 2 vCPUs, and a drive that moves 2.8 GB/s of reads and writes together.
MachineModel Machine() {
  MachineModel machine;
  machine.read_bytes_per_s = machine.write_bytes_per_s = machine.mixed_bytes_per_s = 2.8e9;
  machine.io_latency_seconds = 840e-6;
  machine.commit_seconds = 400e-6;
  machine.update_parameters_per_s = 1.2e9;
  machine.verify_bytes_per_s = 30e9;
  machine.cores = machine.compute_threads = 2;
  return machine;
}

// ClippedLowerBound, if all of the arena held weights and state.
double LowerBoundOfArena(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  double forward = 0, backward = 0;
  for (const StageShape& stage : graph.stages) {
    forward += stage.forward_seconds;
    backward += stage.backward_seconds;
  }
  const double moved = static_cast<double>(plan.precision.UnpaddedBytes(graph.elements()) - plan.arena_bytes);
  return std::max(forward, machine.drive_seconds(moved, moved)) + backward;
}

struct Case {
  const char* name;
  int layers;
  int64_t width, tokens, budget;
  double compute_seconds;
};

struct Step {
  Plan plan;
  Prediction unclipped, clipped;
};

Step MakeStep(const ModelGraph& graph, const Case& of, Prefer prefer) {
  PlanOptions options;
  options.machine = Machine();
  options.prefer = prefer;
  options.host_memory_budget_bytes = of.budget;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  Step step{*std::move(plan), {}, {}};
  step.unclipped = *Simulate(graph, step.plan, options.machine, /*steps=*/6);
  Plan clipped = step.plan;
  for (BlockPlan& block : clipped.blocks)
    std::fill(block.speculative_update.begin(), block.speculative_update.end(), 0);
  step.clipped = *Simulate(graph, clipped, options.machine, /*steps=*/6);
  const auto elements = static_cast<double>(graph.elements());
  std::printf(
      "%s, %s: %.3f s, %.3f of its lower bound; clipped %.3f s, %.3f of that and %.3f of its own; %.1f and "
      "%.1f bytes a parameter; %.0f%% previewed; waits: read %.3f, update %.3f, write %.3f, host %.3f\n",
      of.name, prefer == Prefer::kTime ? "time" : "wear", step.unclipped.step_seconds,
      step.unclipped.step_seconds / step.unclipped.lower_bound_seconds, step.clipped.step_seconds,
      step.clipped.step_seconds / step.unclipped.lower_bound_seconds,
      step.clipped.step_seconds / step.clipped.lower_bound_seconds,
      static_cast<double>(step.plan.nvme_read_bytes + step.plan.nvme_write_bytes) / elements,
      static_cast<double>(step.plan.clipped_read_bytes + step.plan.nvme_write_bytes) / elements,
      100 * step.plan.previewed_share(), step.clipped.usage.stall_seconds[0] / 6,
      step.clipped.usage.stall_seconds[2] / 6, step.clipped.usage.stall_seconds[1] / 6,
      step.clipped.usage.stall_seconds[7] / 6);
  return step;
}

// The plan of a case is made once for all tests.
const Step& StepOf(const Case& of, Prefer prefer) {
  static auto& steps = *new std::map<std::pair<std::string, Prefer>, Step>;
  const auto [at, made] = steps.try_emplace({of.name, prefer});
  if (made) at->second = MakeStep(Gpt(of.layers, of.width, of.tokens, of.compute_seconds), of, prefer);
  return at->second;
}

class ClippedStep : public testing::TestWithParam<Case> {};

// What is read once costs a step that no order of the same bytes brings to 1.25, and little more than that.
TEST_P(ClippedStep, IsNearWhatItsMemoryAllows) {
  const Case& of = GetParam();
  const ModelGraph graph = Gpt(of.layers, of.width, of.tokens, of.compute_seconds);
  const Step& step = StepOf(of, Prefer::kWear);
  const double bound = ClippedLowerBound(graph, step.plan, Machine());
  EXPECT_GE(step.clipped.step_seconds, bound);
  EXPECT_LE(step.clipped.step_seconds, 1.05 * bound);
  EXPECT_GT(LowerBoundOfArena(graph, step.plan, Machine()), 1.25 * step.unclipped.lower_bound_seconds);
  EXPECT_EQ(step.plan.previewed_share(), 0);
  // What plan and report say of it.
  const Prediction prediction = *Predict(graph, step.plan, Machine());
  EXPECT_DOUBLE_EQ(prediction.clipped_lower_bound_seconds, bound);
  EXPECT_GE(prediction.clipped_step_seconds, bound);
  EXPECT_LE(prediction.clipped_step_seconds, 1.05 * bound);
}

TEST_P(ClippedStep, ItsBoundSaysNothingWhereItDoesNotApply) {
  const Case& of = GetParam();
  const ModelGraph graph = Gpt(of.layers, of.width, of.tokens, of.compute_seconds);
  Plan plan = StepOf(of, Prefer::kWear).plan;
  EXPECT_GT(ClippedLowerBound(graph, plan, Machine()), 0);
  plan.clips = false;
  EXPECT_EQ(ClippedLowerBound(graph, plan, Machine()), 0);
  const Plan& previewed = StepOf(of, Prefer::kTime).plan;  // its previewed tiles are read twice
  ASSERT_GT(previewed.previewed_share(), 0);
  EXPECT_EQ(ClippedLowerBound(graph, previewed, Machine()), 0);
}

TEST_P(ClippedStep, IsShorterWhereTimeIsPreferredAndNothingElseChanges) {
  const Case& of = GetParam();
  const Step &wear = StepOf(of, Prefer::kWear), &time = StepOf(of, Prefer::kTime);
  EXPECT_LE(time.clipped.step_seconds, 1.08 * time.clipped.lower_bound_seconds);
  EXPECT_LE(time.clipped.step_seconds, 0.92 * wear.clipped.step_seconds);
  EXPECT_LE(time.unclipped.step_seconds, 1.005 * wear.unclipped.step_seconds);
  EXPECT_EQ(time.plan.nvme_write_bytes, wear.plan.nvme_write_bytes);
  EXPECT_EQ(time.plan.nvme_read_bytes, wear.plan.nvme_read_bytes);
  EXPECT_EQ(time.plan.least_host_memory_bytes, wear.plan.least_host_memory_bytes);
  EXPECT_LE(time.plan.host_bytes(), of.budget);
}

INSTANTIATE_TEST_SUITE_P(Presets, ClippedStep,
                         testing::Values(Case{"gpt_125m", 12, 768, 128, 300 << 20, 0.7},
                                         Case{"gpt_350m", 24, 1024, 256, int64_t{1} << 30, 2.6}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace penstock::tiering::clipped_test
