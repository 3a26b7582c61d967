// Weights that come from the drive to the device past host memory, with the test-only device, whose storage
// reads files into its memory: the same bits, checked there, and no loss where it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/zero/training.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"

namespace penstock::zero::gds_test {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing_support::MakeTestDevice;
using testing_support::RunOptions;
using testing_support::ScratchDirectory;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kSlack = 64 << 10;  // what measuring a stage's tensors may differ by

// The processor updates everything, in the next forward: all of backward's weights are the device's alone.
RunOptions OnTheDrive(const TestDeviceOptions& device) {
  RunOptions run;
  run.offload = OffloadDevice::kNvme;
  run.update_order = tiering::UpdateOrder::kInNextForward;
  run.clip = 0.3;
  run.model.layers = 12;
  run.model.width = 128;  // so that rounding to huge pages leaves no room for all of them
  run.device = MakeTestDevice(device);
  run.device_memory_budget_bytes = 8 * kMiB;
  run.adjust = [](EngineOptions& options) {
    options.storage.gds = true;
    options.memory.bounds.processor_share = 1;
    options.memory.bounds.resident_elements = 0;
  };
  return run;
}

// At the least budgets, which hold few of its layers.
RunOptions AtLeast(RunOptions run, const TestDeviceOptions& device) {
  run.device = MakeTestDevice({.gds = device.gds});
  run.device_memory_budget_bytes = 1;
  run.device_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes + kSlack;
  run.host_memory_budget_bytes = 1;
  run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes + kSlack;
  run.device = MakeTestDevice(device);
  return run;
}

TEST(Gds, EveryTypeOrderAndBudgetGivesTheBitsOfTheProcessor) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const auto order : {tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward}) {
      for (const bool least : {false, true}) {
        SCOPED_TRACE(testing::Message() << dtype << ", order " << static_cast<int>(order) << ", " << least);
        RunOptions run = OnTheDrive({.gds = true});
        run.dtype = dtype;
        run.update_order = order;
        run.steps = 3;
        run.evaluate_every = 2;
        run.micro_batches = least ? 1 : 2;
        run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
        if (least) run = AtLeast(run, {.latency_seconds = 1e-4, .gds = true});
        RunOptions processor = run;
        processor.device = HostDevice();
        processor.offload = OffloadDevice::kNone;
        processor.host_memory_budget_bytes = processor.device_memory_budget_bytes = 0;
        processor.adjust = nullptr;
        const TrainedLosses cpu = TrainGpt(processor);
        ASSERT_TRUE(cpu.status.ok()) << cpu.status;
        const TrainedLosses device = TrainGpt(run);
        ASSERT_TRUE(device.status.ok()) << device.status;
        EXPECT_EQ(device.losses, cpu.losses);
        EXPECT_EQ(device.norms, cpu.norms);
        EXPECT_EQ(device.evaluations, cpu.evaluations);
        EXPECT_TRUE(device.plan.device.gds);
        EXPECT_GT(device.gds_read_bytes, 0);
        EXPECT_LE(device.peak_device_bytes, run.device_memory_budget_bytes);
        if (least) {
          EXPECT_LE(device.peak_managed_bytes, run.host_memory_budget_bytes);
        }
      }
    }
  }
}

// What comes past host memory is not copied to the device, and a step's reads and copies are the plan's.
TEST(Gds, BytesAreThePlans) {
  int64_t reads[2][2], copied[2], gds[2];
  for (const bool straight : {false, true}) {
    tiering::Plan plan;
    for (const int more : {0, 1}) {
      RunOptions run = AtLeast(OnTheDrive({}), {.gds = straight});
      run.steps = 4 + more;
      const TrainedLosses trained = TrainGpt(run);
      ASSERT_TRUE(trained.status.ok()) << trained.status;
      reads[straight][more] = trained.read_bytes;
      gds[more] = trained.gds_read_bytes;
      plan = trained.plan;
    }
    const auto planned = static_cast<double>(plan.nvme_read_bytes);
    EXPECT_NEAR(static_cast<double>(reads[straight][1] - reads[straight][0]), planned, 0.01 * planned);
    EXPECT_EQ(gds[1] > gds[0], straight);
    copied[straight] = plan.device.h2d_bytes;
  }
  EXPECT_LT(copied[1], copied[0]);
  EXPECT_GE(copied[1] + gds[1] - gds[0], copied[0] - 1 * kMiB);
}

TEST(Gds, DamageOnTheWayIsFoundThere) {
  for (const int64_t read : {int64_t{2}, int64_t{9}, int64_t{20}}) {
    const TrainedLosses trained = TrainGpt(AtLeast(OnTheDrive({}), {.gds = true, .damage_read = read}));
    EXPECT_EQ(trained.status.code(), absl::StatusCode::kDataLoss) << trained.status;
    EXPECT_THAT(std::string(trained.status.message()), HasSubstr("does not match the checksum"));
  }
}

TEST(Gds, ARunWhoseReadsFailIsResumedByWayOfHostMemory) {
  RunOptions run = AtLeast(OnTheDrive({}), {.gds = true});
  run.steps = 6;
  const TrainedLosses whole = TrainGpt(run);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  run.state_dir = ScratchDirectory();
  run.keep_state = true;
  run.device = MakeTestDevice({.gds = true, .fail_read = 150});
  const TrainedLosses failed = TrainGpt(run);
  EXPECT_EQ(failed.status.code(), absl::StatusCode::kDataLoss) << failed.status;
  EXPECT_THAT(std::string(failed.status.message()), HasSubstr("without aio.use_gds"));
  EXPECT_GT(failed.losses.size(), 0u);
  run.resume = true;
  run.device = MakeTestDevice();
  const TrainedLosses resumed = TrainGpt(run);
  ASSERT_TRUE(resumed.status.ok()) << resumed.status;
  const auto from = static_cast<size_t>(resumed.resumed_from);
  EXPECT_EQ(resumed.losses,
            std::vector<double>(whole.losses.begin() + static_cast<ptrdiff_t>(from), whole.losses.end()));
  EXPECT_EQ(resumed.gds_read_bytes, 0);
  std::filesystem::remove_all(run.state_dir);
}

// Which way is taken is said in a line, with its reason.
TEST(Gds, ALineSaysWhichWayIsTaken) {
  const auto way = [](const TestDeviceOptions& device, bool asked) {
    std::vector<std::string> lines;
    RunOptions run = OnTheDrive(device);
    run.steps = 1;
    run.adjust = [&, asked, adjust = run.adjust](EngineOptions& options) {
      adjust(options);
      options.storage.gds = asked;
      options.hooks.log = [&](const std::string& line) { lines.push_back(line); };
    };
    const TrainedLosses trained = TrainGpt(run);
    EXPECT_TRUE(trained.status.ok()) << trained.status;
    EXPECT_EQ(trained.plan.device.gds,
              device.gds && asked && device.fail_read == 0 && device.damage_read == 0);
    return lines;
  };
  EXPECT_THAT(way({.gds = true}, true),
              Contains(HasSubstr("straight to it from the drive (GPUDirect Storage, test)")));
  EXPECT_THAT(way({.gds = true}, false), Contains(HasSubstr("by way of pinned host memory")));
  EXPECT_THAT(way({}, true), Contains(HasSubstr("no GPUDirect Storage: the test device has none")));
  // It is tried before it is relied on.
  EXPECT_THAT(
      way({.gds = true, .fail_read = 1}, true),
      Contains(HasSubstr("no GPUDirect Storage: test device: read 1 of 1048576 bytes was made to fail")));
  EXPECT_THAT(way({.gds = true, .damage_read = 1}, true),
              Contains(HasSubstr("is not what came to the device")));
}

}  // namespace
}  // namespace penstock::zero::gds_test
