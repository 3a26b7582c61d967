#include "bench/kernels_cuda_bench.h"

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"

namespace penstock::bench {
namespace {

using kernels::DType;
using kernels::ParamType;

constexpr size_t kN = size_t{64} << 20;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Device memory for one benchmark, zeroed.
class DeviceArray {
 public:
  explicit DeviceArray(size_t bytes) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess || cudaMemset(data_, 0, bytes) != cudaSuccess)
      data_ = nullptr;
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Milliseconds of device time, by events around the work.
class Timer {
 public:
  Timer() {
    cudaEventCreate(&start_);
    cudaEventCreate(&stop_);
  }
  ~Timer() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  double Seconds(const std::function<int()>& work, int* error) {
    cudaEventRecord(start_);
    *error = work();
    cudaEventRecord(stop_);
    if (*error == cudaSuccess) *error = cudaEventSynchronize(stop_);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, start_, stop_);
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t start_, stop_;
};

// In turns with a copy that reads and writes as many bytes in all; `of_copy` is the median ratio of pairs.
void Measure(benchmark::State& state, size_t bytes, const std::function<int()>& work) {
  const DeviceArray from(bytes / 2), to(bytes / 2);
  if (from.data() == nullptr || to.data() == nullptr) {
    state.SkipWithError("not enough device memory");
    return;
  }
  Timer timer;
  std::vector<double> seconds, ratios;
  int error = work();  // once to warm up
  for (auto _ : state) {
    int copy_error = cudaSuccess;
    const double copy = timer.Seconds(
        [&] {
          return static_cast<int>(
              cudaMemcpyAsync(to.data(), from.data(), bytes / 2, cudaMemcpyDeviceToDevice));
        },
        &copy_error);
    if (error == cudaSuccess) error = copy_error;
    int work_error = cudaSuccess;
    seconds.push_back(timer.Seconds(work, &work_error));
    if (error == cudaSuccess) error = work_error;
    ratios.push_back(copy / seconds.back());
  }
  if (error != cudaSuccess) {
    state.SkipWithError(kernels::cuda::ErrorText(error).c_str());
    return;
  }
  state.counters["bytes_per_second"] = static_cast<double>(bytes) / Median(seconds);
  state.counters["of_copy"] = Median(ratios);
}

void AdamW(benchmark::State& state, ParamType param, DType grad, size_t bytes) {
  const DeviceArray p(4 * kN), master_low(2 * kN), g(4 * kN), m(4 * kN), v(4 * kN);
  for (const DeviceArray* array : {&p, &master_low, &g, &m, &v}) {
    if (array->data() == nullptr) return state.SkipWithError("not enough device memory");
  }
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param_type = param;
  arrays.param = p.data();
  arrays.master_low = static_cast<int16_t*>(master_low.data());
  arrays.grad_type = grad;
  arrays.grad = g.data();
  arrays.m = m.data();
  arrays.v = v.data();
  const kernels::AdamStep step = kernels::MakeAdamStep({.weight_decay = 0.1}, 10);
  Measure(state, bytes * kN, [&] { return kernels::cuda::ApplyUpdates(step, &arrays, 1, {}, nullptr); });
}

void SumOfSquares(benchmark::State& state) {
  const DeviceArray g(2 * kN), partials(8 * kernels::cuda::PartialSums(kN));
  if (g.data() == nullptr || partials.data() == nullptr)
    return state.SkipWithError("not enough device memory");
  Measure(state, 2 * kN, [&] {
    return kernels::cuda::SquarePartials(DType::kBf16, g.data(), kN, static_cast<double*>(partials.data()),
                                         nullptr);
  });
}

void Cast(benchmark::State& state) {
  const DeviceArray from(4 * kN), to(2 * kN);
  if (from.data() == nullptr || to.data() == nullptr) return state.SkipWithError("not enough device memory");
  Measure(state, 6 * kN, [&] {
    return kernels::cuda::Convert(DType::kFp32, from.data(), DType::kBf16, to.data(), kN, nullptr);
  });
}

// A tile's weights, of which several are checked one after another.
void Checksum(benchmark::State& state) {
  constexpr size_t kBytes = size_t{4} << 20;
  const DeviceArray tile(kBytes), out(sizeof(uint64_t));
  if (tile.data() == nullptr || out.data() == nullptr) return state.SkipWithError("not enough device memory");
  Measure(state, kBytes, [&] {
    return kernels::cuda::Checksum(tile.data(), kBytes, 1, static_cast<uint64_t*>(out.data()), nullptr);
  });
}

}  // namespace

void RegisterCudaBenchmarks() {
  std::string why;
  if (!kernels::cuda::DeviceAvailable(&why)) {
    std::fprintf(stderr, "kernels_bench: CUDA benchmarks are left out: %s\n", why.c_str());
    return;
  }
  benchmark::RegisterBenchmark("CudaAdamW/fp32/64Mi",
                               [](benchmark::State& s) { AdamW(s, ParamType::kFp32, DType::kFp32, 28); });
  benchmark::RegisterBenchmark("CudaAdamW/split/64Mi",
                               [](benchmark::State& s) { AdamW(s, ParamType::kSplit, DType::kBf16, 26); });
  benchmark::RegisterBenchmark("CudaSumOfSquares/bf16/64Mi", SumOfSquares);
  benchmark::RegisterBenchmark("CudaFp32ToBf16/64Mi", Cast);
  benchmark::RegisterBenchmark("CudaChecksum/4MiB", Checksum);
}

}  // namespace penstock::bench
