// A run whose first steps differ much from what was predicted of them is planned once more by what they
// showed. Bits are real; times are virtual: the compute is said to take what the test says, and the steps are
// those of the simulator on the machine that the test calls the true one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "tiering/plan/placement.h"
#include "tiering/simulate/simulate.h"
#include "zero/engine/engine.h"
#include "zero/engine/prediction_check.h"
#include "zero/engine/report.h"

namespace penstock::zero::replan_by_steps_test {
namespace {

using testing::HasSubstr;
using testing_support::PlainBatch;

constexpr plain::Shape kShape = {.layers = 6, .width = 96};
constexpr int64_t kBusyBytes = 1;

// A machine, and what a stage takes there in forward; backward takes three times as long.
struct World {
  tiering::MachineModel machine;
  double forward_seconds = 1e-3;
};
World WorldOf(double drive_bytes_per_s, double forward_seconds) {
  World world;
  world.machine.read_bytes_per_s = world.machine.write_bytes_per_s = world.machine.mixed_bytes_per_s =
      drive_bytes_per_s;
  world.machine.io_latency_seconds = 0;
  world.machine.commit_seconds = 1e-6;
  world.forward_seconds = forward_seconds;
  return world;
}

class SaidCompute final : public plain::PlainCompute {
 public:
  explicit SaidCompute(double forward_seconds) : PlainCompute(kShape), forward_seconds_(forward_seconds) {}
  absl::StatusOr<Measured> Measure(const ComputeSetup& setup, const Batch& example,
                                   const MeasureOptions& options) override {
    absl::StatusOr<Measured> measured = PlainCompute::Measure(setup, example, options);
    if (!measured.ok()) return measured;
    timed += options.times ? 1 : 0;
    for (tiering::StageShape& stage : measured->graph.stages) {
      stage.forward_seconds = options.times ? forward_seconds_ : 0;
      stage.backward_seconds = 3 * stage.forward_seconds;
    }
    return measured;
  }
  int timed = 0;

 private:
  const double forward_seconds_;
};

std::vector<Batch> Batches(int64_t step) {
  return {PlainBatch(kShape, 2 * step), PlainBatch(kShape, 2 * step + 1)};
}

// A run that is planned for `assumed` and, as far as its steps are told, runs on `truth`.
class Virtual {
 public:
  Virtual(EngineOptions options, const World& assumed, bool plans_again = true)
      : compute_(std::make_shared<SaidCompute>(assumed.forward_seconds)) {
    options.hooks.machine = [machine = assumed.machine](int64_t, const std::function<void()>&) {
      return machine;
    };
    report_.Start(options, "1", 1);
    auto made = Engine::Create(compute_, std::move(options));
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return;
    engine_ = *std::move(made);
    const EnginePlan& plan = engine_->plan();
    at_start_ = *tiering::Predict(plan.graph, plan.plan, plan.options.machine);
    report_.Planned(*engine_, {}, at_start_);
    check_ = std::make_unique<PredictionCheck>(*engine_, at_start_, kBusyBytes, plans_again, &report_);
  }

  Engine& engine() { return *engine_; }
  PredictionCheck& check() { return *check_; }
  const SaidCompute& compute() const { return *compute_; }
  double predicted_seconds() const { return at_start_.step_seconds; }
  const std::vector<double>& losses() const { return losses_; }

  // One real step, which is said to have been as the simulator has it on `truth`. Returns its seconds.
  double Step(const World& truth) {
    const EnginePlan& plan = engine_->plan();
    tiering::ModelGraph graph = plan.graph;
    for (tiering::StageShape& stage : graph.stages) {
      stage.forward_seconds = truth.forward_seconds;
      stage.backward_seconds = 3 * truth.forward_seconds;
    }
    double ends = now_;
    const double seconds =
        tiering::Simulate(graph, plan.plan, truth.machine, /*steps=*/2,
                          [&](tiering::OpId, const tiering::Op& op, double start, double end) {
                            check_->Observe(op, now_ + start, now_ + end);
                            ends = std::max(ends, now_ + end);
                          })
            ->step_seconds;
    now_ = ends;
    auto result = engine_->Step(Batches(engine_->step() + 1), Next::kTrain);
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return 0;
    losses_.push_back(result->loss);
    result->seconds = seconds;
    report_.Stepped(*engine_, *result, 1);
    check_->Stepped(*result);
    return seconds;
  }
  // Until step `last`, and plans again when it is due. Returns the lines of that.
  std::vector<std::string> Train(const World& truth, int64_t last,
                                 std::optional<int64_t> steps_left = std::nullopt) {
    std::vector<std::string> lines;
    while (engine_->step() < last) {
      Step(truth);
      if (!check_->due()) continue;
      const absl::StatusOr<std::string> line = check_->PlanAgain(*engine_, steps_left);
      EXPECT_TRUE(line.ok()) << line.status();
      lines.push_back(line.value_or(""));
    }
    return lines;
  }
  nlohmann::json Report() { return nlohmann::json::parse(report_.Finish(engine_.get(), absl::OkStatus())); }

 private:
  std::shared_ptr<SaidCompute> compute_;
  class Report report_;
  std::unique_ptr<Engine> engine_;
  tiering::Prediction at_start_;
  std::unique_ptr<PredictionCheck> check_;
  std::vector<double> losses_;
  double now_ = 0;
};

// A drive that gives a tenth of what it was taken for: the compute does not hide it any more, and updates are
// better spread over the step.
const World kAssumed = WorldOf(/*drive_bytes_per_s=*/1e8, /*forward_seconds=*/1e-3);
const World kSlow = WorldOf(1e7, 1e-3);

class ReplanByStepsTest : public testing::Test {
 protected:
  ~ReplanByStepsTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(const std::string& name = "state") const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = 2;
    options.example = PlainBatch(kShape, 0);
    options.storage.state_dirs = {directory_ + "/" + name};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 16 << 10;
    options.optimizer.clip = 0;
    options.memory.host_memory_budget_bytes = Least(options) + (256 << 10);
    return options;
  }
  static int64_t Least(EngineOptions options) {
    const auto plan = Engine::MakePlan(*std::make_unique<SaidCompute>(1e-3), options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->plan.least_host_memory_bytes : 0;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("replan-by-steps-" + std::to_string(getpid()))).string();
};

TEST_F(ReplanByStepsTest, TheRunGoesOnWithAnotherPlanAndTheSameBits) {
  Virtual stays(Options("stays"), kAssumed, /*plans_again=*/false);
  EXPECT_TRUE(stays.Train(kSlow, 10).empty());
  EXPECT_TRUE(stays.Report()["replanned"].is_null());

  EngineOptions options = Options();
  int asked = 0;
  options.hooks.planned = [&](const EnginePlan&) {
    ++asked;
    return absl::OkStatus();
  };
  std::vector<int64_t> committed;
  options.hooks.committed = [&](const StepResult& result) {
    committed.push_back(result.step);
    return absl::OkStatus();
  };
  Virtual moves(options, kAssumed);
  const double measured = [&] {
    moves.Step(kSlow);
    return moves.Step(kSlow);
  }();
  EXPECT_FALSE(moves.check().due()) << "the first window is three steps";
  const std::vector<std::string> lines = moves.Train(kSlow, 10);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(), testing::AllOf(HasSubstr("planned again after step 3"),
                                            HasSubstr("from here on"), HasSubstr("(were ")));
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(moves.compute().timed, 1) << "times are the steps'";
  EXPECT_EQ(moves.losses(), stays.losses());
  ASSERT_TRUE(moves.engine().Flush().ok());
  EXPECT_EQ(committed, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_LE(moves.engine().peak_managed_bytes(), options.memory.host_memory_budget_bytes);

  const nlohmann::json report = moves.Report(), replanned = report["replanned"];
  EXPECT_EQ(replanned["after_step"], 3);
  EXPECT_DOUBLE_EQ(replanned["predicted_step_seconds"].get<double>(), moves.predicted_seconds());
  EXPECT_DOUBLE_EQ(replanned["measured_step_seconds"].get<double>(), measured);
  EXPECT_NEAR(replanned["kept_step_seconds"].get<double>(), measured, 0.05 * measured);
  EXPECT_LT(replanned["step_seconds"].get<double>(), 0.95 * measured);
  EXPECT_FALSE(replanned["moved"].empty());
  EXPECT_EQ(replanned["outcome"], "moved");
  EXPECT_EQ(report["predicted_at_start_step_seconds"].get<double>(), moves.predicted_seconds());
  // What the report says of the plan, and of its steps, is of the newest.
  EXPECT_EQ(report["in_backward_share"], moves.engine().plan().plan.speculative_share());
  const double after = moves.Step(kSlow);
  EXPECT_NEAR(after, replanned["step_seconds"].get<double>(), 0.05 * after);
  EXPECT_LT(after, 0.95 * measured);
}

TEST_F(ReplanByStepsTest, AMachineThatIsFasterThanItWasTakenForIsPlannedForToo) {
  Virtual moves(Options(), WorldOf(1e9, 1e-3));
  const std::vector<std::string> lines = moves.Train(WorldOf(1e9, 1e-5), 4);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(), HasSubstr("from here on"));
  EXPECT_LT(moves.Report()["replanned"]["measured_step_seconds"],
            moves.Report()["replanned"]["predicted_step_seconds"]);
}

TEST_F(ReplanByStepsTest, ARightPredictionIsLeftAlone) {
  for (const World& world : {kAssumed, kSlow}) {
    Virtual right(Options(), world);
    EXPECT_TRUE(right.Train(world, 12).empty());
    EXPECT_TRUE(right.Report()["replanned"].is_null());
    EXPECT_EQ(right.Report()["prediction_from"], "steps");
  }
  // Seven tenths more is much, four tenths is not.
  const double forward_seconds = 20e-3;
  for (const double factor : {1.4, 1.7}) {
    Virtual of(Options(), WorldOf(1e8, forward_seconds));
    const std::vector<std::string> lines = of.Train(WorldOf(1e8, factor * forward_seconds), 4);
    EXPECT_EQ(lines.size(), factor > 1.5 ? 1U : 0U) << factor;
  }
}

TEST_F(ReplanByStepsTest, WhereEverythingStaysTheRunIsNotTouched) {
  EngineOptions options = Options();
  int asked = 0;
  options.hooks.planned = [&](const EnginePlan&) {
    ++asked;
    return absl::OkStatus();
  };
  // Compute hides the drive, and more so where it takes ten times as long.
  const World slower = WorldOf(1e8, 1e-2);
  Virtual stays(options, kAssumed);
  const std::byte* const memory = stays.engine().arena().data();
  const std::vector<std::string> lines = stays.Train(slower, 8);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(), HasSubstr("everything stays where it is"));
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(stays.engine().arena().data(), memory);
  const nlohmann::json report = stays.Report();
  EXPECT_EQ(report["replanned"]["outcome"], "stays");
  EXPECT_TRUE(report["replanned"]["moved"].empty());
  const double measured = report["replanned"]["measured_step_seconds"];
  EXPECT_GT(measured, 5 * stays.predicted_seconds());
  EXPECT_NEAR(report["predicted_step_seconds"].get<double>(), measured, 0.05 * measured) << "that is renewed";
}

// A drive that moves too little for its bandwidth to be seen, and is a hundred times as fast.
TEST_F(ReplanByStepsTest, WhatDoesNotExplainTheStepsIsNotPlannedFor) {
  Virtual stays(Options(), WorldOf(1e7, 1e-5));
  const std::vector<int64_t> before = tiering::PlacementNumbers(stays.engine().plan().plan);
  const std::vector<std::string> lines = stays.Train(WorldOf(1e9, 1e-5), 5);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(), testing::AllOf(HasSubstr("not planned again"), HasSubstr("does not explain")));
  EXPECT_EQ(stays.Report()["replanned"]["outcome"], "unexplained");
  EXPECT_EQ(tiering::PlacementNumbers(stays.engine().plan().plan), before);
}

TEST_F(ReplanByStepsTest, FewStepsThatAreLeftAreMadeAsTheyWerePlanned) {
  Virtual moves(Options(), kAssumed);
  const std::vector<std::string> lines = moves.Train(kSlow, 5, /*steps_left=*/1);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(), HasSubstr("everything stays where it is"));
}

TEST_F(ReplanByStepsTest, APlanThatIsRefusedLeavesTheRunAsItWas) {
  Virtual stays(Options("stays"), kAssumed, /*plans_again=*/false);
  stays.Train(kSlow, 8);
  EngineOptions options = Options();
  int asked = 0;
  options.hooks.planned = [&](const EnginePlan&) {
    return ++asked > 1 ? absl::CancelledError("not this one") : absl::OkStatus();
  };
  Virtual refused(options, kAssumed);
  const std::vector<int64_t> before = tiering::PlacementNumbers(refused.engine().plan().plan);
  const std::vector<std::string> lines = refused.Train(kSlow, 8);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines.front(),
              testing::AllOf(HasSubstr("not planned again after step 3"), HasSubstr("not this one")));
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(tiering::PlacementNumbers(refused.engine().plan().plan), before);
  EXPECT_EQ(refused.losses(), stays.losses());
  EXPECT_EQ(refused.Report()["replanned"]["outcome"], "refused");
}

TEST_F(ReplanByStepsTest, WhereNothingCanBePlannedAgainALineSaysWhy) {
  EXPECT_TRUE(CanPlanAgain(1, OffloadDevice::kNvme).ok());
  EXPECT_THAT(std::string(CanPlanAgain(2, OffloadDevice::kNvme).message()), HasSubstr("several ranks"));
  EXPECT_THAT(std::string(CanPlanAgain(1, OffloadDevice::kCpu).message()), HasSubstr("state in memory"));
  EngineOptions options = Options();
  options.storage.offload = OffloadDevice::kCpu;
  options.storage.state_dirs.clear();
  options.memory.host_memory_budget_bytes = 0;
  Virtual in_memory(options, kAssumed);
  ShownBySteps shown;
  shown.graph = in_memory.engine().plan().graph;
  const absl::Status refused = in_memory.engine().Replan(shown).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(in_memory.engine().usable().ok());
}

// Trains to the end and writes losses of evaluations, which read what all steps have left. From the plan that
// is made by steps on, what finishes and what hooks are asked is counted: it is killed after so many of them.
// `log`.line has what came of it, and `log`.events how many of these there were by then.
constexpr int64_t kLast = 6;
[[noreturn]] void Child(EngineOptions options, const std::string& log, int64_t events, bool plans_again) {
  bool counts = false;
  int64_t came = 0;
  const auto event = [&] {
    if (counts && came++ == events) kill(getpid(), SIGKILL);
  };
  options.resume.enabled = std::filesystem::exists(options.storage.state_dirs.front());
  options.storage.overwrite = !options.resume.enabled;
  options.hooks.observer = [&](tiering::OpId, const tiering::Op&, double, double) { event(); };
  options.hooks.preparing = [&](const std::string&) { event(); };
  options.hooks.planned = [&](const EnginePlan&) {
    event();
    return absl::OkStatus();
  };
  options.hooks.describe = [&](const StepResult& result) {
    event();
    return nlohmann::json(result.step);
  };
  options.hooks.committed = [&](const StepResult&) {
    event();
    return absl::OkStatus();
  };
  Virtual run(options, kAssumed, plans_again);
  while (run.engine().step() < kLast && !testing::Test::HasFailure()) {
    run.Step(kSlow);
    if (!run.check().due()) continue;
    counts = true;
    const absl::StatusOr<std::string> line = run.check().PlanAgain(run.engine(), std::nullopt);
    if (!line.ok()) _exit(3);
    std::ofstream(log + ".line") << *line;
    std::ofstream(log + ".events") << came;
  }
  counts = false;
  std::ofstream file(log);
  const auto losses = run.engine().EvaluateEach({PlainBatch(kShape, 1000), PlainBatch(kShape, 1001)});
  if (!losses.ok() || !run.engine().Flush().ok() || testing::Test::HasFailure()) _exit(3);
  for (const double loss : *losses) file << std::hexfloat << loss << "\n";
  file.close();
  _exit(0);
}

TEST_F(ReplanByStepsTest, KilledAtAnyMomentOfItTheRunGoesOnWithTheSameBits) {
  std::filesystem::create_directories(directory_);
  const EngineOptions options = Options();
  const auto run = [&](const std::string& name, int64_t events, bool plans_again) {
    EngineOptions of = options;
    of.storage.state_dirs = {directory_ + "/" + name};
    const pid_t child = fork();
    if (child == 0) Child(of, directory_ + "/" + name + ".log", events, plans_again);
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  };
  const auto text_of = [&](const std::string& file) {
    std::ifstream from(directory_ + "/" + file);
    return std::string(std::istreambuf_iterator<char>(from), std::istreambuf_iterator<char>());
  };
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  ASSERT_EQ(run("plain", kNever, false), 0);
  const std::string expected = text_of("plain.log");
  ASSERT_FALSE(expected.empty());
  ASSERT_EQ(run("whole", kNever, true), 0);
  EXPECT_EQ(text_of("whole.log"), expected);
  EXPECT_THAT(text_of("whole.log.line"), HasSubstr("from here on"));
  const int64_t within = std::atoll(text_of("whole.log.events").c_str());
  ASSERT_GT(within, 8);
  // Its last questions are those of the new plan; before them what was pending is committed. Then the first
  // step under that plan.
  std::set<int64_t> moments = {0, within - 4, within - 3, within - 2, within - 1, within, within + 20};
  for (int64_t each = 1; each < 5; ++each) moments.insert(each * within / 5);
  for (const int64_t moment : moments) {
    SCOPED_TRACE(moment);
    std::filesystem::remove_all(directory_ + "/killed");
    std::filesystem::remove(directory_ + "/killed.log");
    const int status = run("killed", moment, true);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    ASSERT_EQ(run("killed", kNever, true), 0);
    EXPECT_EQ(text_of("killed.log"), expected);
  }
}

}  // namespace
}  // namespace penstock::zero::replan_by_steps_test
