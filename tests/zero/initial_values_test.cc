#include "zero/compute/libtorch/initial_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "tests/zero/training.h"
#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/engine/engine.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero::initial_values_test {
namespace {

// Parameters of the given sizes.
std::shared_ptr<torch::nn::Module> OfSizes(const std::vector<std::vector<int64_t>>& sizes) {
  auto module = std::make_shared<torch::nn::Module>();
  for (size_t i = 0; i < sizes.size(); ++i)
    module->register_parameter(absl::StrCat("p", i), WithoutMemory(sizes[i]));
  return module;
}

void ExpectBits(const std::vector<float>& run, const Parameter& parameter, const torch::Tensor& whole) {
  ASSERT_EQ(parameter.elements, whole.numel());
  EXPECT_EQ(std::memcmp(run.data() + parameter.offset, whole.contiguous().data_ptr<float>(),
                        static_cast<size_t>(whole.numel()) * sizeof(float)),
            0)
      << parameter.name << " " << whole.sizes();
}

TEST(InitialStream, HasTheBitsOfParametersDrawnAsAWholeWhateverTheTiles) {
  std::mt19937 random(5);
  for (int round = 0; round < 12; ++round) {
    std::vector<std::vector<int64_t>> sizes;
    BlockSpec spec{"block", "", nullptr, {}};
    // Around the groups of 16 that LibTorch draws in, and the pieces of the stream.
    const std::vector<int64_t> odd = {1,     7,     15,    16,     17,     31,     33,     1000,
                                      65535, 65536, 65537, 131071, 131072, 131073, 131087, 200001};
    for (int i = 0; i < 6; ++i) {
      const int64_t n = odd[random() % odd.size()];
      sizes.push_back(n % 3 == 0 ? std::vector<int64_t>{3, n / 3} : std::vector<int64_t>{n});
      switch (random() % 4) {
        case 0:
          spec.initial.push_back({.mean = 1.5});
          break;
        case 1:
          spec.initial.push_back({.bound = 0.125});
          break;
        default:
          spec.initial.push_back({.mean = 0.25, .deviation = 0.02});
      }
    }
    const std::shared_ptr<torch::nn::Module> module = OfSizes(sizes);
    const FlatLayout layout = LayoutOf(*module);
    const auto seed = static_cast<uint64_t>(round) + 100;
    torch::manual_seed(seed);
    std::vector<torch::Tensor> whole;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const InitialValues& values = spec.initial[i];
      whole.push_back(values.bound > 0       ? torch::empty(sizes[i]).uniform_(-values.bound, values.bound)
                      : values.deviation > 0 ? torch::normal(values.mean, values.deviation, sizes[i])
                                             : torch::full(sizes[i], values.mean));
    }
    const torch::Tensor after = torch::rand({4});
    torch::manual_seed(seed);
    InitialStream stream(spec, layout);
    std::vector<float> run(static_cast<size_t>(layout.elements), 7);
    const auto tile = static_cast<int64_t>(2048 * (1 + random() % 40));
    for (int64_t first = 0; first < layout.elements; first += tile) {
      stream.Read(first, std::min(tile, layout.elements - first), run.data() + first);
    }
    for (size_t i = 0; i < sizes.size(); ++i) ExpectBits(run, layout.parameters[i], whole[i]);
    EXPECT_TRUE(torch::equal(torch::rand({4}), after)) << "the generator goes on as if nothing had been cut";
    float padding = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t from = layout.parameters[i].offset + layout.parameters[i].elements;
      const int64_t to = i + 1 < sizes.size() ? layout.parameters[i + 1].offset : layout.elements;
      for (int64_t e = from; e < to; ++e) padding += std::abs(run[static_cast<size_t>(e)]);
    }
    EXPECT_EQ(padding, 0);
    // A later rank's part alone, which ends beyond the run.
    torch::manual_seed(seed);
    InitialStream again(spec, layout);
    const int64_t half = layout.elements / 2 / 2048 * 2048, beyond = layout.elements - half + 4096;
    std::vector<float> part(static_cast<size_t>(beyond), 7);
    again.Read(half, beyond, part.data());
    EXPECT_EQ(std::memcmp(part.data(), run.data() + half, static_cast<size_t>(layout.elements - half) * 4),
              0);
    EXPECT_EQ(part.back(), 0);
  }
}

// The losses that runs had before their blocks said what they begin with; and initializer_range as
// transformers has it: tables and linear weights by it, c_proj by that over sqrt(2 n_layer), biases zero,
// norms one.
TEST(InitialStream, AGptBeginsAsItAlwaysDid) {
  for (const double range : {0.02, 0.5}) {
    models::GptConfig config{3, 48, 4, 40, 300, 0};
    config.deviation = range;
    const Model model = models::MakeGpt(config);
    const auto of = [&](size_t block) {
      torch::manual_seed(11);
      return UniqueParameters(*BuildWhole(model.blocks[block]));
    };
    torch::manual_seed(11);
    std::vector<torch::Tensor> embedding = {torch::normal(0, range, {300, 48}),
                                            torch::normal(0, range, {40, 48}), torch::ones({48}),
                                            torch::zeros({48})};
    torch::manual_seed(11);
    const double projected = range / std::sqrt(6.0);
    std::vector<torch::Tensor> layer = {torch::ones({48}), torch::zeros({48})};
    for (const auto& [out, in, deviation] : {std::tuple{144, 48, range},
                                             {48, 48, projected},
                                             {0, 0, 0.0},
                                             {192, 48, range},
                                             {48, 192, projected}}) {
      if (out == 0) {
        layer.push_back(torch::ones({48}));
        layer.push_back(torch::zeros({48}));
        continue;
      }
      layer.push_back(torch::normal(0, deviation, {out, in}));
      layer.push_back(torch::zeros({out}));
    }
    for (const auto& [block, expected] :
         {std::pair<size_t, std::vector<torch::Tensor>>{0, embedding}, {1, layer}}) {
      const std::vector<torch::Tensor> begins = of(block);
      ASSERT_EQ(begins.size(), expected.size());
      for (size_t i = 0; i < begins.size(); ++i)
        EXPECT_TRUE(torch::equal(begins[i], expected[i])) << range << " " << block << " " << i;
    }
  }
}

TEST(InitialStream, ABlockBeginsInTheMemoryOfATile) {
  testing_support::RunOptions run;
  run.model = {3, 512, 8, 16, 256, 0};
  run.batch = 1;
  run.seq = 16;
  run.steps = 2;
  const testing_support::TrainedLosses none = TrainGpt(run);
  ASSERT_TRUE(none.status.ok()) << none.status;
  run.offload = OffloadDevice::kNvme;
  run.host_memory_budget_bytes = 1;
  run.tile_bytes = 1 << 20;
  run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes;
  const testing_support::TrainedLosses least = TrainGpt(run);
  ASSERT_TRUE(least.status.ok()) << least.status;
  EXPECT_EQ(least.losses, none.losses);
  EXPECT_LE(least.peak_managed_bytes, run.host_memory_budget_bytes);
  // A layer has 3.15 M parameters, 12.6 MB in fp32, and none of them is in memory to begin with.
  const absl::StatusOr<EnginePlan> plan = PlanEngine(models::MakeGpt(run.model), [&] {
    testing_support::RunOptions in_memory = run;
    in_memory.offload = OffloadDevice::kCpu;
    in_memory.host_memory_budget_bytes = 0;
    return testing_support::OptionsOf(in_memory);
  }());
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const tiering::BlockShape& block : plan->graph.blocks)
    EXPECT_LT(block.init_bytes, 64 << 10) << block.name;
}

// Refused by arithmetic, before anything of its size is allocated.
TEST(MeasureModel, WhatCouldNotFitAnywhereIsRefusedUnbuilt) {
  EngineOptions options;
  options.storage.offload = OffloadDevice::kCpu;
  options.memory.host_memory_budget_bytes = 256 << 20;
  options.example = TensorBatch{torch::zeros({1, 8}, torch::kInt64), torch::zeros({1, 8}, torch::kInt64)};
  InstallTensorAllocator();
  TensorMemory::ResetLivePeak();
  const int64_t before = TensorMemory::Stats().live_bytes;
  const absl::StatusOr<EnginePlan> plan = PlanEngine(models::MakeGpt({4, 1 << 17, 8, 16, 256, 0}), options);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition) << plan.status();
  EXPECT_THAT(std::string(plan.status().message()),
              testing::AllOf(testing::HasSubstr("268435456 bytes is too small"),
                             testing::HasSubstr("block h.0 alone has")));
  EXPECT_LT(TensorMemory::Stats().peak_live_bytes - before, 1 << 20);
}

// A block that its factory makes as a whole is built within the budget, or refused.
TEST(MeasureModel, TheBudgetHoldsWhileABlockIsBuilt) {
  Model model;
  model.identity = {{"model", "wide"}};
  const int wide =
      model.AddBlock("wide", "", [] { return std::make_shared<torch::nn::LinearImpl>(2048, 2048); });
  model.AddStage("wide", wide, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
    return module.as<torch::nn::LinearImpl>()->forward(x).square().mean();
  });
  EngineOptions options;
  options.storage.offload = OffloadDevice::kCpu;
  options.dtype = kernels::DType::kFp32;
  options.example = TensorBatch{torch::randn({2, 2048}), torch::zeros({2})};
  options.memory.host_memory_budget_bytes = 8 << 20;  // its weights alone have 16 MiB
  const absl::StatusOr<EnginePlan> refused = PlanEngine(model, options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), testing::HasSubstr("least that works is"));
  options.memory.host_memory_budget_bytes = 512 << 20;
  TensorMemory::Trim();
  TensorMemory::ResetPeak();
  const absl::StatusOr<EnginePlan> plan = PlanEngine(model, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LE(TensorMemory::Stats().peak_bytes, options.memory.host_memory_budget_bytes);
}

}  // namespace
}  // namespace penstock::zero::initial_values_test
