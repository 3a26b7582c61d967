// Models of lists, named batches and inner losses: gradients are those of LibTorch's autograd over the whole
// model, to the bit, and so are losses wherever the state and the inputs of stages are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/zero/freeze.h"
#include "tests/zero/wide_training.h"
#include "zero/compute/libtorch/libtorch_compute.h"

namespace penstock::zero::wide_model_test {
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

using WideModelTest = testing_support::ScratchTest;

void ExpectGradientsOf(WholeModel& whole, Engine& engine) {
  for (size_t b = 0; b < whole.modules.size(); ++b) {
    for (const auto& parameter : whole.modules[b]->named_parameters()) {
      const std::string name = whole.model.blocks[b].name + "." + parameter.key();
      const absl::StatusOr<torch::Tensor> ours = ReadStateTensor(engine, name, StateKind::kGradient);
      ASSERT_TRUE(ours.ok()) << ours.status();
      EXPECT_TRUE(torch::equal(*ours, parameter.value().grad())) << name;
      EXPECT_GT(ours->abs().max().item<float>(), 0) << name;
    }
  }
}

// With the engine's parameters and the statistics that the whole model's steps have left.
void ExpectEvaluatesAs(WholeModel& whole, Engine& engine, const WideShape& shape) {
  torch::NoGradGuard no_grad;
  const TensorBatch held_out = MakeWideBatch(shape, 1000, 0);
  for (size_t b = 0; b < whole.modules.size(); ++b) {
    whole.modules[b]->eval();
    for (auto& parameter : whole.modules[b]->named_parameters()) {
      const auto now =
          ReadStateTensor(engine, whole.model.blocks[b].name + "." + parameter.key(), StateKind::kParameter);
      ASSERT_TRUE(now.ok()) << now.status();
      parameter.value().set_data(*now);
    }
  }
  double expected = 0;
  whole.Loss(held_out, 1, 1, 0, &expected);
  const absl::StatusOr<double> evaluated = engine.Evaluate({held_out});
  ASSERT_TRUE(evaluated.ok()) << evaluated.status();
  EXPECT_EQ(*evaluated, expected);
}

TEST_F(WideModelTest, GradientsOfListsAreThoseOfTheWholeModel) {
  const WideShape shape;
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(MakeWideModel(shape), WideOptions(shape));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, 1));
  ASSERT_TRUE(result.ok()) << result.status();
  WholeModel whole(MakeWideModel(shape), EngineOptions().seed);
  EXPECT_EQ(result->loss, whole.Backward({MakeWideBatch(shape, 1, 0), MakeWideBatch(shape, 1, 1)},
                                         EngineOptions().seed, 1));
  ExpectGradientsOf(whole, **engine);
}

TEST_F(WideModelTest, LossesOfInnerStagesCountWithTheirGradientAndAreShownApart) {
  WideShape shape;
  shape.inner_losses = true;
  const auto compute = std::make_shared<LibTorchCompute>(MakeWideModel(shape));
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(compute, WideOptions(shape));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::StatusOr<StepResult> result = (*engine)->Step(WideBatches(shape, 1));
  ASSERT_TRUE(result.ok()) << result.status();
  const absl::StatusOr<std::map<std::string, double>> inner = compute->InnerLosses();
  ASSERT_TRUE(inner.ok()) << inner.status();
  WholeModel whole(MakeWideModel(shape), EngineOptions().seed);
  const double loss =
      whole.Backward({MakeWideBatch(shape, 1, 0), MakeWideBatch(shape, 1, 1)}, EngineOptions().seed, 1);
  EXPECT_EQ(result->loss, loss);
  ASSERT_EQ(inner->size(), 2u);
  for (const auto& [name, value] : whole.inner_losses) {
    ASSERT_EQ(inner->count(name), 1u) << name;
    EXPECT_NEAR(inner->at(name), value, 1e-12) << name;
    EXPECT_GT(value, 0) << name;
  }
  ExpectGradientsOf(whole, **engine);
  // An evaluation has them too.
  ExpectEvaluatesAs(whole, **engine, shape);
}

TEST_F(WideModelTest, LossesAreTheSameInMemoryAndOnADriveInTheLeastMemory) {
  WideShape shape;
  shape.inner_losses = true;
  shape.layers = 6;
  const Model model = MakeWideModel(shape);
  absl::StatusOr<std::unique_ptr<Engine>> in_memory = CreateEngine(model, WideOptions(shape));
  ASSERT_TRUE(in_memory.ok()) << in_memory.status();
  const WideLosses expected = TrainWide(**in_memory, shape, 6);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  in_memory->reset();
  EngineOptions options = WideOnADrive(shape, model, scratch_ + "/state");
  WideLosses ours;
  {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_GT((*engine)->plan().plan.input_scratch_bytes, 0);
    ours = TrainWide(**engine, shape, 3);
    EXPECT_LE((*engine)->peak_managed_bytes(), options.memory.host_memory_budget_bytes);
    ASSERT_TRUE((*engine)->Flush().ok());
  }
  options.resume.enabled = true;
  absl::StatusOr<std::unique_ptr<Engine>> resumed = CreateEngine(model, options);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ((*resumed)->resumed_from(), 3);
  const WideLosses rest = TrainWide(**resumed, shape, 6);
  ours.Append(rest);
  EXPECT_EQ(ours, expected);
}

// Their losses count and their statistics go on, and backward does not come to them.
TEST_F(WideModelTest, StagesBeforeTheFirstThatTrainsAreComputedOnce) {
  WideShape shape;
  shape.inner_losses = true;
  shape.statistics = true;
  shape.layers = 5;
  Model model = MakeWideModel(shape);
  constexpr size_t kFrozen = 3;  // the embedding and two layers
  for (size_t b = 0; b < kFrozen; ++b) testing_support::Freeze(&model.blocks[b]);
  std::vector<int> repeated(model.stages.size());
  Model counting = model;
  for (size_t s = 0; s < model.stages.size(); ++s) {
    counting.stages[s].compute = [&repeated, s, compute = model.stages[s].compute](StageCall& call,
                                                                                   const Values& inputs) {
      if (torch::GradMode::is_enabled()) ++repeated[s];
      return compute(call, inputs);
    };
  }
  const auto compute = std::make_shared<LibTorchCompute>(counting);
  absl::StatusOr<std::unique_ptr<Engine>> in_memory = Engine::Create(compute, WideOptions(shape));
  ASSERT_TRUE(in_memory.ok()) << in_memory.status();
  std::fill(repeated.begin(), repeated.end(), 0);  // while they were measured
  const absl::StatusOr<StepResult> result = (*in_memory)->Step(WideBatches(shape, 1));
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t s = 0; s < model.stages.size(); ++s)
    EXPECT_EQ(repeated[s], s < kFrozen ? 0 : testing_support::kWideMicroBatches) << s;
  WholeModel whole(model, EngineOptions().seed);
  EXPECT_EQ(result->loss, whole.Backward({MakeWideBatch(shape, 1, 0), MakeWideBatch(shape, 1, 1)},
                                         EngineOptions().seed, 1));
  const absl::StatusOr<std::map<std::string, double>> inner = compute->InnerLosses();
  ASSERT_TRUE(inner.ok()) << inner.status();
  for (const auto& [name, value] : whole.inner_losses) EXPECT_NEAR(inner->at(name), value, 1e-12) << name;
  for (size_t b = kFrozen; b < whole.modules.size(); ++b) {
    for (const auto& parameter : whole.modules[b]->named_parameters()) {
      const std::string name = model.blocks[b].name + "." + parameter.key();
      const absl::StatusOr<torch::Tensor> ours = ReadStateTensor(**in_memory, name, StateKind::kGradient);
      ASSERT_TRUE(ours.ok()) << ours.status();
      EXPECT_TRUE(torch::equal(*ours, parameter.value().grad())) << name;
    }
  }
  // An evaluation goes by the statistics that the step has left, of all layers.
  ExpectEvaluatesAs(whole, **in_memory, shape);
  // Another order brings a layer that trains before one that does not, and back again.
  const auto train = [&](Engine& engine, int64_t first) {
    WideLosses losses = TrainWide(engine, shape, first + 2);
    EXPECT_TRUE(engine.SetOrder({0, 1, 4, 2, 3, 5, 6}).ok());
    std::fill(repeated.begin(), repeated.end(), 0);
    losses.Append(TrainWide(engine, shape, first + 4));
    EXPECT_TRUE(engine.SetOrder({0, 1, 2, 3, 4, 5, 6}).ok());
    losses.Append(TrainWide(engine, shape, first + 6));
    return losses;
  };
  in_memory->reset();
  in_memory = CreateEngine(model, WideOptions(shape));
  ASSERT_TRUE(in_memory.ok()) << in_memory.status();
  const WideLosses expected = train(**in_memory, 0);
  absl::StatusOr<std::unique_ptr<Engine>> on_a_drive =
      CreateEngine(counting, WideOnADrive(shape, model, scratch_ + "/state"));
  ASSERT_TRUE(on_a_drive.ok()) << on_a_drive.status();
  EXPECT_EQ(train(**on_a_drive, 0), expected);
  EXPECT_EQ(repeated[1], 0);
  EXPECT_EQ(repeated[2], 2 * testing_support::kWideMicroBatches);  // in the other order alone
  EXPECT_LE((*on_a_drive)->peak_managed_bytes(),
            WideOnADrive(shape, model, scratch_).memory.host_memory_budget_bytes);
}

TEST_F(WideModelTest, AnotherOrderOfLayersHasTheSameBitsEverywhere) {
  WideShape shape;
  shape.layers = 4;
  const Model model = MakeWideModel(shape);
  std::vector<WideLosses> all;
  for (const bool on_a_drive : {false, true}) {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(
        model, on_a_drive ? WideOnADrive(shape, model, scratch_ + "/state") : WideOptions(shape));
    ASSERT_TRUE(engine.ok()) << engine.status();
    WideLosses losses = TrainWide(**engine, shape, 2);
    ASSERT_TRUE((*engine)->SetOrder({0, 3, 1, 4, 2, 5}).ok());
    losses.Append(TrainWide(**engine, shape, 4));
    all.push_back(losses);
  }
  EXPECT_EQ(all[0], all[1]);
}

TEST_F(WideModelTest, WhatNeedsNoGradientGetsNone) {
  WideShape shape;
  Model model = MakeWideModel(shape);
  // A mask of floats that no parameter leads to, and what a stage has cut off.
  model.stages[0].compute = [](StageCall& call, const Values&) -> Values {
    auto& module = call.module<testing_support::WideEmbeddingImpl>();
    return {module.words(call.batch()["input_ids"]), module.places.detach(),
            call.batch()["attention_mask"].to(torch::kFloat32)};
  };
  int wanted = 0, refused = 0;
  model.stages[2].compute = [&](StageCall& call, const Values& inputs) {
    if (torch::GradMode::is_enabled()) {
      (inputs[0].requires_grad() ? wanted : refused) += 1;
      EXPECT_FALSE(inputs[1].requires_grad());
      EXPECT_FALSE(inputs[2].requires_grad());
    }
    return testing_support::WideLayer(call, inputs, false);
  };
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, WideOptions(shape));
  ASSERT_TRUE(engine.ok()) << engine.status();
  wanted = 0;
  ASSERT_TRUE((*engine)->Step(WideBatches(shape, 1)).ok());
  EXPECT_EQ(wanted, testing_support::kWideMicroBatches);
  EXPECT_EQ(refused, 0);
}

TEST_F(WideModelTest, WhatDiffersFromWhereItWasMeasuredIsSaid) {
  const WideShape shape;
  const auto refusal = [&](const std::function<void(Model&, bool*)>& change) {
    Model model = MakeWideModel(shape);
    bool measured = false;
    change(model, &measured);
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, WideOptions(shape));
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return std::string();
    measured = true;
    return std::string((*engine)->Step(WideBatches(shape, 1)).status().message());
  };
  // A gradient would be lost.
  EXPECT_THAT(refusal([](Model& model, bool* measured) {
                model.stages[0].compute = [measured, compute = model.stages[0].compute](
                                              StageCall& call, const Values& inputs) {
                  Values outputs = compute(call, inputs);
                  if (!*measured) outputs[1] = outputs[1].detach();
                  return outputs;
                };
              }),
              HasSubstr("value 1 of what it returns needs a gradient now"));
  // A buffer would be changed twice.
  EXPECT_THAT(refusal([](Model& model, bool* measured) {
                model.blocks[1].build = model.blocks[2].build = model.blocks[3].build = [] {
                  auto module = std::make_shared<testing_support::WideLayerImpl>(WideShape());
                  module->register_buffer("seen", torch::zeros({1}));
                  return module;
                };
                model.stages[1].compute = [measured](StageCall& call, const Values& inputs) {
                  if (*measured) call.any_module().named_buffers()["seen"].add_(1);
                  return testing_support::WideLayer(call, inputs, false);
                };
              }),
              HasSubstr("changes a buffer of its block that it left alone where it was measured"));
}

TEST_F(WideModelTest, WhatIsWrongWithAListIsSaid) {
  const WideShape shape;
  const auto refusal = [&](const std::function<void(Model&)>& change) {
    Model model = MakeWideModel(shape);
    change(model);
    return std::string(CreateEngine(model, WideOptions(shape)).status().message());
  };
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[0].compute = [](StageCall& call, const Values&) -> Values {
                  return {call.batch()["input_idz"]};
                };
              }),
              AllOf(HasSubstr("the batch has no input_idz"), HasSubstr("attention_mask")));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = nullptr;
                model.stages[1].forward = [](torch::nn::Module&, const torch::Tensor& x, const TensorBatch&) {
                  return x;
                };
              }),
              AllOf(HasSubstr("stage layer.0"), HasSubstr("takes one tensor, and is given 3")));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = [](StageCall&, const Values& inputs) -> Values {
                  return {inputs[0], torch::Tensor()};
                };
              }),
              HasSubstr("value 1 of what it returned is undefined"));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = [](StageCall& call, const Values& inputs) -> Values {
                  call.AddLoss("balance", inputs[0]);
                  return inputs;
                };
              }),
              HasSubstr("the inner loss balance must be a scalar"));
  EXPECT_THAT(refusal([](Model& model) {
                model.stages[1].compute = [](StageCall& call, const Values& inputs) {
                  inputs[1].add_(1);
                  return testing_support::WideLayer(call, inputs, false);
                };
              }),
              HasSubstr("stage layer.0 changes its input 1 of 3 in place"));
}

}  // namespace
}  // namespace penstock::zero::wide_model_test
