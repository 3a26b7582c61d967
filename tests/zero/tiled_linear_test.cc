// A linear layer in tiles against the same layer whole, and trained in memory that does not hold it.
#include "zero/compute/libtorch/tiled_linear.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <filesystem>

#include "models/families/stages.h"
#include "tests/zero/training.h"
#include "zero/engine/engine.h"

namespace penstock::zero::tiled_linear_test {
namespace {

constexpr int64_t kIn = 96, kOut = 240, kRows = 8;

Model MakeModel(int64_t tiles) {
  Model model;
  model.identity = {{"tiles", tiles}};
  const int stem =
      model.AddBlock("stem", "stem", [] { return std::make_shared<torch::nn::LinearImpl>(16, kIn); });
  model.AddStage("stem", stem, Apply<torch::nn::LinearImpl>);
  EXPECT_TRUE(AddTiledLinear(&model, "wide", {.in = kIn, .out = kOut, .tiles = tiles}).ok());
  const int head =
      model.AddBlock("head", "head", [] { return std::make_shared<torch::nn::LinearImpl>(kOut, 4); });
  model.AddStage("loss", head,
                 [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
                   return torch::cross_entropy_loss(
                       module.as<torch::nn::LinearImpl>()->forward(torch::relu(x)), batch.targets);
                 });
  return model;
}

TensorBatch MakeRows(int64_t step) {
  torch::manual_seed(1000 + step);
  const torch::Tensor inputs = torch::randn({kRows, 16});
  return {inputs, inputs.narrow(1, 0, 4).argmax(1)};
}

// The losses of so many steps, which are then flushed.
std::vector<double> Train(Engine& engine, TensorBatch (*rows)(int64_t step), int64_t steps) {
  std::vector<double> losses;
  for (int64_t step = 1; step <= steps; ++step) {
    absl::StatusOr<StepResult> result = engine.Step({rows(step)}, Next::kTrain);
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return losses;
    losses.push_back(result->loss);
  }
  EXPECT_TRUE(engine.Flush().ok());
  return losses;
}

TEST(TiledLinear, ForwardAndGradientsAreThoseOfTheWholeLayer) {
  for (const int64_t tiles : {1, 2, 5}) {
    Model model;
    ASSERT_TRUE(AddTiledLinear(&model, "wide", {.in = kIn, .out = kOut, .tiles = tiles}).ok());
    ASSERT_EQ(model.blocks.size(), static_cast<size_t>(tiles));
    torch::nn::Linear whole(kIn, kOut);
    std::vector<std::shared_ptr<torch::nn::Module>> parts;
    {
      torch::NoGradGuard no_grad;
      for (int64_t t = 0; t < tiles; ++t) {
        parts.push_back(model.blocks[static_cast<size_t>(t)].build());
        auto* part = parts.back()->as<torch::nn::LinearImpl>();
        part->weight.copy_(whole->weight.narrow(0, t * kOut / tiles, kOut / tiles));
        part->bias.copy_(whole->bias.narrow(0, t * kOut / tiles, kOut / tiles));
      }
    }
    const torch::Tensor x = torch::randn({3, kRows, kIn}).set_requires_grad(true);
    const torch::Tensor same = x.detach().clone().set_requires_grad(true);
    torch::Tensor tiled = x;
    for (int64_t t = 0; t < tiles; ++t) {
      tiled =
          model.stages[static_cast<size_t>(t)].forward(*parts[static_cast<size_t>(t)], tiled, TensorBatch());
    }
    const torch::Tensor y = whole->forward(same);
    EXPECT_TRUE(torch::allclose(tiled, y, 1e-6, 1e-6));
    tiled.square().sum().backward();
    y.square().sum().backward();
    EXPECT_TRUE(torch::allclose(x.grad(), same.grad(), 1e-4, 1e-4));
    for (int64_t t = 0; t < tiles; ++t) {
      EXPECT_TRUE(torch::allclose(parts[static_cast<size_t>(t)]->as<torch::nn::LinearImpl>()->weight.grad(),
                                  whole->weight.grad().narrow(0, t * kOut / tiles, kOut / tiles), 1e-4,
                                  1e-4));
    }
  }
}

TEST(TiledLinear, TrainsFromTheDriveWithTheBitsOfMemory) {
  std::vector<double> losses[2];
  const std::string directory = testing_support::ScratchDirectory();
  for (int i = 0; i < 2; ++i) {
    EngineOptions options;
    options.storage.offload = i == 0 ? OffloadDevice::kNone : OffloadDevice::kNvme;
    options.storage.state_dirs = {directory};
    options.dtype = kernels::DType::kFp32;
    options.example = MakeRows(0);
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-2};
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeModel(5), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    losses[i] = Train(**engine, MakeRows, 12);
    ASSERT_EQ(losses[i].size(), 12u);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_LT(losses[0].back(), losses[0].front());
  std::filesystem::remove_all(directory);
}

constexpr int64_t kWideIn = 1024, kWideOut = 8192;

Model MakeWide(int64_t tiles) {
  Model model;
  model.identity = {{"tiles", tiles}};
  EXPECT_TRUE(AddTiledLinear(&model, "wide", {.in = kWideIn, .out = kWideOut, .tiles = tiles}).ok());
  const int head =
      model.AddBlock("head", "head", [] { return std::make_shared<torch::nn::LinearImpl>(kWideOut, 1); });
  model.AddStage("loss", head, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
    return module.as<torch::nn::LinearImpl>()->forward(x).to(torch::kFloat32).square().mean();
  });
  return model;
}

TensorBatch MakeWideRows(int64_t step) {
  torch::manual_seed(step);
  return {torch::randn({2, kWideIn}).to(torch::kBFloat16), torch::zeros({1})};
}

// A device whose memory does not hold the layer's weights trains it.
TEST(TiledLinear, TrainsOnADeviceThatDoesNotHoldTheLayer) {
  constexpr int64_t kLayerBytes = kWideIn * kWideOut * 2;
  const std::string directory = testing_support::ScratchDirectory();
  std::vector<double> losses[2];
  for (int i = 0; i < 2; ++i) {
    EngineOptions options;
    options.storage.offload = i == 0 ? OffloadDevice::kNone : OffloadDevice::kNvme;
    options.storage.state_dirs = {directory};
    options.example = MakeWideRows(0);
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-3};
    if (i == 1) {
      options.device = testing_support::MakeTestDevice();
      options.memory.device_memory_budget_bytes = kLayerBytes;
    }
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeWide(16), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    losses[i] = Train(**engine, MakeWideRows, 3);
    ASSERT_EQ(losses[i].size(), 3u);
    if (i == 0) continue;
    EXPECT_LE((*engine)->peak_device_bytes(), kLayerBytes);
    EXPECT_GT((*engine)->peak_device_bytes(), 0);
    options.storage.state_dirs = {directory + "/whole"};
    const absl::StatusOr<std::unique_ptr<Engine>> whole = CreateEngine(MakeWide(1), options);
    EXPECT_EQ(whole.status().code(), absl::StatusCode::kFailedPrecondition) << "the layer in one piece fits";
  }
  EXPECT_EQ(losses[0], losses[1]);
  std::filesystem::remove_all(directory);
}

TEST(TiledLinear, TilesTakeLessMemoryThanTheLayer) {
  auto least = [](int64_t tiles) {
    const Model model = MakeWide(tiles);
    EngineOptions options;
    options.storage.state_dirs = {"nowhere"};
    options.example = MakeWideRows(0);
    absl::StatusOr<EnginePlan> plan = PlanEngine(model, options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan->plan.least_host_memory_bytes;
  };
  EXPECT_LT(least(8), least(1) / 2);
}

TEST(TiledLinear, RefusesTilesThatDoNotDivideTheOutputs) {
  Model model;
  EXPECT_EQ(AddTiledLinear(&model, "wide", {.in = 4, .out = 10, .tiles = 3}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(model.blocks.empty());
}

}  // namespace
}  // namespace penstock::zero::tiled_linear_test
