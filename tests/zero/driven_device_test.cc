// A model that its owner drives on a device with memory of its own: the bits are those of the host's memory,
// at every budget, whatever lives there and whichever streams the owner computes on; and nobody waits for the
// device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/float16.h"
#include "swap/checkpoint.h"
#include "tests/zero/arithmetic_owner.h"
#include "zero/compute/driven_compute.h"
#include "zero/compute/frozen_source.h"
#include "zero/compute/test_device.h"
#include "zero/engine/driven_engine.h"

namespace penstock::zero::driven_device_test {
namespace {

using kernels::DType;
using testing_support::ArithmeticOwner;
using testing_support::DeviceQueue;
using testing_support::Shape;
using tiering::BlockIndex;
using tiering::StageIndex;

// The streams of a late device.
class Queue : public DeviceQueue {
 public:
  explicit Queue(TestDevice& device) : device_(device) {}
  void* NewStream() override { return device_.NewStream(); }
  void Enqueue(void* stream, std::function<void()> work) override {
    device_.Enqueue(stream, std::move(work));
  }

 private:
  TestDevice& device_;
};

// With the queue that it computes on.
class Owner {
 public:
  Owner(Shape shape, TestDevice* device) {
    if (device != nullptr && device->late()) queue_.emplace(*device);
    owner_.emplace(std::move(shape), device != nullptr, queue_.has_value() ? &*queue_ : nullptr);
  }
  ArithmeticOwner* operator->() { return &*owner_; }

 private:
  std::optional<Queue> queue_;
  std::optional<ArithmeticOwner> owner_;
};

struct Trained {
  absl::Status status;
  std::vector<double> losses, norms;
  std::vector<float> state;
  tiering::Plan plan;
  int64_t h2d_bytes = 0, d2h_bytes = 0;  // of the last step
  std::vector<double> in_backward;       // [step] share of the tiles that were updated there
  int replayed = 0;                      // steps
};

absl::Status StateOf(Engine& engine, std::vector<float>* state) {
  for (const std::string& name : engine.ParameterNames()) {
    for (const StateKind kind : {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
      const auto value = engine.ReadState(name, kind);
      if (absl::IsNotFound(value.status()) || absl::IsFailedPrecondition(value.status())) continue;  // frozen
      if (!value.ok()) return value.status();
      const auto* const values = static_cast<const float*>(value->view.data);
      state->insert(state->end(), values, values + value->view.elements());
    }
  }
  return absl::OkStatus();
}

// What is frozen, as files would bring it: not before Finish.
class Elsewhere : public FrozenSource {
 public:
  explicit Elsewhere(EngineOptions options) : options_(std::move(options)) {}
  int64_t BytesOf(BlockIndex, int64_t elements) const override { return elements / 2; }
  std::string PlaceOf(BlockIndex) const override { return "elsewhere"; }
  std::unique_ptr<Read> MakeRead() const override { return std::make_unique<Wanted>(); }
  absl::Status Start(aio::Engine&, Read* read, BlockIndex block, int64_t first, int64_t elements,
                     std::byte* to, Done done, void* context) override {
    Wanted& wanted = static_cast<Wanted&>(*read);
    wanted.block = block.value();
    wanted.first = first;
    wanted.elements = elements;
    wanted.to = to;
    std::memset(to, 0xff, static_cast<size_t>(elements) * kernels::BytesPerElement(options_.dtype));  // NaN
    done(context);
    return absl::OkStatus();
  }
  absl::Status Finish(Read* read) override {
    const Wanted& wanted = static_cast<Wanted&>(*read);
    std::vector<float> values(static_cast<size_t>(wanted.elements));
    absl::Status status = options_.initial_values(wanted.block, wanted.first, wanted.elements, values.data());
    kernels::Convert(DType::kFp32, values.data(), options_.dtype, wanted.to, values.size());
    return status;
  }

 private:
  struct Wanted : Read {
    int block = 0;
    int64_t first = 0, elements = 0;
    std::byte* to = nullptr;
  };
  const EngineOptions options_;
};

class DrivenDeviceTest : public testing::Test {
 protected:
  ~DrivenDeviceTest() override { std::filesystem::remove_all(directory_); }

  Trained Train(const Shape& shape, const std::shared_ptr<TestDevice>& device,
                const std::function<void(EngineOptions&)>& adjust, int64_t steps = 4) {
    Trained trained;
    Owner owner(shape, device.get());
    EngineOptions options = owner->Options(directory_);
    if (device != nullptr) options.device = device;
    adjust(options);
    auto engine = DrivenEngine::Create(owner->Measure(), options);
    trained.status = engine.status();
    if (!engine.ok()) return trained;
    trained.plan = (*engine)->plan().plan;
    for (int64_t step = 1; step <= steps && trained.status.ok(); ++step) {
      const Device::Traffic before = options.device->traffic();
      StepResult result;
      trained.status = owner->Step(**engine, step, &result);
      trained.losses.push_back(result.loss);
      trained.norms.push_back(result.grad_norm);
      trained.in_backward.push_back(result.speculative_share);
      trained.replayed += result.replayed ? 1 : 0;
      const Device::Traffic after = options.device->traffic();
      trained.h2d_bytes = after.h2d_bytes - before.h2d_bytes;
      trained.d2h_bytes = after.d2h_bytes - before.d2h_bytes;
    }
    if (trained.status.ok())
      trained.status = (*engine)->Call([&](Engine& of) { return StateOf(of, &trained.state); });
    return trained;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("driven-device-" + std::to_string(getpid()))).string();
};

TEST_F(DrivenDeviceTest, TheBitsAreThoseOfHostMemoryAtEveryBudget) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); };
  int updated_there = 0, kept_there = 0, two_versions = 0, replayed = 0, from_elsewhere = 0;
  for (int round = 0; round < 36; ++round) {
    Shape shape;
    shape.dtype = std::array{DType::kBf16, DType::kFp32, DType::kFp16}[static_cast<size_t>(below(3))];
    shape.micro_batches = 1 + static_cast<int>(below(3));
    if (below(3) == 0) shape.frozen = {1, static_cast<int>(below(2)) * 2};
    if (below(3) == 0) shape.partly_frozen = {3};
    const OffloadDevice offload = std::array{OffloadDevice::kNone, OffloadDevice::kCpu,
                                             OffloadDevice::kNvme}[static_cast<size_t>(below(3))];
    const double clip = below(2) == 0 ? 0 : 0.2;
    const bool elsewhere =
        offload == OffloadDevice::kNvme && shape.frozen.size() + shape.partly_frozen.size() > 0;
    from_elsewhere += elsewhere ? 1 : 0;
    const auto common = [&](EngineOptions& options) {
      options.storage.offload = offload;
      options.optimizer.clip = clip;
      if (elsewhere) options.frozen = std::make_shared<Elsewhere>(options);
    };
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << DTypeName(shape.dtype) << ", "
                                    << shape.micro_batches << " micro-batches, " << shape.frozen.size()
                                    << " frozen, offload " << static_cast<int>(offload));
    const Trained host = Train(shape, nullptr, common);
    ASSERT_TRUE(host.status.ok()) << host.status;
    const auto device_of = [&] {
      return std::make_shared<TestDevice>(
          TestDeviceOptions{.latency_seconds = below(2) == 0 ? 0 : 1e-4, .late = below(2) == 0});
    };
    const Trained all = Train(shape, device_of(), common);
    ASSERT_TRUE(all.status.ok()) << all.status;
    const int64_t least = all.plan.device.least_bytes, most = all.plan.device.bytes();
    ASSERT_GT(least, 0);
    const auto check = [&](const Trained& trained) {
      ASSERT_TRUE(trained.status.ok()) << trained.status;
      EXPECT_EQ(trained.losses, host.losses);
      EXPECT_EQ(trained.norms, host.norms);
      EXPECT_EQ(trained.state, host.state);
      updated_there += trained.plan.device.resident_elements > 0 ? 1 : 0;
      kept_there += trained.plan.device.weight_slots.size() > 2 ? 1 : 0;
      two_versions += trained.plan.second_versions > 0 ? 1 : 0;
      replayed += trained.plan.second_versions > 0 ? trained.replayed : 0;
    };
    check(all);
    for (const int64_t budget : {least, least + below(std::max<int64_t>(1, most - least)), most}) {
      const int share = static_cast<int>(below(4));
      SCOPED_TRACE(testing::Message()
                   << "budget " << budget << " of " << least << " to " << most << ", share " << share);
      check(Train(shape, device_of(), [&](EngineOptions& options) {
        common(options);
        options.memory.device_memory_budget_bytes = budget;
        if (share != 1) options.optimizer.order = tiering::UpdateOrder::kInBackward;
        if (share < 3) options.memory.bounds.processor_share = 0.5 * share;
      }));
    }
    const Trained refused = Train(shape, device_of(), [&](EngineOptions& options) {
      common(options);
      options.memory.device_memory_budget_bytes = least - 1;
    });
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition) << refused.status;
    EXPECT_THAT(std::string(refused.status.message()), testing::HasSubstr(std::to_string(least)));
  }
  EXPECT_GT(updated_there, 20);
  EXPECT_GT(kept_there, 20);
  EXPECT_GT(two_versions, 10);
  EXPECT_GT(replayed, 10);
  EXPECT_GT(from_elsewhere, 4);
}

// Without a drive updates in backward are made beside the version before, which is in force again where the
// norm asks for another update, or for none.
class SecondVersionsTest : public DrivenDeviceTest {
 protected:
  static void InMemory(EngineOptions& options) {
    options.storage.offload = OffloadDevice::kCpu;
    options.memory.bounds.processor_share = 1;
    options.optimizer.clip = 0.05;
  }
  static void InBackward(EngineOptions& options) {
    InMemory(options);
    options.optimizer.order = tiering::UpdateOrder::kInBackward;
  }
  static std::shared_ptr<TestDevice> NewDevice(bool late) {
    return std::make_shared<TestDevice>(TestDeviceOptions{.late = late});
  }
  static Shape Untied() {
    Shape shape;
    shape.stages = {0, 1, 2, 3, 4};
    return shape;
  }
};

TEST_F(SecondVersionsTest, ClippedStepsAndOthersHaveTheBitsOfUpdatesAfterTheNorm) {
  int64_t skipped = 0;
  for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
    for (const kernels::StateType states :
         {kernels::StateType::kFp32, kernels::StateType::kBf16, kernels::StateType::k8Bit}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << ", states " << StateTypeName(states));
      Shape shape;
      shape.dtype = dtype;
      double clip = 0;
      const auto adjusted = [&](auto adjust) {
        return [=, &clip](EngineOptions& options) {
          adjust(options);
          options.optimizer.clip = clip;
          options.optimizer.missing_gradients = MissingGradients::kZeros;
          options.optimizer.states = states;
          options.optimizer.loss_scale.initial_scale = 1 << 23;  // at which some overflow
        };
      };
      // Such that some steps are clipped.
      std::vector<double> norms = Train(shape, NewDevice(true), adjusted(InMemory), 8).norms;
      std::erase_if(norms, [](double norm) { return !std::isfinite(norm); });
      std::sort(norms.begin(), norms.end());
      clip = norms[norms.size() / 2];
      const Trained later = Train(shape, NewDevice(true), adjusted(InMemory), 8);
      const Trained beside = Train(shape, NewDevice(true), adjusted(InBackward), 8);
      ASSERT_TRUE(later.status.ok()) << later.status;
      ASSERT_TRUE(beside.status.ok()) << beside.status;
      EXPECT_EQ(later.plan.second_versions, 0);
      EXPECT_EQ(beside.plan.second_versions, beside.plan.trained_tiles());
      EXPECT_THAT(beside.in_backward, testing::Each(1.0));
      EXPECT_GT(beside.replayed, 0);
      EXPECT_LT(beside.replayed, 8);
      skipped += std::count_if(beside.norms.begin(), beside.norms.end(),
                               [](double norm) { return !std::isfinite(norm); });
      EXPECT_EQ(beside.losses, later.losses);
      EXPECT_EQ(beside.norms, later.norms);
      EXPECT_EQ(beside.state, later.state);
    }
  }
  EXPECT_GT(skipped, 0);
}

// What backward updated of a step that failed is as it was before.
TEST_F(SecondVersionsTest, AStepThatFailsLeavesTheVersionsBefore) {
  const Shape shape = Untied();
  const Trained whole = Train(shape, NewDevice(false), InBackward, 4);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  for (const int stops_at : {3, 2, 1}) {
    const auto device = NewDevice(false);
    Owner owner(shape, device.get());
    EngineOptions options = owner->Options(directory_);
    options.device = device;
    InBackward(options);
    std::atomic<int> updated{0};
    options.hooks.observer = [&](tiering::OpId, const tiering::Op& op, double, double) {
      updated += op.step == 3 && op.speculative_update && op.kind == tiering::OpKind::kUpdate ? 1 : 0;
    };
    auto engine = DrivenEngine::Create(owner->Measure(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    StepResult result;
    std::vector<double> losses;
    for (int64_t step = 1; step <= 4; ++step) {
      if (step == 3) {
        ASSERT_TRUE((*engine)->Begin(Next::kTrain).ok());
        ASSERT_TRUE(owner->PassUntil((*engine)->compute(), step, stops_at).ok());
        // The last block's update, at the least, is over.
        while (updated == 0) std::this_thread::yield();
        (*engine)->compute().Fail(absl::CancelledError("seen enough"));
        EXPECT_FALSE((*engine)->Finish().ok());
      }
      const absl::Status status = owner->Step(**engine, step, &result);
      ASSERT_TRUE(status.ok()) << status;
      losses.push_back(result.loss);
    }
    EXPECT_EQ(losses, whole.losses);
    std::vector<float> state;
    ASSERT_TRUE((*engine)->Call([&](Engine& of) { return StateOf(of, &state); }).ok());
    EXPECT_EQ(state, whole.state);
  }
}

// A checkpoint copies what is in memory until the next norm: the step behind it updates nothing before.
TEST_F(SecondVersionsTest, ACheckpointHasTheStepThatItIsOf) {
  const Shape shape = Untied();
  const std::string parent = directory_ + "-checkpoints";
  std::filesystem::remove_all(parent);
  const auto with_checkpoints = [&](EngineOptions& options) {
    InBackward(options);
    options.storage.checkpoints.parent = parent;
    options.storage.checkpoints.every = 2;
  };
  const Trained whole = Train(shape, NewDevice(false), with_checkpoints, 6);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  EXPECT_EQ(whole.in_backward, (std::vector<double>{0, 1, 0, 1, 0, 1}));
  for (const int64_t step : {2, 4}) {
    const auto device = NewDevice(false);
    Owner owner(shape, device.get());
    EngineOptions options = owner->Options(directory_);
    options.device = device;
    InMemory(options);
    options.storage.overwrite = false;
    options.resume.enabled = true;
    options.storage.state_dirs = {parent + "/" + swap::CheckpointName(static_cast<uint64_t>(step))};
    auto engine = DrivenEngine::Create(owner->Measure(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    StepResult result;
    std::vector<double> losses;
    for (int64_t next = step + 1; next <= 6; ++next) {
      ASSERT_TRUE(owner->Step(**engine, next, &result).ok());
      losses.push_back(result.loss);
    }
    EXPECT_EQ(losses, std::vector<double>(whole.losses.begin() + step, whole.losses.end()));
    std::vector<float> state;
    ASSERT_TRUE((*engine)->Call([&](Engine& of) { return StateOf(of, &state); }).ok());
    EXPECT_EQ(state, whole.state);
  }
  std::filesystem::remove_all(parent);
}

// Weights and gradients alone are copied, as often as the plan says.
TEST_F(DrivenDeviceTest, BytesCopiedAreThePlans) {
  Shape shape;
  shape.micro_batches = 2;
  for (const double share : {0.0, 0.5, 1.0}) {
    const Trained trained =
        Train(shape, std::make_shared<TestDevice>(TestDeviceOptions{}), [&](EngineOptions& options) {
          options.storage.offload = OffloadDevice::kCpu;
          options.memory.bounds.processor_share = share;
        });
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    EXPECT_EQ(trained.h2d_bytes, trained.plan.device.h2d_bytes) << share;
    EXPECT_EQ(trained.d2h_bytes, trained.plan.device.d2h_bytes) << share;
  }
}

// While the device waits with the last forward, two blocks of backward are enqueued behind it, gradients and
// all.
TEST_F(DrivenDeviceTest, NobodyWaitsForTheDevice) {
  Shape shape;
  shape.stages = {0, 1, 2, 3, 4};
  const auto device = std::make_shared<TestDevice>(TestDeviceOptions{.late = true});
  Owner owner(shape, device.get());
  EngineOptions options = owner->Options(directory_);
  options.device = device;
  options.storage.offload = OffloadDevice::kCpu;
  options.memory.bounds.processor_share = 1;
  auto engine = DrivenEngine::Create(owner->Measure(), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  StepResult result;
  ASSERT_TRUE(owner->Step(**engine, 1, &result).ok());
  ASSERT_TRUE((*engine)->Begin(Next::kTrain).ok());
  DrivenCompute& compute = (*engine)->compute();
  const DeviceStream stream{.stream = device->NewStream()};
  std::promise<void> opens;
  std::atomic<bool> computed{false};
  std::vector<float> gradient(20000, 0.25F);
  const auto use = [&](Direction direction, int stage) {
    auto entered = compute.Enter(direction, StageIndex(stage), 0, stream);
    ASSERT_TRUE(entered.ok()) << entered.status();
    if (direction == Direction::kForward && stage == 3) {
      device->Enqueue(stream.stream, [opened = opens.get_future().share(), &computed] {
        opened.wait();
        computed = true;
      });
    }
    DrivenCompute::Result left;
    left.stream = stream;
    if (direction == Direction::kBackward) {
      const int64_t elements = shape.blocks[static_cast<size_t>(stage)][0];
      left.gradients = {{BlockIndex(stage),
                         {{0,
                           {.data = gradient.data(),
                            .type = ElementType::kFp32,
                            .sizes = {elements},
                            .on_device = true}}}}};
    }
    const absl::Status status = compute.Leave(*std::move(entered), std::move(left));
    ASSERT_TRUE(status.ok()) << status;
  };
  for (int stage = 0; stage < 4; ++stage) use(Direction::kForward, stage);
  use(Direction::kBackward, 4);
  EXPECT_FALSE(computed);
  auto entered = compute.Enter(Direction::kBackward, StageIndex(3), 0, stream);
  EXPECT_TRUE(entered.ok()) << entered.status();
  EXPECT_FALSE(computed);
  opens.set_value();
  compute.Fail(absl::CancelledError("seen enough"));
  { const auto dropped = std::move(entered); }
  EXPECT_FALSE((*engine)->Finish().ok());
  EXPECT_TRUE(owner->Step(**engine, 2, &result).ok());
}

TEST_F(DrivenDeviceTest, WhatDoesNotLieOnTheDeviceIsRefusedAndTheNextStepGoesOn) {
  Shape shape;
  const auto device = std::make_shared<TestDevice>(TestDeviceOptions{});
  Owner owner(shape, device.get()), in_host(shape, nullptr);
  EngineOptions options = owner->Options(directory_);
  options.device = device;
  auto engine = DrivenEngine::Create(owner->Measure(), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  StepResult result;
  const absl::Status refused = in_host->Step(**engine, 1, &result);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("memory of the host"));
  EXPECT_TRUE(owner->Step(**engine, 1, &result).ok());
  EXPECT_EQ(result.step, 1);
}

TEST_F(DrivenDeviceTest, ACopyThatFailsEndsTheStepAndTheLastCommitStands) {
  Shape shape;
  const auto trained = [&](int64_t fail_copy) {
    return Train(shape, std::make_shared<TestDevice>(TestDeviceOptions{.fail_copy = fail_copy}),
                 [](EngineOptions& options) { options.memory.bounds.processor_share = 1; });
  };
  ASSERT_TRUE(trained(0).status.ok());
  for (const int64_t fail_copy : {1, 7, 20}) {
    const Trained failed = trained(fail_copy);
    EXPECT_EQ(failed.status.code(), absl::StatusCode::kInternal) << failed.status;
    EXPECT_THAT(std::string(failed.status.message()), testing::HasSubstr("was made to fail"));
  }
}

}  // namespace
}  // namespace penstock::zero::driven_device_test
