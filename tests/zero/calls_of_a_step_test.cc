// Steps that are made by several calls: the bits of one call with all micro-batches, wherever sums wait.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "tests/zero/failing_compute.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/engine.h"

namespace penstock::zero::calls_of_a_step_test {
namespace {

using testing_support::FailingCompute;
using testing_support::Owner;
using testing_support::PlainBatch;

constexpr plain::Shape kShape = {.layers = 5, .width = 96};
constexpr int kMicroBatches = 6;  // of a step

struct Mode {
  std::string name;
  OffloadDevice offload = OffloadDevice::kNvme;
  tiering::UpdateOrder order = tiering::UpdateOrder::kAuto;
  double clip = 1;
  bool least = false;  // of memory
  bool previews = false;
};

class CallsOfAStepTest : public testing::TestWithParam<Mode> {
 protected:
  ~CallsOfAStepTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(int calls) const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = kMicroBatches / calls;
    options.calls_per_step = calls;
    options.example = PlainBatch(kShape, 0);
    options.optimizer.clip = GetParam().clip;
    options.optimizer.order = GetParam().order;
    if (GetParam().previews) {
      options.optimizer.prefer = tiering::Prefer::kTime;
      options.memory.bounds.previewed_share = 1;
    }
    options.storage.offload = GetParam().offload;
    if (GetParam().offload == OffloadDevice::kNvme) options.storage.state_dirs = {directory_};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 16 << 10;
    if (GetParam().least) {
      options.memory.host_memory_budget_bytes = 1 << 30;
      const auto plan = Engine::MakePlan(*std::make_unique<plain::PlainCompute>(kShape), options);
      EXPECT_TRUE(plan.ok()) << plan.status();
      options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes;
    }
    return options;
  }
  std::unique_ptr<Engine> Open(const EngineOptions& options) {
    compute_ = std::make_shared<FailingCompute>(kShape);
    auto engine = Engine::Create(compute_, options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  // Call `call` of a step of so many.
  static std::vector<Batch> Batches(int64_t step, int call, int calls) {
    std::vector<Batch> batches;
    for (int m = 0; m < kMicroBatches / calls; ++m)
      batches.push_back(PlainBatch(kShape, kMicroBatches * step + kMicroBatches / calls * call + m));
    return batches;
  }
  static absl::StatusOr<StepResult> Call(Engine& engine, int64_t step, int call, int calls, bool announces) {
    StepOptions options(announces ? Next::kTrain : Next::kUnknown);
    options.update = call + 1 == calls;
    return engine.Step(Batches(step, call, calls), options);
  }
  struct Run {
    std::vector<double> losses, norms;
    std::vector<float> state;
    bool operator==(const Run&) const = default;
  };
  static void ReadState(Engine& engine, Run* run) {
    for (const std::string& name : engine.ParameterNames()) {
      const auto value = engine.ReadState(name, StateKind::kParameter);
      ASSERT_TRUE(value.ok()) << value.status();
      const auto* const values = static_cast<const float*>(value->view.data);
      run->state.insert(run->state.end(), values, values + value->view.elements());
    }
  }
  Run Train(Engine& engine, int calls, int64_t steps) {
    Run run;
    while (engine.step() < steps) {
      const int64_t step = engine.step() + 1;
      for (int call = 0; call < calls; ++call) {
        const auto result = Call(engine, step, call, calls, call + 1 < calls || step < steps);
        EXPECT_TRUE(result.ok()) << result.status();
        if (!result.ok()) return run;
        EXPECT_EQ(result->updated, call + 1 == calls);
        EXPECT_EQ(result->step, step);
        if (!result->updated) continue;
        run.losses.push_back(result->loss);
        run.norms.push_back(result->grad_norm);
      }
    }
    ReadState(engine, &run);
    return run;
  }

  static constexpr int64_t kSteps = 5;
  const std::string directory_ =
      (std::filesystem::current_path() / ("calls-" + std::to_string(getpid()))).string();
  std::shared_ptr<FailingCompute> compute_;
};

TEST_P(CallsOfAStepTest, TheyHaveTheBitsOfOneCall) {
  const Run whole = Train(*Open(Options(1)), 1, kSteps);
  for (const int calls : {2, 3, 6}) {
    const EngineOptions options = Options(calls);
    const auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(Train(*engine, calls, kSteps), whole) << calls;
    int on_drive = 0;
    for (const tiering::BlockIndex b : engine->plan().plan.blocks.indices())
      on_drive += engine->plan().plan.keeps_sums(b) ? 0 : 1;
    EXPECT_EQ(on_drive > 0, GetParam().least);
    if (GetParam().least) {
      EXPECT_LE(engine->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
    }
  }
}

// What else an engine is asked for between the calls of a step leaves its sums alone.
TEST_P(CallsOfAStepTest, EvaluationsFlushesAndReadsComeBetweenThem) {
  const Run whole = Train(*Open(Options(1)), 1, kSteps);
  const auto engine = Open(Options(3));
  ASSERT_NE(engine, nullptr);
  Run run;
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (int call = 0; call < 3; ++call) {
      const auto result = Call(*engine, step, call, 3, /*announces=*/(step + call) % 2 == 0);
      ASSERT_TRUE(result.ok()) << result.status();
      if (result->updated) run.losses.push_back(result->loss);
      if (result->updated) run.norms.push_back(result->grad_norm);
      if ((step + call) % 3 == 0) {
        ASSERT_TRUE(engine->Evaluate(Batches(9, 0, 3)).ok());
      }
      if ((step + call) % 3 == 1) {
        ASSERT_TRUE(engine->Flush().ok());
      }
      if ((step + call) % 3 == 2) {
        const std::string name = engine->ParameterNames().front();
        EXPECT_TRUE(engine->ReadState(name, StateKind::kParameter).ok());
        EXPECT_EQ(engine->ReadState(name, StateKind::kGradient).ok(), result->updated);
      }
    }
  }
  ReadState(*engine, &run);
  EXPECT_EQ(run, whole);
}

TEST_P(CallsOfAStepTest, AStepWhoseCallFailsBeginsAgain) {
  const Run whole = Train(*Open(Options(1)), 1, kSteps);
  const auto engine = Open(Options(3));
  ASSERT_NE(engine, nullptr);
  Run run;
  for (int failing = 0; failing < 3; ++failing) {
    for (int call = 0; call <= failing; ++call) {
      if (call == failing) compute_->fails_in = 0;
      EXPECT_EQ(Call(*engine, engine->step() + 1, call, 3, true).ok(), call < failing);
    }
    compute_->fails_in.reset();
    const Run part = Train(*engine, 3, engine->step() + 1);
    run.losses.insert(run.losses.end(), part.losses.begin(), part.losses.end());
    run.norms.insert(run.norms.end(), part.norms.begin(), part.norms.end());
  }
  const Run rest = Train(*engine, 3, kSteps);
  run.losses.insert(run.losses.end(), rest.losses.begin(), rest.losses.end());
  run.norms.insert(run.norms.end(), rest.norms.begin(), rest.norms.end());
  run.state = rest.state;
  EXPECT_EQ(run, whole);
}

// (What is in memory is gone.)
class CallsOfAStepOnDriveTest : public CallsOfAStepTest {};

TEST_P(CallsOfAStepOnDriveTest, ARunThatEndsBetweenThemGoesOnFromItsLastCommit) {
  const Run whole = Train(*Open(Options(1)), 1, kSteps);
  EngineOptions options = Options(3);
  auto engine = Open(options);
  ASSERT_NE(engine, nullptr);
  (void)Train(*engine, 3, 2);
  for (int call = 0; call < 2; ++call) ASSERT_TRUE(Call(*engine, 3, call, 3, call == 0).ok());
  engine.reset();
  options.storage.overwrite = false;
  options.resume.enabled = true;
  engine = Open(options);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->step(), 2);
  EXPECT_EQ(Train(*engine, 3, kSteps).state, whole.state);
}

TEST_P(CallsOfAStepTest, OneMayEndItsStepEarlyAndNoneMayLeaveItOpenForEver) {
  auto engine = Open(Options(3));
  ASSERT_NE(engine, nullptr);
  StepOptions sums(Next::kTrain), updates;
  sums.update = false;
  ASSERT_TRUE(engine->Step(Batches(1, 0, 3), sums).ok());
  const auto ended = engine->Step(Batches(1, 1, 3), updates);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(engine->step(), 1);
  ASSERT_TRUE(engine->Step(Batches(2, 0, 3), sums).ok());
  ASSERT_TRUE(engine->Step(Batches(2, 1, 3), sums).ok());
  const absl::Status refused = engine->Step(Batches(2, 2, 3), sums).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(engine->Step(Batches(2, 2, 3), updates).ok());
  EXPECT_EQ(engine->step(), 2);
  engine.reset();
  EXPECT_EQ(Open(Options(1))->Step(Batches(1, 0, 1), sums).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(CallsOfAStepTest, AnOwnerWhoDrivesMakesThemToo) {
  std::vector<Run> runs;
  for (const int calls : {1, 3}) {
    Owner owner(kShape, kMicroBatches / calls);
    EngineOptions options = Options(calls);
    options.memory.host_memory_budget_bytes = 0;
    options.initial_values = owner.Options("").initial_values;
    absl::StatusOr<Measured> measured = owner.Measure();
    ASSERT_TRUE(measured.ok()) << measured.status();
    auto driven = DrivenEngine::Create(*std::move(measured), options);
    ASSERT_TRUE(driven.ok()) << driven.status();
    Run& run = runs.emplace_back();
    for (int64_t step = 1; step <= kSteps; ++step) {
      for (int call = 0; call < calls; ++call) {
        StepOptions with(Next::kTrain);
        with.update = call + 1 == calls;
        ASSERT_TRUE((*driven)->Begin(with).ok());
        const absl::Status computed = owner.Compute((*driven)->compute(), Batches(step, call, calls));
        const auto result = (*driven)->Finish();
        ASSERT_TRUE(result.ok()) << result.status() << computed;
        if (result->updated) run.losses.push_back(result->loss);
      }
    }
    ASSERT_TRUE((*driven)
                    ->Call([&](Engine& engine) {
                      ReadState(engine, &run);
                      return absl::OkStatus();
                    })
                    .ok());
  }
  EXPECT_EQ(runs[0], runs[1]);
}

const Mode kOnDrive[] = {
    {"OnDrive"},
    {.name = "Least", .least = true},
    {.name = "InBackward", .order = tiering::UpdateOrder::kInBackward, .clip = 0},
    {.name = "InBackwardLeast", .order = tiering::UpdateOrder::kInBackward, .clip = 0.02, .least = true},
    {.name = "PreviewedLeast", .clip = 0.02, .least = true, .previews = true}};

INSTANTIATE_TEST_SUITE_P(Memory, CallsOfAStepTest,
                         testing::Values(Mode{"InMemory", OffloadDevice::kNone},
                                         Mode{"StatesInMemory", OffloadDevice::kCpu}),
                         [](const auto& mode) { return mode.param.name; });
INSTANTIATE_TEST_SUITE_P(Drive, CallsOfAStepTest, testing::ValuesIn(kOnDrive),
                         [](const auto& mode) { return mode.param.name; });
INSTANTIATE_TEST_SUITE_P(Drive, CallsOfAStepOnDriveTest, testing::ValuesIn(kOnDrive),
                         [](const auto& mode) { return mode.param.name; });

}  // namespace
}  // namespace penstock::zero::calls_of_a_step_test
