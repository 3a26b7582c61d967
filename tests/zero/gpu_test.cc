// The engine on a CUDA device, where there is one (`ctest -L gpu`); elsewhere every test says that it was
// skipped and why.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <vector>

#include "kernels/checksum.h"
#include "tests/zero/training.h"
#include "zero/compute/device_gradients.h"
#include "zero/compute/libtorch/cuda_device.h"

#ifdef PENSTOCK_TORCH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace penstock::zero::gpu_test {
namespace {

using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

constexpr int64_t kMiB = int64_t{1} << 20;

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::shared_ptr<Device>> device = OpenCudaDevice();
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *std::move(device);
  }
  std::shared_ptr<Device> device_;
};

TEST_F(Gpu, CopiesArriveWholeInBothDirections) {
  constexpr int64_t kBytes = 8 * kMiB;
  std::unique_ptr<std::byte, decltype(&std::free)> host(
      static_cast<std::byte*>(std::aligned_alloc(2 * kMiB, 2 * kBytes)), &std::free);
  for (int64_t i = 0; i < kBytes; ++i) host.get()[i] = static_cast<std::byte>(i * 7 >> 3);
  std::memset(host.get() + kBytes, 0, kBytes);
  ASSERT_TRUE(device_->RegisterHost(host.get(), 2 * kBytes).ok());
  const absl::StatusOr<std::byte*> there = device_->AllocateArena(kBytes);
  ASSERT_TRUE(there.ok()) << there.status();
  std::promise<absl::Status> in, out;
  device_->CopyIn(*there, host.get(), kBytes, /*after_compute=*/true,
                  [&](absl::Status status) { in.set_value(std::move(status)); });
  ASSERT_TRUE(in.get_future().get().ok());
  device_->CopyOut(host.get() + kBytes, *there, kBytes,
                   [&](absl::Status status) { out.set_value(std::move(status)); });
  ASSERT_TRUE(out.get_future().get().ok());
  device_->UnregisterHost(host.get());
  EXPECT_EQ(std::memcmp(host.get(), host.get() + kBytes, kBytes), 0);
  EXPECT_EQ(device_->traffic().h2d_bytes, kBytes);
  EXPECT_EQ(device_->traffic().d2h_bytes, kBytes);
}

// Products of other kernels than the processor's: bounds as derived in engine_test.cc; fp16 has three bits
// more than bf16.
TEST_F(Gpu, LossesAreTheProcessorsWithinRoundingAndTheSameInEveryOffloadMode) {
  struct Case {
    kernels::DType dtype;
    double bound;
    int64_t seq;
  };
  for (const auto& [dtype, bound, seq] : {Case{kernels::DType::kFp32, 2e-3, 32},
                                          {kernels::DType::kBf16, 0.03, 32},
                                          {kernels::DType::kFp16, 0.01, 32},
                                          {kernels::DType::kBf16, 0.03, 300}}) {  // attention goes by blocks
    RunOptions run;
    run.dtype = dtype;
    run.model.context = run.seq = seq;
    run.micro_batches = 2;
    run.steps = 8;
    const TrainedLosses cpu = TrainGpt(run);
    ASSERT_TRUE(cpu.status.ok()) << cpu.status;
    run.device = device_;
    run.device_memory_budget_bytes = 1;
    const int64_t least = TrainGpt(run).least_host_memory_bytes;
    ASSERT_GT(least, 0);
    std::vector<double> first;
    for (const OffloadDevice offload : {OffloadDevice::kCpu, OffloadDevice::kNvme}) {
      for (const int64_t extra : {64 * kMiB, 512 * kMiB}) {
        run.offload = offload;
        run.device_memory_budget_bytes = least + extra;
        const TrainedLosses gpu = TrainGpt(run);
        ASSERT_TRUE(gpu.status.ok()) << gpu.status;
        EXPECT_LE(gpu.peak_device_bytes, run.device_memory_budget_bytes);
        if (first.empty()) first = gpu.losses;
        EXPECT_EQ(gpu.losses, first);
      }
    }
    ASSERT_EQ(first.size(), cpu.losses.size());
    for (size_t i = 0; i < first.size(); ++i) EXPECT_NEAR(first[i], cpu.losses[i], bound) << dtype << i + 1;
  }
}

TEST_F(Gpu, ChecksumsAreTheStores) {
  constexpr size_t kBytes = 4 * kMiB;
  std::vector<std::byte> host(kBytes);
  for (size_t i = 0; i < kBytes; ++i) host[i] = static_cast<std::byte>(i * i >> 7);
  const absl::StatusOr<std::byte*> there = device_->AllocateArena(kBytes);
  ASSERT_TRUE(there.ok()) << there.status();
  std::promise<absl::Status> copied;
  device_->CopyIn(*there, host.data(), kBytes, /*after_compute=*/false,
                  [&](absl::Status status) { copied.set_value(std::move(status)); });
  ASSERT_TRUE(copied.get_future().get().ok());
  for (const size_t bytes : {kBytes, size_t{4096}, kBytes - 4096}) {
    const absl::StatusOr<uint64_t> checksum = device_->Checksum(*there, bytes, 7);
    ASSERT_TRUE(checksum.ok()) << checksum.status();
    EXPECT_EQ(*checksum, kernels::Checksum(host.data(), bytes, 7)) << bytes;
  }
}

#ifdef PENSTOCK_TORCH_CUDA
// What an owner has enqueued on a stream of its own, and not waited for, is in the gradients that come back.
TEST_F(Gpu, GradientsOfAnotherStreamAreCopiedBehindIt) {
  constexpr size_t kFloats = 16 << 20, kRounds = 24;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::vector<void*> there(2);
  for (void*& each : there) ASSERT_EQ(cudaMalloc(&each, kFloats * sizeof(float)), cudaSuccess);
  std::vector<float> last(kFloats);
  for (size_t i = 0; i < kFloats; ++i) last[i] = static_cast<float>(i % 8191);
  DeviceGradients gradients;
  for (const bool own_stream : {true, false}) {
    cudaStream_t of = own_stream ? stream : nullptr;
    for (void* each : there) ASSERT_EQ(cudaMemset(each, 0, kFloats * sizeof(float)), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    // Much that is still to come when ToHost begins, the values last.
    for (size_t round = 0; round < kRounds; ++round) {
      ASSERT_EQ(cudaMemsetAsync(there[0], static_cast<int>(round), kFloats * sizeof(float), of), cudaSuccess);
      ASSERT_EQ(cudaMemcpyAsync(there[1], there[0], kFloats * sizeof(float), cudaMemcpyDeviceToDevice, of),
                cudaSuccess);
    }
    ASSERT_EQ(cudaMemcpyAsync(there[1], last.data(), kFloats * sizeof(float), cudaMemcpyHostToDevice, of),
              cudaSuccess);
    std::vector<Gradient> both;
    for (int i = 0; i < 2; ++i) {
      both.push_back({i,
                      {there[static_cast<size_t>(i)],
                       ElementType::kFp32,
                       {static_cast<int64_t>(kFloats)},
                       /*on_device=*/true}});
    }
    const absl::Status copied = gradients.ToHost({device_->ordinal(), of}, &both);
    ASSERT_TRUE(copied.ok()) << copied;
    EXPECT_FALSE(both[1].value.on_device);
    EXPECT_EQ(std::memcmp(both[1].value.data, last.data(), kFloats * sizeof(float)), 0);
    const auto* bytes = static_cast<const unsigned char*>(both[0].value.data);
    EXPECT_TRUE(std::all_of(bytes, bytes + kFloats * sizeof(float),
                            [](unsigned char c) { return c == kRounds - 1; }));
  }
  std::vector<Gradient> one = {{0, {there[0], ElementType::kFp32, {4}, /*on_device=*/true}}};
  const absl::Status absent = gradients.ToHost({/*device=*/1 << 10, nullptr}, &one);
  EXPECT_EQ(absent.code(), absl::StatusCode::kUnavailable) << absent;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error is left behind";
  for (void* each : there) EXPECT_EQ(cudaFree(each), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}
#endif

// The same bits whichever way weights come. Without cuFile the run goes by way of host memory and says so.
TEST_F(Gpu, GpuDirectStorageChangesNoBit) {
  RunOptions run;
  run.offload = OffloadDevice::kNvme;
  run.update_order = tiering::UpdateOrder::kInNextForward;
  run.evaluate_every = 2;
  run.device = device_;
  run.device_memory_budget_bytes = 512 * kMiB;
  run.adjust = [](EngineOptions& options) { options.memory.bounds.processor_share = 1; };
  const TrainedLosses by_host = TrainGpt(run);
  ASSERT_TRUE(by_host.status.ok()) << by_host.status;
  std::vector<std::string> lines;
  run.adjust = [&](EngineOptions& options) {
    options.memory.bounds.processor_share = 1;
    options.memory.bounds.resident_elements = 0;
    options.storage.gds = true;
    options.hooks.log = [&](const std::string& line) { lines.push_back(line); };
  };
  const TrainedLosses straight = TrainGpt(run);
  ASSERT_TRUE(straight.status.ok()) << straight.status;
  EXPECT_EQ(straight.losses, by_host.losses);
  EXPECT_EQ(straight.evaluations, by_host.evaluations);
  const bool has = device_->OpenStorage().ok() && straight.plan.device.gds;
  EXPECT_EQ(straight.gds_read_bytes > 0, has);
  EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
    return line.find(has ? "(GPUDirect Storage, cuFile)" : "no GPUDirect Storage: ") != std::string::npos;
  }));
}

}  // namespace
}  // namespace penstock::zero::gpu_test
