// The engine with a Compute that knows no LibTorch: what holds for any model holds for it too.
#include "plain_compute.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "tests/zero/plain_batch.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"

namespace penstock::zero::plain_compute_test {
namespace {

using testing_support::PlainBatch;

// One that may fail, or hand over other gradients than it has.
class Meddled final : public plain::PlainCompute {
 public:
  using PlainCompute::PlainCompute;
  std::function<absl::Status(const char* call, const StageUse& use)> fails;
  std::function<void(std::vector<Gradient>*)> meddles;

  absl::Status Forward(const StageUse& use, std::span<const Weights> weights) override {
    const absl::Status why = Why("forward", use);
    return why.ok() ? PlainCompute::Forward(use, weights) : why;
  }
  absl::Status Backward(const StageUse& use, std::span<const Weights> weights) override {
    const absl::Status why = Why("backward", use);
    return why.ok() ? PlainCompute::Backward(use, weights) : why;
  }
  absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                      tiering::BlockIndex block) override {
    RETURN_IF_ERROR(Why("gradients", use));
    const absl::StatusOr<std::span<const Gradient>> gradients = PlainCompute::Gradients(use, block);
    if (!gradients.ok() || !meddles) return gradients;
    meddled_.assign(gradients->begin(), gradients->end());
    meddles(&meddled_);
    return std::span<const Gradient>(meddled_);
  }

 private:
  absl::Status Why(const char* call, const StageUse& use) const {
    return fails ? fails(call, use) : absl::OkStatus();
  }
  std::vector<Gradient> meddled_;
};

class PlainComputeTest : public testing::Test {
 protected:
  PlainComputeTest() {
    options_.dtype = kernels::DType::kFp32;
    options_.storage.offload = OffloadDevice::kNone;
    options_.micro_batches = 2;
    options_.example = PlainBatch(shape_, 0);
  }
  ~PlainComputeTest() override { std::filesystem::remove_all(directory_); }

  struct Trained {
    absl::Status status;
    std::vector<double> losses;
    std::vector<float> state;  // of every parameter: masters and moments
    tiering::Plan plan;
    int64_t peak_bytes = 0;
  };
  Trained Train(const EngineOptions& options, int64_t steps, std::shared_ptr<Compute> compute = nullptr) {
    Trained trained;
    if (compute == nullptr) compute = std::make_shared<plain::PlainCompute>(shape_);
    auto engine = Engine::Create(std::move(compute), options);
    trained.status = engine.status();
    while (trained.status.ok() && (*engine)->step() < steps) {
      const int64_t step = (*engine)->step() + 1;
      const auto result = (*engine)->Step({PlainBatch(shape_, 2 * step), PlainBatch(shape_, 2 * step + 1)},
                                          step < steps ? Next::kTrain : Next::kUnknown);
      trained.status = result.status();
      if (result.ok()) trained.losses.push_back(result->loss);
    }
    if (trained.status.ok()) trained.status = (*engine)->Flush();
    if (!trained.status.ok()) return trained;
    for (const std::string& name : (*engine)->ParameterNames()) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        const auto value = (*engine)->ReadState(name, kind);
        if (!value.ok()) trained.status = value.status();
        if (!value.ok()) return trained;
        const auto* const values = static_cast<const float*>(value->view.data);
        trained.state.insert(trained.state.end(), values, values + value->view.elements());
      }
    }
    trained.plan = (*engine)->plan().plan;
    trained.peak_bytes = (*engine)->peak_managed_bytes();
    return trained;
  }
  EngineOptions OnDrive() const {
    EngineOptions options = options_;
    options.storage.offload = OffloadDevice::kNvme;
    options.storage.state_dirs = {directory_};
    options.storage.overwrite = true;
    return options;
  }

  const plain::Shape shape_ = {.layers = 6, .width = 96};
  const std::string directory_ =
      (std::filesystem::current_path() / ("plain-" + std::to_string(getpid()))).string();
  EngineOptions options_;
};

TEST_F(PlainComputeTest, GradientsAreThoseOfFiniteDifferences) {
  options_.micro_batches = 1;
  options_.optimizer.algorithm = kernels::AdamOptions{.lr = 0};
  auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options_);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const Batch batch = PlainBatch(shape_, 1);
  ASSERT_TRUE((*engine)->Step({batch}).ok());
  int compared = 0;
  for (const std::string& name :
       {std::string("layer.0.weight"), std::string("layer.3.bias"), std::string("layer.5.weight")}) {
    const auto gradient = (*engine)->ReadState(name, StateKind::kGradient);
    ASSERT_TRUE(gradient.ok()) << gradient.status();
    const auto before = (*engine)->ReadState(name, StateKind::kParameter);
    ASSERT_TRUE(before.ok());
    auto* const values = static_cast<float*>(before->view.data);
    for (const int64_t element : {int64_t{0}, int64_t{17}, before->view.elements() - 1}) {
      const float kept = values[element], by = 1e-2F;
      double losses[2];
      for (const int side : {0, 1}) {
        values[element] = kept + (side == 0 ? by : -by);
        ASSERT_TRUE((*engine)->WriteState(name, StateKind::kParameter, before->view).ok());
        const auto loss = (*engine)->Evaluate({batch});
        ASSERT_TRUE(loss.ok()) << loss.status();
        losses[side] = *loss;
      }
      values[element] = kept;
      ASSERT_TRUE((*engine)->WriteState(name, StateKind::kParameter, before->view).ok());
      const double numeric = (losses[0] - losses[1]) / (2 * by);
      const double ours = static_cast<const float*>(gradient->view.data)[element];
      EXPECT_NEAR(ours, numeric, 2e-5 + 0.02 * std::abs(numeric)) << name << " " << element;
      if (std::abs(ours) > 1e-5) ++compared;
    }
  }
  EXPECT_GE(compared, 6);
}

TEST_F(PlainComputeTest, TheBitsAreTheSameWhereverStateAndInputsLive) {
  const Trained in_memory = Train(options_, 5);
  ASSERT_TRUE(in_memory.status.ok()) << in_memory.status;
  EXPECT_LT(in_memory.losses.back(), in_memory.losses.front());
  EngineOptions streamed = OnDrive();
  const Trained on_drive = Train(streamed, 5);
  ASSERT_TRUE(on_drive.status.ok()) << on_drive.status;
  EXPECT_EQ(on_drive.losses, in_memory.losses);
  EXPECT_EQ(on_drive.state, in_memory.state);
  streamed.memory.host_memory_budget_bytes = on_drive.plan.least_host_memory_bytes;
  const Trained least = Train(streamed, 5);
  ASSERT_TRUE(least.status.ok()) << least.status;
  EXPECT_EQ(least.losses, in_memory.losses);
  EXPECT_EQ(least.state, in_memory.state);
  EXPECT_GT(least.plan.input_scratch_bytes, 0) << "inputs were to go to the drive";
  EXPECT_LE(least.peak_bytes, streamed.memory.host_memory_budget_bytes);
}

TEST_F(PlainComputeTest, ARunGoesOnWhereItsProcessStopped) {
  EngineOptions options = OnDrive();
  const Trained whole = Train(options, 6);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const Trained first = Train(options, 3);
  ASSERT_TRUE(first.status.ok()) << first.status;
  options.storage.overwrite = false;
  options.resume.enabled = true;
  const Trained second = Train(options, 6);
  ASSERT_TRUE(second.status.ok()) << second.status;
  std::vector<double> losses = first.losses;
  losses.insert(losses.end(), second.losses.begin(), second.losses.end());
  EXPECT_EQ(losses, whole.losses);
  EXPECT_EQ(second.state, whole.state);
}

TEST_F(PlainComputeTest, AnErrorIsTheStepsAndTheLastCommitStands) {
  EngineOptions options = OnDrive();
  const Trained whole = Train(options, 5);
  for (const char* const call : {"forward", "backward", "gradients"}) {
    options.storage.overwrite = true;
    options.resume.enabled = false;
    auto meddled = std::make_shared<Meddled>(shape_);
    int uses = 0;
    meddled->fails = [&](const char* at, const StageUse& use) {
      const bool there = std::string(at) == call && use.stage == tiering::StageIndex(2);
      return there && ++uses == 5 ? absl::AbortedError("made to fail") : absl::OkStatus();
    };
    const Trained failed = Train(options, 5, meddled);
    EXPECT_EQ(failed.status.code(), absl::StatusCode::kAborted) << call << ": " << failed.status;
    options.storage.overwrite = false;
    options.resume.enabled = true;
    const Trained resumed = Train(options, 5);
    ASSERT_TRUE(resumed.status.ok()) << call << ": " << resumed.status;
    EXPECT_EQ(resumed.state, whole.state) << call;
  }
}

TEST_F(PlainComputeTest, GradientsThatAreNoneOfTheBlocksAreRefusedByName) {
  const auto refused = [&](std::function<void(std::vector<Gradient>*)> meddles) {
    auto meddled = std::make_shared<Meddled>(shape_);
    meddled->meddles = std::move(meddles);
    return Train(options_, 1, meddled).status;
  };
  const absl::Status size = refused([](auto* gradients) { (*gradients)[1].value.sizes = {3}; });
  EXPECT_EQ(size.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(size.message().find("bias"), std::string::npos) << size;
  const absl::Status type = refused([](auto* gradients) { (*gradients)[0].value.type = ElementType::kBf16; });
  EXPECT_NE(type.message().find("bf16"), std::string::npos) << type;
  const absl::Status twice = refused([](auto* gradients) { (*gradients)[1].parameter = 0; });
  EXPECT_EQ(twice.code(), absl::StatusCode::kInvalidArgument) << twice;
  const absl::Status elsewhere = refused([](auto* gradients) { (*gradients)[0].value.on_device = true; });
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kInvalidArgument) << elsewhere;
}

TEST_F(PlainComputeTest, AParameterWithoutAGradientTookNoPart) {
  options_.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-2, .weight_decay = 0};
  auto meddled = std::make_shared<Meddled>(shape_);
  meddled->meddles = [](auto* gradients) { gradients->pop_back(); };
  auto engine = Engine::Create(meddled, options_);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_TRUE((*engine)->Step({PlainBatch(shape_, 1), PlainBatch(shape_, 2)}).ok());
  const auto bias = (*engine)->ReadState("layer.1.bias", StateKind::kParameter);
  ASSERT_TRUE(bias.ok());
  for (int64_t i = 0; i < shape_.width; ++i)
    EXPECT_EQ(static_cast<const float*>(bias->view.data)[i], 0.0F);  // as it began
}

TEST_F(PlainComputeTest, WhatItCannotComputeIsRefusedBeforeAnythingIsMade) {
  EngineOptions options = OnDrive();
  options.dtype = kernels::DType::kBf16;
  EXPECT_EQ(Train(options, 1).status.code(), absl::StatusCode::kInvalidArgument);
  options = OnDrive();
  options.example = PlainBatch({.layers = 1, .width = 32}, 0);
  EXPECT_EQ(Train(options, 1).status.code(), absl::StatusCode::kInvalidArgument);
  options = OnDrive();
  options.device = std::make_shared<TestDevice>(TestDeviceOptions());
  EXPECT_EQ(Train(options, 1).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

TEST_F(PlainComputeTest, AModelWithoutLayersIsRefused) {
  const Trained none = Train(options_, 1, std::make_shared<plain::PlainCompute>(plain::Shape{.layers = 0}));
  EXPECT_EQ(none.status.code(), absl::StatusCode::kInvalidArgument) << none.status;
}

}  // namespace
}  // namespace penstock::zero::plain_compute_test
