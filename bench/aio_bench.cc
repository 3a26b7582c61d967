// aio_bench: the I/O engine on a real disk, beside bare loops with the raw system calls and beside fio.
//
//   aio_bench                                  everything, on a file in the current directory
//   PENSTOCK_BENCH_DIR=/nvme aio_bench --benchmark_filter=Paired --benchmark_format=json
//
// Names: Engine/<op>/<backend>/<pages>/<registered or plain>/<block>/<blocks in flight>, Bare/... likewise.
// Throughput is in bytes_per_second; cpu_ms_per_gib is CPU of the whole process, all its threads;
// syscalls_per_4mib those of the I/O thread.
//
// Disks drift, threefold here: numbers of two different minutes cannot be compared. Paired/... runs engine
// and bare loop in turn, in changing order, and reports `ratio`, the median over the pairs of engine's
// throughput to the bare loop's.
#include <benchmark/benchmark.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "aio/arena.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/profile.h"
#include "aio/program.h"
#include "bench/aio_bare_loop.h"

namespace penstock::bench {
namespace {

using aio::Arena;
using aio::BackendKind;
using aio::Engine;
using aio::File;
using aio::kMiB;
using aio::PageKind;
using aio::Request;

constexpr uint64_t kFileBytes = 1000 * kMiB;  // 1000 places of 1 MiB
constexpr uint64_t kMoveBytes = 256 * kMiB;   // by one iteration
constexpr uint64_t kArenaBytes = 64 * kMiB;
constexpr int kPairs = 21;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? 0 : n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// The test file and the arenas, made on first use and removed at the end.
class Fixture {
 public:
  static Fixture& Get() {
    static Fixture fixture;
    return fixture;
  }
  ~Fixture() {
    file_.reset();
    if (!path_.empty()) unlink(path_.c_str());
  }

  // Null, with the reason in error(), where there is no disk to measure.
  File* file() {
    if (file_ != nullptr || !error_.empty()) return file_.get();
    const char* directory = std::getenv("PENSTOCK_BENCH_DIR");
    path_ = std::string(directory == nullptr ? "." : directory) + "/.aio_bench-" + std::to_string(getpid());
    aio::FileOptions options;
    options.path = path_;
    options.create = true;
    options.size = kFileBytes;
    auto file = File::Open(options);
    if (!file.ok()) {
      error_ = std::string(file.status().message());
      return nullptr;
    }
    // Written once in full, so that what is measured is overwriting.
    auto engine = MakeEngine(BackendKind::kAuto, arena(PageKind::kTransparent), true, kMiB, 16);
    for (uint64_t at = 0; engine != nullptr && at < kFileBytes; at += kArenaBytes) {
      Request request;
      request.PrepareWrite(**file, at, arena(PageKind::kTransparent)->data(),
                           std::min(kArenaBytes, kFileBytes - at));
      if (!engine->Submit(&request).ok() || !engine->Wait(&request).ok())
        error_ = "the test file cannot be written";
    }
    if (engine == nullptr) error_ = "no engine";
    if (error_.empty()) file_ = *std::move(file);
    return file_.get();
  }
  const std::string& error() const { return error_; }
  const std::string& path() const { return path_; }

  // Null where the machine has no such pages.
  Arena* arena(PageKind kind) {
    std::unique_ptr<Arena>& arena = arenas_[static_cast<size_t>(kind)];
    if (arena == nullptr) {
      aio::ArenaOptions options;
      options.bytes = kArenaBytes;
      options.try_hugetlb = kind == PageKind::kHugetlb;
      options.try_transparent = kind == PageKind::kTransparent;
      auto made = Arena::Create(options);
      if (!made.ok() || (*made)->page_kind() != kind) return nullptr;
      arena = *std::move(made);
    }
    return arena.get();
  }

  static std::unique_ptr<Engine> MakeEngine(BackendKind backend, Arena* arena, bool registered,
                                            uint64_t block, uint64_t depth) {
    aio::EngineOptions options;
    options.backend = backend;
    options.allow_fallback = false;
    options.block_bytes = block;
    options.max_read_bytes_in_flight = options.max_write_bytes_in_flight = block * depth;
    options.arenas = {arena};
    options.register_buffers = registered;
    options.worker_threads = static_cast<int>(std::min<uint64_t>(depth, 16));
    options.log = [](std::string_view) {};
    auto engine = Engine::Create(std::move(options));
    return engine.ok() ? *std::move(engine) : nullptr;
  }

 private:
  std::string path_;
  std::string error_;
  std::unique_ptr<File> file_;
  std::array<std::unique_ptr<Arena>, 3> arenas_;
};

// `bytes` of the file as one request over the same `window` bytes of memory again and again, or, mixed, as
// reads and writes at once, with half of the memory each. The window is what is in flight, as the bare loop
// has it: twice the memory costs 3% of the bandwidth here, whoever uses it.
class EngineMover {
 public:
  EngineMover(Engine* engine, File* file, Arena* arena, uint64_t window)
      : engine_(engine), file_(file), memory_(arena->data()), window_(window) {}

  bool Run(BareOp op, uint64_t bytes) {
    if (op == BareOp::kMixed) {
      // Half read from the first half, half written to the second, each with half of what is in flight.
      const uint64_t half = window_ / 2;
      const auto reads = Segments(memory_, half, bytes / 2),
                 writes = Segments(memory_ + half, half, bytes / 2);
      requests_[0].PrepareRead(*file_, 0, reads);
      requests_[1].PrepareWrite(*file_, bytes / 2, writes);
      return Finish({&requests_[0], &requests_[1]});
    }
    const auto segments = Segments(memory_, window_, bytes);
    op == BareOp::kRead ? requests_[0].PrepareRead(*file_, 0, segments)
                        : requests_[0].PrepareWrite(*file_, 0, segments);
    return Finish({&requests_[0]});
  }

 private:
  static std::vector<aio::Segment> Segments(std::byte* data, uint64_t window, uint64_t bytes) {
    std::vector<aio::Segment> segments;
    for (uint64_t at = 0; at < bytes; at += window) segments.push_back({data, std::min(window, bytes - at)});
    return segments;
  }
  bool Finish(std::vector<Request*> requests) {
    for (Request* request : requests) request->set_priority(aio::Priority::kPrefetch);
    return engine_->Submit(requests).ok() && engine_->WaitAll(requests).ok();
  }

  Engine* const engine_;
  File* const file_;
  std::byte* const memory_;
  const uint64_t window_;
  Request requests_[2];
};

void Report(benchmark::State& state, uint64_t bytes, double cpu_seconds) {
  state.SetBytesProcessed(static_cast<int64_t>(bytes));
  state.counters["cpu_ms_per_gib"] = cpu_seconds * 1e3 / (static_cast<double>(bytes) / 1073741824.0);
}

uint64_t Syscalls(const Engine& engine) {
  const auto stats = engine.stats();
  return stats.devices.empty() ? 0 : stats.devices[0].syscalls;
}

const char* OpText(BareOp op) {
  return op == BareOp::kRead ? "read" : op == BareOp::kWrite ? "write" : "mixed";
}

void EngineBench(benchmark::State& state, BareOp op, BackendKind backend, PageKind pages, bool registered,
                 uint64_t block, uint64_t depth) {
  Fixture& fixture = Fixture::Get();
  Arena* const arena = fixture.arena(pages);
  if (fixture.file() == nullptr) return state.SkipWithError(fixture.error().c_str());
  if (arena == nullptr) return state.SkipWithError("no such pages here");
  auto engine =
      Fixture::MakeEngine(backend, arena, registered, block, op == BareOp::kMixed ? depth / 2 : depth);
  if (engine == nullptr) return state.SkipWithError("backend not available");
  EngineMover mover(engine.get(), fixture.file(), arena, block * depth);
  const double cpu = CpuSeconds();
  const uint64_t syscalls = Syscalls(*engine);
  uint64_t bytes = 0;
  while (state.KeepRunning()) {
    if (!mover.Run(op, kMoveBytes)) return state.SkipWithError("transfer failed");
    bytes += kMoveBytes;
  }
  Report(state, bytes, CpuSeconds() - cpu);
  state.counters["syscalls_per_4mib"] = static_cast<double>(Syscalls(*engine) - syscalls) /
                                        (static_cast<double>(bytes) / static_cast<double>(4 * kMiB));
}

void BareBench(benchmark::State& state, BareOp op, bool libaio, PageKind pages, bool registered,
               uint64_t block, uint64_t depth) {
  Fixture& fixture = Fixture::Get();
  Arena* const arena = fixture.arena(pages);
  if (fixture.file() == nullptr) return state.SkipWithError(fixture.error().c_str());
  if (arena == nullptr) return state.SkipWithError("no such pages here");
  auto ring = libaio ? nullptr : BareRing::Make(arena->data(), arena->bytes(), registered);
  if (!libaio && ring == nullptr) return state.SkipWithError("no such ring here");
  const double cpu = CpuSeconds();
  uint64_t bytes = 0;
  while (state.KeepRunning()) {
    const auto n = static_cast<unsigned>(depth);
    const bool ok = libaio ? RunBareLibaio(fixture.file()->fd(), arena->data(), op, kMoveBytes, block, n)
                           : ring->Run(fixture.file()->fd(), op, kMoveBytes, block, n);
    if (!ok) return state.SkipWithError("transfer failed");
    bytes += kMoveBytes;
  }
  Report(state, bytes, CpuSeconds() - cpu);
}

// Runs both in turn, whose turn it is first changing from pair to pair. One iteration of the benchmark is all
// pairs.
void RunPairs(benchmark::State& state, uint64_t bytes, const std::function<bool()>& ours,
              const std::function<bool()>& theirs) {
  std::vector<double> ratios;
  double our_seconds = 0, their_seconds = 0, our_cpu = 0, their_cpu = 0;
  while (state.KeepRunning()) {
    if (!ours() || !theirs()) return state.SkipWithError("transfer failed");  // warm
    for (int pair = 0; pair < kPairs; ++pair) {
      double seconds[2] = {};
      for (const bool engine : {pair % 2 == 0, pair % 2 != 0}) {
        const double cpu = CpuSeconds(), start = Now();
        if (!(engine ? ours() : theirs())) return state.SkipWithError("transfer failed");
        seconds[engine] = Now() - start;
        (engine ? our_cpu : their_cpu) += CpuSeconds() - cpu;
      }
      our_seconds += seconds[1];
      their_seconds += seconds[0];
      ratios.push_back(seconds[0] / seconds[1]);
    }
  }
  const double total = static_cast<double>(bytes) * static_cast<double>(ratios.size());
  const double gib = total / 1073741824.0;
  std::sort(ratios.begin(), ratios.end());
  state.counters["pairs"] = static_cast<double>(ratios.size());
  state.counters["ratio"] = Median(ratios);
  state.counters["ratio_p25"] = ratios[ratios.size() / 4];
  state.counters["ratio_p75"] = ratios[ratios.size() * 3 / 4];
  state.counters["bytes_per_second"] = total / our_seconds;
  state.counters["bare_bytes_per_second"] = total / their_seconds;
  state.counters["cpu_ms_per_gib"] = our_cpu * 1e3 / gib;
  state.counters["bare_cpu_ms_per_gib"] = their_cpu * 1e3 / gib;
}

void PairedBench(benchmark::State& state, BareOp op, PageKind pages, uint64_t block, uint64_t depth) {
  Fixture& fixture = Fixture::Get();
  Arena* const arena = fixture.arena(pages);
  if (fixture.file() == nullptr) return state.SkipWithError(fixture.error().c_str());
  if (arena == nullptr) return state.SkipWithError("no such pages here");
  auto engine = Fixture::MakeEngine(BackendKind::kIoUring, arena, true, block,
                                    op == BareOp::kMixed ? depth / 2 : depth);
  auto ring = BareRing::Make(arena->data(), arena->bytes(), true);
  if (engine == nullptr || ring == nullptr) return state.SkipWithError("no io_uring here");
  EngineMover mover(engine.get(), fixture.file(), arena, block * depth);
  RunPairs(
      state, kMoveBytes, [&] { return mover.Run(op, kMoveBytes); },
      [&] { return ring->Run(fixture.file()->fd(), op, kMoveBytes, block, static_cast<unsigned>(depth)); });
}

// 1000 requests of 1 MiB against one of 1000 MiB, both through the engine: in order, which shows what
// requests cost, and in scattered places (a step of 389 visits every place once), which adds what the drive
// makes of that.
void SmallTensors(benchmark::State& state, BareOp op, uint64_t step) {
  Fixture& fixture = Fixture::Get();
  Arena* const arena = fixture.arena(PageKind::kTransparent);
  if (fixture.file() == nullptr) return state.SkipWithError(fixture.error().c_str());
  if (arena == nullptr) return state.SkipWithError("no such pages here");
  auto engine = Fixture::MakeEngine(BackendKind::kIoUring, arena, true, kMiB, 16);
  if (engine == nullptr) return state.SkipWithError("no io_uring here");
  EngineMover mover(engine.get(), fixture.file(), arena, 32 * kMiB);
  std::vector<Request> requests(1000);
  std::vector<Request*> pointers;
  pointers.reserve(requests.size());
  for (Request& request : requests) pointers.push_back(&request);
  const auto scattered = [&] {
    for (uint64_t i = 0; i < requests.size(); ++i) {
      const uint64_t offset = (i * step) % 1000 * kMiB;
      std::byte* const data = arena->data() + i % 32 * kMiB;
      op == BareOp::kRead ? requests[i].PrepareRead(*fixture.file(), offset, data, kMiB)
                          : requests[i].PrepareWrite(*fixture.file(), offset, data, kMiB);
      requests[i].set_priority(aio::Priority::kPrefetch);
    }
    return engine->Submit(pointers).ok() && engine->WaitAll(pointers).ok();
  };
  RunPairs(state, kFileBytes, scattered, [&] { return mover.Run(op, kFileBytes); });
}

// What a request costs when the device costs nothing: one at a time, or handed over in batches.
void NilBench(benchmark::State& state) {
  Arena* const arena = Fixture::Get().arena(PageKind::kTransparent);
  if (Fixture::Get().file() == nullptr || arena == nullptr) return state.SkipWithError("no file or arena");
  auto engine = Fixture::MakeEngine(BackendKind::kNil, arena, true, kMiB, 64);
  const auto batch = static_cast<size_t>(state.range(0));
  std::vector<Request> requests(batch);
  std::vector<Request*> pointers;
  pointers.reserve(requests.size());
  for (Request& request : requests) pointers.push_back(&request);
  const double cpu = CpuSeconds();
  while (state.KeepRunning()) {
    for (Request& request : requests) request.PrepareRead(*Fixture::Get().file(), 0, arena->data(), kMiB);
    if (!engine->Submit(pointers).ok() || !engine->WaitAll(pointers).ok())
      return state.SkipWithError("failed");
  }
  const double count = static_cast<double>(state.iterations()) * static_cast<double>(batch);
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(batch));
  state.counters["cpu_ns_per_request"] = (CpuSeconds() - cpu) * 1e9 / count;
}

// fio on the same file, where it is installed, with huge pages if it can.
void FioBench(benchmark::State& state, const char* op, const char* engine) {
  Fixture& fixture = Fixture::Get();
  if (fixture.file() == nullptr) return state.SkipWithError(fixture.error().c_str());
  const std::string command =
      "fio --name=x --filename=" + fixture.path() + " --rw=" + op + " --ioengine=" + engine +
      " --direct=1 --bs=1M --iodepth=16 --size=1000M --loops=2 --overwrite=1 --allow_file_create=0"
      " --output-format=json 2>/dev/null";
  while (state.KeepRunning()) {
    std::FILE* const pipe = popen(command.c_str(), "r");
    std::string text;
    char buffer[4096];
    for (size_t n = 0; pipe != nullptr && (n = fread(buffer, 1, sizeof(buffer), pipe)) != 0;)
      text.append(buffer, n);
    const bool ok = pipe != nullptr && pclose(pipe) == 0;
    const nlohmann::json report =
        nlohmann::json::parse(text.substr(std::min(text.find('{'), text.size())), nullptr, false);
    if (!ok || report.is_discarded()) return state.SkipWithError("fio failed or is not installed");
    const auto& job = report["jobs"][0];
    const double cpu = job["job_runtime"].get<double>() *
                       (job["usr_cpu"].get<double>() + job["sys_cpu"].get<double>()) / 100;
    const double bytes = job[op]["io_bytes"].get<double>();
    state.counters["bytes_per_second"] = job[op]["bw_bytes"].get<double>();
    state.counters["cpu_ms_per_gib"] = cpu / (bytes / 1073741824.0);
  }
}

std::string SizeText(uint64_t bytes) {
  return bytes % kMiB == 0 ? std::to_string(bytes / kMiB) + "M" : std::to_string(bytes / 1024) + "K";
}

std::string Join(std::initializer_list<std::string> parts) {
  std::string name;
  for (const std::string& part : parts) name.append(name.empty() ? "" : "/").append(part);
  return name;
}

template <typename... Arguments>
benchmark::internal::Benchmark* Add(const std::string& name,
                                    void (*function)(benchmark::State&, Arguments...),
                                    Arguments... arguments) {
  return benchmark::RegisterBenchmark(name.c_str(),
                                      [=](benchmark::State& state) { function(state, arguments...); })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

void RegisterAll() {
  constexpr PageKind kThp = PageKind::kTransparent;
  for (const BareOp op : {BareOp::kRead, BareOp::kWrite, BareOp::kMixed}) {
    const std::string name = OpText(op);
    for (const PageKind pages : {PageKind::kHugetlb, kThp, PageKind::kSmall}) {
      const std::string on(aio::PageKindName(pages));
      Add(Join({"Paired", name, on, "1M/16"}), &PairedBench, op, pages, kMiB, uint64_t{16})->Iterations(1);
    }
    Add(Join({"Paired", name, "thp/4M/4"}), &PairedBench, op, kThp, 4 * kMiB, uint64_t{4})->Iterations(1);
    for (const PageKind pages : {kThp, PageKind::kSmall}) {
      for (const bool registered : {true, false}) {
        const std::string how =
            std::string(aio::PageKindName(pages)) + (registered ? "/registered" : "/plain");
        Add(Join({"Bare", name, "io_uring", how, "1M/16"}), &BareBench, op, false, pages, registered, kMiB,
            uint64_t{16});
        Add(Join({"Engine", name, "io_uring", how, "1M/16"}), &EngineBench, op, BackendKind::kIoUring, pages,
            registered, kMiB, uint64_t{16});
      }
      const std::string on(aio::PageKindName(pages));
      Add(Join({"Bare", name, "libaio", on, "plain/1M/16"}), &BareBench, op, true, pages, false, kMiB,
          uint64_t{16});
      Add(Join({"Engine", name, "libaio", on, "plain/1M/16"}), &EngineBench, op, BackendKind::kLibaio, pages,
          false, kMiB, uint64_t{16});
      Add(Join({"Engine", name, "threads", on, "plain/1M/4"}), &EngineBench, op, BackendKind::kThreads, pages,
          false, kMiB, uint64_t{4});
    }
    for (const uint64_t block : {256 * aio::kKiB, kMiB, 4 * kMiB}) {
      for (const uint64_t in_flight : {kMiB, 4 * kMiB, 16 * kMiB}) {
        if (in_flight < block || (op == BareOp::kMixed && in_flight < 2 * block)) continue;
        const uint64_t depth = in_flight / block;
        Add(Join({"Engine", name, "sweep", SizeText(block), std::to_string(depth)}), &EngineBench, op,
            BackendKind::kIoUring, kThp, true, block, depth);
      }
    }
  }
  for (const BareOp op : {BareOp::kRead, BareOp::kWrite}) {
    Add(std::string("SmallTensors/") + OpText(op) + "/1000x1M/in_order", &SmallTensors, op, uint64_t{1})
        ->Iterations(1);
    Add(std::string("SmallTensors/") + OpText(op) + "/1000x1M/scattered", &SmallTensors, op, uint64_t{389})
        ->Iterations(1);
  }
  benchmark::RegisterBenchmark("Nil", &NilBench)->Arg(1)->Arg(16)->Arg(256)->UseRealTime();
  for (const char* engine : {"libaio", "io_uring"}) {
    for (const char* op : {"read", "write"}) {
      Add(std::string("Fio/") + op + "/" + engine + "/1M/16", &FioBench, op, engine)->Iterations(1);
    }
  }
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  penstock::bench::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
