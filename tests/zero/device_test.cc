// The engine on a device with memory of its own: the test-only one, whose bits are the processor's.
#include "zero/compute/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "models/families/stages.h"
#include "tests/zero/training.h"
#include "zero/compute/libtorch/cuda_device.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"

namespace penstock::zero::device_test {
namespace {

using testing_support::MakeTestDevice;
using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t BytesOf(const TensorBatch& batch) {
  return static_cast<int64_t>(batch.inputs.nbytes() + batch.targets.nbytes());
}

TEST(Device, EveryOffloadModeAndBudgetGivesTheBitsOfTheProcessor) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 3}) {
      for (const double clip : {0.0, 0.3}) {
        SCOPED_TRACE(testing::Message() << dtype << ", " << micro_batches << " micro-batches, clip " << clip);
        RunOptions run;
        run.dtype = dtype;
        run.micro_batches = micro_batches;
        run.clip = clip;
        run.steps = 4;
        run.evaluate_every = 2;
        run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
        const TrainedLosses cpu = TrainGpt(run);
        ASSERT_TRUE(cpu.status.ok()) << cpu.status;
        run.device = MakeTestDevice();
        run.device_memory_budget_bytes = 1;
        const TrainedLosses refused = TrainGpt(run);
        ASSERT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
        ASSERT_GT(refused.least_host_memory_bytes, 0) << refused.status;
        for (const OffloadDevice offload :
             {OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme}) {
          run.offload = offload;
          for (const int64_t extra : {int64_t{0}, int64_t{400} << 10, 64 * kMiB}) {
            if (extra != 0 && offload == OffloadDevice::kNone) continue;
            run.device = MakeTestDevice({.latency_seconds = extra == 0 ? 1e-4 : 0});
            run.device_memory_budget_bytes = refused.least_host_memory_bytes + extra;
            run.host_memory_budget_bytes = 0;
            if (offload == OffloadDevice::kNvme) {
              run.host_memory_budget_bytes = 1;
              run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes + extra;
            }
            const TrainedLosses device = TrainGpt(run);
            ASSERT_TRUE(device.status.ok()) << device.status;
            EXPECT_EQ(device.losses, cpu.losses) << "device budget " << run.device_memory_budget_bytes;
            EXPECT_EQ(device.norms, cpu.norms);
            EXPECT_EQ(device.evaluations, cpu.evaluations);
            EXPECT_LE(device.peak_device_bytes, run.device_memory_budget_bytes);
            EXPECT_GT(device.peak_device_bytes, device.plan.device.arena_bytes);
            if (run.host_memory_budget_bytes > 0) {
              EXPECT_LE(device.peak_managed_bytes, run.host_memory_budget_bytes);
            }
          }
        }
      }
    }
  }
}

// What is copied is what the plan says, and the batches.
TEST(Device, BytesCopiedAreThePlans) {
  RunOptions run;
  run.offload = OffloadDevice::kCpu;
  run.micro_batches = 2;
  run.device_memory_budget_bytes = 1;
  run.device = MakeTestDevice();
  run.device_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes;
  int64_t h2d[2], d2h[2];
  tiering::DevicePlan plan;
  for (const int more : {0, 1}) {
    run.device = MakeTestDevice();
    run.steps = 3 + more;
    const TrainedLosses trained = TrainGpt(run);
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    h2d[more] = run.device->traffic().h2d_bytes;
    d2h[more] = run.device->traffic().d2h_bytes;
    plan = trained.plan.device;
    EXPECT_FALSE(trained.plan.input_slots.empty()) << "inputs leave the device at the least budget";
  }
  EXPECT_EQ(h2d[1] - h2d[0], plan.h2d_bytes + 2 * BytesOf(testing_support::MakeBatch(run, 1, 0)));
  EXPECT_EQ(d2h[1] - d2h[0], plan.d2h_bytes);
}

TEST(Device, UpdatesInBackwardStepsThatAreSkippedAndShuffledStagesChangeNoBit) {
  for (const bool shuffles : {false, true}) {
    RunOptions run;
    run.steps = 8;
    run.poison_step = 4;
    run.shuffles = shuffles;
    run.announce_always = true;
    run.clip = 1.5;
    const TrainedLosses cpu = TrainGpt(run);
    ASSERT_TRUE(cpu.status.ok()) << cpu.status;
    ASSERT_EQ(cpu.skipped, (std::vector<int64_t>{4}));
    run.offload = OffloadDevice::kNvme;
    run.update_order = tiering::UpdateOrder::kInBackward;
    run.adjust = [](EngineOptions& options) {
      options.memory.bounds.processor_share = 1;
    };  // which makes them
    run.device = MakeTestDevice({.bytes_per_s = 2e9});
    for (const int64_t memory : {10 * kMiB, 64 * kMiB}) {
      run.device_memory_budget_bytes = memory;
      const TrainedLosses device = TrainGpt(run);
      ASSERT_TRUE(device.status.ok()) << device.status;
      EXPECT_EQ(device.losses, cpu.losses);
      EXPECT_EQ(device.skipped, cpu.skipped);
      EXPECT_GT(device.speculative_share, 0);
    }
  }
}

TEST(Device, ACopyThatFailsEndsTheRunInWords) {
  for (const int64_t copy : {1, 10, 30}) {
    RunOptions run;
    run.offload = OffloadDevice::kCpu;
    run.device = MakeTestDevice({.fail_copy = copy});
    const TrainedLosses trained = TrainGpt(run);
    EXPECT_EQ(trained.status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(trained.status.message()), testing::HasSubstr("was made to fail"));
  }
}

// The step before it is whole, and is committed by who flushes what there is.
TEST(Device, ABatchThatTheDeviceDoesNotHoldEndsNoStepButItsOwn) {
  RunOptions run;
  run.offload = OffloadDevice::kNvme;
  run.device = MakeTestDevice({.capacity_bytes = 32 * kMiB});
  run.state_dir = testing_support::ScratchDirectory();
  EngineOptions options = testing_support::OptionsOf(run);
  std::vector<int64_t> committed;
  options.hooks.committed = [&](const StepResult& step) {
    committed.push_back(step.step);
    return absl::OkStatus();
  };
  auto engine = CreateEngine(models::MakeGpt(run.model), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_TRUE((*engine)->Step({testing_support::MakeBatch(run, 1, 0)}, Next::kTrain).ok());
  TensorBatch large = testing_support::MakeBatch(run, 2, 0);
  std::vector<uint8_t> bytes(static_cast<size_t>(64 * kMiB));  // not LibTorch's, which counts its own here
  large.inputs = torch::from_blob(bytes.data(), {64 * kMiB}, torch::kByte);
  EXPECT_FALSE((*engine)->Step({large}, Next::kTrain).ok());
  EXPECT_TRUE((*engine)->Flush().ok());
  EXPECT_EQ(committed, (std::vector<int64_t>{1}));
  const auto again = (*engine)->Step({testing_support::MakeBatch(run, 2, 0)}, Next::kUnknown);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE((*engine)->Flush().ok());
  EXPECT_EQ(committed, (std::vector<int64_t>{1, 2}));
  engine->reset();
  std::filesystem::remove_all(run.state_dir);
}

TEST(Device, ABudgetBeyondWhatTheDeviceHasIsRefused) {
  RunOptions run;
  run.device = MakeTestDevice({.capacity_bytes = 32 * kMiB});
  run.device_memory_budget_bytes = 33 * kMiB;
  const TrainedLosses refused = TrainGpt(run);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status.message()), testing::HasSubstr("is more than the 33554432 bytes"));
  run.device_memory_budget_bytes = 0;
  const TrainedLosses trained = TrainGpt(run);
  EXPECT_TRUE(trained.status.ok()) << trained.status;
  EXPECT_LE(trained.peak_device_bytes, 32 * kMiB);
}

TEST(Device, TheTestDeviceIsParsed) {
  const auto device = TestDevice::Parse("capacity=64MiB,bandwidth=1e9,latency=1e-5");
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->capacity_bytes(), 64 * kMiB);
  for (const char* given : {"capacity", "capacity=-1", "speed=1", "bandwidth=fast"}) {
    EXPECT_EQ(TestDevice::Parse(given).status().code(), absl::StatusCode::kInvalidArgument) << given;
  }
}

TEST(Device, WithoutCudaTheWordsSayWhatIsMissing) {
  const auto device = OpenCudaDevice();
  if (device.ok()) GTEST_SKIP() << "there is a CUDA device: " << (*device)->Describe();
  EXPECT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(device.status().message()), testing::HasSubstr("`device cpu`"));
}

}  // namespace
}  // namespace penstock::zero::device_test
