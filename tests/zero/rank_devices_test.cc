// Several ranks, each with a device apart of its own (the test-only one, whose bits are the processor's): the
// losses of ranks on processors, within every budget, and an end with a reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/zero/ranks.h"
#include "zero/rank_setup.h"
#include "zero/test_device.h"

namespace penstock::zero {
namespace {

using testing_support::Alone;
using testing_support::ExpectSameLosses;
using testing_support::MakeTestDevice;
using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::ToJson;
using testing_support::TrainGpt;
using testing_support::TrainRanks;
using testing_support::UntiedRun;

constexpr int64_t kMiB = int64_t{1} << 20;

// A device has threads: it is made in the rank's own process.
std::vector<RankOutcome> TrainOnDevices(int world, const RunOptions& run,
                                        const TestDeviceOptions& device = {}) {
  return TrainRanks(world, run, [&](int, RunOptions* own) { own->device = MakeTestDevice(device); });
}

// From the words of a refusal, which all ranks must give.
int64_t LeastOf(const std::vector<RankOutcome>& refused) {
  const int64_t least = refused.front().report.value("least_host_memory_bytes", int64_t{0});
  EXPECT_GT(least, 0) << refused.front().text();
  for (const RankOutcome& rank : refused)
    EXPECT_EQ(rank.report["least_host_memory_bytes"], least) << rank.text();
  return least;
}

TEST(RankDevices, EveryOffloadModeAndBudgetGivesTheBitsOfProcessors) {
  for (const torch::Dtype dtype : {torch::kBFloat16, torch::kFloat32, torch::kHalf}) {
    for (const int micro_batches : {1, 2}) {
      SCOPED_TRACE(testing::Message() << dtype << ", " << micro_batches << " micro-batches");
      RunOptions run;  // a GPT: its embedding has two addends in every micro-batch
      run.dtype = dtype;
      run.batch = 2;
      run.micro_batches = micro_batches;
      run.clip = 0.3;
      run.steps = 4;
      run.evaluate_every = 2;
      run.model.dropout = 0.1;
      const std::vector<RankOutcome> processors = TrainRanks(2, run);
      run.device_memory_bytes = 1;
      const int64_t least_device = LeastOf(TrainOnDevices(2, run));
      for (const OffloadDevice offload : {OffloadDevice::kNone, OffloadDevice::kNvme}) {
        for (const int64_t extra : {int64_t{0}, 64 * kMiB}) {
          if (extra == 0 && offload == OffloadDevice::kNone) continue;
          run.device_memory_bytes = least_device + extra;
          run.host_memory_bytes = 0;
          run.state_dir.clear();
          if (offload == OffloadDevice::kNvme) {
            run.state_dir = testing_support::ScratchDirectory();
            run.host_memory_bytes = 1;
            run.host_memory_bytes = LeastOf(TrainOnDevices(2, run)) + extra;
          }
          const std::vector<RankOutcome> devices =
              TrainOnDevices(2, run, {.latency_seconds = extra == 0 ? 1e-4 : 0});
          ExpectSameLosses(processors.front().report, devices);
          for (const RankOutcome& rank : devices) {
            EXPECT_LE(rank.report["peak_device_bytes"].get<int64_t>(), run.device_memory_bytes);
            EXPECT_GT(rank.report["peak_device_bytes"].get<int64_t>(), 0);
            if (run.host_memory_bytes > 0) {
              EXPECT_LE(rank.report["peak_managed_bytes"].get<int64_t>(), run.host_memory_bytes);
            }
          }
          if (!run.state_dir.empty()) std::filesystem::remove_all(run.state_dir);
        }
      }
    }
  }
}

// Where a gradient has one addend a rank, also those of one rank with all micro-batches.
TEST(RankDevices, SameBitsAsOneProcessorWithTheirMicroBatchesInEveryOrderOfUpdate) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, torch::kBFloat16);
  run.clip = 0.15;  // of norms below and above it: updates made in backward are made again in some steps
  run.micro_batches = 3;
  const nlohmann::json one = Alone(run);
  run.micro_batches = 1;
  run.host_memory_bytes = 64 * kMiB;
  run.tile_bytes = 1 << 16;
  for (const tiering::UpdateOrder order :
       {tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward}) {
    run.state_dir = testing_support::ScratchDirectory();
    run.update_order = order;
    ExpectSameLosses(one, TrainOnDevices(3, run, {.bytes_per_s = 2e9}));
    std::filesystem::remove_all(run.state_dir);
  }
}

TEST(RankDevices, ACopyThatFailsOnOneEndsAllInItsWords) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, torch::kFloat32);
  run.steps = 1000;
  const std::vector<RankOutcome> ranks = TrainRanks(2, run, [](int rank, RunOptions* own) {
    own->device = MakeTestDevice({.fail_copy = rank == 1 ? 40 : 0});
  });
  for (const RankOutcome& rank : ranks) {
    EXPECT_EQ(rank.exit_code, 0);
    EXPECT_THAT(rank.text(), testing::HasSubstr("was made to fail"));
  }
  EXPECT_THAT(ranks[0].text(), testing::HasSubstr("rank 1 of 2 failed"));
}

// Without a budget each takes its share of the device that it computes on.
TEST(RankDevices, RanksOfOneDeviceShareItsMemory) {
  const auto budgets = testing_support::RunProcesses(3, [](int rank, int port) {
    auto comm = ConnectGloo(testing_support::LoopbackRank(rank, 3, port), {});
    if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
    const TestDevice shared({.capacity_bytes = 90 * kMiB, .identity = rank < 2 ? "one" : "another"});
    const TestDevice own({.capacity_bytes = (90 + rank) * kMiB});
    nlohmann::json seen;
    seen["shared"] = AgreeOnDeviceBudget(**comm, shared, 0).value_or(-1);
    seen["own"] = AgreeOnDeviceBudget(**comm, own, 0).value_or(-1);
    seen["given"] = AgreeOnDeviceBudget(**comm, shared, rank == 1 ? 20 * kMiB : 0).value_or(-1);
    return seen;
  });
  for (const RankOutcome& rank : budgets) {
    EXPECT_EQ(rank.report, (nlohmann::json{{"shared", 45 * kMiB}, {"own", 90 * kMiB}, {"given", 20 * kMiB}}));
  }
}

}  // namespace
}  // namespace penstock::zero
