// Modules of one's own that break a rule of zero/compute/libtorch/model.h are refused where they are
// measured, with the way out; what can be served is served with the bits of plain LibTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "tests/zero/training.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/engine/engine.h"

namespace penstock::zero::recompute_rules_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kWidth = 16;

EngineOptions Options() {
  EngineOptions options;
  options.storage.offload = OffloadDevice::kNone;
  options.dtype = kernels::DType::kFp32;
  torch::manual_seed(3);
  options.example = TensorBatch{torch::randn({8, kWidth}), torch::zeros({8})};
  options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-2};
  return options;
}

torch::Tensor Loss(torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
  return module.as<torch::nn::LinearImpl>()->forward(x).square().mean();
}

// `first` as the first stage, and a linear layer that gives the loss.
Model Before(std::function<std::shared_ptr<torch::nn::Module>()> build, StageFunction first) {
  Model model;
  model.identity = {{"model", "rules"}};
  const int block = model.AddBlock("odd", "odd", std::move(build));
  model.AddStage("odd stage", block, std::move(first));
  const int loss =
      model.AddBlock("loss", "loss", [] { return std::make_shared<torch::nn::LinearImpl>(kWidth, 4); });
  model.AddStage("loss", loss, Loss);
  return model;
}

std::shared_ptr<torch::nn::Module> Linear() {
  return std::make_shared<torch::nn::LinearImpl>(kWidth, kWidth);
}

void ExpectRefused(const Model& model, const testing::Matcher<std::string>& words) {
  const absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, Options());
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument) << engine.status();
  EXPECT_THAT(std::string(engine.status().message()), words);
}

TEST(RecomputeRules, AStageThatChangesItsInputIsRefused) {
  const auto in_place = [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
    x.mul_(1.5);
    return module.as<torch::nn::LinearImpl>()->forward(x);
  };
  ExpectRefused(Before(Linear, in_place),
                AllOf(HasSubstr("stage odd stage changes its input in place"), HasSubstr("clone()")));
  // Through a view, and of the batch that a later stage looks at.
  ExpectRefused(Before(Linear,
                       [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
                         x.view({-1}).narrow(0, 0, 3).relu_();
                         return module.as<torch::nn::LinearImpl>()->forward(x);
                       }),
                HasSubstr("its input in place"));
  ExpectRefused(Before(Linear,
                       [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
                         torch::Tensor targets = batch.targets;
                         targets.add_(1);
                         return module.as<torch::nn::LinearImpl>()->forward(x);
                       }),
                HasSubstr("the batch's targets in place"));
  Model later = Before(Linear, Apply<torch::nn::LinearImpl>);
  later.stages[1].forward = [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
    torch::Tensor changed = x;
    changed.relu_();
    return Loss(module, changed, batch);
  };
  ExpectRefused(later, HasSubstr("stage loss changes its input in place"));
}

TEST(RecomputeRules, ACopyThatIsChangedInPlaceIsServed) {
  const Model model =
      Before(Linear, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
        return module.as<torch::nn::LinearImpl>()->forward(x.clone().mul_(1.5)).relu_();
      });
  EXPECT_TRUE(CreateEngine(model, Options()).ok());
}

struct GrowingImpl : torch::nn::Module {
  GrowingImpl() { seen = register_buffer("seen", torch::zeros({1})); }
  torch::Tensor forward(const torch::Tensor& x) {
    seen.set_data(torch::cat({seen, x.flatten().narrow(0, 0, 1).detach()}));
    return x + 1;
  }
  torch::Tensor seen;
};

TEST(RecomputeRules, ABufferThatChangesItsShapeIsRefused) {
  ExpectRefused(Before([] { return std::make_shared<GrowingImpl>(); }, Apply<GrowingImpl>),
                HasSubstr("stage odd stage changes the type or the shape of its block's buffer seen"));
}

// What they keep: changing_buffers_test.cc.
TEST(RecomputeRules, BuffersThatChangeAreServed) {
  for (const bool tracks : {true, false}) {
    const auto norm = [tracks] {
      return std::make_shared<torch::nn::BatchNorm1dImpl>(
          torch::nn::BatchNorm1dOptions(kWidth).track_running_stats(tracks));
    };
    const absl::StatusOr<std::unique_ptr<Engine>> engine =
        CreateEngine(Before(norm, Apply<torch::nn::BatchNorm1dImpl>), Options());
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ((*engine)->plan().buffer_bytes > 0, tracks);
  }
}

// A buffer that is a constant.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    scale = register_buffer("scale", torch::full({kWidth}, 0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear->forward(x) * scale; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor scale;
};

TEST(RecomputeRules, AConstantBufferIsServed) {
  EXPECT_TRUE(
      CreateEngine(Before([] { return std::make_shared<ScaledImpl>(); }, Apply<ScaledImpl>), Options()).ok());
}

// One matrix, there and back again, under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    there = register_parameter("there", torch::randn({kWidth, kWidth}) / 4);
    bias = register_parameter("bias", torch::zeros({kWidth}));
    register_parameter("back", there);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(torch::tanh(torch::linear(x, there, bias)), named_parameters()["back"]);
  }
  torch::Tensor there, bias;
};

TEST(RecomputeRules, OneTensorUnderTwoNamesIsOneParameter) {
  const Model model = Before([] { return std::make_shared<TiedImpl>(); }, Apply<TiedImpl>);
  EngineOptions options = Options();
  options.optimizer.clip = 0.1;  // the norm counts, once
  // Plain LibTorch.
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::vector<torch::Tensor> parameters;
  for (size_t b = 0; b < 2; ++b) {
    torch::manual_seed(MixSeed(options.seed, 0x696e6974, b));
    modules.push_back(model.blocks[b].build());
    for (const torch::Tensor& parameter : UniqueParameters(*modules.back())) parameters.push_back(parameter);
  }
  ASSERT_EQ(parameters.size(), 4u);
  torch::optim::AdamW plain(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  std::vector<double> losses, norms;
  for (int step = 0; step < 5; ++step) {
    plain.zero_grad();
    const TensorBatch example = TensorsOf(options.example);
    torch::Tensor x = example.inputs;
    for (size_t s = 0; s < 2; ++s) x = model.stages[s].forward(*modules[s], x, example);
    x.backward();
    losses.push_back(x.item<double>());
    norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, options.optimizer.clip));
    plain.step();
  }
  options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-2, .weight_decay = 0.01};
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ((*engine)->plan().parameters, 2 * kWidth * kWidth - kWidth * (kWidth - 4) + kWidth + 4);
  EXPECT_THAT((*engine)->ParameterNames(),
              testing::ElementsAre("odd.there", "odd.bias", "loss.weight", "loss.bias"));
  for (size_t step = 0; step < losses.size(); ++step) {
    const absl::StatusOr<StepResult> result = (*engine)->Step({options.example});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_NEAR(result->loss, losses[step], 1e-5);
    EXPECT_NEAR(result->grad_norm, norms[step], 1e-5);
  }
}

TEST(RecomputeRules, MemoryThatParametersShareIsRefused) {
  const auto halves = [] {
    auto module = std::make_shared<torch::nn::Module>();
    const torch::Tensor whole = torch::randn({2, kWidth, kWidth});
    module->register_parameter("upper", whole.select(0, 0));
    module->register_parameter("lower", whole.select(0, 1));
    return module;
  };
  const StageFunction apply = [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
    return torch::linear(torch::linear(x, module.parameters()[0]), module.parameters()[1]);
  };
  ExpectRefused(Before(halves, apply), AllOf(HasSubstr("block odd: its parameters upper and lower"),
                                             HasSubstr("one memory"), HasSubstr("clone()")));
  // One module in two blocks.
  const auto shared = std::make_shared<torch::nn::LinearImpl>(kWidth, kWidth);
  Model model;
  model.identity = {{"model", "shared"}};
  for (const char* name : {"a", "b"}) {
    const int block = model.AddBlock(name, name, [shared] { return shared; });
    if (*name == 'a') {
      model.AddStage(name, block, Apply<torch::nn::LinearImpl>);
    } else {
      model.AddStage(name, block, Loss);
    }
  }
  ExpectRefused(model, AllOf(HasSubstr("block b has the parameter weight, which block a has too"),
                             HasSubstr("one block")));
}

}  // namespace
}  // namespace penstock::zero::recompute_rules_test
