// Speed of the kernels, each beside its limit in the same run.
//
//   kernels_bench [--threads=N] [Google Benchmark's flags]         N: threads of the pool, the caller
//   included (2)
//
// Names end in the number of elements (64Mi) or bytes. `bytes_per_second` counts the bytes that the algorithm
// has to read and write, over the median pass; `cpu_ms_per_gib` is CPU time of the whole process.
// `Streams/...` is the limit: a loop that moves the same streams and computes nothing, with plain or
// non-temporal stores, whichever is faster here. `of_streams`, where it stands, is the median over pairs of
// passes, limit and kernel in turns: memory bandwidth drifts, and only a pair sees the same machine.
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/kernels_streams.h"
#include "kernels/checksum.h"
#include "kernels/cpu_features.h"
#include "kernels/optimizer.h"
#include "kernels/split_master.h"
#include "kernels/thread_pool.h"

#ifdef PENSTOCK_BENCH_CUDA
#include "bench/kernels_cuda_bench.h"
#endif
#ifdef PENSTOCK_BENCH_TORCH
#include <torch/torch.h>
#endif

namespace penstock::bench {
namespace {

using kernels::DType;
using kernels::ParamType;
using kernels::StateType;
using kernels::ThreadPool;

constexpr size_t kN = size_t{64} << 20;  // 64 Mi elements: 256 MiB an fp32 array, far beyond any cache
constexpr size_t kGrain = 16384;

int thread_budget = 2;
ThreadPool& Pool() {
  static ThreadPool pool(thread_budget);
  return pool;
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Memory as the engine's arena has it: aligned to 2 MiB, with huge pages where the system gives them.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_(bytes + kHuge) {
    void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
      std::fprintf(stderr, "kernels_bench: no memory for %zu bytes\n", bytes_);
      std::exit(1);
    }
    start_ = static_cast<unsigned char*>(start);
    madvise(start, bytes_, MADV_HUGEPAGE);
    data_ = start_ + (kHuge - reinterpret_cast<uintptr_t>(start_) % kHuge) % kHuge;
  }
  ~Block() { munmap(start_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  unsigned char* data() const { return data_; }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  size_t bytes_;
  unsigned char* start_;
  unsigned char* data_;
};

// All arrays that any benchmark here uses, filled once with ordinary values.
struct Memory {
  Block p{4 * kN}, m{4 * kN}, v{4 * kN}, g{4 * kN}, master_high{2 * kN}, master_low{2 * kN}, g16{2 * kN},
      m8{kN}, v8{kN}, scales{2 * 4 * kN / kernels::kStateBlock};
  template <class T>
  static T* As(const Block& block) {
    return reinterpret_cast<T*>(block.data());
  }
  Memory() {
    Pool().ParallelFor(kN, kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const float x = static_cast<float>(static_cast<int>(i * 2654435761u % 2001) - 1000) * 1e-3f;
        As<float>(p)[i] = x;
        As<float>(m)[i] = 0.1f * x;
        As<float>(v)[i] = 0.01f * x * x + 1e-6f;
        As<float>(g)[i] = 0.3f - x;
        As<uint16_t>(g16)[i] = kernels::FloatToBf16(0.3f - x);
      }
    });
    kernels::SplitMaster(As<float>(p), As<uint16_t>(master_high), As<int16_t>(master_low), kN, &Pool());
    auto* scale = As<float>(scales);
    kernels::Quantize8(kernels::Code8::kSigned, As<float>(m), m8.data(), scale, kN, {}, &Pool());
    kernels::Quantize8(kernels::Code8::kUnsigned, As<float>(v), v8.data(), scale + kN / kernels::kStateBlock,
                       kN, {}, &Pool());
  }
  StreamSet Four() const { return {4, 3, {p.data(), m.data(), v.data(), g.data()}, {4, 4, 4, 4}, nullptr}; }
  StreamSet Mixed() const {
    return {4, 3, {p.data(), m.data(), v.data(), g16.data()}, {4, 4, 4, 2}, master_high.data()};
  }
  StreamSet Split() const {
    return {5,
            4,
            {m.data(), v.data(), master_high.data(), master_low.data(), g16.data()},
            {4, 4, 2, 2, 2},
            nullptr};
  }
};
Memory& Mem() {
  static Memory memory;
  return memory;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// The limit of a set of streams as one pass over the pool.
class Limit {
 public:
  explicit Limit(const StreamSet& set) : set_(set) {
    std::vector<double> seconds[2];
    for (int round = 0; round < 5; ++round) {
      for (const bool non_temporal : {false, true}) {
        const double start = Seconds();
        Pass(non_temporal);
        seconds[non_temporal].push_back(Seconds() - start);
      }
    }
    non_temporal_ = Median(seconds[1]) < Median(seconds[0]);
  }
  void Pass() const { Pass(non_temporal_); }
  void Pass(bool non_temporal) const {
    Pool().ParallelFor(kN, kGrain,
                       [&](size_t begin, size_t end) { MoveStreams(set_, non_temporal, begin, end); });
  }
  bool non_temporal() const { return non_temporal_; }
  double bytes() const { return static_cast<double>(set_.BytesPerElement() * kN); }

 private:
  StreamSet set_;
  bool non_temporal_ = false;
};
Limit& FourLimit() {
  static Limit limit(Mem().Four());
  return limit;
}
Limit& MixedLimit() {
  static Limit limit(Mem().Mixed());
  return limit;
}
Limit& SplitLimit() {
  static Limit limit(Mem().Split());
  return limit;
}

// Runs `pass`, which moves `bytes`, once an iteration; in turns with `limit`, where there is one.
void Measure(benchmark::State& state, double bytes, const std::function<void()>& pass,
             const Limit* limit = nullptr) {
  std::vector<double> seconds, ratios;
  double cpu = 0;
  for (auto _ : state) {
    double limit_seconds = 0;
    if (limit != nullptr) {
      state.PauseTiming();
      const double start = Seconds();
      limit->Pass();
      limit_seconds = Seconds() - start;
      state.ResumeTiming();
    }
    const double cpu_start = CpuSeconds();
    const double start = Seconds();
    pass();
    seconds.push_back(Seconds() - start);
    cpu += CpuSeconds() - cpu_start;
    if (limit != nullptr) ratios.push_back((bytes / seconds.back()) / (limit->bytes() / limit_seconds));
  }
  state.counters["bytes_per_second"] = bytes / Median(seconds);
  const double gib = bytes * static_cast<double>(seconds.size()) / static_cast<double>(size_t{1} << 30);
  state.counters["cpu_ms_per_gib"] = 1e3 * cpu / gib;
  if (limit != nullptr) {
    state.counters["of_streams"] = Median(ratios);
    state.counters["pairs"] = static_cast<double>(ratios.size());
  }
}

kernels::AdamStep Step() {
  return kernels::MakeAdamStep({.lr = 1e-5, .beta2 = 0.95, .weight_decay = 0.1}, 100, 0.5);
}

void Streams(benchmark::State& state) {
  Measure(state, FourLimit().bytes(), [] { FourLimit().Pass(); });
  state.SetLabel(FourLimit().non_temporal() ? "non-temporal stores" : "plain stores");
}
void StreamsSplit(benchmark::State& state) {
  Measure(state, SplitLimit().bytes(), [] { SplitLimit().Pass(); });
  state.SetLabel(SplitLimit().non_temporal() ? "non-temporal stores" : "plain stores");
}
void StreamsMixed(benchmark::State& state) {
  Measure(state, MixedLimit().bytes(), [] { MixedLimit().Pass(); });
  state.SetLabel(MixedLimit().non_temporal() ? "non-temporal stores" : "plain stores");
}
void StreamsKind(benchmark::State& state, bool non_temporal) {
  Measure(state, FourLimit().bytes(), [=] { FourLimit().Pass(non_temporal); });
}

void AdamWFp32(benchmark::State& state) {
  const Memory& a = Mem();
  Measure(
      state, 28.0 * kN,
      [&] {
        kernels::AdamWFp32(Step(), a.As<float>(a.p), a.As<float>(a.m), a.As<float>(a.v), a.As<float>(a.g), kN,
                           &Pool());
      },
      &FourLimit());
}
void AdamWSplit(benchmark::State& state) {
  const Memory& a = Mem();
  Measure(
      state, 26.0 * kN,
      [&] {
        kernels::AdamWSplit(Step(), a.As<uint16_t>(a.master_high), a.As<int16_t>(a.master_low),
                            a.As<float>(a.m), a.As<float>(a.v), a.As<uint16_t>(a.g16), kN, &Pool());
      },
      &SplitLimit());
}

// fp32 masters, bf16 gradient and copy-out: what mixed-precision training asks of one step.
kernels::UpdateArrays MixedArrays() {
  const Memory& a = Mem();
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param = a.p.data();
  arrays.copy_out = a.As<uint16_t>(a.master_high);
  arrays.grad_type = DType::kBf16;
  arrays.grad = a.g16.data();
  arrays.m = a.m.data();
  arrays.v = a.v.data();
  return arrays;
}
// One pass: cast, unscale and clip factor, finite check, norm, update, copy-out. 14 bytes in, 14 out.
void FusedPass() {
  kernels::SumOfSquares squares;
  kernels::ApplyUpdate(Step(), MixedArrays(), &squares, &Pool());
  benchmark::DoNotOptimize(squares.Value());
}
// Without norm and finite check.
void MixedPass() { kernels::ApplyUpdate(Step(), MixedArrays(), nullptr, &Pool()); }
// The same work with a pass for each part.
void SeparatePasses() {
  const Memory& a = Mem();
  auto* g = a.As<float>(a.g);
  kernels::Bf16ToFp32(a.As<uint16_t>(a.g16), g, kN, &Pool());
  benchmark::DoNotOptimize(kernels::AllFinite(DType::kFp32, g, kN, &Pool()));
  kernels::SumOfSquares squares;
  kernels::AddSquaresFp32(g, kN, &squares, &Pool());
  benchmark::DoNotOptimize(squares.Value());
  kernels::Scale(DType::kFp32, g, 0.5f, kN, &Pool());
  kernels::AdamStep step = Step();
  step.grad_scale = 1.0f;
  kernels::AdamWFp32(step, a.As<float>(a.p), a.As<float>(a.m), a.As<float>(a.v), g, kN, &Pool());
  kernels::Fp32ToBf16(a.As<float>(a.p), a.As<uint16_t>(a.master_high), kN, &Pool());
}
void AdamWMixed(benchmark::State& state) { Measure(state, 28.0 * kN, MixedPass, &MixedLimit()); }
void Fused(benchmark::State& state) { Measure(state, 28.0 * kN, FusedPass, &MixedLimit()); }
// Bytes are those of the fused pass, so that the two rates compare the same work; `fused_speedup` is of
// pairs.
void Separate(benchmark::State& state) {
  std::vector<double> speedups;
  Measure(state, 28.0 * kN, [&] {
    const double start = Seconds();
    SeparatePasses();
    const double separate = Seconds() - start;
    state.PauseTiming();
    const double fused_start = Seconds();
    FusedPass();
    speedups.push_back(separate / (Seconds() - fused_start));
    state.ResumeTiming();
  });
  state.counters["fused_speedup"] = Median(speedups);
}

void Update8Bit(benchmark::State& state) {
  const Memory& a = Mem();
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param_type = ParamType::kSplit;
  arrays.param = a.master_high.data();
  arrays.master_low = a.As<int16_t>(a.master_low);
  arrays.grad_type = DType::kBf16;
  arrays.grad = a.g16.data();
  arrays.state_type = StateType::k8Bit;
  arrays.m = a.m8.data();
  arrays.v = a.v8.data();
  arrays.m_scales = a.As<float>(a.scales);
  arrays.v_scales = a.As<float>(a.scales) + kN / kernels::kStateBlock;
  Measure(state, 14.0 * kN, [&] {
    ++arrays.seed;
    kernels::ApplyUpdate(Step(), arrays, nullptr, &Pool());
  });
}
// The update whose version before stays: 14 bytes in and 12 out of an element as in place.
void AdamWSplitToAnotherPlace(benchmark::State& state) {
  const Memory& a = Mem();
  Block high(2 * kN), low(2 * kN), m(4 * kN), v(4 * kN);
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param_type = ParamType::kSplit;
  arrays.param = high.data();
  arrays.master_low = a.As<int16_t>(low);
  arrays.grad_type = DType::kBf16;
  arrays.grad = a.g16.data();
  arrays.m = m.data();
  arrays.v = v.data();
  arrays.from = {.param = a.master_high.data(),
                 .master_low = a.As<int16_t>(a.master_low),
                 .m = a.m.data(),
                 .v = a.v.data()};
  Measure(
      state, 26.0 * kN, [&] { kernels::ApplyUpdate(Step(), arrays, nullptr, &Pool()); }, &SplitLimit());
}
void UpdateBf16States(benchmark::State& state) {
  const Memory& a = Mem();
  Block m(2 * kN), v(2 * kN);
  kernels::Fp32ToBf16(a.As<float>(a.m), a.As<uint16_t>(m), kN, &Pool());
  kernels::Fp32ToBf16(a.As<float>(a.v), a.As<uint16_t>(v), kN, &Pool());
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param_type = ParamType::kSplit;
  arrays.param = a.master_high.data();
  arrays.master_low = a.As<int16_t>(a.master_low);
  arrays.grad_type = DType::kBf16;
  arrays.grad = a.g16.data();
  arrays.state_type = StateType::kBf16;
  arrays.m = m.data();
  arrays.v = v.data();
  Measure(state, 18.0 * kN, [&] {
    ++arrays.seed;
    kernels::ApplyUpdate(Step(), arrays, nullptr, &Pool());
  });
}

template <class OptimizerStep>
void UpdateFp32(benchmark::State& state, const OptimizerStep& step, double bytes) {
  const Memory& a = Mem();
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param = a.p.data();
  arrays.grad = a.g.data();
  arrays.m = a.m.data();
  arrays.v = a.v.data();
  Measure(state, bytes * kN, [&] { kernels::ApplyUpdate(step, arrays, nullptr, &Pool()); });
}
void Lamb(benchmark::State& state) {
  const Memory& a = Mem();
  kernels::UpdateArrays arrays;
  arrays.n = kN;
  arrays.param = a.p.data();
  arrays.grad = a.g.data();
  arrays.m = a.m.data();
  arrays.v = a.v.data();
  const kernels::LambStep step = kernels::MakeLambStep({}, 100);
  Measure(state, (16.0 + 8.0 + 12.0 + 4.0) * kN, [&] {
    kernels::LambNorms norms;
    kernels::LambMoments(step, arrays, &norms, nullptr, &Pool());
    kernels::LambApply(step, kernels::LambTrust(step, norms), arrays, &Pool());
  });
}

void ChecksumFromCache(benchmark::State& state) {
  constexpr size_t kBytes = size_t{256} << 10;  // in the second-level cache; on one thread
  const Memory& a = Mem();
  constexpr int kTimes = 64;
  Measure(state, static_cast<double>(kBytes) * kTimes, [&] {
    for (int i = 0; i < kTimes; ++i) {
      benchmark::DoNotOptimize(kernels::Checksum(a.p.data(), kBytes, static_cast<uint64_t>(i)));
    }
  });
}
void ChecksumFromMemory(benchmark::State& state) {
  const Memory& a = Mem();
  Measure(state, 4.0 * kN, [&] { benchmark::DoNotOptimize(kernels::Checksum(a.p.data(), 4 * kN)); });
}

#ifdef PENSTOCK_BENCH_TORCH
// LibTorch's AdamW on as many threads, fp32, parameters and states of its own. The bytes are those that an
// update has to move, not the several times that its separate passes do move.
void TorchAdamW(benchmark::State& state) {
  at::set_num_threads(thread_budget);
  torch::NoGradGuard no_grad;
  torch::Tensor p = torch::full({static_cast<int64_t>(kN)}, 0.1f).set_requires_grad(true);
  p.mutable_grad() = torch::full({static_cast<int64_t>(kN)}, 0.2f);
  torch::optim::AdamW optimizer({p}, torch::optim::AdamWOptions(1e-5).weight_decay(0.1));
  optimizer.step();
  Measure(state, 28.0 * kN, [&] { optimizer.step(); });
}
#endif

void Register() {
  const auto add = [](const char* name, auto&& function) {
    benchmark::RegisterBenchmark(name, function)->Unit(benchmark::kMillisecond);
  };
  add("Streams/64Mi", Streams);
  add("AdamW/fp32/64Mi", AdamWFp32);
  add("Streams/split/64Mi", StreamsSplit);
  add("AdamW/split/64Mi", AdamWSplit);
  add("AdamW/split_to_another_place/64Mi", AdamWSplitToAnotherPlace);
  add("Streams/plain/64Mi", [](benchmark::State& s) { StreamsKind(s, false); });
  add("Streams/non_temporal/64Mi", [](benchmark::State& s) { StreamsKind(s, true); });
#ifdef PENSTOCK_BENCH_TORCH
  add("LibTorchAdamW/fp32/64Mi", TorchAdamW);
#endif
  add("Streams/mixed/64Mi", StreamsMixed);
  add("AdamW/mixed/64Mi", AdamWMixed);
  add("Fused/64Mi", Fused);
  add("Separate/64Mi", Separate);
  add("AdamW/split_bf16_states/64Mi", UpdateBf16States);
  add("AdamW/split_8bit_states/64Mi", Update8Bit);
  add("Adagrad/fp32/64Mi",
      [](benchmark::State& s) { UpdateFp32(s, kernels::MakeAdagradStep({}, 10), 20.0); });
  add("Lion/fp32/64Mi", [](benchmark::State& s) { UpdateFp32(s, kernels::MakeLionStep({}), 20.0); });
  add("SGDMomentum/fp32/64Mi",
      [](benchmark::State& s) { UpdateFp32(s, kernels::MakeSgdStep({.momentum = 0.9}, 10), 20.0); });
  add("LAMB/fp32/64Mi", Lamb);

  const auto convert = [&](const char* name, double bytes, std::function<void(const Memory&)> pass) {
    add(name, [=](benchmark::State& s) { Measure(s, bytes * kN, [&] { pass(Mem()); }); });
  };
  convert("Bf16ToFp32/64Mi", 6,
          [](const Memory& a) { kernels::Bf16ToFp32(a.As<uint16_t>(a.g16), a.As<float>(a.g), kN, &Pool()); });
  convert("Fp32ToBf16/64Mi", 6,
          [](const Memory& a) { kernels::Fp32ToBf16(a.As<float>(a.g), a.As<uint16_t>(a.g16), kN, &Pool()); });
  convert("Fp32ToFp16/64Mi", 6,
          [](const Memory& a) { kernels::Fp32ToFp16(a.As<float>(a.g), a.As<uint16_t>(a.g16), kN, &Pool()); });
  convert("AccumulateBf16/64Mi", 10, [](const Memory& a) {
    kernels::AccumulateBf16(a.As<uint16_t>(a.master_high), a.As<float>(a.g), kN, &Pool());
  });
  convert("SplitMaster/64Mi", 8, [](const Memory& a) {
    kernels::SplitMaster(a.As<float>(a.p), a.As<uint16_t>(a.master_high), a.As<int16_t>(a.master_low), kN,
                         &Pool());
  });
  convert("JoinMaster/64Mi", 8, [](const Memory& a) {
    kernels::JoinMaster(a.As<uint16_t>(a.master_high), a.As<int16_t>(a.master_low), a.As<float>(a.p), kN,
                        &Pool());
  });
  convert("SumOfSquares/bf16/64Mi", 2, [](const Memory& a) {
    kernels::SumOfSquares squares;
    kernels::AddSquaresBf16(a.As<uint16_t>(a.master_high), kN, &squares, &Pool());
    benchmark::DoNotOptimize(squares.Value());
  });
  convert("SumOfSquares/fp32/64Mi", 4, [](const Memory& a) {
    kernels::SumOfSquares squares;
    kernels::AddSquaresFp32(a.As<float>(a.m), kN, &squares, &Pool());
    benchmark::DoNotOptimize(squares.Value());
  });
  convert("Quantize8/64Mi", 5, [](const Memory& a) {
    kernels::Quantize8(kernels::Code8::kSigned, a.As<float>(a.m), a.m8.data(), a.As<float>(a.scales), kN, {},
                       &Pool());
  });
  convert("Dequantize8/64Mi", 5, [](const Memory& a) {
    kernels::Dequantize8(kernels::Code8::kSigned, a.m8.data(), a.As<float>(a.scales), a.As<float>(a.m), kN,
                         &Pool());
  });
  add("Checksum/256KiB", ChecksumFromCache);
  add("Checksum/256MiB", ChecksumFromMemory);
#ifdef PENSTOCK_BENCH_CUDA
  RegisterCudaBenchmarks();
#endif
}

}  // namespace

int Main(int argc, char** argv) {
  std::vector<char*> args = {argv[0]};
  // Long enough for some thirty pairs; a --benchmark_min_time of the user's comes later and wins.
  std::string min_time = "--benchmark_min_time=1";
  args.push_back(min_time.data());
  constexpr std::string_view kThreads = "--threads=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg.substr(0, kThreads.size()) == kThreads) {
      thread_budget = std::atoi(argv[i] + kThreads.size());
      if (thread_budget < 1) {
        std::fprintf(stderr, "kernels_bench: %s: want a number of threads from 1\n", argv[i]);
        return 2;
      }
    } else {
      args.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(args.size());
  args.push_back(nullptr);
  benchmark::Initialize(&count, args.data());
  if (benchmark::ReportUnrecognizedArguments(count, args.data())) return 2;
  benchmark::AddCustomContext("kernels", kernels::DescribeCpu());
  benchmark::AddCustomContext("threads", std::to_string(thread_budget));
  Register();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace penstock::bench

int main(int argc, char** argv) { return penstock::bench::Main(argc, argv); }
