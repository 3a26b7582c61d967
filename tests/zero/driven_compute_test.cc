// A model that its owner drives, against the same model as a Compute: bits, and what is done wrong.
#include "zero/compute/driven_compute.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/loaded_library.h"
#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "tiering/plan/working_set.h"
#include "zero/compute/device.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/restore.h"

namespace penstock::zero::driven_compute_test {
namespace {

using testing_support::Owner;
using testing_support::PlainBatch;
using tiering::BlockIndex;
using tiering::StageIndex;

class DrivenComputeTest : public testing::Test {
 protected:
  ~DrivenComputeTest() override { std::filesystem::remove_all(directory_); }

  std::vector<Batch> Batches(int64_t step) const {
    std::vector<Batch> batches;
    for (int m = 0; m < kMicroBatches; ++m) batches.push_back(PlainBatch(shape_, kMicroBatches * step + m));
    return batches;
  }
  std::unique_ptr<DrivenEngine> Open(Owner& owner, const EngineOptions& options, int drivers = 1) {
    absl::StatusOr<Measured> measured = owner.Measure();
    EXPECT_TRUE(measured.ok()) << measured.status();
    auto engine = DrivenEngine::Create(*std::move(measured), options, drivers);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  static absl::Status State(Engine& engine, std::vector<float>* state) {
    for (const std::string& name : engine.ParameterNames()) {
      for (const StateKind kind : {StateKind::kParameter, StateKind::kSecondMoment}) {
        const auto value = engine.ReadState(name, kind);
        if (!value.ok()) return value.status();
        const auto* const values = static_cast<const float*>(value->view.data);
        state->insert(state->end(), values, values + value->view.elements());
      }
    }
    return absl::OkStatus();
  }

  static constexpr int kMicroBatches = 2;
  const plain::Shape shape_ = {.layers = 5, .width = 80};
  const std::string directory_ =
      (std::filesystem::current_path() / ("driven-" + std::to_string(getpid()))).string();
};

TEST_F(DrivenComputeTest, TheBitsAreThoseOfTheSameModelAsACompute) {
  Owner owner(shape_, kMicroBatches);
  EngineOptions options = owner.Options(directory_);
  std::vector<double> losses, expected;
  std::vector<float> state, expected_state;
  {
    options.example = PlainBatch(shape_, 0);
    auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (int64_t step = 1; step <= 6; ++step) {
      const auto result = (*engine)->Step(Batches(step), step < 6 ? Next::kTrain : Next::kUnknown);
      ASSERT_TRUE(result.ok()) << result.status();
      expected.push_back(result->loss);
    }
    ASSERT_TRUE(State(**engine, &expected_state).ok());
    options.memory.host_memory_budget_bytes = (*engine)->plan().plan.least_host_memory_bytes;
  }
  const auto driven = Open(owner, options);
  ASSERT_NE(driven, nullptr);
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(driven->Begin(step < 6 ? Next::kTrain : Next::kUnknown).ok());
    const absl::Status computed = owner.Compute(driven->compute(), Batches(step));
    ASSERT_TRUE(computed.ok()) << computed;
    const auto result = driven->Finish();
    ASSERT_TRUE(result.ok()) << result.status();
    losses.push_back(result->loss);
  }
  ASSERT_TRUE(driven->Call([&](Engine& engine) { return State(engine, &state); }).ok());
  EXPECT_EQ(losses, expected);
  EXPECT_EQ(state, expected_state);
}

// Twice the bytes of what leaves go to and from the drive, and no more inputs are in memory than the plan has
// counted.
TEST_F(DrivenComputeTest, InputsWaitForBackwardOnTheDriveAndTheBitsAreTheSame) {
  const plain::Shape deep = {.layers = 9, .width = 80};
  std::vector<double> losses[2];
  std::vector<float> states[2];
  for (const bool moves : {false, true}) {
    Owner owner(deep, kMicroBatches);
    owner.moves_inputs = moves;
    EngineOptions options = owner.Options(directory_);
    if (moves) options.memory.saved_activations = tiering::SavedActivations::kDrive;
    const auto driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    EXPECT_EQ(driven->plan().plan.input_scratch_bytes > 0, moves);
    for (int64_t step = 1; step <= 3; ++step) {
      std::vector<Batch> batches;
      for (int m = 0; m < kMicroBatches; ++m) batches.push_back(PlainBatch(deep, kMicroBatches * step + m));
      ASSERT_TRUE(driven->Begin(step < 3 ? Next::kTrain : Next::kUnknown).ok());
      const absl::Status computed = owner.Compute(driven->compute(), std::move(batches));
      ASSERT_TRUE(computed.ok()) << computed;
      const auto result = driven->Finish();
      ASSERT_TRUE(result.ok()) << result.status();
      losses[moves ? 1 : 0].push_back(result->loss);
    }
    ASSERT_TRUE(driven->Call([&](Engine& engine) { return State(engine, &states[moves ? 1 : 0]); }).ok());
    const int leave = deep.layers - 3 - 1;  // all but the first, which has the batch, and the last ones
    EXPECT_EQ(owner.came_back, moves ? 3 * kMicroBatches * leave : 0);
    EXPECT_LE(owner.most_inputs_here, 3 * kMicroBatches);
    const DrivenCompute::InputTraffic traffic = driven->compute().input_traffic();
    EXPECT_EQ(traffic.left_bytes, traffic.returned_bytes);
    EXPECT_EQ(traffic.left_bytes > 0, moves);
    const int64_t one = traffic.left_bytes / (3 * kMicroBatches * leave);
    EXPECT_LE(traffic.peak_bytes, tiering::kInputRing * kMicroBatches * TensorMemory::Counted(one));
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(states[0], states[1]);
}

TEST_F(DrivenComputeTest, WhatIsAskedForOutOfOrderEndsThePassAndNamesBoth) {
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  ASSERT_NE(driven, nullptr);
  ASSERT_TRUE(driven->Begin().ok());
  const auto wrong = driven->compute().Enter(Direction::kForward, StageIndex(3), 0);
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kAborted) << wrong.status();
  EXPECT_NE(wrong.status().message().find("stage 0"), std::string::npos) << wrong.status();
  EXPECT_NE(wrong.status().message().find("stage 3"), std::string::npos) << wrong.status();
  EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kAborted);
}

TEST_F(DrivenComputeTest, AForwardWithoutABackwardIsNamedAndNothingHangs) {
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  ASSERT_NE(driven, nullptr);
  ASSERT_TRUE(driven->Begin().ok());
  EXPECT_FALSE(driven->Begin().ok());
  EXPECT_FALSE(driven->Call([](Engine&) { return absl::OkStatus(); }).ok());
  std::vector<Batch> batches = Batches(1);
  for (int m = 0; m < kMicroBatches; ++m)
    ASSERT_TRUE(owner.One(driven->compute(), Direction::kForward, 0, m, &batches).ok());
  const absl::Status finished = driven->Finish().status();
  EXPECT_EQ(finished.code(), absl::StatusCode::kFailedPrecondition) << finished;
  EXPECT_NE(finished.message().find("forward of stage 1, micro-batch 0"), std::string::npos) << finished;
  EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(driven->compute().Enter(Direction::kForward, StageIndex(1), 0).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(DrivenComputeTest, AUseThatIsDroppedAnErrorAndAnInterruptEndThePass) {
  const auto ends = [&](absl::StatusCode code, const std::function<void(DrivenCompute&)>& how) {
    Owner owner(shape_, kMicroBatches);
    auto driven = Open(owner, owner.Options(directory_), /*drivers=*/2);
    ASSERT_NE(driven, nullptr);
    ASSERT_TRUE(driven->Begin().ok());
    how(driven->compute());
    EXPECT_EQ(driven->Finish().status().code(), code);
  };
  ends(absl::StatusCode::kCancelled, [](DrivenCompute& compute) {
    const auto entered = compute.Enter(Direction::kForward, StageIndex(0), 0);
    EXPECT_TRUE(entered.ok());
  });
  ends(absl::StatusCode::kDataLoss, [](DrivenCompute& compute) {
    compute.Fail(absl::DataLossError("the owner's data"));
    EXPECT_EQ(compute.Enter(Direction::kForward, StageIndex(0), 0).status().code(),
              absl::StatusCode::kDataLoss);
  });
  ends(absl::StatusCode::kCancelled, [](DrivenCompute& compute) {
    std::atomic<int> asked{0};
    compute.set_interrupted([&] { return ++asked == 3; });
    EXPECT_EQ(compute.Enter(Direction::kForward, StageIndex(4), 0).status().code(),
              absl::StatusCode::kCancelled);
    EXPECT_EQ(asked, 3);
    compute.set_interrupted(nullptr);
  });
}

// The wait for the engine ends, and the pass goes on: it is there when it is asked for again.
TEST_F(DrivenComputeTest, AnInterruptedFinishMayBeCalledAgain) {
  Owner owner(shape_, kMicroBatches);
  EngineOptions options = owner.Options(directory_);
  std::promise<void> goes_on;
  options.hooks.stops = [held = goes_on.get_future().share()] {  // towards the end of a step
    held.wait();
    return false;
  };
  const auto driven = Open(owner, options);
  ASSERT_NE(driven, nullptr);
  std::atomic<bool> interrupted{false};
  driven->compute().set_interrupted([&] { return interrupted.load(); });
  ASSERT_TRUE(driven->Begin().ok());
  ASSERT_TRUE(owner.Compute(driven->compute(), Batches(1)).ok());
  interrupted = true;
  EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(driven->Begin().code(), absl::StatusCode::kFailedPrecondition);
  goes_on.set_value();
  interrupted = false;
  const auto result = driven->Finish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 1);
}

TEST_F(DrivenComputeTest, AUseThatIsNotLeftBeforeTheNextIsNamed) {
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  ASSERT_NE(driven, nullptr);
  ASSERT_TRUE(driven->Begin().ok());
  {
    const auto entered = driven->compute().Enter(Direction::kForward, StageIndex(0), 0);
    ASSERT_TRUE(entered.ok());
    const absl::Status second = driven->compute().Enter(Direction::kForward, StageIndex(0), 1).status();
    EXPECT_EQ(second.code(), absl::StatusCode::kAborted) << second;
    EXPECT_NE(second.message().find("micro-batch 0 is entered"), std::string::npos) << second;
  }
  EXPECT_FALSE(driven->Finish().ok());
}

TEST_F(DrivenComputeTest, ItIsClosedInTheMiddleOfAPassAndTheRunGoesOn) {
  Owner owner(shape_, kMicroBatches);
  EngineOptions options = owner.Options(directory_);
  for (int64_t last = 1; last <= 3; ++last) {
    const auto driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    ASSERT_TRUE(driven->Begin(Next::kTrain).ok());
    ASSERT_TRUE(owner.Compute(driven->compute(), Batches(last)).ok());
    const auto result = driven->Finish();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, last);
    ASSERT_TRUE(driven->Call([](Engine& engine) { return engine.Flush(); }).ok());
    ASSERT_TRUE(driven->Begin().ok());
    auto entered = driven->compute().Enter(Direction::kForward, StageIndex(0), 0);
    ASSERT_TRUE(entered.ok());
    ASSERT_TRUE(driven->compute().Leave(*std::move(entered), {}).ok());
    options.storage.overwrite = false;
    options.resume.enabled = true;
  }
}

// Drivers that hold what they enter: one waits, one is inside, and both hear of it.
TEST_F(DrivenComputeTest, TheEngineGoesWhileDriversAreInside) {
  for (int round = 0; round < 8; ++round) {
    Owner owner(shape_, kMicroBatches);
    auto driven = Open(owner, owner.Options(directory_), /*drivers=*/2);
    ASSERT_NE(driven, nullptr);
    ASSERT_TRUE(driven->Begin().ok());
    const std::shared_ptr<DrivenCompute> compute = driven->compute().shared_from_this();
    std::promise<void> inside;
    std::atomic<bool> left{false};
    std::thread computes([&, compute] {
      auto entered = compute->Enter(Direction::kForward, StageIndex(0), 0);
      ASSERT_TRUE(entered.ok()) << entered.status();
      inside.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::byte first = *entered->weights().front().data;  // still there
      EXPECT_EQ(first, *entered->weights().front().data);
      left = true;
      EXPECT_FALSE(compute->Leave(*std::move(entered), {}).ok());
      EXPECT_FALSE(compute->Enter(Direction::kForward, StageIndex(1), 0).ok());
    });
    std::thread waits(
        [compute] { EXPECT_FALSE(compute->Enter(Direction::kForward, StageIndex(0), 1).ok()); });
    inside.get_future().wait();
    driven.reset();
    EXPECT_TRUE(left);
    computes.join();
    waits.join();
    EXPECT_FALSE(compute->Enter(Direction::kForward, StageIndex(0), 0).ok());
    compute->Fail(absl::AbortedError("nobody hears it"));
  }
}

// What is left with something else than its use has made is refused, and the next pass is as if nothing had
// been.
TEST_F(DrivenComputeTest, AResultThatIsNotOfItsUseFailsThePassAndTheNextOneGoesOn) {
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  ASSERT_NE(driven, nullptr);
  DrivenCompute& compute = driven->compute();
  for (int round = 0; round < 4; ++round) {
    ASSERT_TRUE(driven->Begin().ok());
    std::vector<Batch> batches = Batches(1);
    for (int s = 0; s + 1 < shape_.layers; ++s) {
      for (int m = 0; m < kMicroBatches; ++m)
        ASSERT_TRUE(owner.One(compute, Direction::kForward, s, m, &batches).ok());
    }
    auto entered = compute.Enter(Direction::kBackward, StageIndex(shape_.layers - 1), 0);
    ASSERT_TRUE(entered.ok());
    const BlockIndex block(shape_.layers - 1);
    DrivenCompute::Result result;
    if (round != 0) result.gradients = {{round == 1 ? BlockIndex(0) : block, {}}};
    if (round != 2) result.loss = 1;  // it may follow
    const absl::Status left = compute.Leave(*std::move(entered), std::move(result));
    EXPECT_EQ(left.code(), round >= 2 ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument) << left;
    EXPECT_FALSE(driven->Finish().ok());
  }
  // An evaluation is a pass of its own, not a call.
  const absl::Status evaluated = driven->Call([](Engine& engine) {
    return engine.Evaluate({testing_support::PlainBatch({.layers = 1, .width = 4}, 0)}).status();
  });
  EXPECT_EQ(evaluated.code(), absl::StatusCode::kFailedPrecondition) << evaluated;
  ASSERT_TRUE(driven->Begin().ok());
  auto entered = compute.Enter(Direction::kForward, StageIndex(0), 0);
  ASSERT_TRUE(entered.ok());
  EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kFailedPrecondition);
  compute.Fail(absl::AbortedError("no more of it"));
  EXPECT_FALSE(compute.Leave(*std::move(entered), {}).ok());
  EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kAborted);
  owner.leaves = [](DrivenCompute::Result* result) { result->loss.reset(); };
  ASSERT_TRUE(driven->Begin().ok());
  const absl::Status lossless = owner.Compute(compute, Batches(1));
  EXPECT_EQ(lossless.code(), absl::StatusCode::kInvalidArgument) << lossless;
  EXPECT_NE(lossless.message().find("backward of stage 0"), std::string::npos) << lossless;
  EXPECT_FALSE(driven->Finish().ok());
  owner.leaves = nullptr;
  ASSERT_TRUE(driven->Begin().ok());
  ASSERT_TRUE(owner.Compute(compute, Batches(1)).ok());
  const auto result = driven->Finish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 1);
}

// The memory of a device, as the stand-in for CUDA's runtime has it: reading it here would crash.
class DeviceMemory {
 public:
  ~DeviceMemory() {
    for (void* each : memory_) free_(each);
  }
  // Moves them there.
  void Take(std::vector<Gradient>* gradients) {
    for (Gradient& gradient : *gradients) {
      void* there = nullptr;
      const auto bytes = static_cast<size_t>(gradient.value.bytes());
      ASSERT_EQ(malloc_(&there, bytes), 0);
      memory_.push_back(there);
      ASSERT_EQ(copy_(there, gradient.value.data, bytes, /*to the device*/ 1, nullptr), 0);
      gradient.value.data = there;
      gradient.value.on_device = true;
    }
  }
  int current() const {
    int device = -1;
    get_device_(&device);
    return device;
  }

 private:
  // By its path, and so the one that the engine finds in the process.
  const aio::LoadedLibrary runtime_{FAKE_CUDA_DIRECTORY "/libcudart.so"};
  int (*const malloc_)(void**, size_t) = runtime_.Get<int(void**, size_t)>("cudaMalloc");
  int (*const free_)(void*) = runtime_.Get<int(void*)>("cudaFree");
  int (*const get_device_)(int*) = runtime_.Get<int(int*)>("cudaGetDevice");
  int (*const copy_)(void*, const void*, size_t, int,
                     void*) = runtime_.Get<int(void*, const void*, size_t, int, void*)>("cudaMemcpyAsync");
  std::vector<void*> memory_;
};

TEST_F(DrivenComputeTest, GradientsOnADeviceAreCopiedAndTheBitsAreTheSame) {
  const auto losses = [&](bool on_device) {
    DeviceMemory memory;
    Owner owner(shape_, kMicroBatches);
    if (on_device) {
      owner.leaves = [&](DrivenCompute::Result* result) {
        memory.Take(&result->gradients.front().second);
        result->stream = DeviceStream{.device = 1};
      };
    }
    const auto driven = Open(owner, owner.Options(directory_));
    std::vector<double> all;
    for (int64_t step = 1; step <= 4; ++step) {
      EXPECT_TRUE(driven->Begin().ok());
      EXPECT_TRUE(owner.Compute(driven->compute(), Batches(step)).ok());
      const auto result = driven->Finish();
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) all.push_back(result->loss);
    }
    EXPECT_EQ(memory.current(), 0) << "the caller's device is as it was";
    return all;
  };
  const std::vector<double> on_device = losses(true);
  EXPECT_EQ(on_device.size(), 4U);
  EXPECT_EQ(on_device, losses(false));
}

TEST_F(DrivenComputeTest, ADeviceThatFailsIsNamedAndTheNextStepGoesOn) {
  DeviceMemory memory;
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  const auto step = [&](std::optional<DeviceStream> stream) {
    owner.leaves = [&memory, stream](DrivenCompute::Result* result) {
      memory.Take(&result->gradients.front().second);
      result->stream = stream;
      setenv("FAKE_CUDA_FAULT", "copy", 1);
    };
    EXPECT_TRUE(driven->Begin().ok());
    absl::Status computed = owner.Compute(driven->compute(), Batches(1));
    unsetenv("FAKE_CUDA_FAULT");
    EXPECT_EQ(driven->Finish().status().code(), computed.code());
    return computed;
  };
  const absl::Status fails = step(DeviceStream{});
  EXPECT_EQ(fails.code(), absl::StatusCode::kUnavailable) << fails;
  EXPECT_NE(fails.message().find("device 0"), std::string::npos) << fails;
  EXPECT_NE(fails.message().find("cudaMemcpyAsync"), std::string::npos) << fails;
  const absl::Status absent = step(DeviceStream{.device = 7});
  EXPECT_EQ(absent.code(), absl::StatusCode::kUnavailable) << absent;
  EXPECT_EQ(step(std::nullopt).code(), absl::StatusCode::kInvalidArgument);
  owner.leaves = nullptr;
  ASSERT_TRUE(driven->Begin().ok());
  ASSERT_TRUE(owner.Compute(driven->compute(), Batches(1)).ok());
  EXPECT_TRUE(driven->Finish().ok());
}

// Rates that are given with a step hold in the place of the schedule's, for each group of parameters.
TEST_F(DrivenComputeTest, AStepGoesByTheRatesOfItsGroups) {
  const auto train = [&](const std::vector<std::vector<GroupRates>>& steps, std::vector<float>* state) {
    Owner owner(shape_, kMicroBatches);
    absl::StatusOr<Measured> measured = owner.Measure();
    ASSERT_TRUE(measured.ok()) << measured.status();
    const auto layout = std::make_shared<const FlatLayout>(FlatLayout::Of(std::vector<ParameterSpec>{
        {"weight", {shape_.width, shape_.width}}, {"bias", {shape_.width}, true, /*group=*/1}}));
    for (auto& each : measured->layouts) each = layout;
    auto driven = DrivenEngine::Create(*std::move(measured), owner.Options(directory_));
    ASSERT_TRUE(driven.ok()) << driven.status();
    for (size_t t = 0; t < steps.size(); ++t) {
      StepOptions options(Next::kTrain);
      options.groups = steps[t];
      ASSERT_TRUE((*driven)->Begin(options).ok());
      const absl::Status computed = owner.Compute((*driven)->compute(), Batches(static_cast<int64_t>(t)));
      const auto result = (*driven)->Finish();
      ASSERT_TRUE(result.ok()) << result.status() << computed;
      EXPECT_EQ(result->lr, steps[t].empty() ? 1e-3 : steps[t].front().rates.lr);
    }
    ASSERT_TRUE((*driven)->Call([&](Engine& engine) { return State(engine, state); }).ok());
  };
  const GroupRates own = {{.lr = 1e-3}}, none = {{.lr = 0.0}}, other = {{.lr = 5e-4}, 0.1};
  std::vector<float> schedule, one, two, halved;
  train({{}, {}, {}}, &schedule);
  train({{own}, {own}, {}}, &one);
  train({{own, own}, {own, own}, {own}}, &two);
  train({{own, none}, {own, none}, {other, none}}, &halved);
  EXPECT_EQ(one, schedule);
  EXPECT_EQ(two, schedule);
  EXPECT_NE(halved, schedule);
  ASSERT_EQ(halved.size(), schedule.size());
}

TEST_F(DrivenComputeTest, RatesThatNoOptimizerHasAreRefusedAndTheNextStepGoesOn) {
  Owner owner(shape_, kMicroBatches);
  const auto driven = Open(owner, owner.Options(directory_));
  ASSERT_NE(driven, nullptr);
  for (const std::vector<GroupRates>& wrong : {std::vector<GroupRates>{{{.lr = -1}}},
                                               {{{.lr = std::nan("")}}},
                                               {{{.lr = 1}, -0.1}},
                                               {{}, {{.lr = -1}}}}) {
    StepOptions options;
    options.groups = wrong;
    ASSERT_TRUE(driven->Begin(options).ok());
    EXPECT_EQ(driven->Finish().status().code(), absl::StatusCode::kInvalidArgument);
  }
  ASSERT_TRUE(driven->Begin().ok());
  ASSERT_TRUE(owner.Compute(driven->compute(), Batches(1)).ok());
  EXPECT_TRUE(driven->Finish().ok());
}

// Of a run on a drive, and of one in memory: what is gone on with from there has the same losses.
TEST_F(DrivenComputeTest, ACheckpointThatIsAskedForIsGoneOnWithElsewhere) {
  for (const OffloadDevice offload : {OffloadDevice::kNvme, OffloadDevice::kCpu}) {
    const std::string parent = directory_ + "/kept", again = directory_ + "/again";
    std::filesystem::remove_all(directory_);
    std::string path;
    std::vector<double> expected;
    const auto step = [&](Owner& owner, DrivenEngine& driven, int64_t number) {
      EXPECT_TRUE(driven.Begin(Next::kTrain).ok());
      EXPECT_TRUE(owner.Compute(driven.compute(), Batches(number)).ok());
      const auto result = driven.Finish();
      EXPECT_TRUE(result.ok()) << result.status();
      return result.ok() ? result->loss : -1;
    };
    {
      Owner owner(shape_, kMicroBatches);
      EngineOptions options = owner.Options(directory_ + "/run");
      options.storage.offload = offload;
      if (offload != OffloadDevice::kNvme) options.storage.state_dirs.clear();
      const auto said = std::make_shared<std::string>("before");
      options.hooks.describe = [said](const StepResult&) { return nlohmann::json(*said); };
      const auto driven = Open(owner, options);
      ASSERT_NE(driven, nullptr);
      for (int64_t number = 1; number <= 3; ++number) step(owner, *driven, number);
      ASSERT_TRUE(driven->Call([](Engine& engine) { return engine.Flush(); }).ok());
      const auto keep = [&](const std::string& where) {
        return driven->Call([&](Engine& engine) -> absl::Status {
          const absl::StatusOr<std::string> kept = engine.Checkpoint(where);
          if (kept.ok()) path = *kept;
          return kept.status();
        });
      };
      *said = "after";  // what a commit says may be known only when it is made
      ASSERT_TRUE(keep(parent).ok());
      EXPECT_EQ(keep(parent).code(), absl::StatusCode::kAlreadyExists);
      EXPECT_FALSE(keep("/proc/nowhere").ok());
      for (int64_t number = 4; number <= 6; ++number) expected.push_back(step(owner, *driven, number));
    }
    Owner owner(shape_, kMicroBatches);
    EngineOptions options = owner.Options(again);
    ASSERT_TRUE(RestoreRun(path, options).ok());
    options.storage.overwrite = false;
    options.resume.enabled = true;
    const auto looked_at = [&](DrivenEngine& opened, const std::string& says) {
      return opened.Call([&](Engine& engine) {
        EXPECT_EQ(engine.last_description(), says);
        return engine.CommitDescription("before a step");
      });
    };
    auto driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    ASSERT_TRUE(looked_at(*driven, "after").ok());
    driven.reset();
    driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    ASSERT_TRUE(looked_at(*driven, "before a step").ok());
    std::vector<double> losses;
    for (int64_t number = 4; number <= 6; ++number) losses.push_back(step(owner, *driven, number));
    EXPECT_EQ(losses, expected);
  }
}

// Each of two threads has a micro-batch of its own.
TEST_F(DrivenComputeTest, DriversEnterTheirOwnMicroBatches) {
  constexpr int kDrivers = 2;
  Owner owner(shape_, kDrivers);
  auto driven = Open(owner, owner.Options(directory_), kDrivers);
  ASSERT_NE(driven, nullptr);
  ASSERT_TRUE(driven->Begin().ok());
  std::vector<absl::Status> ended(kDrivers);
  std::vector<std::thread> drivers;
  for (int m = 0; m < kDrivers; ++m) {
    drivers.emplace_back([&, m] {
      DrivenCompute& compute = driven->compute();
      const auto use = [&](Direction direction, int stage) {
        auto entered = compute.Enter(direction, StageIndex(stage), m);
        if (!entered.ok()) return entered.status();
        EXPECT_EQ(entered->use().micro_batch, m);
        DrivenCompute::Result result;  // without gradients of parameters: zeros
        if (direction == Direction::kBackward) result.gradients = {{BlockIndex(stage), {}}};
        if (entered->use().last) result.loss = 1;
        return compute.Leave(*std::move(entered), std::move(result));
      };
      for (int s = 0; s + 1 < shape_.layers && ended[At(m)].ok(); ++s)
        ended[At(m)] = use(Direction::kForward, s);
      for (int s = shape_.layers - 1; s >= 0 && ended[At(m)].ok(); --s)
        ended[At(m)] = use(Direction::kBackward, s);
    });
  }
  for (std::thread& driver : drivers) driver.join();
  for (const absl::Status& status : ended) EXPECT_TRUE(status.ok()) << status;
  const auto result = driven->Finish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->grad_norm, 0);
}

}  // namespace
}  // namespace penstock::zero::driven_compute_test
