// Ranks on CUDA devices, where there are any (`ctest -L gpu`): apart from gpu_test.cc, because a
// process that has used CUDA cannot fork ranks that do.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/zero/ranks.h"
#include "zero/compute/libtorch/cuda_device.h"

namespace penstock::zero::gpu_ranks_test {
namespace {

using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::TrainRanks;

constexpr int64_t kMiB = int64_t{1} << 20;

// Why a rank cannot open its device; empty where it can.
std::string WhyNot() {
  const auto outcomes = testing_support::RunProcesses(1, [](int rank, int) {
    const auto device = OpenCudaDevice(rank);
    return nlohmann::json{{"status", device.ok() ? "" : std::string(device.status().message())}};
  });
  return outcomes.front().report.is_object() ? outcomes.front().text() : "its process ended";
}

std::vector<RankOutcome> TrainOnCuda(const RunOptions& run) {
  return TrainRanks(2, run, [](int rank, RunOptions* own) { own->device = OpenCudaDevice(rank).value(); });
}

// Two ranks, with a device each or sharing the only one. Products of other kernels than the processor's:
// bounds as in gpu_test.cc.
TEST(GpuRanks, LossesAreTheProcessorsWithinRoundingAndTheSameInEveryOffloadMode) {
  if (const std::string why = WhyNot(); !why.empty()) GTEST_SKIP() << why;
  for (const auto& [dtype, bound] : {std::pair{kernels::DType::kFp32, 2e-3}, {kernels::DType::kBf16, 0.03}}) {
    RunOptions run;
    run.dtype = dtype;
    run.batch = 2;
    run.micro_batches = 2;
    run.steps = 6;
    const std::vector<RankOutcome> processors = TrainRanks(2, run);
    ASSERT_EQ(processors.front().text(), "");
    run.device_memory_budget_bytes = 1;
    const int64_t least = TrainOnCuda(run).front().report.value("least_host_memory_bytes", int64_t{0});
    ASSERT_GT(least, 0);
    nlohmann::json first;
    for (const OffloadDevice offload : {OffloadDevice::kCpu, OffloadDevice::kNvme}) {
      run.offload = offload;
      run.state_dir = offload == OffloadDevice::kNvme ? testing_support::ScratchDirectory() : "";
      run.device_memory_budget_bytes = least + 64 * kMiB;
      const std::vector<RankOutcome> ranks = TrainOnCuda(run);
      if (!run.state_dir.empty()) std::filesystem::remove_all(run.state_dir);
      for (const RankOutcome& rank : ranks) {
        ASSERT_EQ(rank.text(), "");
        EXPECT_LE(rank.report["peak_device_bytes"].get<int64_t>(), run.device_memory_budget_bytes);
        if (first.is_null()) first = rank.report["losses"];
        EXPECT_EQ(rank.report["losses"], first);
      }
    }
    const auto expected = processors.front().report["losses"].get<std::vector<double>>();
    const auto seen = first.get<std::vector<double>>();
    ASSERT_EQ(seen.size(), expected.size());
    for (size_t i = 0; i < seen.size(); ++i) EXPECT_NEAR(seen[i], expected[i], bound) << dtype << i + 1;
  }
}

}  // namespace
}  // namespace penstock::zero::gpu_ranks_test
