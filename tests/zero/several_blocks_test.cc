// Stages with several blocks, and modules that differ within a kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/zero/wide_training.h"

namespace penstock::zero::several_blocks_test {
namespace {

using testing::AllOf;
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

using SeveralBlocksTest = testing_support::ScratchTest;

// A low-rank pair that stands beside what it adapts.
struct AdapterImpl : torch::nn::Module {
  explicit AdapterImpl(int64_t width) {
    down = register_parameter("down", torch::randn({4, width}) / 8);
    up = register_parameter("up", torch::randn({width, 4}) / 8);
  }
  torch::Tensor down, up;
};

// Layers beside an adapter each, whose own weights are frozen, and beside one block that all share; the
// embedding gives the loss its words too.
Model MakeAdapted(const WideShape& shape) {
  Model model = MakeWideModel(shape);
  const int shared =
      model.AddBlock("shared", "adapter", [shape] { return std::make_shared<AdapterImpl>(shape.width); });
  for (int64_t i = 0; i < shape.layers; ++i) {
    StageSpec& stage = model.stages[static_cast<size_t>(1 + i)];
    const int own = model.AddBlock("adapter." + std::to_string(i), "adapter",
                                   [shape] { return std::make_shared<AdapterImpl>(shape.width); });
    BlockSpec& layer = model.blocks[static_cast<size_t>(stage.block)];
    layer.build = [build = layer.build] {
      auto module = build();
      for (torch::Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
      return module;
    };
    stage.more_blocks = {own, shared};
    stage.compute = [compute = stage.compute](StageCall& call, const Values& inputs) {
      Values outputs = compute(call, inputs);
      for (const size_t block : {1, 2}) {
        auto& adapter = call.module<AdapterImpl>(block);
        outputs[0] = outputs[0] + torch::linear(torch::linear(inputs[0], adapter.down), adapter.up);
      }
      return outputs;
    };
  }
  StageSpec& loss = model.stages.back();
  loss.more_blocks = {0};
  loss.compute = [](StageCall& call, const Values& inputs) -> Values {
    const torch::Tensor words = call.module<testing_support::WideEmbeddingImpl>(1).words->weight;
    const torch::Tensor x = inputs[0] + inputs[1];
    const torch::Tensor logits =
        call.module<torch::nn::LinearImpl>().forward(x) + torch::matmul(x, words.t());
    return {torch::cross_entropy_loss(logits.flatten(0, 1), call.batch()["labels"].flatten())};
  };
  return model;
}

TEST_F(SeveralBlocksTest, GradientsAreThoseOfTheWholeModel) {
  const WideShape shape;
  for (const int micro_batches : {1, 2}) {
    EngineOptions options = WideOptions(shape);
    options.micro_batches = micro_batches;
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeAdapted(shape), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    std::vector<TensorBatch> batches;
    for (int m = 0; m < micro_batches; ++m) batches.push_back(MakeWideBatch(shape, 1, m));
    const absl::StatusOr<StepResult> result = (*engine)->Step({batches.begin(), batches.end()});
    ASSERT_TRUE(result.ok()) << result.status();
    WholeModel whole(MakeAdapted(shape), options.seed);
    whole.seed_stages = {0, 3, 8, 13, 17};  // with the parts before and after them
    EXPECT_EQ(result->loss, whole.Backward(batches, options.seed, 1));
    for (size_t b = 0; b < whole.modules.size(); ++b) {
      for (const auto& parameter : whole.modules[b]->named_parameters()) {
        if (!parameter.value().requires_grad()) continue;
        const std::string name = whole.model.blocks[b].name + "." + parameter.key();
        const absl::StatusOr<torch::Tensor> ours = ReadStateTensor(**engine, name, StateKind::kGradient);
        ASSERT_TRUE(ours.ok()) << ours.status();
        const torch::Tensor& theirs = parameter.value().grad();
        EXPECT_GT(ours->abs().max().item<float>(), 0) << name;
        if (micro_batches == 1) {
          EXPECT_TRUE(torch::equal(*ours, theirs)) << name;
        } else {  // of a block with several uses the engine adds in another order
          EXPECT_TRUE(torch::allclose(*ours, theirs, 1e-5, 1e-8)) << name;
        }
      }
    }
  }
}

TEST_F(SeveralBlocksTest, LossesAreTheSameInMemoryAndOnADriveInTheLeastMemory) {
  WideShape shape;
  shape.layers = 4;
  shape.statistics = true;  // of the layers, which have further blocks
  const Model model = MakeAdapted(shape);
  WideLosses expected;
  {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, WideOptions(shape));
    ASSERT_TRUE(engine.ok()) << engine.status();
    expected = TrainWide(**engine, shape, 5);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
  }
  EngineOptions options = WideOnADrive(shape, model, scratch_ + "/state");
  WideLosses ours;
  for (const int64_t until : {2, 5}) {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_GT((*engine)->plan().plan.input_scratch_bytes, 0);
    ours.Append(TrainWide(**engine, shape, until));
    EXPECT_LE((*engine)->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
    ASSERT_TRUE((*engine)->Flush().ok());
    options.resume.enabled = true;
  }
  EXPECT_EQ(ours, expected);
}

TEST_F(SeveralBlocksTest, ADeviceWithMemoryOfItsOwnGivesTheSameBits) {
  WideShape shape;
  shape.layers = 4;
  shape.statistics = true;
  const Model model = MakeAdapted(shape);
  EngineOptions options = WideOptions(shape);
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const WideLosses expected = TrainWide(**engine, shape, 3);
  engine->reset();
  for (const bool least : {false, true}) {
    options.device = testing_support::MakeTestDevice();
    if (least) {
      options.memory.device_memory_budget_bytes = 1;
      const std::string refused(CreateEngine(model, options).status().message());
      const std::string words = "least that works is ";
      ASSERT_NE(refused.find(words), std::string::npos) << refused;
      options.memory.device_memory_budget_bytes =
          std::stoll(refused.substr(refused.find(words) + words.size()));
      options.device = testing_support::MakeTestDevice();
    }
    engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ((*engine)->plan().plan.input_slots.empty(), !least);
    EXPECT_EQ(TrainWide(**engine, shape, 3), expected);
    engine->reset();
  }
}

TEST_F(SeveralBlocksTest, WeightsOf16BitsGiveTheSameBitsEverywhere) {
  const WideShape shape;
  const Model model = MakeAdapted(shape);
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp16}) {
    std::vector<double> losses[2];
    for (const bool on_a_drive : {false, true}) {
      EngineOptions options = WideOptions(shape);
      options.dtype = dtype;
      options.optimizer.loss_scale = {.dynamic = true, .initial_scale = 1024};
      if (on_a_drive) {
        options.storage.offload = OffloadDevice::kNvme;
        options.storage.overwrite = true;
        options.storage.state_dirs = {scratch_ + "/state"};
        const absl::StatusOr<EnginePlan> plan = PlanEngine(model, options);
        ASSERT_TRUE(plan.ok()) << plan.status();
        options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes;
      }
      absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
      ASSERT_TRUE(engine.ok()) << engine.status();
      for (int64_t step = 1; step <= 3; ++step) {
        const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, step));
        ASSERT_TRUE(result.ok()) << result.status();
        losses[on_a_drive].push_back(result->loss);
      }
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_LT(losses[0].back(), losses[0].front());
  }
}

TEST_F(SeveralBlocksTest, AStageThatFailsLeavesAnEngineThatGoesOn) {
  const WideShape shape;
  Model model = MakeAdapted(shape);
  int calls_left = -1;
  for (StageSpec& stage : model.stages) {
    stage.compute = [&calls_left, compute = stage.compute](StageCall& call, const Values& inputs) {
      if (calls_left >= 0 && calls_left-- == 0) throw std::runtime_error("made to fail");
      return compute(call, inputs);
    };
  }
  absl::StatusOr<std::unique_ptr<Engine>> whole = CreateEngine(model, WideOptions(shape));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const WideLosses expected = TrainWide(**whole, shape, 3);
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      CreateEngine(model, WideOnADrive(shape, model, scratch_ + "/state"));
  ASSERT_TRUE(engine.ok()) << engine.status();
  WideLosses ours = TrainWide(**engine, shape, 1);
  for (calls_left = 0; calls_left < 18;) {
    const int at = calls_left;
    const absl::StatusOr<StepResult> failed = (*engine)->Step(WideBatches(shape, 2));
    EXPECT_THAT(std::string(failed.status().message()), HasSubstr("made to fail")) << at;
    calls_left = at + 1;
  }
  calls_left = -1;
  ours.Append(TrainWide(**engine, shape, 3));
  EXPECT_EQ(ours, expected);
}

TEST_F(SeveralBlocksTest, WhatIsWrongWithBlocksIsSaid) {
  const WideShape shape;
  const auto refusal = [&](const std::function<void(Model&)>& change) {
    Model model = MakeAdapted(shape);
    change(model);
    return std::string(CreateEngine(model, WideOptions(shape)).status().message());
  };
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].more_blocks = {2, 99};
              }),
              HasSubstr("stage layer.0 uses block 99 of"));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].more_blocks = {2, 2};
              }),
              AllOf(HasSubstr("stage layer.0 names block layer.1"), HasSubstr("twice")));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = nullptr;
                model.stages[1].forward = [](torch::nn::Module&, const torch::Tensor& x, const TensorBatch&) {
                  return x;
                };
              }),
              HasSubstr("it needs a function of lists"));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = [](StageCall& call, const Values& inputs) -> Values {
                  call.module<AdapterImpl>(3);
                  return inputs;
                };
              }),
              HasSubstr("the stage has 3 blocks, none of number 3"));
  // What an order of stages must keep together.
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeAdapted(shape), WideOptions(shape));
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<int> order((*engine)->plan().graph.stages.size());
  for (size_t s = 0; s < order.size(); ++s) order[s] = static_cast<int>(s);
  std::swap(order[3], order[8]);  // two layers, without the parts before and after them
  ASSERT_TRUE((*engine)->SetOrder(order).ok());
  EXPECT_THAT(std::string((*engine)->Step(WideBatches(shape, 1)).status().message()),
              HasSubstr("an order of stages keeps them together"));
  for (size_t s = 0; s < order.size(); ++s) order[s] = static_cast<int>(s);
  std::rotate(order.begin() + 1, order.begin() + 6, order.begin() + 11);  // with them
  ASSERT_TRUE((*engine)->SetOrder(order).ok());
  EXPECT_TRUE((*engine)->Step(WideBatches(shape, 1)).ok());
}

// A layer that knows its number.
struct NumberedImpl : torch::nn::LinearImpl {
  NumberedImpl(int64_t width, int64_t of_layer) : LinearImpl(width, width), number(of_layer) {
    scale = register_buffer("scale", torch::full({width}, 1.0 / static_cast<double>(1 + of_layer)));
  }
  const int64_t number;
  torch::Tensor scale;
};

Model MakeNumbered(const WideShape& shape, bool own_modules) {
  Model model = MakeWideModel(shape);
  for (int64_t i = 0; i < shape.layers; ++i) {
    BlockSpec& block = model.blocks[static_cast<size_t>(1 + i)];
    block.own_module = own_modules;
    block.build = [shape, i] { return std::make_shared<NumberedImpl>(shape.width, i); };
    model.stages[static_cast<size_t>(1 + i)].compute = [](StageCall& call, const Values& inputs) -> Values {
      auto& layer = call.module<NumberedImpl>();
      const torch::Tensor x = layer.forward(inputs[0]) * layer.scale;
      return {layer.number % 2 == 0 ? torch::tanh(x) : torch::gelu(x), inputs[1], inputs[2]};
    };
  }
  return model;
}

TEST_F(SeveralBlocksTest, ModulesOfOneKindMayDifferInWhatIsNoParameter) {
  const WideShape shape;
  WholeModel whole(MakeNumbered(shape, true), EngineOptions().seed);
  const double loss =
      whole.Backward({MakeWideBatch(shape, 1, 0), MakeWideBatch(shape, 1, 1)}, EngineOptions().seed, 1);
  for (const bool own : {true, false}) {
    int measured = 0;
    EngineOptions options = WideOptions(shape);
    options.hooks.preparing = [&measured](const std::string& what) {
      measured += what.find("measuring stage layer") != std::string::npos ? 1 : 0;
    };
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeNumbered(shape, own), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ(measured, 1) << "one is measured for all";
    const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, 1));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->loss == loss, own);
  }
}

TEST_F(SeveralBlocksTest, AModuleOfOtherShapesThanItsKindIsRefused) {
  const WideShape shape;
  Model model = MakeNumbered(shape, true);
  model.blocks[2].build = [shape] { return std::make_shared<NumberedImpl>(2 * shape.width, 1); };
  EXPECT_THAT(std::string(CreateEngine(model, WideOptions(shape)).status().message()),
              AllOf(HasSubstr("block layer.1 has other parameters than the first of its kind, layer"),
                    HasSubstr("a kind of its own")));
}

}  // namespace
}  // namespace penstock::zero::several_blocks_test
