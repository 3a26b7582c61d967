// Weights in fp16, compact states, and every optimizer: against LibTorch, and the same bits in every mode.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/float16.h"
#include "models/families/gpt.h"
#include "tests/zero/plain_model.h"
#include "tests/zero/training.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/seed.h"
#include "zero/compute/update.h"
#include "zero/engine/engine.h"

namespace penstock::zero::precision_test {
namespace {

using testing_support::PlainModel;
using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

torch::Tensor RoundedToFp16(const torch::Tensor& x) { return x.to(torch::kHalf).to(torch::kFloat32); }

// fp16 training in plain LibTorch: fp32 masters, weights and scaled gradients rounded to fp16 once.
std::vector<double> PlainFp16Losses(const RunOptions& run, double scale) {
  PlainModel plain(run);
  std::vector<torch::Tensor> masters;
  for (const torch::Tensor& parameter : plain.parameters) masters.push_back(parameter.detach().clone());
  torch::optim::AdamW optimizer(
      masters,
      torch::optim::AdamWOptions(run.lr).betas({0.9, 0.999}).eps(1e-8).weight_decay(run.weight_decay));
  std::vector<double> losses;
  for (int64_t step = 1; step <= run.steps; ++step) {
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < masters.size(); ++i) plain.parameters[i].copy_(RoundedToFp16(masters[i]));
    }
    losses.push_back(plain.Backward(run, step, scale));
    for (size_t i = 0; i < masters.size(); ++i) {
      masters[i].mutable_grad() = RoundedToFp16(plain.parameters[i].grad()) / scale;
    }
    if (run.clip > 0) torch::nn::utils::clip_grad_norm_(masters, run.clip);
    optimizer.step();
  }
  return losses;
}

// The engine computes what the emulation computes, in fp32, and rounds at the same places; what differs is
// the order in which a tied block's gradients are summed, whose last fp32 bit may decide a rounding to fp16:
// 2^-11 of single gradients, of which a loss sees the mean. Measured 2e-6 over 20 steps; 1e-4 is the bound
// for bf16 (tests/zero/engine_test.cc) over 2^3 for the three more bits, and over 40 for what is not rounded.
TEST(Fp16, LossesAgreeWithLibTorchWhereItRoundsAtTheSamePlaces) {
  for (const int micro_batches : {1, 2}) {
    RunOptions run;
    run.dtype = kernels::DType::kFp16;
    run.batch = 4;
    run.seq = 32;
    run.micro_batches = micro_batches;
    run.steps = 20;
    run.clip = 0.5;
    run.lr = 1e-3;
    run.loss_scale = {.dynamic = true, .initial_scale = 1024};
    const std::vector<double> plain = PlainFp16Losses(run, 1024);
    const TrainedLosses ours = TrainGpt(run);
    ASSERT_TRUE(ours.status.ok()) << ours.status;
    EXPECT_TRUE(ours.skipped.empty());
    ASSERT_EQ(ours.losses.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(ours.losses[i], plain[i], 1e-4) << "step " << i + 1;
    EXPECT_LT(plain.back(), plain.front() - 0.2);
  }
}

TEST(Fp16, OverflowSkipsStepsUntilTheScaleFitsInEveryModeAndAcrossAResume) {
  RunOptions run;
  run.dtype = kernels::DType::kFp16;
  run.steps = 14;
  // Nothing of the loss survives a factor of 2^40 in fp16; with hysteresis 1 every overflow halves it.
  run.loss_scale = {.dynamic = true, .initial_scale = 0x1p24, .window = 2, .hysteresis = 1};
  const TrainedLosses none = TrainGpt(run);
  ASSERT_TRUE(none.status.ok()) << none.status;
  ASSERT_FALSE(none.skipped.empty());
  EXPECT_EQ(none.skipped.front(), 1);
  EXPECT_LT(none.skipped.size(), 12u);
  EXPECT_EQ(none.committed.size(), 14u);
  for (size_t i = 0; i < none.losses.size(); ++i) {
    EXPECT_TRUE(std::isfinite(none.losses[i]));
    const bool skipped = std::count(none.skipped.begin(), none.skipped.end(), i + 1) != 0;
    if (i + 1 < none.losses.size() && skipped) {
      EXPECT_EQ(none.loss_scales[i + 1], none.loss_scales[i] / 2) << "step " << i + 2;
    }
    EXPECT_EQ(std::isfinite(none.norms[i]), !skipped);
  }
  // After the window the scale rose again.
  EXPECT_NE(std::adjacent_find(none.loss_scales.begin(), none.loss_scales.end(), std::less<>()),
            none.loss_scales.end());
  run.offload = OffloadDevice::kNvme;
  const TrainedLosses nvme = TrainGpt(run);
  ASSERT_TRUE(nvme.status.ok()) << nvme.status;
  EXPECT_EQ(nvme.losses, none.losses);
  EXPECT_EQ(nvme.loss_scales, none.loss_scales);
  EXPECT_EQ(nvme.skipped, none.skipped);
  for (const int64_t stop : {2, 9}) {
    run.state_dir = testing_support::ScratchDirectory();
    run.keep_state = true;
    run.stop_after = stop;
    const TrainedLosses first = TrainGpt(run);
    ASSERT_TRUE(first.status.ok()) << first.status;
    run.resume = true;
    run.stop_after = 0;
    run.keep_state = false;
    run.loss_scale = {.dynamic = true, .initial_scale = 2};  // of a new run: this one has its own
    const TrainedLosses second = TrainGpt(run);
    ASSERT_TRUE(second.status.ok()) << second.status;
    std::vector<double> scales = first.loss_scales, losses = first.losses;
    scales.insert(scales.end(), second.loss_scales.begin(), second.loss_scales.end());
    losses.insert(losses.end(), second.losses.begin(), second.losses.end());
    EXPECT_EQ(scales, none.loss_scales);
    EXPECT_EQ(losses, none.losses);
    run.resume = false;
    run.state_dir.clear();
    run.loss_scale = {.dynamic = true, .initial_scale = 0x1p24, .window = 2, .hysteresis = 1};
  }
}

TEST(Fp16, OverflowAtTheSmallestScaleEndsTrainingInWords) {
  RunOptions run;
  run.dtype = kernels::DType::kFp16;
  run.loss_scale = {.dynamic = true, .initial_scale = 0x1p40, .min_scale = 0x1p39, .hysteresis = 1};
  const TrainedLosses trained = TrainGpt(run);
  EXPECT_EQ(trained.status.code(), absl::StatusCode::kOutOfRange) << trained.status;
  EXPECT_THAT(std::string(trained.status.message()), testing::HasSubstr("fp16.min_loss_scale"));
}

struct Types {
  kernels::DType dtype;
  kernels::StateType states;
  std::optional<OptimizerOptions> optimizer;
};

std::vector<Types> AllTypes() {
  using kernels::StateType;
  const OptimizerOptions lion = kernels::LionOptions{.lr = 3e-4, .weight_decay = 0.1};
  const OptimizerOptions adagrad = kernels::AdagradOptions{.lr = 1e-2};
  const OptimizerOptions momentum = kernels::SgdOptions{.lr = 1e-2, .momentum = 0.9};
  const OptimizerOptions sgd = kernels::SgdOptions{.lr = 1e-2};
  const OptimizerOptions lamb = kernels::LambOptions{.adam = {.lr = 1e-2, .weight_decay = 0.1}};
  const OptimizerOptions fused_lamb =
      kernels::LambOptions{.adam = {.lr = 1e-2, .weight_decay = 0.01}, .corrects_rate = true};
  return {
      {kernels::DType::kFp16, StateType::kFp32, {}},
      {kernels::DType::kFp16, StateType::k8Bit, {}},
      {kernels::DType::kBf16, StateType::k8Bit, {}},
      {kernels::DType::kBf16, StateType::kBf16, {}},
      {kernels::DType::kFp32, StateType::k8Bit, {}},
      {kernels::DType::kFp32, StateType::kBf16, adagrad},
      {kernels::DType::kBf16, StateType::kFp32, lion},
      {kernels::DType::kBf16, StateType::k8Bit, lion},
      {kernels::DType::kFp16, StateType::kFp32, adagrad},
      {kernels::DType::kBf16, StateType::kFp32, momentum},
      {kernels::DType::kFp32, StateType::kFp32, sgd},
      {kernels::DType::kBf16, StateType::kFp32, sgd},
      {kernels::DType::kBf16, StateType::kFp32, lamb},
      {kernels::DType::kFp32, StateType::kBf16, fused_lamb},
      {kernels::DType::kFp16, StateType::kFp32, fused_lamb},
  };
}

TEST(Precision, EveryModeBudgetAndCutGivesTheSameBits) {
  int number = 0;
  for (const Types& types : AllTypes()) {
    SCOPED_TRACE(testing::Message() << "types " << number);
    RunOptions run;
    run.dtype = types.dtype;
    run.optimizer_states = types.states;
    run.optimizer = types.optimizer;
    run.micro_batches = 1 + number % 2 * 2;
    run.clip = number % 3 == 0 ? 0.0 : 0.3;
    run.steps = 4;
    run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
    ++number;
    const TrainedLosses none = TrainGpt(run);
    ASSERT_TRUE(none.status.ok()) << none.status;
    ASSERT_EQ(none.losses.size(), 4u);
    for (const double loss : none.losses) EXPECT_TRUE(std::isfinite(loss));
    run.offload = OffloadDevice::kCpu;
    EXPECT_EQ(TrainGpt(run).losses, none.losses);
    run.offload = OffloadDevice::kNvme;
    run.host_memory_budget_bytes = 1;
    const int64_t least = TrainGpt(run).least_host_memory_bytes;
    ASSERT_GT(least, 0);
    for (const int64_t extra : {int64_t{0}, int64_t{1} << 20, int64_t{64} << 20}) {
      run.host_memory_budget_bytes = least + extra;
      run.update_workers = extra == 0 ? 1 : 2;
      run.tile_bytes = extra == 1 << 20 ? 64 << 10 : 0;
      const TrainedLosses nvme = TrainGpt(run);
      ASSERT_TRUE(nvme.status.ok()) << nvme.status;
      EXPECT_EQ(nvme.losses, none.losses) << "budget " << run.host_memory_budget_bytes;
      EXPECT_EQ(nvme.norms, none.norms);
      EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
    }
  }
}

// Sums in fp32 wait for the calls behind them, and are rounded once; dropout draws what it draws in one call.
TEST(Precision, TheCallsOfAStepHaveTheBitsOfOneWithEveryType) {
  const auto make = [] {
    Model model;
    model.identity = {{"model", "chain"}};
    for (int i = 0; i < 3; ++i) {
      const int block = model.AddBlock("layer." + std::to_string(i), "linear",
                                       [] { return std::make_shared<torch::nn::LinearImpl>(96, 96); });
      model.AddStage(
          "layer", block, [i](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
            const torch::Tensor in = i == 0 ? batch.inputs.to(module.parameters().front().dtype()) : x;
            const torch::Tensor y =
                torch::dropout(module.as<torch::nn::LinearImpl>()->forward(in), 0.2, module.is_training());
            return i < 2 ? torch::tanh(y) : y.to(torch::kFloat32).square().mean();
          });
    }
    return model;
  };
  const std::string directory = testing_support::ScratchDirectory();
  const auto train = [&](const EngineOptions& options) {
    std::vector<double> numbers;
    auto engine = CreateEngine(make(), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    for (int number = 0; engine.ok() && number < 16;) {
      for (int call = 0; call < options.calls_per_step; ++call) {
        std::vector<Batch> batches;
        for (int m = 0; m < options.micro_batches; ++m, ++number) {
          torch::manual_seed(number);
          batches.push_back(TensorBatch{torch::randn({4, 96}), torch::zeros({1})});
        }
        StepOptions with(Next::kTrain);
        with.update = call + 1 == options.calls_per_step;
        const auto result = (*engine)->Step(batches, with);
        EXPECT_TRUE(result.ok()) << result.status();
        if (!result.ok()) return numbers;
        if (result->updated) numbers.insert(numbers.end(), {result->loss, result->grad_norm});
      }
    }
    return numbers;
  };
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp16, kernels::DType::kFp32}) {
    EngineOptions options;
    options.dtype = dtype;
    options.example = TensorBatch{torch::randn({4, 96}), torch::zeros({1})};
    options.storage.offload = OffloadDevice::kNone;
    options.optimizer.loss_scale = {.dynamic = false, .initial_scale = 128};
    options.micro_batches = 4;
    const std::vector<double> whole = train(options);
    for (const bool on_drive : {false, true}) {
      options.storage.offload = on_drive ? OffloadDevice::kNvme : OffloadDevice::kNone;
      options.storage.state_dirs = {directory};
      options.storage.overwrite = true;
      options.micro_batches = 1;
      options.calls_per_step = 4;
      options.memory.host_memory_budget_bytes = 1 << 30;
      const auto plan = PlanEngine(make(), options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes;
      EXPECT_EQ(train(options), whole) << on_drive;
    }
  }
  std::filesystem::remove_all(directory);
}

// 300 steps of a small model on made-up text: compact states must learn it as fp32 ones do.
TEST(Precision, CompactStatesLearnWhatFp32StatesLearn) {
  RunOptions run;
  run.model = {2, 32, 2, 16, 256, 0};
  run.batch = 4;
  run.steps = 150;
  const auto mean_of_last = [](const std::vector<double>& losses) {
    double sum = 0;
    for (size_t i = losses.size() - 20; i < losses.size(); ++i) sum += losses[i];
    return sum / 20;
  };
  const TrainedLosses exact = TrainGpt(run);
  ASSERT_TRUE(exact.status.ok()) << exact.status;
  ASSERT_LT(mean_of_last(exact.losses), exact.losses.front() / 2);
  for (const kernels::StateType states : {kernels::StateType::kBf16, kernels::StateType::k8Bit}) {
    run.optimizer_states = states;
    const TrainedLosses compact = TrainGpt(run);
    ASSERT_TRUE(compact.status.ok()) << compact.status;
    EXPECT_NE(compact.losses, exact.losses);
    EXPECT_NEAR(mean_of_last(compact.losses), mean_of_last(exact.losses), 0.05 * exact.losses.front())
        << StateTypeName(states);
  }
}

TEST(Precision, AStateLayoutOrOptimizerThatDiffersIsAnotherRun) {
  RunOptions run;
  run.steps = 2;
  run.optimizer_states = kernels::StateType::k8Bit;
  run.state_dir = testing_support::ScratchDirectory();
  run.keep_state = true;
  ASSERT_TRUE(TrainGpt(run).status.ok());
  run.resume = true;
  run.steps = 3;
  RunOptions other = run;
  other.optimizer_states = kernels::StateType::kFp32;
  absl::Status refused = TrainGpt(other).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("optimizer_states is \"8bit\" there and \"fp32\" here"));
  other = run;
  other.optimizer = kernels::LionOptions{};
  refused = TrainGpt(other).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("optimizer is \"adam\" there and \"lion\""));
  EXPECT_TRUE(TrainGpt(run).status.ok());
  std::filesystem::remove_all(run.state_dir);
}

// LibTorch's optimizer over the whole model, beside the engine in fp32.
void ExpectAsLibTorch(
    const OptimizerOptions& ours,
    const std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>& theirs,
    int64_t steps = 20, double tolerance = 1e-5) {
  RunOptions run;
  run.dtype = kernels::DType::kFp32;
  run.batch = 4;
  run.seq = 32;
  run.steps = steps;
  run.clip = 0.5;
  run.optimizer = ours;
  PlainModel plain(run);
  const std::unique_ptr<torch::optim::Optimizer> optimizer = theirs(plain.parameters);
  const double untrained = plain.Backward(run, run.steps, 1);
  std::vector<double> losses;
  for (int64_t step = 1; step <= run.steps; ++step) {
    losses.push_back(plain.Backward(run, step, 1));
    torch::nn::utils::clip_grad_norm_(plain.parameters, run.clip);
    optimizer->step();
  }
  const TrainedLosses trained = TrainGpt(run);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  ASSERT_EQ(trained.losses.size(), losses.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(trained.losses[i], losses[i], tolerance * losses[i]) << "step " << i + 1;
  }
  EXPECT_LT(losses.back(), untrained - 0.01);
}

TEST(Optimizers, AdamWithL2AgreesWithLibTorch) {
  ExpectAsLibTorch(kernels::AdamOptions{.lr = 1e-3, .weight_decay = 0.1, .mode = kernels::AdamMode::kAdam},
                   [](const std::vector<torch::Tensor>& parameters) {
                     return std::make_unique<torch::optim::Adam>(
                         parameters, torch::optim::AdamOptions(1e-3).weight_decay(0.1));
                   });
}

// A first update of lr * g / (|g| + eps) takes the sign of gradients that are nothing but rounding errors (of
// the keys' biases, which softmax cancels); a larger eps keeps them from deciding the loss.
TEST(Optimizers, AdagradAgreesWithLibTorch) {
  ExpectAsLibTorch(kernels::AdagradOptions{.lr = 3e-3, .lr_decay = 0.01, .eps = 1e-3, .weight_decay = 1e-3},
                   [](const std::vector<torch::Tensor>& parameters) {
                     return std::make_unique<torch::optim::Adagrad>(
                         parameters,
                         torch::optim::AdagradOptions(3e-3).lr_decay(0.01).eps(1e-3).weight_decay(1e-3));
                   });
}

TEST(Optimizers, SgdAgreesWithLibTorch) {
  for (const double momentum : {0.0, 0.9}) {
    ExpectAsLibTorch(kernels::SgdOptions{.lr = momentum > 0 ? 0.1 : 0.5,
                                         .momentum = momentum,
                                         .weight_decay = 1e-3,
                                         .nesterov = momentum > 0},
                     [&](const std::vector<torch::Tensor>& parameters) {
                       return std::make_unique<torch::optim::SGD>(
                           parameters, torch::optim::SGDOptions(momentum > 0 ? 0.1 : 0.5)
                                           .momentum(momentum)
                                           .weight_decay(1e-3)
                                           .nesterov(momentum > 0));
                     });
  }
}

// LibTorch has no Lion: its paper's formulas over tensors.
class PlainLion : public torch::optim::Optimizer {
 public:
  PlainLion(const std::vector<torch::Tensor>& parameters, const kernels::LionOptions& options)
      : Optimizer(parameters, std::make_unique<torch::optim::SGDOptions>(options.lr)), options_(options) {
    for (const torch::Tensor& parameter : parameters) m_.push_back(torch::zeros_like(parameter));
  }
  using Optimizer::step;
  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < m_.size(); ++i) {
      torch::Tensor& p = param_groups()[0].params()[i];
      const torch::Tensor g = p.grad();
      const torch::Tensor c = m_[i] * options_.beta1 + g * (1 - options_.beta1);
      p.mul_(1 - options_.lr * options_.weight_decay).sub_(torch::sign(c) * options_.lr);
      m_[i].mul_(options_.beta2).add_(g * (1 - options_.beta2));
    }
    return {};
  }

 private:
  const kernels::LionOptions options_;
  std::vector<torch::Tensor> m_;
};

TEST(Optimizers, LionAgreesWithItsPaper) {
  const kernels::LionOptions options{.lr = 1e-3, .weight_decay = 0.1};
  // A step by the sign: of a gradient that is nearly zero it is another one where sums are rounded otherwise,
  // as some processors' BLAS does for memory that lies otherwise; from the seventh step on that was seen to
  // grow. The formula itself is held in kernels/optimizer_test.cc.
  ExpectAsLibTorch(
      options,
      [&](const std::vector<torch::Tensor>& parameters) {
        return std::make_unique<PlainLion>(parameters, options);
      },
      /*steps=*/6, /*tolerance=*/1e-4);
}

// LibTorch has no LAMB: the paper's formulas (algorithm 2), or those of DeepSpeed's FusedLamb
// (csrc/lamb/fused_lamb_cuda_kernel.cu), over tensors.
class PlainLamb : public torch::optim::Optimizer {
 public:
  PlainLamb(const std::vector<torch::Tensor>& parameters, const kernels::LambOptions& options)
      : Optimizer(parameters, std::make_unique<torch::optim::SGDOptions>(options.adam.lr)),
        options_(options) {
    for (const torch::Tensor& parameter : parameters) {
      m_.push_back(torch::zeros_like(parameter));
      v_.push_back(torch::zeros_like(parameter));
    }
  }
  using Optimizer::step;
  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    const kernels::AdamOptions& adam = options_.adam;
    ++steps_;
    const double correction1 = 1 - std::pow(adam.beta1, steps_),
                 correction2 = 1 - std::pow(adam.beta2, steps_);
    for (size_t i = 0; i < m_.size(); ++i) {
      torch::Tensor& p = param_groups()[0].params()[i];
      const torch::Tensor g = p.grad();
      m_[i].mul_(adam.beta1).add_(g * (1 - adam.beta1));
      v_[i].mul_(adam.beta2).add_(g * g * (1 - adam.beta2));
      const bool fused = options_.corrects_rate;
      const double of_m = fused ? 1 : correction1, of_v = fused ? 1 : correction2;
      const double lr = fused ? adam.lr * std::sqrt(correction2) / correction1 : adam.lr;
      const torch::Tensor u = (m_[i] / of_m) / ((v_[i] / of_v).sqrt() + adam.eps) + p * adam.weight_decay;
      const auto of_p = p.to(torch::kFloat64).norm().item<double>();
      const auto of_u = u.to(torch::kFloat64).norm().item<double>();
      const double trust =
          of_p > 0 && of_u > 0 ? std::clamp(of_p / of_u, options_.least_trust, options_.most_trust) : 1.0;
      p.sub_(u * (lr * trust));
    }
    return {};
  }

 private:
  const kernels::LambOptions options_;
  std::vector<torch::Tensor> m_, v_;
  int steps_ = 0;
};

TEST(Optimizers, LambAgreesWithItsPaperAndWithDeepSpeedsFusedLamb) {
  for (const bool fused : {false, true}) {
    // A larger eps, as above.
    const kernels::LambOptions options{.adam = {.lr = 1e-2, .eps = 1e-3, .weight_decay = 0.01},
                                       .corrects_rate = fused};
    ExpectAsLibTorch(options, [&](const std::vector<torch::Tensor>& parameters) {
      return std::make_unique<PlainLamb>(parameters, options);
    });
  }
}

TEST(Optimizers, LambRefusesMomentsOf8BitInOneLine) {
  RunOptions run;
  run.optimizer = kernels::LambOptions{};
  run.optimizer_states = kernels::StateType::k8Bit;
  const absl::Status refused = TrainGpt(run).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("LAMB's moments are fp32 or bf16"));
}

// Norms and updates of a block, cut into tiles in any way, are those of the block as one.
TEST(Optimizers, LambOfATileIsThatOfTheWholeBlockHoweverItIsCut) {
  const std::vector<ParameterSpec> specs = {{.name = "a", .sizes = {77, 53}},
                                            {.name = "frozen", .sizes = {100}, .trains = false},
                                            {.name = "b", .sizes = {3}},
                                            {.name = "c", .sizes = {9'001}, .group = 1},
                                            {.name = "d", .sizes = {64, 64}}};
  const FlatLayout layout = FlatLayout::Of(specs);
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (const auto& [weights, states] : {std::pair{kernels::DType::kBf16, kernels::StateType::kFp32},
                                        std::pair{kernels::DType::kFp32, kernels::StateType::kBf16}}) {
    TileFormat format;
    format.weights = weights;
    format.states = states;
    const tiering::Precision precision = format.precision();
    std::vector<float> initial(static_cast<size_t>(layout.elements)), gradient(initial.size());
    for (float& value : initial) value = normal(random);
    for (float& value : gradient) value = normal(random);
    UpdateDecision decision{.step = 1, .update = 1};
    decision.groups.clear();
    for (const double lr : {1e-2, 3e-2}) {
      decision.groups.push_back(
          MakeOptimizerStep(kernels::LambOptions{.adam = {.weight_decay = 0.1}}, {{.lr = lr}}, 1, 0.5));
    }
    std::vector<std::vector<char>> results;
    std::vector<double> first_trusts;
    for (int cut = 0; cut < 6; ++cut) {
      // Tiles of their own memory, as they lie in a plan.
      std::vector<tiering::Tile> tiles;
      for (int64_t at = 0; at < layout.elements;) {
        const int64_t most = layout.elements - at;
        const int64_t step =
            cut == 0 ? most
                     : std::min(most, tiering::kElementAlignment * (1 + static_cast<int64_t>(random() % 3)));
        tiles.push_back({at, step});
        at += step;
      }
      struct Held {
        TileMemory memory;
        std::vector<std::vector<char>> segments;
        std::vector<char> gradient;
      };
      std::vector<Held> held(tiles.size());
      std::vector<kernels::LambNorms> norms(layout.parameters.size());
      for (size_t i = 0; i < tiles.size(); ++i) {
        Held& tile = held[i];
        const auto n = static_cast<size_t>(tiles[i].elements), at = static_cast<size_t>(tiles[i].offset);
        tile.memory.elements = tiles[i].elements;
        for (size_t s = 0; s < precision.segment_bytes.size(); ++s) {
          tile.segments.emplace_back(static_cast<size_t>(precision.SegmentBytes(s, tiles[i].elements)));
          (s == 0 ? tile.memory.weights : tile.memory.state.emplace_back()) = tile.segments.back().data();
        }
        FillTile(format, initial.data() + at, tile.memory);
        tile.gradient.resize(n * kernels::BytesPerElement(weights));
        kernels::Convert(kernels::DType::kFp32, gradient.data() + at, weights, tile.gradient.data(), n);
        tile.memory.gradient = tile.gradient.data();
      }
      for (const size_t back : {size_t{1}, size_t{2}}) {  // in any order: the last first
        for (size_t i = held.size(); i-- > 0;) {
          if (i % 2 != back % 2) continue;
          const auto before = held[i].segments;
          AddTensorNorms(format, {decision, layout}, 3, tiles[i], held[i].memory, norms);
          EXPECT_EQ(held[i].segments, before) << "norms changed what they are of";
        }
      }
      std::vector<double> trusts;
      for (size_t p = 0; p < norms.size(); ++p)
        trusts.push_back(TrustOf(decision.of(layout.parameters[p].group), norms[p]));
      if (cut == 0) first_trusts = trusts;
      EXPECT_EQ(trusts, first_trusts);
      std::vector<char> masters(initial.size() * sizeof(float));
      for (size_t i = 0; i < tiles.size(); ++i) {
        UpdateTile(format, {decision, layout}, 3, tiles[i], held[i].memory, trusts);
        ReadMasters(format, held[i].memory, reinterpret_cast<float*>(masters.data()) + tiles[i].offset);
      }
      results.push_back(std::move(masters));
      EXPECT_TRUE(results.back() == results.front()) << "cut " << cut;
    }
    // Against a reference in double: the norms of one whole parameter.
    const Parameter& d = layout.parameters[4];
    double of_p = 0;
    for (int64_t i = d.offset; i < d.offset + d.elements; ++i) {
      const double p = initial[static_cast<size_t>(i)];
      of_p += p * p;
    }
    double of_u = 0;
    const auto& step = std::get<kernels::LambStep>(decision.groups[0]);
    for (int64_t i = d.offset; i < d.offset + d.elements; ++i) {
      const double g = 0.5 * static_cast<double>(gradient[static_cast<size_t>(i)]);
      const double u = g / (std::abs(g) + static_cast<double>(step.adam.eps)) +
                       0.1 * static_cast<double>(initial[static_cast<size_t>(i)]);
      of_u += u * u;
    }
    EXPECT_NEAR(first_trusts[4], std::sqrt(of_p / of_u), 1e-2 * std::sqrt(of_p / of_u));
  }
}

// Some parameters of a block train and some do not, in odd sizes: 8-bit blocks are not shared between them.
class HalfFrozen : public torch::nn::Module {
 public:
  HalfFrozen() {
    frozen = register_parameter("frozen", torch::normal(0, 0.5, {7, 7}), /*requires_grad=*/false);
    trained = register_parameter("trained", torch::normal(0, 0.5, {7, 77}));
    last = register_parameter("last", torch::normal(0, 0.5, {77}), /*requires_grad=*/false);
  }
  torch::Tensor frozen, trained, last;
};

TEST(Precision, FrozenParametersStayAsTheyAreBesideCompactStates) {
  const auto module = std::make_shared<HalfFrozen>();
  const FlatLayout layout = LayoutOf(*module);
  for (const auto& [from, to, group] : layout.trained)
    EXPECT_EQ(from % tiering::kScaleBlock, 0) << from << " " << to;
  TileFormat format;
  format.states = kernels::StateType::k8Bit;
  const tiering::Precision precision = format.precision();
  std::vector<std::vector<char>> segments;
  TileMemory memory;
  memory.elements = layout.elements;
  for (size_t s = 0; s < precision.segment_bytes.size(); ++s) {
    segments.emplace_back(static_cast<size_t>(precision.SegmentBytes(s, layout.elements)));
    (s == 0 ? memory.weights : memory.state.emplace_back()) = segments.back().data();
  }
  std::vector<float> before(static_cast<size_t>(layout.elements)), after(before.size());
  CopyParameters(*module, layout, 0, layout.elements, before.data());
  FillTile(format, before.data(), memory);
  std::vector<uint16_t> gradient(before.size(), kernels::FloatToBf16(0.25f));
  memory.gradient = gradient.data();
  UpdateDecision decision;
  decision.groups = {MakeOptimizerStep(kernels::AdamOptions{.weight_decay = 0.5}, {{.lr = 1e-2}}, 1, 1.0)};
  UpdateTile(format, {decision, layout}, 1, {0, layout.elements}, memory);
  ReadMasters(format, memory, after.data());
  for (const Parameter& parameter : layout.parameters) {
    for (int64_t i = parameter.offset; i < parameter.offset + parameter.elements; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(after[at] == before[at], !parameter.trains) << parameter.name << " " << i - parameter.offset;
    }
  }
}

}  // namespace
}  // namespace penstock::zero::precision_test
