// Buffers that training changes: one change for each use and micro-batch, as in the whole model in memory;
// committed with the step, undone with a step that fails, read by evaluations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>

#include "absl/strings/escaping.h"
#include "swap/inspect.h"
#include "tests/zero/wide_training.h"
#include "zero/compute/libtorch/libtorch_compute.h"

namespace penstock::zero::changing_buffers_test {
namespace {

using testing::HasSubstr;
using testing_support::MakeWideBatch;
using testing_support::MakeWideModel;
using testing_support::TrainWide;
using testing_support::WholeModel;
using testing_support::WideBatches;
using testing_support::WideLosses;
using testing_support::WideOnADrive;
using testing_support::WideOptions;
using testing_support::WideShape;

using ChangingBuffersTest = testing_support::ScratchTest;

WideShape WithStatistics(int64_t layers) {
  WideShape shape;
  shape.statistics = true;
  shape.layers = layers;
  return shape;
}

// Of the commit that stands.
nlohmann::json CommittedBuffers(const std::string& directory) {
  const absl::StatusOr<swap::Inspection> inspection = swap::Inspect({directory});
  EXPECT_TRUE(inspection.ok()) << inspection.status();
  if (!inspection.ok()) return nlohmann::json();
  return nlohmann::json::parse(inspection->record.payload).value("buffers", nlohmann::json());
}

void ExpectBuffersOf(const WholeModel& whole, const nlohmann::json& buffers) {
  int compared = 0;
  for (size_t b = 0; b < whole.modules.size(); ++b) {
    const std::string& block = whole.model.blocks[b].name;
    for (const auto& buffer : whole.modules[b]->named_buffers()) {
      SCOPED_TRACE(block + "." + buffer.key());
      ASSERT_TRUE(buffers.contains(block) && buffers[block].contains(buffer.key()));
      std::string bytes;
      ASSERT_TRUE(absl::Base64Unescape(buffers[block][buffer.key()]["data"].get<std::string>(), &bytes));
      const torch::Tensor value = buffer.value().contiguous();
      EXPECT_EQ(bytes, std::string(static_cast<const char*>(value.data_ptr()), value.nbytes()));
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

TEST_F(ChangingBuffersTest, StatisticsAndGradientsAreThoseOfTheWholeModel) {
  const WideShape shape = WithStatistics(4);
  const Model model = MakeWideModel(shape);
  for (const bool on_a_drive : {false, true}) {
    SCOPED_TRACE(on_a_drive ? "on a drive" : "in memory");
    EngineOptions options = on_a_drive ? WideOnADrive(shape, model, scratch_ + "/state") : WideOptions(shape);
    // The weights stay as they are, for LibTorch's optimizer rounds otherwise.
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 0};
    const auto compute = std::make_shared<LibTorchCompute>(model);
    absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(compute, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    WholeModel whole(model, options.seed);
    for (int64_t step = 1; step <= 3; ++step) {
      const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, step));
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->loss, whole.Backward({MakeWideBatch(shape, step, 0), MakeWideBatch(shape, step, 1)},
                                             options.seed, step));
    }
    ASSERT_TRUE((*engine)->Flush().ok());
    for (const auto& parameter : whole.modules[2]->named_parameters()) {
      const auto ours = ReadStateTensor(**engine, "layer.1." + parameter.key(), StateKind::kGradient);
      ASSERT_TRUE(ours.ok()) << ours.status();
      EXPECT_TRUE(torch::equal(*ours, parameter.value().grad())) << parameter.key();
    }
    if (!on_a_drive) {
      const absl::StatusOr<nlohmann::json> buffers = compute->Buffers();
      ASSERT_TRUE(buffers.ok()) << buffers.status();
      ExpectBuffersOf(whole, *buffers);
      continue;
    }
    EXPECT_GT((*engine)->plan().plan.input_scratch_bytes, 0);
    engine->reset();
    ExpectBuffersOf(whole, CommittedBuffers(scratch_ + "/state"));
  }
}

TEST_F(ChangingBuffersTest, ARunThatGoesOnHasTheBitsOfOneInOnePiece) {
  const WideShape shape = WithStatistics(6);
  const Model model = MakeWideModel(shape);
  absl::StatusOr<std::unique_ptr<Engine>> in_memory = CreateEngine(model, WideOptions(shape));
  ASSERT_TRUE(in_memory.ok()) << in_memory.status();
  const WideLosses expected = TrainWide(**in_memory, shape, 6);
  in_memory->reset();

  EngineOptions options = WideOnADrive(shape, model, scratch_ + "/state");
  WideLosses ours;
  double last = 0;
  for (const int64_t until : {2, 3, 6}) {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    if (options.resume.enabled) {
      const absl::StatusOr<double> evaluation = (*engine)->Evaluate(WideBatches(shape, 1000));
      ASSERT_TRUE(evaluation.ok()) << evaluation.status();
      EXPECT_EQ(*evaluation, last);
    }
    ours.Append(TrainWide(**engine, shape, until));
    last = ours.evaluations.back();
    EXPECT_LE((*engine)->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
    ASSERT_TRUE((*engine)->Flush().ok());
    options.resume.enabled = true;
  }
  EXPECT_EQ(ours, expected);

  // For evaluation alone, where nothing tells which of them change.
  options.trains = false;
  options.memory.host_memory_budget_bytes = 0;
  absl::StatusOr<std::unique_ptr<Engine>> reader = CreateEngine(model, options);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const absl::StatusOr<double> evaluation = (*reader)->Evaluate(WideBatches(shape, 1000));
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  EXPECT_EQ(*evaluation, last);
}

TEST_F(ChangingBuffersTest, ACheckpointOfMemoryHasThem) {
  const WideShape shape = WithStatistics(2);
  const Model model = MakeWideModel(shape);
  EngineOptions options = WideOptions(shape);
  WideLosses expected, ours;
  std::string path;
  {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    TrainWide(**engine, shape, 3);
    absl::StatusOr<std::string> kept = (*engine)->Checkpoint(scratch_ + "/kept");
    ASSERT_TRUE(kept.ok()) << kept.status();
    path = *kept;
    expected = TrainWide(**engine, shape, 6);
  }
  options.resume.enabled = true;
  options.storage.state_dirs = {path};
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ((*engine)->resumed_from(), 3);
  EXPECT_EQ(TrainWide(**engine, shape, 6), expected);
}

TEST_F(ChangingBuffersTest, AStepThatFailsLeavesThemAsTheyWere) {
  const WideShape shape = WithStatistics(3);
  int calls_left = -1;
  Model model = MakeWideModel(shape);
  for (size_t s = 1; s + 1 < model.stages.size(); ++s) {
    model.stages[s].compute = [&calls_left, compute = model.stages[s].compute](StageCall& call,
                                                                               const Values& inputs) {
      Values outputs = compute(call, inputs);  // they have changed
      if (calls_left >= 0 && calls_left-- == 0) throw std::runtime_error("made to fail");
      return outputs;
    };
  }
  for (const bool on_a_drive : {false, true}) {
    const EngineOptions options =
        on_a_drive ? WideOnADrive(shape, model, scratch_ + "/state") : WideOptions(shape);
    absl::StatusOr<std::unique_ptr<Engine>> whole = CreateEngine(model, WideOptions(shape));
    ASSERT_TRUE(whole.ok()) << whole.status();
    const WideLosses expected = TrainWide(**whole, shape, 4);
    whole->reset();
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    WideLosses ours = TrainWide(**engine, shape, 2);
    // In forward and in backward, with an evaluation between the attempts.
    for (const int at : {0, 3, 5, 6, 9, 11}) {
      calls_left = at;
      const absl::StatusOr<StepResult> failed = (*engine)->Step(WideBatches(shape, 3));
      EXPECT_THAT(std::string(failed.status().message()), HasSubstr("made to fail")) << at;
      calls_left = -1;
      const absl::StatusOr<double> evaluation = (*engine)->Evaluate(WideBatches(shape, 1000));
      ASSERT_TRUE(evaluation.ok()) << evaluation.status();
      EXPECT_EQ(*evaluation, ours.evaluations.back()) << at;
    }
    ours.Append(TrainWide(**engine, shape, 4));
    EXPECT_EQ(ours, expected);
  }
}

TEST_F(ChangingBuffersTest, AStepThatIsSkippedKeepsThemAsPyTorchDoes) {
  const WideShape shape = WithStatistics(2);
  EngineOptions options = WideOptions(shape);
  options.dtype = kernels::DType::kFp16;
  options.optimizer.loss_scale = {.dynamic = true, .initial_scale = 0x1p40, .hysteresis = 1};
  const auto compute = std::make_shared<LibTorchCompute>(MakeWideModel(shape));
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(compute, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto batches_seen = [&](const nlohmann::json& buffers) {
    std::string bytes;
    EXPECT_TRUE(absl::Base64Unescape(
        buffers["layer.0"]["norm.num_batches_tracked"]["data"].get<std::string>(), &bytes));
    return static_cast<int>(bytes[0]);
  };
  for (int step = 1; step <= 3; ++step) {
    const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, step));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->skipped);
    const absl::StatusOr<nlohmann::json> buffers = compute->Buffers();
    ASSERT_TRUE(buffers.ok()) << buffers.status();
    EXPECT_EQ(batches_seen(*buffers), step * testing_support::kWideMicroBatches);
  }
}

TEST_F(ChangingBuffersTest, WhatDoesNotFitIntoACommitIsRefused) {
  const WideShape shape = WithStatistics(1);
  Model model = MakeWideModel(shape);
  struct LargeImpl : torch::nn::LinearImpl {
    explicit LargeImpl(const WideShape& shape) : LinearImpl(shape.width, shape.words) {
      seen = register_buffer("seen", torch::zeros({4 << 20}));
    }
    torch::Tensor seen;
  };
  model.blocks.back().build = [shape] { return std::make_shared<LargeImpl>(shape); };
  model.stages.back().compute = [](StageCall& call, const Values& inputs) -> Values {
    auto& large = call.module<LargeImpl>();
    large.seen.add_(1);
    return {large.forward(inputs[0]).square().mean()};
  };
  const absl::Status refused = CreateEngine(model, WideOptions(shape)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes of each commit, and there is room for"));
}

}  // namespace
}  // namespace penstock::zero::changing_buffers_test
