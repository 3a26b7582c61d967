// Another plan for a run that is under way: the bits of one that is closed and resumed, and an engine that is
// as it was where the plan is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "swap/inspect.h"
#include "tests/leaks.h"
#include "tests/zero/failing_compute.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/engine.h"

namespace penstock::zero::replan_test {
namespace {

using testing::HasSubstr;
using testing_support::FailingCompute;
using testing_support::Owner;
using testing_support::PlainBatch;
using tiering::StageIndex;

constexpr int kMicroBatches = 2;
constexpr plain::Shape kShape = {.layers = 6, .width = 96};

Batch Example(int64_t rows) { return PlainBatch(kShape, 0, rows); }

// Rows of a micro-batch, and the step that it goes on to.
struct Stretch {
  int64_t rows = 0, until = 0;
};
const std::vector<Stretch> kStretches = {{8, 3}, {64, 6}, {4, 8}, {128, 11}, {128, 12}};

struct Trained {
  std::vector<double> losses, norms;
  std::vector<float> state;  // of every parameter: masters and moments
  bool operator==(const Trained&) const = default;
};

class ReplanTest : public testing::Test {
 protected:
  ~ReplanTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(int64_t rows) const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = kMicroBatches;
    options.example = Example(rows);
    options.storage.state_dirs = {directory_ + "/state"};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 16 << 10;
    return options;
  }
  static int64_t LeastFor(EngineOptions options, int64_t rows) {
    options.memory.host_memory_budget_bytes = 0;
    options.hooks = EngineHooks();
    options.storage.overwrite = true;
    options.resume.enabled = false;
    options.example = Example(rows);
    const auto plan = Engine::MakePlan(*std::make_unique<plain::PlainCompute>(kShape), options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->plan.least_host_memory_bytes : 0;
  }
  std::unique_ptr<Engine> Open(const EngineOptions& options) {
    compute_ = std::make_shared<FailingCompute>(kShape);
    auto engine = Engine::Create(compute_, options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  static std::vector<Batch> Batches(int64_t step, int64_t rows) {
    return {PlainBatch(kShape, 2 * step, rows), PlainBatch(kShape, 2 * step + 1, rows)};
  }
  static void Train(Engine& engine, const Stretch& stretch, Trained* trained) {
    while (engine.step() < stretch.until) {
      // One is announced behind the last, too.
      const auto result = engine.Step(Batches(engine.step() + 1, stretch.rows), Next::kTrain);
      ASSERT_TRUE(result.ok()) << result.status();
      trained->losses.push_back(result->loss);
      trained->norms.push_back(result->grad_norm);
    }
  }
  static void ReadState(Engine& engine, Trained* trained) {
    for (const std::string& name : engine.ParameterNames()) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        const auto value = engine.ReadState(name, kind);
        ASSERT_TRUE(value.ok()) << value.status();
        const auto* const values = static_cast<const float*>(value->view.data);
        trained->state.insert(trained->state.end(), values, values + value->view.elements());
      }
    }
  }
  // An engine for each stretch.
  Trained Resumed(EngineOptions options, const std::vector<Stretch>& stretches) {
    Trained trained;
    for (const Stretch& stretch : stretches) {
      options.example = Example(stretch.rows);
      const auto engine = Open(options);
      if (engine == nullptr) return trained;
      Train(*engine, stretch, &trained);
      EXPECT_TRUE(engine->Flush().ok());
      options.storage.overwrite = false;
      options.resume.enabled = true;
      if (stretch.until == stretches.back().until) ReadState(*engine, &trained);
    }
    return trained;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("replan-" + std::to_string(getpid()))).string();
  std::shared_ptr<FailingCompute> compute_;
};

TEST_F(ReplanTest, TheBitsAreThoseOfARunThatIsClosedAndGoesOn) {
  for (const tiering::UpdateOrder order : {tiering::UpdateOrder::kAuto, tiering::UpdateOrder::kInBackward,
                                           tiering::UpdateOrder::kInNextForward}) {
    for (const int versions : {0, 1}) {
      SCOPED_TRACE(testing::Message() << "order " << static_cast<int>(order) << ", versions " << versions);
      EngineOptions options = Options(kStretches.front().rows);
      options.optimizer.order = order;
      options.storage.versions = versions;
      if (versions == 1) options.storage.durability = Durability::kCheckpoint;
      options.memory.host_memory_budget_bytes = LeastFor(options, 128);
      const Trained expected = Resumed(options, kStretches);

      std::vector<int64_t> committed;
      options.hooks.committed = [&](const StepResult& result) {
        committed.push_back(result.step);
        return absl::OkStatus();
      };
      const auto engine = Open(options);
      ASSERT_NE(engine, nullptr);
      Trained ours;
      uint64_t read_bytes = 0;
      int64_t by_program = 0;
      for (const Stretch& stretch : kStretches) {
        if (engine->step() > 0) {
          const absl::Status planned = engine->Replan(Example(stretch.rows));
          ASSERT_TRUE(planned.ok()) << planned;
        }
        Train(*engine, stretch, &ours);
        // Nothing that was counted is forgotten.
        EXPECT_GT(engine->io_stats().DeviceReadBytes(), read_bytes);
        read_bytes = engine->io_stats().DeviceReadBytes();
        const int64_t now = engine->usage().bytes[static_cast<size_t>(tiering::Lane::kRead)];
        EXPECT_GT(now, by_program);
        by_program = now;
      }
      ASSERT_TRUE(engine->Flush().ok());
      ReadState(*engine, &ours);
      EXPECT_EQ(ours, expected);
      EXPECT_EQ(committed, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
      EXPECT_EQ(engine->committed_step(), 12);
      EXPECT_EQ(engine->resumed_from(), std::nullopt);
      EXPECT_LE(engine->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
    }
  }
}

TEST_F(ReplanTest, AnotherPlanBeforeTheFirstStepAndTwiceInARow) {
  const Trained expected = Resumed(Options(16), {{16, 4}});
  const auto engine = Open(Options(8));
  ASSERT_NE(engine, nullptr);
  for (const int64_t rows : {64, 4, 16}) {
    const absl::Status planned = engine->Replan(Example(rows));
    ASSERT_TRUE(planned.ok()) << planned;
  }
  Trained ours;
  Train(*engine, {16, 4}, &ours);
  ReadState(*engine, &ours);
  EXPECT_EQ(ours, expected);
}

TEST_F(ReplanTest, APlanThatIsRefusedLeavesTheEngineAsItWas) {
  EngineOptions options = Options(8);
  options.memory.host_memory_budget_bytes = LeastFor(options, 8);
  const int64_t needed = LeastFor(options, 512);
  ASSERT_GT(needed, options.memory.host_memory_budget_bytes);
  const Trained expected = Resumed(options, {{8, 6}});
  bool refuses = false;
  int asked = 0, measured = 0;
  options.hooks.planned = [&](const EnginePlan&) {
    ++asked;
    return refuses ? absl::CancelledError("not this one") : absl::OkStatus();
  };
  options.hooks.machine = [&](int64_t, const std::function<void()>&) {
    ++measured;
    return tiering::MachineModel();
  };
  const auto engine = Open(options);
  ASSERT_NE(engine, nullptr);
  Trained ours;
  Train(*engine, {8, 2}, &ours);
  const tests::Held before;
  for (int round = 0; round < 3; ++round) {
    const absl::Status refused = engine->Replan(Example(512));
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("the least that works is " + std::to_string(needed) + " bytes"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("goes on with the plan that it had"));
    EXPECT_TRUE(engine->usable().ok()) << engine->usable();
    EXPECT_EQ(engine->step(), 2);
  }
  EXPECT_EQ(asked, 1);  // no plan came to be
  refuses = true;
  EXPECT_EQ(engine->Replan(Example(4)).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(engine->Replan(Batch()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(measured, 1);
  const tests::Held after;
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_LE(tests::ThreadsOnceAtMost(before.threads), before.threads);
  Train(*engine, {8, 6}, &ours);
  ReadState(*engine, &ours);
  EXPECT_EQ(ours, expected);
  EXPECT_LE(engine->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
}

TEST_F(ReplanTest, WhatCannotBePlannedAnewIsRefusedInALine) {
  const auto refused = [](Engine& engine, const char* why) {
    const absl::Status status = engine.Replan(Example(16));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_TRUE(engine.usable().ok());
  };
  EngineOptions options = Options(8);
  options.storage.offload = OffloadDevice::kCpu;
  options.storage.state_dirs.clear();
  {
    const auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    refused(*engine, "state is in memory");
    EXPECT_TRUE(engine->Step(Batches(1, 8)).ok());
  }
  options = Options(8);
  options.micro_batches = 1;
  options.calls_per_step = 2;
  {
    const auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    StepOptions sums;
    sums.update = false;
    ASSERT_TRUE(engine->Step({PlainBatch(kShape, 2)}, sums).ok());
    refused(*engine, "has more calls to come");
    ASSERT_TRUE(engine->Step({PlainBatch(kShape, 3)}).ok());
    ASSERT_TRUE(engine->Replan(Example(16)).ok());
    ASSERT_TRUE(engine->Step({PlainBatch(kShape, 4, 16)}, sums).ok());
    ASSERT_TRUE(engine->Step({PlainBatch(kShape, 5, 16)}).ok());
    ASSERT_TRUE(engine->Flush().ok());
    EXPECT_EQ(engine->committed_step(), 2);
  }
  options.calls_per_step = 1;
  options.trains = false;
  options.storage.overwrite = false;
  const auto reader = Open(options);
  ASSERT_NE(reader, nullptr);
  refused(*reader, "only reads");
}

// Sums and gradients of what came before are no part of the next plan.
TEST_F(ReplanTest, AStepThatFailedAndGradientsAreForgotten) {
  const std::string name = "layer.2.weight";
  const Trained expected = Resumed(Options(8), {{8, 2}, {32, 4}});
  Trained ours;
  const auto engine = Open(Options(8));
  ASSERT_NE(engine, nullptr);
  EXPECT_THAT(std::string(engine->ReadState(name, StateKind::kGradient).status().message()),
              HasSubstr("no step has been made"));
  Train(*engine, {8, 2}, &ours);
  EXPECT_TRUE(engine->ReadState(name, StateKind::kGradient).ok());
  compute_->fails_in = 1;
  EXPECT_EQ(engine->Step(Batches(3, 8), Next::kTrain).status().code(), absl::StatusCode::kAborted);
  compute_->fails_in.reset();
  ASSERT_TRUE(engine->Replan(Example(32)).ok());
  EXPECT_EQ(engine->ReadState(name, StateKind::kGradient).status().code(),
            absl::StatusCode::kFailedPrecondition);
  Train(*engine, {32, 3}, &ours);
  EXPECT_TRUE(engine->ReadState(name, StateKind::kGradient).ok());
  ASSERT_TRUE(engine->Replan(Example(32)).ok());
  EXPECT_THAT(std::string(engine->ReadState(name, StateKind::kGradient).status().message()),
              HasSubstr("plan was made anew"));
  Train(*engine, {32, 4}, &ours);
  ReadState(*engine, &ours);
  EXPECT_EQ(ours, expected);
}

TEST_F(ReplanTest, NobodyGetsAtTheRunMeanwhile) {
  EngineOptions options = Options(8);
  options.storage.checkpoints = {.parent = directory_ + "/kept", .every = 2};
  std::vector<swap::Holding> seen;
  options.hooks.preparing = [&](const std::string&) {
    seen.push_back(swap::Probe(options.storage.state_dirs).holding);
  };
  const auto engine = Open(options);
  ASSERT_NE(engine, nullptr);
  Trained trained;
  Train(*engine, {8, 3}, &trained);
  seen.clear();
  ASSERT_TRUE(engine->Replan(Example(32)).ok());
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(std::set<swap::Holding>(seen.begin(), seen.end()), std::set{swap::Holding::kInUse});
  EXPECT_EQ(swap::CheckpointLock::Take(directory_ + "/kept").status().code(),
            absl::StatusCode::kFailedPrecondition);
  Train(*engine, {32, 5}, &trained);
  ASSERT_TRUE(engine->Flush().ok());
  for (const char* step : {"2", "4"})
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/kept/step-0000000" + step)) << step;
}

TEST_F(ReplanTest, NobodyGetsAtTheRunWhenAPlanCannotBeCarriedOut) {
  EngineOptions options = Options(8);
  options.memory.host_memory_budget_bytes = LeastFor(options, 32);
  options.storage.sync = swap::Sync::kProcess;  // opening writes nothing
  const Trained expected = Resumed(options, {{8, 4}});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  // From the new plan on no file may grow: it wants one for inputs, and the one before had none.
  bool refuses = false;
  std::vector<swap::Holding> seen;
  options.hooks.planned = [&](const EnginePlan&) {
    const rlimit none = {0, before.rlim_max};
    return refuses && setrlimit(RLIMIT_FSIZE, &none) != 0 ? absl::ErrnoToStatus(errno, "setrlimit")
                                                          : absl::OkStatus();
  };
  options.hooks.preparing = [&](const std::string&) {
    seen.push_back(swap::Probe(options.storage.state_dirs).holding);
  };
  const auto engine = Open(options);
  ASSERT_NE(engine, nullptr);
  Trained ours;
  Train(*engine, {8, 2}, &ours);
  seen.clear();
  refuses = true;
  const absl::Status refused = engine->Replan(Example(32));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("inputs"), HasSubstr("goes on with the plan that it had")));
  ASSERT_GE(seen.size(), 2U);
  EXPECT_EQ(std::set<swap::Holding>(seen.begin(), seen.end()), std::set{swap::Holding::kInUse});
  Train(*engine, {8, 4}, &ours);
  ReadState(*engine, &ours);
  EXPECT_EQ(ours, expected);
}

TEST_F(ReplanTest, WhatTheCallerHasSaidOfTheRunStays) {
  EngineOptions options = Options(8);
  options.resume.run = {{"name", "ours"}};
  std::string says = "first";
  options.hooks.describe = [&](const StepResult&) { return nlohmann::json(says); };
  std::vector<int> order = {0, 2, 1, 4, 3, 5};
  Trained expected, ours;
  {
    auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->SetOrder(order).ok());
    Train(*engine, {8, 2}, &expected);
    ASSERT_TRUE(engine->Flush().ok());
    engine.reset();
    EngineOptions on = options;
    on.storage.overwrite = false;
    on.resume.enabled = true;
    on.example = Example(32);
    engine = Open(on);
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->SetOrder(order).ok());
    Train(*engine, {32, 4}, &expected);
  }
  {
    const auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->SetOrder(order).ok());
    Train(*engine, {8, 2}, &ours);
    says = "before the plan";
    ASSERT_TRUE(engine->Replan(Example(32)).ok());
    EXPECT_EQ(engine->run(), options.resume.run);
    EXPECT_TRUE(engine->last_description().is_null());
    says = "after it";
    ASSERT_TRUE(engine->CommitDescription().ok());
    Train(*engine, {32, 4}, &ours);
    says = "at the end";
    ASSERT_TRUE(engine->Replan(Example(8)).ok());
  }
  EXPECT_EQ(ours, expected);
  const auto found = swap::Inspect(options.storage.state_dirs);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(nlohmann::json::parse(found->record.payload)["step"], "at the end");
}

// Nothing to go back to: every call says so, and what was committed is there.
TEST_F(ReplanTest, WhereTheRunIsGoneTheEngineIsDoneForAndSaysWhy) {
  EngineOptions options = Options(8);
  const std::string away = directory_ + "/away";
  bool goes = false;
  options.hooks.planned = [&](const EnginePlan&) -> absl::Status {
    if (!goes) return absl::OkStatus();
    std::filesystem::rename(options.storage.state_dirs.front(), away);
    return absl::CancelledError("the hook's");
  };
  Trained trained;
  {
    const auto engine = Open(options);
    ASSERT_NE(engine, nullptr);
    Train(*engine, {8, 2}, &trained);
    const std::vector<std::string> names = engine->ParameterNames();
    const int64_t peak = engine->peak_managed_bytes();
    goes = true;
    const absl::Status lost = engine->Replan(Example(16));
    EXPECT_THAT(std::string(lost.message()), HasSubstr("the hook's"));
    EXPECT_THAT(std::string(lost.message()), HasSubstr("could not be made again"));
    EXPECT_EQ(engine->usable(), lost);
    EXPECT_EQ(engine->Step(Batches(3, 8)).status(), lost);
    EXPECT_EQ(engine->Evaluate(Batches(3, 8)).status(), lost);
    EXPECT_EQ(engine->Infer(Batches(3, 8)).status(), lost);
    EXPECT_EQ(engine->ReadState(names.front(), StateKind::kParameter).status(), lost);
    float value = 0;
    EXPECT_EQ(engine->WriteState(names.front(), StateKind::kParameter, {.data = &value, .sizes = {1}}), lost);
    EXPECT_EQ(engine->SetOrder({0, 1, 2, 3, 4, 5}), lost);
    EXPECT_EQ(engine->Flush(), lost);
    EXPECT_EQ(engine->Keep().status(), lost);
    EXPECT_EQ(engine->Checkpoint(directory_ + "/kept").status(), lost);
    EXPECT_EQ(engine->CommitDescription(), lost);
    EXPECT_EQ(engine->CommitDescription("more"), lost);
    EXPECT_EQ(engine->Replan(Example(8)), lost);
    EXPECT_EQ(engine->ParameterNames(), names);
    EXPECT_GT(engine->EvaluatesAtOnce(Example(8)), 0);
    EXPECT_GE(engine->peak_managed_bytes(), peak);
    EXPECT_GT(engine->io_stats().DeviceWriteBytes(), 0U);
    EXPECT_EQ(engine->io_backend(), "none");
    EXPECT_EQ(engine->arena_pages(), "none");
    EXPECT_EQ(engine->waiting_for(), tiering::Stall::kNone);
    EXPECT_EQ(engine->peak_device_bytes() + engine->gds_read_bytes() + engine->copied().h2d_bytes, 0);
    engine->set_saturating_bytes_in_flight(1 << 20);
    EXPECT_EQ(engine->step(), 2);
  }
  options.hooks = EngineHooks();
  options.storage.state_dirs = {away};
  options.storage.overwrite = false;
  options.resume.enabled = true;
  const auto again = Open(options);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->step(), 2);
}

// What its owner has measured anew takes more, or less, of the budget.
class DrivenReplanTest : public ReplanTest {
 protected:
  static Measured Of(Owner& owner, int64_t stage_bytes) {
    absl::StatusOr<Measured> measured = owner.Measure();
    EXPECT_TRUE(measured.ok()) << measured.status();
    for (tiering::StageShape& stage : measured->graph.stages) {
      stage.forward_peak_bytes += stage_bytes;
      stage.backward_peak_bytes += stage_bytes;
    }
    return *std::move(measured);
  }
  static void Step(DrivenEngine& driven, Owner& owner, int64_t step, int64_t rows, Trained* trained) {
    ASSERT_TRUE(driven.Begin(Next::kTrain).ok());
    const absl::Status computed = owner.Compute(driven.compute(), Batches(step, rows));
    const auto result = driven.Finish();
    ASSERT_TRUE(result.ok()) << result.status() << computed;
    trained->losses.push_back(result->loss);
    trained->norms.push_back(result->grad_norm);
  }
};

TEST_F(DrivenReplanTest, TheBitsAreThoseOfARunThatIsClosedAndGoesOn) {
  constexpr int64_t kMore = 3 << 20;
  Owner owner(kShape, kMicroBatches);
  EngineOptions options = owner.Options(directory_ + "/state");
  options.memory.tile_bytes = 16 << 10;
  const auto open = [&](const EngineOptions& with, int64_t stage_bytes) {
    auto driven = DrivenEngine::Create(Of(owner, stage_bytes), with);
    EXPECT_TRUE(driven.ok()) << driven.status();
    return driven.ok() ? *std::move(driven) : nullptr;
  };
  int64_t least_small = 0, least_large = 0;
  for (int64_t* least : {&least_small, &least_large}) {
    const auto driven = open(options, least == &least_small ? 0 : kMore);
    ASSERT_NE(driven, nullptr);
    *least = driven->plan().plan.least_host_memory_bytes;
  }
  ASSERT_GT(least_large, least_small);

  const std::vector<Stretch> stretches = {{8, 2}, {32, 4}, {4, 6}};
  const auto read_state = [](DrivenEngine& driven, Trained* trained) {
    const absl::Status read = driven.Call([&](Engine& engine) {
      ReadState(engine, trained);
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
  };
  const auto bytes_of = [](const Stretch& stretch) { return stretch.rows > 8 ? kMore : 0; };
  Trained expected, ours;
  EngineOptions resuming = options;
  for (const Stretch& stretch : stretches) {
    const auto driven = open(resuming, bytes_of(stretch));
    ASSERT_NE(driven, nullptr);
    for (int64_t step = static_cast<int64_t>(expected.losses.size()) + 1; step <= stretch.until; ++step)
      Step(*driven, owner, step, stretch.rows, &expected);
    if (stretch.until == stretches.back().until) read_state(*driven, &expected);
    ASSERT_TRUE(driven->Call([](Engine& engine) { return engine.Flush(); }).ok());
    resuming.storage.overwrite = false;
    resuming.resume.enabled = true;
  }

  options.memory.host_memory_budget_bytes = least_large;
  const auto driven = open(options, 0);
  ASSERT_NE(driven, nullptr);
  for (const Stretch& stretch : stretches) {
    if (!ours.losses.empty()) {
      const absl::Status planned = driven->Replan(Of(owner, bytes_of(stretch)));
      ASSERT_TRUE(planned.ok()) << planned;
    }
    for (int64_t step = static_cast<int64_t>(ours.losses.size()) + 1; step <= stretch.until; ++step) {
      Step(*driven, owner, step, stretch.rows, &ours);
      // One that is refused goes back to what was measured last.
      const absl::Status refused = driven->Replan(Of(owner, 2 * kMore));
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("the least that works is"));
      EXPECT_EQ(driven->plan().graph.stages[StageIndex(0)].forward_peak_bytes,
                Of(owner, bytes_of(stretch)).graph.stages[StageIndex(0)].forward_peak_bytes);
    }
  }
  read_state(*driven, &ours);
  EXPECT_EQ(ours, expected);
}

TEST_F(DrivenReplanTest, NotWhileAPassIsOpen) {
  Owner owner(kShape, kMicroBatches);
  auto made = DrivenEngine::Create(Of(owner, 0), owner.Options(directory_ + "/state"));
  ASSERT_TRUE(made.ok()) << made.status();
  DrivenEngine& driven = **made;
  ASSERT_TRUE(driven.Begin().ok());
  {
    const auto entered = driven.compute().Enter(Direction::kForward, StageIndex(0), 0);
    ASSERT_TRUE(entered.ok());
    EXPECT_EQ(driven.Replan(Of(owner, 1)).code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(driven.Replan(Of(owner, 1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(driven.Finish().ok());
  ASSERT_TRUE(driven.Replan(Of(owner, 1)).ok());
  EXPECT_FALSE(driven.compute().Enter(Direction::kForward, StageIndex(0), 0).ok());
  Trained trained;
  Step(driven, owner, 1, 8, &trained);
  EXPECT_EQ(trained.losses.size(), 1U);
}

}  // namespace
}  // namespace penstock::zero::replan_test
