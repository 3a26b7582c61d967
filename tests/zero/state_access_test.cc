// Reading and writing single parameters' state through the engine, in every home that it may have.
#include "zero/state_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "tests/zero/training.h"
#include "zero/engine.h"

namespace penstock::zero {
namespace {

using testing_support::RunOptions;

std::unique_ptr<Engine> Open(const RunOptions& run, bool resume = false) {
  EngineOptions options = testing_support::OptionsOf(run);
  options.resume = resume;
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(tools::MakeGpt(run.model), options);
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
TEST(StateAccess, ReadsWhatTheUpdateMadeInEveryHome) {
  for (const torch::Dtype dtype : {torch::kFloat32, torch::kBFloat16}) {
    std::vector<torch::Tensor> read[3];
    for (int home = 0; home < 3; ++home) {
      RunOptions run;
      run.dtype = dtype;
      run.clip = 0;
      run.weight_decay = 0;
      if (home > 0) {
        run.state_dir = testing_support::ScratchDirectory();
        run.host_memory_bytes = 1;
        run.host_memory_bytes = testing_support::TrainGpt(run).least_host_memory_bytes;
        if (home == 2) run.host_memory_bytes = 0;
        run.update_order = tiering::UpdateOrder::kInNextForward;
      }
      std::filesystem::create_directories(run.state_dir.empty() ? "." : run.state_dir);
      std::unique_ptr<Engine> engine = Open(run);
      ASSERT_NE(engine, nullptr);
      const std::string name = NameOfAWeight(*engine);
      EXPECT_EQ(engine->ReadState(name, StateKind::kGradient).status().code(),
                absl::StatusCode::kFailedPrecondition);
      const torch::Tensor before = *engine->ReadState(name, StateKind::kParameter);
      Step(*engine, run);
      for (const StateKind kind :
           {StateKind::kGradient, StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        absl::StatusOr<torch::Tensor> values = engine->ReadState(name, kind);
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

TEST(StateAccess, WrittenValuesAreTrainedOnAndSurvive) {
  for (const torch::Dtype dtype : {torch::kFloat32, torch::kBFloat16}) {
    std::vector<double> losses[2];
    torch::Tensor written;
    for (int home = 0; home < 2; ++home) {
      RunOptions run;
      run.dtype = dtype;
      if (home == 1) {
        run.state_dir = testing_support::ScratchDirectory();
        run.update_order = tiering::UpdateOrder::kInBackward;
        run.host_memory_bytes = 64 << 20;
      }
      std::unique_ptr<Engine> engine = Open(run);
      ASSERT_NE(engine, nullptr);
      const std::string name = NameOfAWeight(*engine);
      losses[home] = {Step(*engine, run), Step(*engine, run)};
      written = *engine->ReadState(name, StateKind::kParameter) * 1.5 + 0.01;
      ASSERT_TRUE(engine->WriteState(name, StateKind::kParameter, written).ok());
      ASSERT_TRUE(engine->WriteState(name, StateKind::kFirstMoment, torch::zeros_like(written)).ok());
      // Twice: each is a version of its own.
      ASSERT_TRUE(engine->WriteState(name, StateKind::kSecondMoment, torch::ones_like(written)).ok());
      ASSERT_TRUE(engine->WriteState(name, StateKind::kSecondMoment, torch::ones_like(written) * 1e-4).ok());
      EXPECT_TRUE(torch::equal(*engine->ReadState(name, StateKind::kParameter), written));
      for (int i = 0; i < 3; ++i) losses[home].push_back(Step(*engine, run));
      EXPECT_EQ(engine->WriteState(name, StateKind::kParameter, torch::zeros({3})).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(engine->WriteState(name, StateKind::kGradient, written).code(),
                absl::StatusCode::kFailedPrecondition);
      const absl::Status unknown = engine->ReadState(name + "x", StateKind::kParameter).status();
      EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
      EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("did you mean \"" + name));
      if (home == 0) continue;
      // What is written after the last step is there after a restart.
      ASSERT_TRUE(engine->WriteState(name, StateKind::kParameter, written).ok());
      engine.reset();
      engine = Open(run, /*resume=*/true);
      ASSERT_NE(engine, nullptr);
      EXPECT_EQ(engine->step(), 5);
      EXPECT_TRUE(torch::equal(*engine->ReadState(name, StateKind::kParameter), written));
      engine.reset();
      std::filesystem::remove_all(run.state_dir);
    }
    EXPECT_EQ(losses[0], losses[1]);
  }
}

}  // namespace
}  // namespace penstock::zero
