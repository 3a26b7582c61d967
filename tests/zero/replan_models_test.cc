// Another plan for a run of torch::nn::Modules, in every type, beside a device, with buffers that change and
// over several ranks: the bits of one that is closed and resumed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "models/families/stages.h"
#include "tests/zero/ranks.h"
#include "tests/zero/training.h"
#include "tests/zero/wide_training.h"

namespace penstock::zero::replan_models_test {
namespace {

using testing::HasSubstr;
using testing_support::ConnectLoopback;
using testing_support::MakeBatch;
using testing_support::MakeTestDevice;
using testing_support::MakeWideModel;
using testing_support::RunOptions;
using testing_support::RunProcesses;
using testing_support::WideLosses;
using testing_support::WideShape;

using ReplanModelsTest = testing_support::ScratchTest;

// Rows of a micro-batch, and the step that it goes on to.
struct Stretch {
  int64_t rows = 0, until = 0;
};

struct Trained {
  absl::Status status;
  std::vector<double> losses, norms, loss_scales, evaluations;
  int64_t peak_managed_bytes = 0, peak_device_bytes = 0;
  std::vector<double> Numbers() const {
    std::vector<double> all = losses;
    for (const auto* more : {&norms, &loss_scales, &evaluations})
      all.insert(all.end(), more->begin(), more->end());
    return all;
  }
};

// On the drive: in one engine, or in one for each stretch.
Trained Train(const RunOptions& run, const std::vector<Stretch>& stretches, bool replans) {
  Trained trained;
  trained.status = [&]() -> absl::Status {
    RunOptions now = run;
    now.batch = stretches.front().rows;
    EngineOptions options = OptionsOf(now);
    options.storage.overwrite = true;
    if (run.adjust) run.adjust(options);
    std::unique_ptr<Engine> engine;
    for (const Stretch& stretch : stretches) {
      now.batch = stretch.rows;
      options.example = MakeBatch(now, 0, 0);
      if (engine != nullptr && replans) {
        if (absl::Status status = engine->Replan(options.example); !status.ok()) return status;
      } else {
        engine.reset();
        const Model model = run.make_model ? run.make_model() : models::MakeGpt(run.model);
        auto made = CreateEngine(model, options);
        if (!made.ok()) return made.status();
        engine = *std::move(made);
        options.storage.overwrite = false;
        options.resume.enabled = true;
        options.optimizer.new_loss_scale.reset();
      }
      while (engine->step() < stretch.until) {
        std::vector<Batch> batches;
        for (int m = 0; m < run.micro_batches; ++m)
          batches.push_back(MakeBatch(now, engine->step() + 1, m * options.world() + options.rank()));
        const auto result = engine->Step(std::move(batches), Next::kTrain);
        if (!result.ok()) return result.status();
        trained.losses.push_back(result->loss);
        trained.norms.push_back(result->skipped ? -1 : result->grad_norm);
        trained.loss_scales.push_back(result->loss_scale);
      }
      const auto evaluation = engine->Evaluate({MakeBatch(now, -1, 0), MakeBatch(now, -1, 1)});
      if (!evaluation.ok()) return evaluation.status();
      trained.evaluations.push_back(*evaluation);
      if (absl::Status status = engine->Flush(); !status.ok()) return status;
      trained.peak_managed_bytes = engine->peak_managed_bytes();
      trained.peak_device_bytes = engine->peak_device_bytes();
    }
    return absl::OkStatus();
  }();
  return trained;
}

absl::StatusOr<EnginePlan> PlanFor(RunOptions run, int64_t rows) {
  run.batch = rows;
  run.host_memory_budget_bytes = 0;
  EngineOptions options = OptionsOf(run);
  options.storage.overwrite = true;
  return PlanEngine(run.make_model ? run.make_model() : models::MakeGpt(run.model), options);
}

RunOptions GptRun(const std::string& directory, kernels::DType dtype) {
  RunOptions run;
  run.dtype = dtype;
  run.micro_batches = 2;
  run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
  run.offload = OffloadDevice::kNvme;
  run.state_dir = directory;
  return run;
}

const std::vector<Stretch> kStretches = {{2, 3}, {8, 5}, {1, 7}};

TEST_F(ReplanModelsTest, EveryTypeHasTheBitsOfARunThatIsClosedAndGoesOnInTheBudgetOfTheLargest) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp16}) {
    RunOptions run = GptRun(scratch_ + "/state", dtype);
    // Too large: the first steps are skipped, and the scale falls across the plans.
    run.loss_scale = {.dynamic = true, .initial_scale = 0x1p+30, .hysteresis = 1};
    const auto plan = PlanFor(run, 8);
    ASSERT_TRUE(plan.ok()) << plan.status();
    // A page or two of tensors are still there when the model is measured again (1,088 bytes were seen).
    run.host_memory_budget_bytes = plan->plan.least_host_memory_bytes + (16 << 10);
    const Trained expected = Train(run, kStretches, /*replans=*/false), ours = Train(run, kStretches, true);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    ASSERT_TRUE(ours.status.ok()) << ours.status;
    EXPECT_EQ(ours.Numbers(), expected.Numbers());
    EXPECT_LE(ours.peak_managed_bytes, run.host_memory_budget_bytes);
    if (dtype == kernels::DType::kFp16) {
      EXPECT_LT(ours.loss_scales.back(), ours.loss_scales.front());
    }
  }
}

// What a resumed run was given anew is given once.
TEST_F(ReplanModelsTest, ANewLossScaleIsNotBegunAgain) {
  RunOptions run = GptRun(scratch_ + "/state", kernels::DType::kFp16);
  run.loss_scale = {.dynamic = true, .initial_scale = 64, .window = 2};
  std::vector<Trained> both;
  for (const bool replans : {false, true}) {
    RunOptions first = run;
    ASSERT_TRUE(Train(first, {{2, 2}}, false).status.ok());
    first.resume = true;
    first.adjust = [](EngineOptions& options) {
      options.storage.overwrite = false;
      options.optimizer.new_loss_scale = LossScaleOptions{.dynamic = true, .initial_scale = 8, .window = 2};
    };
    both.push_back(Train(first, {{2, 5}, {4, 9}}, replans));
    ASSERT_TRUE(both.back().status.ok()) << both.back().status;
  }
  EXPECT_EQ(both[1].Numbers(), both[0].Numbers());
  EXPECT_GT(both[0].loss_scales.back(), both[0].loss_scales.front());
}

TEST_F(ReplanModelsTest, BesideADeviceWithMemoryOfItsOwn) {
  RunOptions run = GptRun(scratch_ + "/state", kernels::DType::kBf16);
  const Trained expected = Train(run, kStretches, /*replans=*/true);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  run.device = MakeTestDevice();
  run.device_memory_budget_bytes = 1;
  const std::string refusal(PlanFor(run, 8).status().message()), words = "least that works is ";
  ASSERT_THAT(refusal, HasSubstr(words));
  run.device = MakeTestDevice();
  run.device_memory_budget_bytes = std::stoll(refusal.substr(refusal.find(words) + words.size()));
  const Trained ours = Train(run, kStretches, /*replans=*/true);
  ASSERT_TRUE(ours.status.ok()) << ours.status;
  EXPECT_EQ(ours.Numbers(), expected.Numbers());
  EXPECT_LE(ours.peak_device_bytes, run.device_memory_budget_bytes);
  EXPECT_GT(ours.peak_device_bytes, 0);
}

TEST_F(ReplanModelsTest, BuffersThatChangeGoOnWhereTheyWere) {
  WideShape shape;
  shape.statistics = true;
  const Model model = MakeWideModel(shape);
  std::vector<WideLosses> both;
  for (const bool replans : {false, true}) {
    EngineOptions options = testing_support::WideOptions(shape);
    options.storage.offload = OffloadDevice::kNvme;
    options.storage.state_dirs = {scratch_ + "/state"};
    options.storage.overwrite = true;
    // Also where commits have a description: that of a new run is not written over before the first step.
    options.hooks.describe = [](const StepResult& result) { return nlohmann::json{{"step", result.step}}; };
    WideLosses& losses = both.emplace_back();
    std::unique_ptr<Engine> engine;
    int64_t until = 0;
    for (const int64_t rows : {4, 16, 2}) {
      WideShape now = shape;
      now.rows = rows;
      options.example = testing_support::MakeWideBatch(now, 0, 0);
      if (engine != nullptr && replans) {
        const absl::Status planned = engine->Replan(options.example);
        ASSERT_TRUE(planned.ok()) << planned;
      } else {
        engine.reset();
        auto made = CreateEngine(model, options);
        ASSERT_TRUE(made.ok()) << made.status();
        engine = *std::move(made);
        if (replans) {
          const absl::Status planned = engine->Replan(options.example);
          ASSERT_TRUE(planned.ok()) << planned;
        }
      }
      losses.Append(TrainWide(*engine, now, until += 2));
      ASSERT_TRUE(engine->Flush().ok());
      options.storage.overwrite = false;
      options.resume.enabled = true;
    }
  }
  EXPECT_EQ(both[1], both[0]);
  EXPECT_EQ(both[0].losses.size(), 6U);
}

// All of them make the call, over one connection.
TEST_F(ReplanModelsTest, OverSeveralRanks) {
  constexpr int kWorld = 2;
  const auto run_of = [&](const std::string& name, int rank) {
    RunOptions run = testing_support::UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
    run.state_dir = scratch_ + "/" + name + "/rank-" + std::to_string(rank);
    return run;
  };
  const auto outcomes = RunProcesses(kWorld, [&](int rank, int port) -> nlohmann::json {
    auto connected = ConnectLoopback(rank, kWorld, port);
    if (!connected.ok()) return {{"status", std::string(connected.status().message())}};
    const std::shared_ptr<Comm> comm = *std::move(connected);
    std::vector<Trained> both;
    for (const bool replans : {false, true}) {
      RunOptions run = run_of(replans ? "ours" : "expected", rank);
      run.comm = comm;
      both.push_back(Train(run, kStretches, replans));
      if (!both.back().status.ok()) return {{"status", std::string(both.back().status.message())}};
    }
    // One that is refused ends the run on all.
    RunOptions run = run_of("ours", rank);
    run.comm = comm;
    run.resume = true;
    run.batch = 1;
    run.host_memory_budget_bytes = 24 << 20;
    auto engine = CreateEngine(run.make_model(), OptionsOf(run));
    if (!engine.ok()) return {{"status", std::string(engine.status().message())}};
    run.batch = 4096;
    const absl::Status refused = (*engine)->Replan(MakeBatch(run, 0, 0));
    return {{"status", ""},
            {"same", both[0].Numbers() == both[1].Numbers()},
            {"losses", both[1].losses},
            {"refused", std::string(refused.message())},
            {"done_for", (*engine)->usable() == refused}};
  });
  for (const auto& outcome : outcomes) {
    ASSERT_EQ(outcome.text(), "") << outcome.exit_code;
    EXPECT_EQ(outcome.report["same"], true);
    EXPECT_EQ(outcome.report["losses"], outcomes.front().report["losses"]);
    EXPECT_EQ(outcome.report["losses"].size(), 7U);
    EXPECT_THAT(outcome.report["refused"].get<std::string>(), HasSubstr("host memory budget"));
    EXPECT_EQ(outcome.report["done_for"], true);
  }
}

}  // namespace
}  // namespace penstock::zero::replan_models_test
