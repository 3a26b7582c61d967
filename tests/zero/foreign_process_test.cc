// An engine in a process that is not its own: forks at any moment, and nothing of the process is changed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/engine.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero::foreign_process_test {
namespace {

using testing_support::Owner;
using testing_support::PlainBatch;
using tiering::StageIndex;

// In a forked child, which is ended where it hangs: what `work` returns, or -1.
pid_t Fork(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(20);
  _exit(work());
}
int Ended(pid_t child) {
  int how = 0;
  EXPECT_EQ(waitpid(child, &how, 0), child);
  return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

class ForeignProcessTest : public testing::Test {
 protected:
  ~ForeignProcessTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(const std::string& name = "state") const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.example = PlainBatch(shape_, 0);
    options.storage.state_dirs = {directory_ + "/" + name};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 16 << 10;
    return options;
  }
  std::unique_ptr<Engine> Open(const EngineOptions& options) const {
    auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  std::vector<double> Train(Engine& engine, int64_t steps) const {
    std::vector<double> losses;
    while (engine.step() < steps) {
      const int64_t step = engine.step() + 1;
      const auto result =
          engine.Step({PlainBatch(shape_, step)}, step < steps ? Next::kTrain : Next::kUnknown);
      EXPECT_TRUE(result.ok()) << result.status();
      if (!result.ok()) break;
      losses.push_back(result->loss);
    }
    return losses;
  }

  const plain::Shape shape_ = {.layers = 5, .width = 96};
  const std::string directory_ =
      (std::filesystem::current_path() / ("foreign-" + std::to_string(getpid()))).string();
};

TEST_F(ForeignProcessTest, AForkedChildIsToldThatTheEngineIsItsParents) {
  auto engine = Open(Options());
  ASSERT_NE(engine, nullptr);
  const auto first = engine->Step({PlainBatch(shape_, 1)}, Next::kTrain);  // whose successor reads ahead
  ASSERT_TRUE(first.ok());
  const pid_t child = Fork([&] {
    const auto refused = [](const absl::Status& status) {
      return absl::IsFailedPrecondition(status) &&
             status.message().find("parent process") != absl::string_view::npos;
    };
    if (!refused(engine->Step({PlainBatch(shape_, 2)}).status())) return 1;
    if (!refused(engine->Evaluate({PlainBatch(shape_, 2)}).status())) return 2;
    if (!refused(engine->Flush()) || !refused(engine->usable())) return 3;
    if (!refused(engine->ReadState(engine->ParameterNames().front(), StateKind::kParameter).status()))
      return 4;
    if (!refused(engine->Checkpoint(directory_ + "/kept").status())) return 5;
    (void)engine->io_stats();
    engine.reset();
    return 0;
  });
  EXPECT_EQ(Ended(child), 0);
  EXPECT_EQ(Train(*engine, 4).size(), 3U);
  EXPECT_TRUE(engine->Flush().ok());
}

// Children that touch the engine and destroy it, as a loader's workers may, at any moment of a step.
TEST_F(ForeignProcessTest, ForksWhileStepsRunChangeNoBit) {
  constexpr int64_t kSteps = 30;
  const std::vector<double> expected = Train(*Open(Options("alone")), kSteps);
  auto engine = Open(Options());
  ASSERT_NE(engine, nullptr);
  std::vector<double> losses;
  std::vector<pid_t> children;
  std::atomic<bool> over{false};
  std::thread trains([&] {
    losses = Train(*engine, kSteps);
    over = true;
  });
  while (!over && children.size() < 40) {
    children.push_back(Fork([&] {
      const bool refused = !engine->Flush().ok();
      engine.reset();
      const auto own = HostBuffer::Of(1 << 20, "memory of a child");  // whoever held the lock at the fork
      return refused && own.ok() ? 0 : 1;
    }));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  trains.join();
  for (const pid_t child : children) EXPECT_EQ(Ended(child), 0);
  EXPECT_EQ(losses, expected);
  EXPECT_GT(children.size(), 0U);
}

// A worker that lives on has copies of all descriptors: they keep nobody out.
TEST_F(ForeignProcessTest, AChildThatLivesOnDoesNotKeepTheDirectory) {
  EngineOptions options = Options();
  options.storage.checkpoints = {.parent = directory_ + "/kept", .every = 2};
  int until_over[2];
  ASSERT_EQ(pipe(until_over), 0);
  auto engine = Open(options);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(Train(*engine, 3).size(), 3U);
  ASSERT_TRUE(engine->Flush().ok());
  const pid_t child = Fork([&] {
    close(until_over[1]);
    char none = 0;
    return read(until_over[0], &none, 1) == 0 ? 0 : 1;
  });
  engine.reset();
  options.storage.overwrite = false;
  options.resume.enabled = true;
  engine = Open(options);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->step(), 3);
  close(until_over[1]);
  EXPECT_EQ(Ended(child), 0);
  close(until_over[0]);
}

TEST_F(ForeignProcessTest, AForkInTheMiddleOfADrivenPassIsTheChildsAffairAlone) {
  Owner owner(shape_, 1);
  absl::StatusOr<Measured> measured = owner.Measure();
  ASSERT_TRUE(measured.ok()) << measured.status();
  auto made = DrivenEngine::Create(*std::move(measured), owner.Options(directory_));
  ASSERT_TRUE(made.ok()) << made.status();
  std::unique_ptr<DrivenEngine> driven = *std::move(made);
  ASSERT_TRUE(driven->Begin().ok());
  auto entered = driven->compute().Enter(Direction::kForward, StageIndex(0), 0);
  ASSERT_TRUE(entered.ok());
  const pid_t child = Fork([&] {
    DrivenCompute& compute = driven->compute();
    if (!absl::IsFailedPrecondition(compute.Enter(Direction::kForward, StageIndex(1), 0).status())) return 1;
    compute.Fail(absl::AbortedError("in the child"));
    if (!absl::IsFailedPrecondition(compute.Leave(*std::move(entered), {}))) return 2;
    if (!absl::IsFailedPrecondition(driven->Finish().status())) return 3;
    if (!absl::IsFailedPrecondition(driven->Begin())) return 4;
    if (!absl::IsFailedPrecondition(driven->Call([](Engine&) { return absl::OkStatus(); }))) return 5;
    driven.reset();
    return 0;
  });
  EXPECT_EQ(Ended(child), 0);
  driven->compute().Fail(absl::AbortedError("begin again"));
  { const DrivenCompute::Entered dropped = *std::move(entered); }
  EXPECT_FALSE(driven->Finish().ok());
  ASSERT_TRUE(driven->Begin().ok());
  const absl::Status computed = owner.Compute(driven->compute(), {PlainBatch(shape_, 1)});
  EXPECT_TRUE(computed.ok()) << computed;
  EXPECT_TRUE(driven->Finish().ok());
}

// Other directories, other options, each on a thread: the bits, and the budgets, of each alone.
TEST_F(ForeignProcessTest, TwoEnginesTrainAtOnceAsEachDoesAlone) {
  constexpr int64_t kSteps = 16;
  const auto options_of = [&](const std::string& name, bool second) {
    EngineOptions options = Options(name);
    options.seed = second ? 5 : 1;
    options.optimizer.clip = second ? 0 : 1;
    options.optimizer.workers = second ? 2 : 1;
    if (second) options.optimizer.algorithm = kernels::LionOptions{};
    if (second) options.memory.tile_bytes = 8 << 10;
    options.memory.host_memory_budget_bytes = 1 << 30;
    auto plan = Engine::MakePlan(*std::make_unique<plain::PlainCompute>(shape_), options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes + (second ? 1 << 20 : 0);
    return options;
  };
  std::vector<std::vector<double>> expected;
  for (const bool second : {false, true})
    expected.push_back(Train(*Open(options_of("alone", second)), kSteps));
  EXPECT_NE(expected[0], expected[1]);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::vector<double>> losses(2);
    std::vector<std::thread> threads;
    for (const bool second : {false, true}) {
      threads.emplace_back([&, second] {
        const EngineOptions options = options_of(second ? "b" : "a", second);
        const auto engine = Open(options);
        ASSERT_NE(engine, nullptr);
        losses[second ? 1 : 0] = Train(*engine, kSteps);
        EXPECT_LE(engine->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
        EXPECT_GT(engine->peak_managed_bytes(), 0);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(losses, expected);
  }
}

// And of models that their owners drive, each on two threads: its own and its engine's.
TEST_F(ForeignProcessTest, TwoDrivenEnginesTrainAtOnceAsEachDoesAlone) {
  constexpr int64_t kSteps = 12;
  const auto train = [&](const std::string& name, uint64_t seed, std::vector<double>* losses) {
    const plain::Shape shape = {.layers = seed == 1 ? 5 : 3, .width = 64};
    Owner owner(shape, 1);
    absl::StatusOr<Measured> measured = owner.Measure();
    ASSERT_TRUE(measured.ok()) << measured.status();
    EngineOptions options = owner.Options(directory_ + "/" + name);
    options.memory.tile_bytes = 16 << 10;
    options.seed = seed;
    auto driven = DrivenEngine::Create(*std::move(measured), options);
    ASSERT_TRUE(driven.ok()) << driven.status();
    for (int64_t step = 1; step <= kSteps; ++step) {
      ASSERT_TRUE((*driven)->Begin(Next::kTrain).ok());
      const absl::Status computed = owner.Compute((*driven)->compute(), {PlainBatch(shape, step)});
      const auto result = (*driven)->Finish();
      ASSERT_TRUE(result.ok()) << result.status() << computed;
      losses->push_back(result->loss);
    }
  };
  std::vector<std::vector<double>> expected(2), losses(2);
  train("alone", 1, &expected[0]);
  train("alone", 5, &expected[1]);
  EXPECT_NE(expected[0], expected[1]);
  std::thread first([&] { train("a", 1, &losses[0]); });
  std::thread second([&] { train("b", 5, &losses[1]); });
  first.join();
  second.join();
  EXPECT_EQ(losses, expected);
}

// What is given back later than its engine, and engines that go in the order in which they came.
TEST_F(ForeignProcessTest, EnginesAndTheirMemoryGoInAnyOrder) {
  auto first = Open(Options("a")), second = Open(Options("b"));
  ASSERT_TRUE(first != nullptr && second != nullptr);
  EXPECT_EQ(Train(*first, 2).size(), 2U);
  EXPECT_EQ(Train(*second, 2).size(), 2U);
  auto value = first->ReadState(first->ParameterNames().front(), StateKind::kParameter);
  ASSERT_TRUE(value.ok()) << value.status();
  const float weight = *static_cast<const float*>(value->view.data);
  const int64_t before = TensorMemory::Stats().live_bytes;
  first.reset();
  EXPECT_EQ(*static_cast<const float*>(value->view.data), weight);
  EXPECT_EQ(Train(*second, 4).size(), 2U);
  *value = HostTensor();
  second.reset();
  EXPECT_EQ(TensorMemory::Stats().live_bytes, before);
}

TEST_F(ForeignProcessTest, WhatSignalsDoIsWhatItWas) {
  constexpr std::array kSignals = {SIGINT, SIGTERM, SIGPIPE, SIGXFSZ, SIGCHLD, SIGSEGV, SIGBUS, SIGUSR1};
  const auto handlers = [&] {
    std::vector<void (*)(int)> all;
    for (const int number : kSignals) {
      struct sigaction now {};
      EXPECT_EQ(sigaction(number, nullptr, &now), 0);
      all.push_back(now.sa_handler);
    }
    return all;
  };
  const auto before = handlers();
  auto engine = Open(Options());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(Train(*engine, 2).size(), 2U);
  EXPECT_EQ(handlers(), before);
  engine.reset();
  EXPECT_EQ(handlers(), before);
}

}  // namespace
}  // namespace penstock::zero::foreign_process_test
