// Weights that are only evaluated (EngineOptions::new_weights), driven by their owner.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/float16.h"
#include "swap/inspect.h"
#include "zero/engine/driven_engine.h"

namespace penstock::zero::new_weights_test {
namespace {

using testing::HasSubstr;
using tiering::BlockIndex;
using tiering::StageIndex;

constexpr int kBlocks = 6;
constexpr int64_t kRows = 1024, kColumns = 1024, kElements = kRows * kColumns;

float Initial(int block, int64_t element) {  // exact in bf16
  return static_cast<float>((element * 37 + block * 11) % 129 - 64) / 64;
}

class NewWeightsTest : public testing::Test {
 protected:
  ~NewWeightsTest() override { std::filesystem::remove_all(directory_); }

  // The first `frozen` blocks do not train.
  static Measured Given(int frozen) {
    Measured measured;
    measured.identity = {{"architecture", "rows"}};
    for (int b = 0; b < kBlocks; ++b) {
      const auto layout = std::make_shared<const FlatLayout>(
          FlatLayout::Of(std::vector<ParameterSpec>{{"weight", {kRows, kColumns}, b >= frozen}}));
      measured.graph.blocks.push_back(
          {.name = "block." + std::to_string(b), .elements = layout->elements, .trains = b >= frozen});
      measured.graph.stages.push_back({.name = "stage", .block = BlockIndex(b)});
      measured.layouts.push_back(layout);
      measured.parameters += layout->parameter_elements;
    }
    return measured;
  }
  EngineOptions Options() const {
    EngineOptions options;
    options.dtype = kernels::DType::kBf16;
    options.storage.state_dirs = {directory_};
    options.memory.tile_bytes = 512 << 10;
    options.trains = false;
    options.new_weights = true;
    options.initial_values = [](int block, int64_t first, int64_t n, float* to) {
      for (int64_t i = 0; i < n; ++i) to[i] = first + i < kElements ? Initial(block, first + i) : 0.0F;
      return absl::OkStatus();
    };
    return options;
  }
  // Of one forward: that every block has its values, and how many bytes were read.
  static void Evaluate(DrivenEngine& driven, int64_t* read) {
    ASSERT_TRUE(driven.BeginEvaluation().ok());
    for (int b = 0; b < kBlocks; ++b) {
      auto entered = driven.compute().Enter(Direction::kForward, StageIndex(b), 0);
      ASSERT_TRUE(entered.ok()) << entered.status();
      std::vector<float> values(static_cast<size_t>(kElements));
      kernels::Convert(kernels::DType::kBf16, entered->weights().front().data, kernels::DType::kFp32,
                       values.data(), values.size());
      for (int64_t i = 0; i < kElements; ++i) ASSERT_EQ(values[static_cast<size_t>(i)], Initial(b, i)) << b;
      ASSERT_TRUE(driven.compute().Leave(*std::move(entered), {}).ok());
    }
    ASSERT_TRUE(driven.Finish().ok());
    ASSERT_TRUE(driven
                    .Call([&](Engine& engine) {
                      *read = static_cast<int64_t>(engine.io_stats().DeviceReadBytes());
                      return absl::OkStatus();
                    })
                    .ok());
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("new-weights-" + std::to_string(getpid()))).string();
};

TEST_F(NewWeightsTest, TheDriveHasThemAloneAndMemoryAsManyAsThereIsRoomFor) {
  constexpr int64_t kWeights = kBlocks * kElements * 2;
  EngineOptions options = Options();
  int64_t least_bytes = 0;
  {
    const auto least = DrivenEngine::Create(Given(kBlocks), options);
    ASSERT_TRUE(least.ok()) << least.status();
    EXPECT_EQ((*least)->plan().state_bytes, kWeights);
    least_bytes = (*least)->plan().plan.least_host_memory_bytes;
  }
  EXPECT_LT(least_bytes, kWeights);
  options.storage.overwrite = true;
  for (const int64_t resident : {0, kBlocks / 2, kBlocks}) {
    SCOPED_TRACE(resident);
    options.memory.host_memory_budget_bytes = least_bytes + resident * kElements * 2;
    const auto driven = DrivenEngine::Create(Given(kBlocks), options);
    ASSERT_TRUE(driven.ok()) << driven.status();
    int64_t before = 0, read = 0;
    Evaluate(**driven, &before);
    for (int pass = 0; pass < 3; ++pass) {
      Evaluate(**driven, &read);
      EXPECT_LE(read - before, (kBlocks - resident) * kElements * 2);
      before = read;
    }
    // Whatever memory there is, somebody may look at them.
    std::vector<float> values(static_cast<size_t>(kElements));
    const absl::Status looked = (*driven)->Call([&](Engine& engine) {
      EXPECT_EQ(engine.ReadState("block.2.weight", StateKind::kParameter, std::span<float>()).code(),
                absl::StatusCode::kInvalidArgument);
      return engine.ReadState("block.2.weight", StateKind::kParameter, values);
    });
    ASSERT_TRUE(looked.ok()) << looked;
    for (int64_t i = 0; i < kElements; ++i) ASSERT_EQ(values[static_cast<size_t>(i)], Initial(2, i));
  }
  const auto inspection = swap::Inspect({directory_});
  ASSERT_TRUE(inspection.ok()) << inspection.status();
  EXPECT_EQ(static_cast<int64_t>(inspection->state_bytes), kWeights);
  uintmax_t on_disk = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) on_disk += entry.file_size();
  EXPECT_LT(static_cast<double>(on_disk), 1.2 * kWeights);  // one version, and no state
}

TEST_F(NewWeightsTest, TheyAreEvaluatedAgainAndNeverTrained) {
  int64_t read = 0;
  ASSERT_TRUE(DrivenEngine::Create(Given(kBlocks), Options()).ok());
  EngineOptions options = Options();
  EXPECT_EQ(DrivenEngine::Create(Given(kBlocks), options).status().code(), absl::StatusCode::kAlreadyExists);
  options.new_weights = false;  // those that are there
  {
    const auto driven = DrivenEngine::Create(Given(kBlocks), options);
    ASSERT_TRUE(driven.ok()) << driven.status();
    Evaluate(**driven, &read);
    const absl::Status step = (*driven)->Begin();
    EXPECT_FALSE(step.ok() && (*driven)->Finish().ok());
  }
  options.trains = true;
  options.resume.enabled = true;
  for (const int frozen : {kBlocks, 0}) {
    const absl::Status trains = DrivenEngine::Create(Given(frozen), options).status();
    EXPECT_EQ(trains.code(), absl::StatusCode::kFailedPrecondition) << trains;
    EXPECT_THAT(trains.message(), HasSubstr("holds another run: evaluated_only"));
  }
}

// A training's run, whose first block was frozen when it began.
TEST_F(NewWeightsTest, WhatWasFrozenWholeMayBeEvaluatedWhateverTrainsNow) {
  EngineOptions options = Options();
  options.new_weights = false;
  options.trains = true;
  ASSERT_TRUE(DrivenEngine::Create(Given(1), options).ok());
  options.resume.enabled = true;
  const absl::Status refused = DrivenEngine::Create(Given(0), options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("block block.0 trains, and the run in "));
  for (const int frozen : {1, 3}) {
    const auto goes_on = DrivenEngine::Create(Given(frozen), options);
    EXPECT_TRUE(goes_on.ok()) << goes_on.status();
  }
  options.resume.enabled = false;
  options.trains = false;
  for (const int frozen : {0, 1, 3, kBlocks}) {
    const auto evaluates = DrivenEngine::Create(Given(frozen), options);
    ASSERT_TRUE(evaluates.ok()) << evaluates.status();
    int64_t read = 0;
    Evaluate(**evaluates, &read);
    const absl::Status looked = (*evaluates)->Call([&](Engine& engine) {
      for (const char* name : {"block.0.weight", "block.2.weight"}) {
        const auto value = engine.ReadState(name, StateKind::kParameter);
        if (!value.ok()) return value.status();
        EXPECT_EQ(static_cast<const float*>(value->view.data)[7], Initial(name[6] - '0', 7));
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(looked.ok()) << looked;
  }
}

TEST_F(NewWeightsTest, WhatCannotBeIsRefused) {
  for (const auto& change : std::vector<std::function<void(EngineOptions&)>>{
           [](EngineOptions& options) { options.trains = true; },
           [](EngineOptions& options) { options.resume.enabled = true; },
           [](EngineOptions& options) { options.initial_values = nullptr; },
           [](EngineOptions& options) { options.storage.offload = OffloadDevice::kCpu; }}) {
    EngineOptions options = Options();
    change(options);
    const absl::Status refused = DrivenEngine::Create(Given(options.trains ? 0 : kBlocks), options).status();
    EXPECT_THAT(std::string(refused.message()), HasSubstr("new weights that are only evaluated"));
    EXPECT_FALSE(std::filesystem::exists(directory_));
  }
  const absl::Status trained = DrivenEngine::Create(Given(0), Options()).status();
  EXPECT_THAT(std::string(trained.message()), HasSubstr("whose parameters are all frozen"));
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

}  // namespace
}  // namespace penstock::zero::new_weights_test
