// device_bench: copies between host memory and a CUDA device as the engine makes them, over bare ones of
// pinned memory, in turns within one run. Without a device it says so in one line, and exits 2.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "zero/compute/libtorch/cuda_device.h"
#include "zero/compute/machine_rates.h"

namespace penstock::bench {
namespace {

constexpr size_t kBytes = size_t{64} << 20;
constexpr int kCopies = 8;  // that follow each other, as those of a step do

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Bytes a second of copies that nothing else is done for; 0: they failed.
double BareRate(void* to, const void* from, cudaMemcpyKind kind) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCopies; ++i) {
    if (cudaMemcpyAsync(to, from, kBytes, kind, nullptr) != cudaSuccess) return 0;
  }
  if (cudaStreamSynchronize(nullptr) != cudaSuccess) return 0;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return static_cast<double>(kBytes) * kCopies / seconds;
}

// In turns: a bare copy each way, then the engine's. `_of_bare` is the median ratio of pairs.
void DeviceCopies(benchmark::State& state, zero::Device& device) {
  void *host = nullptr, *there = nullptr;
  if (cudaMallocHost(&host, kBytes) != cudaSuccess || cudaMalloc(&there, kBytes) != cudaSuccess) {
    (void)cudaFreeHost(host);
    return state.SkipWithError("not enough memory for a bare copy");
  }
  std::vector<double> in, out, in_of_bare, out_of_bare;
  std::string error;
  for (auto _ : state) {
    const double bare_in = BareRate(there, host, cudaMemcpyHostToDevice);
    const double bare_out = BareRate(host, there, cudaMemcpyDeviceToHost);
    const absl::StatusOr<zero::CopyRates> rates = zero::MeasureCopyRates(device);
    if (!rates.ok()) error = std::string(rates.status().message());
    if (bare_in <= 0 || bare_out <= 0) error = cudaGetErrorString(cudaGetLastError());
    if (!error.empty()) break;
    in.push_back(rates->h2d_bytes_per_s);
    out.push_back(rates->d2h_bytes_per_s);
    in_of_bare.push_back(in.back() / bare_in);
    out_of_bare.push_back(out.back() / bare_out);
  }
  (void)cudaFree(there);
  (void)cudaFreeHost(host);
  if (!error.empty()) return state.SkipWithError(error.c_str());
  state.counters["h2d_bytes_per_second"] = Median(in);
  state.counters["d2h_bytes_per_second"] = Median(out);
  state.counters["h2d_of_bare"] = Median(in_of_bare);
  state.counters["d2h_of_bare"] = Median(out_of_bare);
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const absl::StatusOr<std::shared_ptr<penstock::zero::Device>> device = penstock::zero::OpenCudaDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "device_bench: %s\n", std::string(device.status().message()).c_str());
    return 2;
  }
  benchmark::RegisterBenchmark("DeviceCopies", [&](benchmark::State& state) {
    penstock::bench::DeviceCopies(state, **device);
  })->Iterations(15);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
