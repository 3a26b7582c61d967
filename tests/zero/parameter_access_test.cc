// Reading and writing single parameters' state through the engine, in every home that it may have.
#include "zero/engine/parameter_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <vector>

#include "models/families/stages.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/zero/training.h"
#include "zero/engine/engine.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero::parameter_access_test {
namespace {

using testing_support::RunOptions;

std::unique_ptr<Engine> Open(const RunOptions& run, bool resume = false) {
  EngineOptions options = testing_support::OptionsOf(run);
  if (run.adjust) run.adjust(options);
  options.resume.enabled = resume;
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(models::MakeGpt(run.model), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? std::move(*engine) : nullptr;
}

double Step(Engine& engine, const RunOptions& run) {
  std::vector<Batch> batches = {testing_support::MakeBatch(run, engine.step() + 1, 0)};
  absl::StatusOr<StepResult> result = engine.Step(std::move(batches), Next::kTrain);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->loss : 0;
}

std::string NameOfAWeight(const Engine& engine) {
  const std::vector<std::string> names = engine.ParameterNames();
  for (const std::string& name : names) {
    if (name.find("mlp") != std::string::npos && name.find("weight") != std::string::npos) return name;
  }
  ADD_FAILURE() << testing::PrintToString(names);
  return "";
}

// The same values in memory and on the drive, of every kind; AdamW's first step by hand.
TEST(ParameterAccess, ReadsWhatTheUpdateMadeInEveryHome) {
  for (const kernels::DType dtype : {kernels::DType::kFp32, kernels::DType::kBf16}) {
    std::vector<torch::Tensor> read[3];
    for (int home = 0; home < 3; ++home) {
      RunOptions run;
      run.dtype = dtype;
      run.clip = 0;
      run.weight_decay = 0;
      if (home > 0) {
        run.state_dir = testing_support::ScratchDirectory();
        run.host_memory_budget_bytes = 1;
        run.host_memory_budget_bytes = testing_support::TrainGpt(run).least_host_memory_bytes;
        if (home == 2) run.host_memory_budget_bytes = 0;
        run.update_order = tiering::UpdateOrder::kInNextForward;
      }
      std::filesystem::create_directories(run.state_dir.empty() ? "." : run.state_dir);
      std::unique_ptr<Engine> engine = Open(run);
      ASSERT_NE(engine, nullptr);
      const std::string name = NameOfAWeight(*engine);
      EXPECT_EQ(ReadStateTensor(*engine, name, StateKind::kGradient).status().code(),
                absl::StatusCode::kFailedPrecondition);
      const torch::Tensor before = *ReadStateTensor(*engine, name, StateKind::kParameter);
      Step(*engine, run);
      for (const StateKind kind :
           {StateKind::kGradient, StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        absl::StatusOr<torch::Tensor> values = ReadStateTensor(*engine, name, kind);
        ASSERT_TRUE(values.ok()) << values.status();
        read[home].push_back(*values);
      }
      const torch::Tensor& gradient = read[home][0];
      EXPECT_GT(gradient.abs().max().item<double>(), 0);
      EXPECT_TRUE(torch::allclose(read[home][2], gradient * 0.1, 1e-5, 1e-12));
      EXPECT_TRUE(torch::allclose(read[home][3], gradient.square() * 0.001, 1e-4, 1e-16));
      const torch::Tensor moved = before - run.lr * gradient / (gradient.abs() + 1e-8);
      EXPECT_TRUE(torch::allclose(read[home][1], moved, 1e-4, 1e-6));
      engine.reset();
      if (home > 0) std::filesystem::remove_all(run.state_dir);
      if (home == 0) continue;
      for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(read[home][i], read[0][i])) << home << i;
    }
  }
}

// Where a run has its state, and how much of it is durable when.
struct Home {
  const char* name;
  Durability durability = Durability::kStep;
  int versions = 0;        // 0: in memory
  int64_t more_bytes = 0;  // than the least
  bool keeps_checkpoints = false;
};

// On another thread than the engine's: the same values, in memory that the engine counts.
TEST(ParameterAccess, RangesAreReadOnAnyThreadInTheEnginesMemory) {
  RunOptions run;
  run.state_dir = testing_support::ScratchDirectory();
  std::filesystem::create_directories(run.state_dir);
  std::unique_ptr<Engine> engine = Open(run);
  ASSERT_NE(engine, nullptr);
  Step(*engine, run);
  const TensorMemoryStats before = TensorMemory::Stats();
  const absl::Status status = engine->ReadRanges([](const Engine::ReadRange& read) {
    constexpr int64_t kElements = 512;
    std::vector<float> values[2][3];
    for (auto& of_thread : values) {
      for (std::vector<float>& each : of_thread) each.assign(kElements, -1);
    }
    const auto read_to = [&](std::vector<float>* to) {
      return read(1, 64, kElements, to[0].data(), to[1].data(), to[2].data());
    };
    absl::Status here = read_to(values[0]), there;
    std::thread([&] { there = read_to(values[1]); }).join();
    EXPECT_TRUE(std::equal(values[0], values[0] + 3, values[1]));
    EXPECT_NE(values[0][1], std::vector<float>(kElements, -1));
    here.Update(there);
    return here;
  });
  EXPECT_TRUE(status.ok()) << status;
  const TensorMemoryStats after = TensorMemory::Stats();
  EXPECT_EQ(after.live_bytes, before.live_bytes);
  EXPECT_EQ(after.kept_bytes, before.kept_bytes);
  EXPECT_EQ(after.peak_bytes, before.peak_bytes);
}

class StateWrittenIn : public testing_support::ScratchTest,
                       public testing::WithParamInterface<kernels::DType> {
 protected:
  RunOptions RunOf(const Home& home) const {
    RunOptions run;
    run.dtype = GetParam();
    run.tile_bytes = 128 << 10;
    if (home.versions == 0) return run;
    run.state_dir = scratch_ + "/state";
    run.keep_state = true;
    run.host_memory_budget_bytes = 1;
    run.adjust = [home, kept = scratch_ + "/kept"](EngineOptions& options) {
      options.storage.durability = home.durability;
      options.storage.versions = home.versions;
      if (home.keeps_checkpoints) options.storage.checkpoints = {kept, 2, 0};
    };
    run.host_memory_budget_bytes = testing_support::TrainGpt(run).least_host_memory_bytes + home.more_bytes;
    return run;
  }

  // Trains, writes and reads on; returns all losses. With a drive it ends and begins again in the middle.
  std::vector<double> Losses(const Home& home) {
    const RunOptions run = RunOf(home);
    std::unique_ptr<Engine> engine = Open(run);
    if (engine == nullptr) return {};
    if (home.more_bytes >= 1 << 20 && home.durability == Durability::kCheckpoint) {
      EXPECT_GT(engine->plan().plan.late_write_bytes, 0) << "some tiles are to stay in memory";
    }
    const std::string name = NameOfAWeight(*engine);
    std::vector<double> losses = {Step(*engine, run), Step(*engine, run)};
    const torch::Tensor written = *ReadStateTensor(*engine, name, StateKind::kParameter) * 1.5 + 0.01;
    const auto write = [&](StateKind kind, const torch::Tensor& value) {
      const absl::Status status = WriteStateTensor(*engine, name, kind, value);
      EXPECT_TRUE(status.ok()) << status;
    };
    write(StateKind::kParameter, written);
    write(StateKind::kFirstMoment, torch::zeros_like(written));
    // Twice: each is a version of its own.
    write(StateKind::kSecondMoment, torch::ones_like(written));
    write(StateKind::kSecondMoment, torch::ones_like(written) * 1e-4);
    EXPECT_TRUE(torch::equal(*ReadStateTensor(*engine, name, StateKind::kParameter), written));
    for (int i = 0; i < 3; ++i) losses.push_back(Step(*engine, run));
    EXPECT_EQ(WriteStateTensor(*engine, name, StateKind::kParameter, torch::zeros({3})).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(WriteStateTensor(*engine, name, StateKind::kGradient, written).code(),
              absl::StatusCode::kFailedPrecondition);
    const absl::Status unknown = ReadStateTensor(*engine, name + "x", StateKind::kParameter).status();
    EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("did you mean \"" + name));
    write(StateKind::kParameter, written);
    if (home.versions > 0) {
      // What is written after the last step is there after a restart.
      engine.reset();
      EXPECT_FALSE(swap::Inspect({run.state_dir})->record.overwriting) << "refusals leave it whole";
      engine = Open(run, /*resume=*/true);
      if (engine == nullptr) return {};
      EXPECT_EQ(engine->step(), 5);
      EXPECT_EQ(engine->plan().versions, home.versions);
    }
    EXPECT_TRUE(torch::equal(*ReadStateTensor(*engine, name, StateKind::kParameter), written));
    for (int i = 0; i < 3; ++i) losses.push_back(Step(*engine, run));
    const absl::Status flushed = engine->Flush();
    EXPECT_TRUE(flushed.ok()) << flushed;
    engine.reset();
    if (home.keeps_checkpoints) {
      // Those of steps 2 and 4 came after their steps and before what was written then; 8 at the end.
      EXPECT_EQ(swap::ListCheckpoints(scratch_ + "/kept")->size(), 4u);
    }
    std::filesystem::remove_all(scratch_ + "/state");
    std::filesystem::remove_all(scratch_ + "/kept");
    return losses;
  }
};

TEST_P(StateWrittenIn, EveryHomeIsTrainedOnAndSurvives) {
  const std::vector<double> in_memory = Losses({"memory"});
  ASSERT_EQ(in_memory.size(), 8u);
  constexpr int64_t kMore = 3 << 20, kLittle = 1 << 19;  // what the test itself holds counts, too
  for (const Home& home : {Home{"a drive", Durability::kStep, 2, 32 << 20},
                           Home{"a drive, little memory, checkpoints", Durability::kStep, 3, kLittle, true},
                           Home{"durable at checkpoints", Durability::kCheckpoint, 2, kMore},
                           Home{"durable at checkpoints, kept", Durability::kCheckpoint, 2, kMore, true},
                           Home{"one version", Durability::kCheckpoint, 1, kLittle},
                           Home{"one version, kept", Durability::kCheckpoint, 1, kMore, true}}) {
    SCOPED_TRACE(home.name);
    EXPECT_EQ(Losses(home), in_memory);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, StateWrittenIn, testing::Values(kernels::DType::kFp32, kernels::DType::kBf16),
                         [](const auto& type) {
                           return type.param == kernels::DType::kFp32 ? "fp32" : "bf16";
                         });

}  // namespace
}  // namespace penstock::zero::parameter_access_test
