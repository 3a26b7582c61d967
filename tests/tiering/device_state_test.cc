// Which blocks live with their state on a device with its own memory: within its memory, as the ratio says,
// and where nobody says, as makes a step the shortest in virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/tiering/meaning_lanes.h"
#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::device_state_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Without a drive, or with one that only has what is persisted.
PlanOptions Options(bool on_nvme) {
  PlanOptions options;
  options.on_nvme = on_nvme;
  options.commits_every_step = false;
  options.compares_policies = false;
  options.device.has_own_memory = true;
  return options;
}

double Seconds(const ModelGraph& graph, const Plan& plan, const MachineModel& machine) {
  const absl::StatusOr<Prediction> prediction = Simulate(graph, plan, machine, 4);
  EXPECT_TRUE(prediction.ok()) << prediction.status();
  return prediction->step_seconds;
}

double Share(const ModelGraph& graph, const Plan& plan) {
  return static_cast<double>(plan.device.resident_elements) / static_cast<double>(graph.elements());
}

TEST(DeviceState, TheRatioIsTheProcessorsLeastShareInWholeBlocksThatFit) {
  const ModelGraph graph = Chain(10, 1 << 20);
  for (const bool on_nvme : {false, true}) {
    PlanOptions options = Options(on_nvme);
    for (const double ratio : {0.0, 0.25, 0.5, 0.99, 1.0}) {
      options.bounds.processor_share = ratio;
      options.device.budget_bytes = 0;
      const Plan plan = *MakePlan(graph, options);
      const double whole = std::floor((1 - ratio) * 10) / 10;
      EXPECT_DOUBLE_EQ(Share(graph, plan), whole) << ratio;
      // The first in the order of their use.
      for (int b = 0; b < 10; ++b) EXPECT_EQ(plan.on_device(BlockIndex(b)), b < whole * 10);
      EXPECT_THAT(plan.reasons.back(), testing::HasSubstr("ratio"));
      // Half of it fits.
      options.device.budget_bytes = plan.device.least_bytes + static_cast<int64_t>(whole * 5 * 14) * kMiB;
      const Plan half = *MakePlan(graph, options);
      EXPECT_LE(half.device.bytes(), options.device.budget_bytes);
      EXPECT_LE(Share(graph, half), whole);
      EXPECT_EQ(Share(graph, half) > 0, whole > 0.2) << ratio;
      RunPasses(graph, half, MachineModel(), nullptr);
    }
  }
}

// With everything there, copies are the partial sums of squares, host memory has no weights and no state, the
// drive is idle, and compute never waits but for the first update.
TEST(DeviceState, EverythingOnTheDeviceNeedsNothingElse) {
  for (const ModelGraph& graph : {Chain(12, 1 << 20), Tied(12, 1 << 20, 1 << 21)}) {
    for (const Precision& precision :
         {Precision::Bf16(), Precision::Fp32(), Precision::Fp16().WithMoments(1), kStateless}) {
      for (const bool on_nvme : {false, true}) {
        for (const int micro_batches : {1, 2}) {
          PlanOptions options = Options(on_nvme);
          options.bounds.processor_share = 0;
          options.precision = precision;
          options.micro_batches = micro_batches;
          const Plan plan = *MakePlan(graph, options);
          ASSERT_EQ(Share(graph, plan), 1);
          int64_t sums = 0;
          for (const BlockShape& block : graph.blocks) sums += PartialSumBytes(block.elements);
          EXPECT_EQ(plan.device.h2d_bytes, 0);
          EXPECT_EQ(plan.device.d2h_bytes, sums);
          EXPECT_EQ(plan.nvme_read_bytes + plan.nvme_write_bytes, 0);
          EXPECT_TRUE(on_nvme || plan.slot_bytes < kMiB) << plan.ledger().Listed();
          const absl::StatusOr<Prediction> prediction = Simulate(graph, plan, options.machine, 4);
          ASSERT_TRUE(prediction.ok());
          EXPECT_LE(prediction->step_seconds, prediction->lower_bound_seconds * 1.05);
          EXPECT_EQ(prediction->bound_by, "compute");
        }
      }
    }
  }
}

// Over several ranks whose devices exchange with each other each has its part there, and the drive is idle
// too.
TEST(DeviceState, OfSeveralRanksEachHasItsPart) {
  for (const ModelGraph& graph : {Chain(12, 1 << 20), Tied(12, 1 << 20, 1 << 21)}) {
    for (const bool on_nvme : {false, true}) {
      for (const int micro_batches : {1, 2}) {
        PlanOptions options = Options(on_nvme);
        options.device.collectives = true;
        options.world = 3;
        options.bounds.processor_share = 0;
        options.micro_batches = micro_batches;
        const Plan plan = *MakePlan(graph, options);
        EXPECT_EQ(plan.on_device_share(), 1);
        int64_t sums = 0;
        for (const BlockPlan& block : plan.blocks) sums += PartialSumBytes(block.elements);
        EXPECT_EQ(plan.device.h2d_bytes, 0);
        EXPECT_EQ(plan.device.d2h_bytes, sums);
        EXPECT_EQ(plan.nvme_read_bytes + plan.nvme_write_bytes, 0);
        RunPasses(graph, plan, options.machine, nullptr);
        options.device.collectives = false;
        EXPECT_EQ(MakePlan(graph, options)->on_device_share(), 0) << "host memory is where they meet";
      }
    }
  }
}

// Gathers and reductions are beside compute, also where they take half as long.
TEST(DeviceState, OfSeveralRanksExchangesAreBesideCompute) {
  const ModelGraph graph = Chain(48, 1 << 20);
  for (const int micro_batches : {1, 2}) {
    PlanOptions options = Options(/*on_nvme=*/false);
    options.device.collectives = true;
    options.world = 2;
    options.bounds.processor_share = 0;
    options.micro_batches = micro_batches;
    double compute = 0;
    for (const StageShape& stage : graph.stages)
      compute += micro_batches * (stage.forward_seconds + stage.backward_seconds);
    const double received = static_cast<double>(graph.elements()) / 2 * (2 + (micro_batches > 1 ? 4 : 2));
    options.machine.network_bytes_per_s = received / (compute / 2);
    const Plan plan = *MakePlan(graph, options);
    const absl::StatusOr<Prediction> prediction = Simulate(graph, plan, options.machine, 4);
    ASSERT_TRUE(prediction.ok());
    EXPECT_LE(prediction->step_seconds, prediction->lower_bound_seconds * 1.1) << prediction->bound_by;
  }
}

// The same where every step is durable: all of it goes out and to the drive, and nothing comes from there.
TEST(DeviceState, WhereEveryStepIsDurableTheDriveIsOnlyWritten) {
  const ModelGraph graph = Chain(12, 1 << 20);
  PlanOptions options = Options(/*on_nvme=*/true);
  options.commits_every_step = true;
  options.bounds.processor_share = 0;
  const Plan plan = *MakePlan(graph, options);
  ASSERT_EQ(Share(graph, plan), 1);
  int64_t sums = 0;
  for (const BlockShape& block : graph.blocks) sums += PartialSumBytes(block.elements);
  EXPECT_EQ(plan.device.h2d_bytes, 0);
  EXPECT_EQ(plan.device.d2h_bytes, sums + 12 * graph.elements());
  EXPECT_EQ(plan.nvme_read_bytes, 0);
  EXPECT_EQ(plan.nvme_write_bytes, 12 * graph.elements());
  RunPasses(graph, plan, options.machine, nullptr);
  // With a drive that writes in a tenth of what computing takes, and one that takes ten times that.
  for (const double rate : {10.0, 0.1}) {
    double compute = 0;
    for (const StageShape& stage : graph.stages) compute += stage.forward_seconds + stage.backward_seconds;
    options.machine.write_bytes_per_s = 12 * static_cast<double>(graph.elements()) / compute * rate;
    const absl::StatusOr<Prediction> prediction = Simulate(graph, plan, options.machine, 4);
    ASSERT_TRUE(prediction.ok());
    EXPECT_LE(prediction->step_seconds, prediction->lower_bound_seconds * 1.05) << rate;
    EXPECT_EQ(prediction->bound_by, rate > 1 ? "compute" : "write");
  }
}

// Whatever the machine and the memory: no ratio gives a step that is shorter by more than 2% than the plan's
// own choice.
TEST(DeviceState, TheChoiceIsAsGoodAsEveryRatio) {
  const ModelGraph base = Chain(12, 1 << 20);
  const auto elements = static_cast<double>(base.elements());
  double gain = 1;
  int shared = 0;
  for (const bool on_nvme : {false, true}) {
    for (const double update : {0.05, 0.5, 2.0}) {  // seconds of the processor's updates to those of compute
      for (const double copy : {0.05, 0.5}) {       // and of copies in
        for (const int64_t blocks : {0, 2, 6, 12}) {  // that fit beside the least
          SCOPED_TRACE(testing::Message() << (on_nvme ? "drive" : "memory") << ", updates " << update
                                          << ", copies " << copy << ", " << blocks << " blocks");
          constexpr double kCompute = 12 * 4e-3;
          PlanOptions options = Options(on_nvme);
          options.machine.update_parameters_per_s = elements / (update * kCompute);
          options.machine.h2d_bytes_per_s = options.machine.d2h_bytes_per_s =
              4 * elements / (copy * kCompute);
          options.device.budget_bytes = 1;
          const std::string refusal(MakePlan(base, options).status().message()),
              words = "least that works is ";
          options.device.budget_bytes =
              std::stoll(refusal.substr(refusal.find(words) + words.size())) + blocks * 15 * kMiB;
          if (on_nvme) options.host_memory_budget_bytes = 160 * kMiB;
          const absl::StatusOr<Plan> chosen = MakePlan(base, options);
          ASSERT_TRUE(chosen.ok()) << chosen.status();
          const double seconds = Seconds(base, *chosen, options.machine);
          double best = seconds, none = 0;
          for (int twelfths = 0; twelfths <= 12; twelfths += 2) {
            options.bounds.processor_share = twelfths / 12.0;
            const absl::StatusOr<Plan> fixed = MakePlan(base, options);
            ASSERT_TRUE(fixed.ok()) << fixed.status();
            EXPECT_LE(fixed->device.bytes(), options.device.budget_bytes);
            none = Seconds(base, *fixed, options.machine);
            best = std::min(best, none);
          }
          EXPECT_LE(seconds, best * 1.02);
          gain = std::max(gain, none / seconds);
          const double share = Share(base, *chosen);
          shared += share > 0 && share < 1 ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(gain, 1.5) << "of updates there over updates by the processor alone";
  EXPECT_GT(shared, 5);
}

}  // namespace
}  // namespace penstock::tiering::device_state_test
