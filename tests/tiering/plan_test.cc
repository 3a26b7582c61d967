// What users say about placement, the tiers that a plan is told by, what-ifs, and the calibration of a
// machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/tiering/plans.h"
#include "tiering/advice/tier_table.h"
#include "tiering/advice/what_if.h"
#include "tiering/program/program.h"
#include "tiering/simulate/calibrate.h"
#include "tiering/simulate/run_prediction.h"
#include "tiering/simulate/sim_lanes.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::plan_test {
namespace {

using testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(Placement, CpuKeepsNothingCudaAllWeightsConstWhatItMayAndAutoIsTheFastest) {
  const ModelGraph graph = Chain(16, 1 << 20, 1e-4);
  PlanOptions options;
  options.host_memory_budget_bytes = 200 * kMiB;
  auto plan = [&](Placement placement) {
    options.bounds.placement = placement;
    absl::StatusOr<Plan> made = MakePlan(graph, options);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  };
  auto seconds = [&](const Plan& p) { return Simulate(graph, p, options.machine)->step_seconds; };
  const Plan chosen = plan(Placement::kAuto);
  EXPECT_THAT(chosen.reasons, testing::Contains(HasSubstr("placement auto: ")));

  const Plan streams = plan(Placement::kCpu);
  EXPECT_EQ(ResidentElements(streams), 0);
  EXPECT_EQ(ResidentTiles(streams), 0);

  const Plan keeps = plan(Placement::kCuda);
  // What has no place of its own has one of the shared ones for good.
  EXPECT_EQ(ResidentElements(keeps), (16 - keeps.weight_classes.front().slots) * int64_t{1 << 20});
  ProgramBuilder builder(graph, keeps, 1);
  builder.Append(Pass::kTrain);
  for (const Op& op : builder.Append(Pass::kTrain)) {
    EXPECT_TRUE(op.kind != OpKind::kReadWeights || op.replay);
  }

  options.bounds.const_bytes = 10 * kMiB;
  const Plan bounded = plan(Placement::kConst);
  const int64_t state = bounded.tile_state_bytes + kPage;
  EXPECT_LE(ResidentElements(bounded) * 2 + ResidentTiles(bounded) * state, 10 * kMiB);
  EXPECT_GT(ResidentElements(bounded) + ResidentTiles(bounded), 0);

  for (const Plan& other : {streams, keeps, bounded}) EXPECT_LE(seconds(chosen), seconds(other) * 1.01);

  options.host_memory_budget_bytes = 30 * kMiB;
  options.bounds.placement = Placement::kCuda;
  const absl::StatusOr<Plan> refused = MakePlan(graph, options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << "32 MiB of weights in 30 MiB";
  options.bounds.placement = Placement::kAuto;
  const int64_t least = LeastHostMemory(graph, options);
  options.bounds.placement = Placement::kCuda;
  const int64_t least_with_all = LeastHostMemory(graph, options);
  EXPECT_GT(least_with_all, least);
  options.host_memory_budget_bytes = least_with_all;
  EXPECT_TRUE(MakePlan(graph, options).ok());
}

// Which tiles were the fastest depends on what the machine gave when the store was made: a plan with larger
// ones and one block of weights in flight, too, fits again into the budget that it was made for.
TEST(Planner, TilesOfAPlanFitIntoItsBudgetWhateverTheMachine) {
  int with_one_block = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const int layers = 2 + static_cast<int>(random() % 2);
    const int64_t elements = (1 + static_cast<int64_t>(random() % 2000)) * kElementAlignment;
    ModelGraph graph =
        seed % 2 == 0 ? Chain(layers, elements, 1e-4) : Tied(layers, elements, 1700 * kElementAlignment);
    FreezeSome(seed, &graph);
    PlanOptions options;
    options.compares_policies = false;                                  // any plan will do
    options.machine.io_latency_seconds = seed % 3 == 0 ? 20e-3 : 1e-4;  // a slow one favours large tiles
    options.machine.read_bytes_per_s = options.machine.write_bytes_per_s = seed % 5 == 0 ? 2e8 : 4e9;
    const int64_t least = LeastHostMemory(graph, options);
    for (const double share : {1.0, 1.02, 1.1}) {
      options.host_memory_budget_bytes = static_cast<int64_t>(static_cast<double>(least) * share);
      const absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      with_one_block += plan->weight_classes.front().slots == 1;
      PlanOptions resumed = options;
      for (const BlockPlan& block : plan->blocks) {
        std::vector<int64_t> tiles;
        for (const Tile& tile : block.tiles) tiles.push_back(tile.elements);
        resumed.fixed_tiles.push_back(std::move(tiles));
      }
      const absl::StatusOr<Plan> again = MakePlan(graph, resumed);
      ASSERT_TRUE(again.ok()) << again.status() << ", " << share << " of the least";
      EXPECT_LE(again->host_bytes(), options.host_memory_budget_bytes);
      EXPECT_LE(again->least_host_memory_bytes, options.host_memory_budget_bytes);
    }
  }
  EXPECT_GT(with_one_block, 0);
}

TEST(Bounds, DeepSpeedsKeysAreUpperBounds) {
  ModelGraph graph = Chain(12, 1 << 20, 1e-4);
  graph.blocks[BlockIndex(3)].elements = graph.blocks[BlockIndex(7)].elements = 40 * kElementAlignment;
  PlanOptions options;
  // Room for about half of the weights, so that it matters which.
  const PlanOptions roomy = options;
  options.host_memory_budget_bytes = int64_t{1} << 40;
  const Plan all = *MakePlan(graph, options);
  EXPECT_EQ(ResidentTiles(all), static_cast<int64_t>([&] {
              size_t tiles = 0;
              for (const BlockPlan& block : all.blocks) tiles += block.tiles.size();
              return tiles;
            }()));

  options.bounds.tile_slots = 2;
  EXPECT_EQ(MakePlan(graph, options)->tile_ring, 2);
  options.bounds.tile_slots = 1;
  EXPECT_EQ(MakePlan(graph, options)->tile_ring, 1);
  options.bounds.tile_slots.reset();
  options.bounds.state_bytes = 25 * kMiB;
  const Plan pool = *MakePlan(graph, options);
  EXPECT_LE(pool.tile_ring * pool.tile_state_bytes, 25 * kMiB);
  EXPECT_GT(pool.tile_ring, 1);
  options.bounds.state_bytes = 0;
  EXPECT_EQ(MakePlan(graph, options)->tile_ring, 1);

  // Weights stay only where no more is used between two uses: on the walk up and down that is the far end.
  options.bounds = {};
  options.bounds.reuse_elements = 0;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 0);
  options.bounds.reuse_elements = 14 << 20;
  const Plan near = *MakePlan(graph, options);
  EXPECT_GT(ResidentElements(near), 0);
  EXPECT_LT(ResidentElements(near), ResidentElements(all));
  options.bounds.reuse_elements = int64_t{1} << 40;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), ResidentElements(all));

  // Small blocks persist before anything else does, up to the model's bound, also where nothing else may.
  options.bounds = {};
  options.bounds.placement = Placement::kCpu;
  options.bounds.persistent_block_elements = 100'000;
  Plan small = *MakePlan(graph, options);
  EXPECT_TRUE(small.blocks[BlockIndex(3)].private_weight_slot.valid());
  EXPECT_TRUE(small.blocks[BlockIndex(7)].private_weight_slot.valid());
  EXPECT_EQ(ResidentElements(small), 80 * kElementAlignment);
  options.bounds.persistent_elements = 40 * kElementAlignment;
  small = *MakePlan(graph, options);
  EXPECT_EQ(ResidentElements(small), 40 * kElementAlignment);
  options.bounds.persistent_block_elements = 1000;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 0);

  // Of the margin, so much for state.
  options = roomy;
  options.host_memory_budget_bytes = MakePlan(graph, roomy)->host_bytes() + 60 * kMiB;
  options.bounds.state_fraction = 0;
  EXPECT_EQ(ResidentTiles(*MakePlan(graph, options)), 0);
}

TEST(Tiers, AddUpToThePlanToTheByte) {
  bool spilled_some = false;
  for (const auto& [type, micro_batches] :
       {std::pair{Precision::Bf16(), 1}, {Precision::Bf16(), 3}, {Precision::Fp32(), 2}}) {
    const Precision& precision = type;  // clang 14 captures no structured binding
    const ModelGraph graph = Chain(12, 1 << 20);
    for (const int64_t extra : {0, 20, 60, 400}) {
      PlanOptions options;
      options.precision = precision;
      options.micro_batches = micro_batches;
      options.compares_policies = false;  // any plan will do
      options.host_memory_budget_bytes = LeastHostMemory(graph, options) + extra * kMiB;
      const Plan plan = *MakePlan(graph, options);
      int64_t host = 0, read = 0, written = 0, nvme = 0;
      for (const TierLine& line : TiersOf(graph, plan)) {
        host += line.in_flight_bytes + line.resident_bytes;
        read += line.read_bytes;
        written += line.written_bytes;
        nvme += line.nvme_bytes;
      }
      EXPECT_EQ(host, plan.host_bytes());
      EXPECT_EQ(host, plan.ledger().total());
      EXPECT_EQ(read, plan.nvme_read_bytes);
      EXPECT_EQ(written, plan.nvme_write_bytes);
      const auto home = [&](int versions) {
        return graph.elements() * (versions * precision.UnpaddedBytes(1) + precision.gradient_bytes) +
               plan.input_scratch_bytes;
      };
      EXPECT_EQ(nvme, home(2));
      for (const int versions : {1, 3}) {
        nvme = 0;
        for (const TierLine& line : TiersOf(graph, plan, {.versions = versions})) nvme += line.nvme_bytes;
        EXPECT_EQ(nvme, home(versions));
        const int64_t files = nvme + 12345;
        nvme = 0;
        for (const TierLine& line : TiersOf(graph, plan, {versions, files})) nvme += line.nvme_bytes;
        EXPECT_EQ(nvme, files);
      }
      spilled_some |= plan.input_scratch_bytes > 0;
    }
  }
  EXPECT_TRUE(spilled_some);  // inputs of stages too
  const Wear wear = WearOf(12'000'000'000, 4, 600e12);
  EXPECT_DOUBLE_EQ(wear.bytes_per_day, 3e9 * 86400);
  EXPECT_DOUBLE_EQ(wear.days_to_rating, 600e12 / (3e9 * 86400));
  EXPECT_TRUE(std::isinf(WearOf(0, 4, 600e12).days_to_rating));
}

TEST(WhatIf, MoreOfWhatBoundsTheStepMakesItFaster) {
  const ModelGraph slow_drive = Chain(12, 1 << 20, 1e-5), slow_compute = Chain(12, 1 << 20, 1e-1);
  PlanOptions options;
  options.host_memory_budget_bytes = 90 * kMiB;
  auto ask = [&](const ModelGraph& graph) {
    const Plan plan = *MakePlan(graph, options);
    return AskWhatIf(graph, options, *Simulate(graph, plan, options.machine), 1);
  };
  const std::vector<WhatIf> drive = ask(slow_drive), compute = ask(slow_compute);
  ASSERT_EQ(drive.size(), 5u);
  EXPECT_EQ(drive[0].change, "one more drive");
  EXPECT_NEAR(drive[0].speedup, 2, 0.15);
  EXPECT_GT(drive[1].speedup, 1.1);        // memory saves reads
  EXPECT_GT(drive[2].speedup, 1.5);        // twice the samples in about the same time
  EXPECT_NEAR(drive[3].speedup, 1, 0.05);  // compute is not what is missing
  EXPECT_NEAR(compute[0].speedup, 1, 0.05);
  EXPECT_NEAR(compute[3].speedup, 2, 0.1);
  // A batch that the budget does not hold is said to be one.
  options.host_memory_budget_bytes = LeastHostMemory(slow_drive, options);
  EXPECT_THAT(ask(slow_drive)[2].error, HasSubstr("too small"));
}

// What the other preference would make of clipped steps is what a plan under it does.
TEST(WhatIf, ThePreferenceIsToldByWhatClippedStepsTakeAndRead) {
  ModelGraph graph = Chain(12, 3 << 20, 8e-3);
  PlanOptions options;
  options.host_memory_budget_bytes = 120 * kMiB;
  options.compares_policies = false;
  const auto plan_of = [&](Prefer prefer) {
    PlanOptions of = options;
    of.prefer = prefer;
    return *MakePlan(graph, of);
  };
  const Plan wear = plan_of(Prefer::kWear), time = plan_of(Prefer::kTime);
  const Prediction of_wear = *Predict(graph, wear, options.machine);
  const Prediction of_time = *Predict(graph, time, options.machine);
  ASSERT_GT(time.previewed_share(), 0);
  ASSERT_LT(of_time.clipped_step_seconds, 0.95 * of_wear.clipped_step_seconds);

  const WhatIf asked = AskWhatIf(graph, options, of_wear, 1).back();
  EXPECT_EQ(asked.change, "prefer: time");
  EXPECT_TRUE(asked.of_clipped_steps);
  EXPECT_DOUBLE_EQ(asked.prediction.clipped_step_seconds, of_time.clipped_step_seconds);
  EXPECT_EQ(asked.clipped_read_bytes, time.clipped_read_bytes);
  EXPECT_GT(asked.clipped_read_bytes, wear.clipped_read_bytes);
  EXPECT_EQ(asked.nvme_write_bytes, time.nvme_write_bytes);
  EXPECT_DOUBLE_EQ(asked.speedup, of_wear.clipped_step_seconds / of_time.clipped_step_seconds);

  options.prefer = Prefer::kTime;
  const WhatIf back = AskWhatIf(graph, options, of_time, 1).back();
  EXPECT_EQ(back.change, "prefer: wear");
  EXPECT_DOUBLE_EQ(back.prediction.clipped_step_seconds, of_wear.clipped_step_seconds);
  EXPECT_LT(back.speedup, 1);
  // Where it has no say, it is not asked.
  options.clips = false;
  for (const WhatIf& each : AskWhatIf(graph, options, of_time, 1)) EXPECT_FALSE(each.of_clipped_steps);
}

TEST(Machine, DriveTimesFollowFromTheThreeBandwidths) {
  MachineModel machine;
  machine.read_bytes_per_s = 4e9;
  machine.write_bytes_per_s = 2e9;
  // One server's time is shared.
  EXPECT_DOUBLE_EQ(machine.drive_seconds(4e9, 0), 1);
  EXPECT_DOUBLE_EQ(machine.drive_seconds(4e9, 2e9), 2);
  // A duplex drive.
  machine.mixed_bytes_per_s = 4e9;
  EXPECT_DOUBLE_EQ(machine.drive_seconds(2e9, 2e9), 1);
  EXPECT_DOUBLE_EQ(machine.drive_seconds(6e9, 2e9), 2);
  // Writes that disturb reads: one after the other is better than both at once.
  machine.mixed_bytes_per_s = 1e9;
  EXPECT_DOUBLE_EQ(machine.drive_seconds(4e9, 2e9), 2);
  EXPECT_DOUBLE_EQ(machine.compute_speed(5, true), 1);
  machine.cores = 2;
  machine.compute_threads = 2;
  EXPECT_DOUBLE_EQ(machine.compute_speed(0, false), 1);
  EXPECT_DOUBLE_EQ(machine.compute_speed(1, false), 1.0 / 2);
  EXPECT_DOUBLE_EQ(machine.compute_speed(3, false), 1.0 / 3);
  EXPECT_DOUBLE_EQ(machine.update_speed(true, 1), 2.0 / 3);
  EXPECT_DOUBLE_EQ(machine.update_speed(false, 2), 1);
  EXPECT_DOUBLE_EQ(machine.update_speed(false, 4), 0.5);
  machine.compute_beside_drive = 0.8;
  EXPECT_DOUBLE_EQ(machine.compute_speed(0, false), 1);
  EXPECT_DOUBLE_EQ(machine.compute_speed(1, true), 0.4);
}

// A machine is simulated, watched, and found again from what was seen, starting from wrong figures.
TEST(Calibration, FindsTheMachineThatRan) {
  for (const auto& [forward, cores] : {std::pair{2e-4, 2}, {3e-3, 2}, {1e-3, 0}}) {
    const ModelGraph graph = Chain(16, 1 << 20, forward);
    MachineModel truth;
    truth.read_bytes_per_s = 2.5e9;
    truth.write_bytes_per_s = 4e9;
    truth.mixed_bytes_per_s = 3.6e9;
    truth.update_parameters_per_s = 500e6;
    truth.verify_bytes_per_s = 6e9;
    truth.cores = cores;
    truth.compute_threads = 2;
    truth.io_latency_seconds = 0;
    truth.compute_beside_drive = 0.75;
    PlanOptions options;
    options.machine = truth;
    options.host_memory_budget_bytes = 90 * kMiB;
    const Plan plan = *MakePlan(graph, options);
    MachineModel guess = truth;
    guess.update_parameters_per_s = 100e6;
    guess.verify_bytes_per_s = 1e9;
    guess.mixed_bytes_per_s = 0;
    guess.read_bytes_per_s = 9e9;
    guess.write_bytes_per_s = 1e9;
    ModelGraph unmeasured = graph;
    for (StageShape& stage : unmeasured.stages) stage.forward_seconds = stage.backward_seconds = 1;
    Calibration calibration(unmeasured, plan, guess, /*busy_bytes=*/1);
    const Prediction seen =
        *Simulate(graph, plan, truth, /*steps=*/3,
                  [&](OpId, const Op& op, double start, double end) { calibration.Observe(op, start, end); });
    const Calibration::Result result = calibration.Calibrated();
    EXPECT_TRUE(result.drive_seen);
    for (const StageIndex s : graph.stages.indices()) {
      if (s + 1 == graph.stages.end_index()) break;
      EXPECT_NEAR(result.graph.stages[s].forward_seconds, forward, 0.01 * forward);
    }
    EXPECT_NEAR(result.graph.stages.back().backward_seconds, 3 * forward, 0.03 * forward);
    EXPECT_NEAR(result.machine.update_parameters_per_s, 500e6, 5e6);
    EXPECT_NEAR(result.machine.verify_bytes_per_s, 6e9, 6e7);
    const Prediction predicted = *Simulate(result.graph, plan, result.machine, 3);
    EXPECT_NEAR(predicted.step_seconds, seen.step_seconds, 0.05 * seen.step_seconds)
        << forward << " " << cores;
  }
}

// The drive halves its pace within the run: every step counts once.
TEST(RunPrediction, IsTheMeanOfWhatItsStepsShow) {
  const ModelGraph graph = Chain(16, 1 << 20, 2e-4);
  MachineModel fast;
  fast.read_bytes_per_s = fast.write_bytes_per_s = fast.mixed_bytes_per_s = 4e9;
  fast.io_latency_seconds = 0;
  MachineModel slow = fast;
  slow.read_bytes_per_s = slow.write_bytes_per_s = slow.mixed_bytes_per_s = 2e9;
  PlanOptions options;
  options.machine = fast;
  options.host_memory_budget_bytes = 90 * kMiB;
  const Plan plan = *MakePlan(graph, options);
  MachineModel guess = fast;
  guess.read_bytes_per_s = guess.mixed_bytes_per_s = 9e9;
  RunPrediction run(graph, plan, guess, /*busy_bytes=*/1, *Predict(graph, plan, guess));
  const auto train = [&](const MachineModel& machine, int steps) {
    return Simulate(graph, plan, machine, steps,
                    [&](OpId, const Op& op, double start, double end) { run.Observe(op, start, end); })
        ->step_seconds;
  };
  train(slow, 1);
  EXPECT_FALSE(run.Stepped({1})) << "the first step fills the pipeline";
  const double step = train(fast, 2);
  EXPECT_FALSE(run.Stepped({step}));
  EXPECT_TRUE(run.Stepped({step, /*deferred=*/true}));
  EXPECT_TRUE(run.first_window());
  EXPECT_NEAR(run.prediction().step_seconds, step, 0.05 * step);
  EXPECT_TRUE(run.shown().drive_seen);
  EXPECT_EQ(run.beside().measured_seconds, step);
  EXPECT_EQ(run.beside().deferred_share, 0.5);
  const Prediction at_start = *Predict(graph, plan, guess);
  EXPECT_DOUBLE_EQ(run.beside().predicted_seconds,
                   (at_start.step_seconds + at_start.clipped_step_seconds) / 2);
  const double slow_step = train(slow, 3);
  for (int k = 0; k < 3; ++k) EXPECT_FALSE(run.Stepped({slow_step}));
  EXPECT_TRUE(run.Finish()) << "of a window that was begun";
  EXPECT_FALSE(run.Finish());
  const double mean = (2 * step + 3 * slow_step) / 5;
  EXPECT_GT(slow_step, 1.5 * step);
  EXPECT_NEAR(run.prediction().step_seconds, mean, 0.05 * mean);
}

// Of a drive that gave a tenth of its figure where it was busy nobody knows that it would give all of it
// elsewhere.
TEST(Calibration, ADirectionThatWasNotSeenIsAsFarFromItsFigureAsWhatWasSeen) {
  const ModelGraph graph = Chain(16, 1 << 20, 2e-4);
  PlanOptions options;
  options.host_memory_budget_bytes = 90 * kMiB;
  const Plan plan = *MakePlan(graph, options);
  MachineModel guess;
  guess.read_bytes_per_s = 3e9;
  guess.write_bytes_per_s = 2e9;
  guess.mixed_bytes_per_s = 4e9;
  Op read, write;
  read.lane = Lane::kRead;
  write.lane = Lane::kWrite;
  read.bytes = 1 << 20;
  write.bytes = 3 << 20;
  Calibration reads(graph, plan, guess, /*busy_bytes=*/1), both(graph, plan, guess, 1),
      idle(graph, plan, guess, 1 << 30);
  for (int k = 0; k < 200; ++k) {
    const double start = k * 4e-3, end = start + 4e-3;
    reads.Observe(read, start, end);
    for (Calibration* each : {&both, &idle}) {
      each->Observe(read, start, end);
      each->Observe(write, start, end);
    }
  }
  const MachineModel of_reads = reads.Calibrated().machine, of_both = both.Calibrated().machine;
  const double read_rate = (1 << 20) / 4e-3, pace = read_rate / 3e9;
  EXPECT_NEAR(of_reads.read_bytes_per_s, read_rate, 1e-6 * read_rate);
  EXPECT_NEAR(of_reads.write_bytes_per_s, pace * 2e9, 1e-6 * pace * 2e9);
  EXPECT_NEAR(of_reads.mixed_bytes_per_s, pace * 4e9, 1e-6 * pace * 4e9);
  const double mixed_rate = (4 << 20) / 4e-3;
  EXPECT_NEAR(of_both.mixed_bytes_per_s, mixed_rate, 1e-6 * mixed_rate);
  EXPECT_NEAR(of_both.read_bytes_per_s, mixed_rate * 3 / 4, 1e-6 * mixed_rate);
  EXPECT_NEAR(of_both.write_bytes_per_s, mixed_rate * 2 / 4, 1e-6 * mixed_rate);
  EXPECT_FALSE(idle.Calibrated().drive_seen);
  EXPECT_EQ(idle.Calibrated().machine.read_bytes_per_s, 3e9);
}

TEST(RunPrediction, DiffersMuchByHalfOfWhatWasPredicted) {
  using Beside = RunPrediction::Beside;
  for (const double measured : {0.0, 0.5, 1.0, 3.0, 3.1, 9.0})
    EXPECT_TRUE((Beside{measured, 2}.differs_much())) << measured;
  for (const double measured : {1.01, 1.5, 2.0, 2.99}) EXPECT_FALSE((Beside{measured, 2}.differs_much()));
  EXPECT_FALSE((Beside{1, 0}.differs_much())) << "nothing was predicted";
}

TEST(Planner, PinnedMemoryDoesNotGrowWithTheNumberOfBlocks) {
  auto arena = [](int layers, int64_t budget) {
    const ModelGraph graph = Chain(layers, 1 << 20);
    PlanOptions options;
    options.host_memory_budget_bytes = budget > 0 ? budget : LeastHostMemory(graph, options);
    return MakePlan(graph, options)->arena_bytes;
  };
  const int64_t least = arena(10, 0);
  for (const int layers : {20, 100, 300}) EXPECT_EQ(arena(layers, 0), least) << layers;
  // With a budget, what is pinned is bounded by it, whatever the depth.
  for (const int layers : {10, 100}) EXPECT_LE(arena(layers, 160 * kMiB), 160 * kMiB);
}

}  // namespace
}  // namespace penstock::tiering::plan_test
