// What the store costs beside the disk: an optimizer pass over two-version tiles against the bare mixture of
// reads and writes on the same files, with and without checksums; verify against bare reads; a commit.
//
//   swap_bench [--benchmark_filter=...]
//
// Files go to the current directory, or to PENSTOCK_BENCH_DIR.
// Throughput is in bytes_per_second; cpu_ms_per_gib is all CPU of the process, I/O threads and checksums
// included. Disks drift: compare lines of one run, by --benchmark_repetitions and medians.
#include <benchmark/benchmark.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/program.h"
#include "base/status_macros.h"
#include "swap/store.h"
#include "swap/stream.h"
#include "swap/verify.h"

namespace penstock::swap {
namespace {

constexpr uint32_t kTiles = 64;
constexpr uint64_t kParams = (uint64_t{8} << 20) / 12;  // a tile of about 8 MiB: high, low, m, v
constexpr uint32_t kLanes = 6;  // tiles in memory: reads and writes of 16 MiB and more in flight

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A version of everything with true checksums, one tile at a time from the same memory, committed.
absl::Status WriteVersion(Store& store, std::byte* memory, uint64_t version) {
  TileIo io;
  for (uint32_t t = 0; t < store.geometry().tiles(); ++t) {
    const void* sources[4];
    uint64_t checksums[4];
    for (uint32_t s = 0; s < 4; ++s) {
      sources[s] = memory + store.geometry().segment_start(t, s);
      checksums[s] = store.SegmentChecksum(t, s, version, sources[s]);
    }
    absl::Status status = store.WriteTile(&io, t, version, sources, aio::Priority::kWriteBehind);
    if (!status.ok()) return status;
    (void)store.Wait(&io);
    status = store.NoteWritten(&io, checksums);
    if (!status.ok()) return status;
  }
  return store.CommitNow({version, version, ""});
}

// Arena, engine and a committed store, made once for all benchmarks.
class World {
 public:
  static World* Get() {
    static World world;
    return world.failed_.ok() ? &world : nullptr;
  }
  aio::Engine& engine() { return *engine_; }
  Store& store() { return *store_; }
  absl::Status WriteAll(uint64_t version) { return WriteVersion(*store_, lane(0), version); }
  // A store of many small tiles, made on first use: what matters for a commit is their number.
  absl::StatusOr<Store*> CommitStore(Sync sync, uint32_t tiles) {
    std::unique_ptr<Store>& store = commit_stores_[{sync, tiles}];
    if (store != nullptr) return store.get();
    StoreOptions options;
    options.directories = {directory_ + "/commit-" + std::to_string(commit_stores_.size())};
    options.sync = sync;
    Layout layout;
    layout.tiles.assign(tiles, TileLayout{{1, 1, 1, 1}, 0});
    ASSIGN_OR_RETURN(auto made, Store::Create(*engine_, options, layout, "{}"));
    RETURN_IF_ERROR(WriteVersion(*made, lane(0), 1));
    store = std::move(made);
    return store.get();
  }
  std::byte* lane(uint32_t i) { return memory_.data() + i * slot_bytes_; }
  uint64_t slot_bytes() const { return slot_bytes_; }
  // As much as `penstock verify` takes.
  std::span<std::byte> memory() { return {memory_.data(), uint64_t{32} << 20}; }

 private:
  World() {
    failed_ = Make();
    if (!failed_.ok()) std::fprintf(stderr, "swap_bench: %s\n", failed_.ToString().c_str());
  }
  ~World() {
    commit_stores_.clear();
    store_.reset();
    engine_.reset();
    std::error_code ignored;
    if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
  }

  absl::Status Make() {
    Layout layout;
    for (uint32_t t = 0; t < kTiles; ++t) {
      layout.tiles.push_back({{2 * kParams, 2 * kParams, 4 * kParams, 4 * kParams}, 0});
    }
    slot_bytes_ = 2 * PaddedBytes(2 * kParams) + 2 * PaddedBytes(4 * kParams);
    aio::ArenaOptions arena_options;
    arena_options.bytes = kLanes * slot_bytes_ + (uint64_t{2} << 20);
    ASSIGN_OR_RETURN(auto arena, aio::Arena::Create(arena_options));
    arena_ = std::move(arena);
    ASSIGN_OR_RETURN(auto region, arena_->Allocate(kLanes * slot_bytes_));
    memory_ = std::move(region);
    std::memset(memory_.data(), 1, memory_.bytes());
    aio::EngineOptions engine_options;
    engine_options.arenas = {arena_.get()};
    ASSIGN_OR_RETURN(auto engine, aio::Engine::Create(engine_options));
    engine_ = std::move(engine);

    const char* base = std::getenv("PENSTOCK_BENCH_DIR");
    directory_ = std::string(base != nullptr ? base : ".") + "/swap-bench-" + std::to_string(::getpid());
    StoreOptions options;
    options.directories = {directory_};
    options.sync = Sync::kPower;
    ASSIGN_OR_RETURN(auto store, Store::Create(*engine_, options, layout, "{}"));
    store_ = std::move(store);
    // Both slots written once: what is measured is the steady state.
    RETURN_IF_ERROR(WriteAll(1));
    return WriteAll(2);
  }

  absl::Status failed_;
  std::string directory_;
  std::unique_ptr<aio::Arena> arena_;
  aio::Region memory_;
  std::unique_ptr<aio::Engine> engine_;
  std::unique_ptr<Store> store_;
  std::map<std::pair<Sync, uint32_t>, std::unique_ptr<Store>> commit_stores_;
  uint64_t slot_bytes_ = 0;
};

// Counts bytes and CPU of the timed part.
class Meter {
 public:
  explicit Meter(benchmark::State& state) : state_(state), cpu_(CpuSeconds()) {}
  void Report(uint64_t bytes) {
    const double gib = static_cast<double>(bytes) / (1u << 30);
    state_.SetBytesProcessed(static_cast<int64_t>(bytes));
    state_.counters["cpu_ms_per_gib"] = 1e3 * (CpuSeconds() - cpu_) / gib;
  }

 private:
  benchmark::State& state_;
  double cpu_;
};

// Reads lo, m and v of each tile and writes all four segments, kLanes tiles at a time, the way an update in
// backward does; `Lane` does one tile's transfers.
template <typename StartRead, typename FinishRead, typename FinishWrite>
absl::Status Pass(const StartRead& start_read, const FinishRead& finish_read,
                  const FinishWrite& finish_write) {
  absl::Status status;
  for (uint32_t step = 0; step < kTiles + kLanes && status.ok(); ++step) {
    // Half of the lanes read ahead, the other half write behind.
    if (step >= kLanes && step - kLanes < kTiles) status.Update(finish_write(step - kLanes));
    if (step < kTiles && status.ok()) status.Update(start_read(step));
    if (step >= kLanes / 2 && step - kLanes / 2 < kTiles && status.ok())
      status.Update(finish_read(step - kLanes / 2));
  }
  return status;
}

uint64_t PassBytes(const Geometry& g) { return kTiles * (2 * g.slot_bytes(0) - g.segment_start(0, 1)); }

void BareMix(benchmark::State& state) {
  World* world = World::Get();
  if (world == nullptr) return state.SkipWithError("no store");
  const Geometry& g = world->store().geometry();
  std::vector<aio::Request> requests(kLanes);
  uint64_t bytes = 0;
  Meter meter(state);
  for (auto _ : state) {
    // Reads the committed slot and writes the other, as the store does.
    const absl::Status status = Pass(
        [&](uint32_t t) {
          aio::Request& r = requests[t % kLanes];
          r.PrepareRead(world->store().file(0), g.segment_offset(t, world->store().committed(t).slot, 1),
                        world->lane(t % kLanes) + g.segment_start(t, 1),
                        g.slot_bytes(t) - g.segment_start(t, 1));
          r.set_priority(aio::Priority::kPrefetch);
          return world->engine().Submit(&r);
        },
        [&](uint32_t t) {
          aio::Request& r = requests[t % kLanes];
          absl::Status s = world->engine().Wait(&r);
          r.PrepareWrite(world->store().file(0), g.slot_offset(t, 1 - world->store().committed(t).slot),
                         world->lane(t % kLanes), g.slot_bytes(t));
          r.set_priority(aio::Priority::kWriteBehind);
          s.Update(world->engine().Submit(&r));
          return s;
        },
        [&](uint32_t t) { return world->engine().Wait(&requests[t % kLanes]); });
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    bytes += PassBytes(g);
  }
  meter.Report(bytes);
}

// range(0): 1 verifies what is read and computes the checksums of what is written, on the calling thread.
void StorePass(benchmark::State& state) {
  World* world = World::Get();
  if (world == nullptr) return state.SkipWithError("no store");
  Store& store = world->store();
  const Geometry& g = store.geometry();
  const bool checksums = state.range(0) != 0;
  std::vector<TileIo> ios(kLanes);
  CommitIo commit;
  uint64_t bytes = 0;
  Meter meter(state);
  for (auto _ : state) {
    const uint64_t version = store.newest_version(0) + 1;
    absl::Status status = Pass(
        [&](uint32_t t) {
          void* places[3];
          for (uint32_t s = 1; s < 4; ++s) places[s - 1] = world->lane(t % kLanes) + g.segment_start(t, s);
          return store.ReadSegments(&ios[t % kLanes], t, 1, 3, places, aio::Priority::kPrefetch);
        },
        [&](uint32_t t) {
          TileIo& io = ios[t % kLanes];
          absl::Status s = store.Wait(&io);
          if (s.ok() && checksums) s = store.VerifyRead(io);
          const void* sources[4];
          for (uint32_t i = 0; i < 4; ++i) sources[i] = world->lane(t % kLanes) + g.segment_start(t, i);
          if (s.ok()) s = store.WriteTile(&io, t, version, sources, aio::Priority::kWriteBehind);
          return s;
        },
        [&](uint32_t t) {
          TileIo& io = ios[t % kLanes];
          uint64_t sums[4] = {};
          for (uint32_t i = 0; i < 4 && checksums; ++i) {
            sums[i] = store.SegmentChecksum(t, i, version, world->lane(t % kLanes) + g.segment_start(t, i));
          }
          (void)store.Wait(&io);
          return store.NoteWritten(&io, sums);
        });
    if (status.ok()) status = store.CommitNow({version, version, "{}"});
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    bytes += PassBytes(g);
  }
  meter.Report(bytes);
  // What was committed without checksums would not verify.
  if (const absl::Status repaired = world->WriteAll(store.newest_version(0) + 1); !repaired.ok()) {
    state.SkipWithError(repaired.ToString().c_str());
  }
}

// The same reading as verify's, into the same memory, and nothing done with it. Returns the bytes.
absl::StatusOr<uint64_t> ReadEverything(World* world) {
  const Geometry& g = world->store().geometry();
  uint64_t bytes = 0;
  uint32_t next = 0;
  ReadStream stream(
      world->engine(), world->memory(), uint64_t{4} << 20, [&]() -> std::optional<ReadStream::Range> {
        if (next == kTiles) return std::nullopt;
        const uint32_t t = next++;
        return ReadStream::Range{&world->store().file(0), g.slot_offset(t, world->store().committed(t).slot),
                                 g.slot_bytes(t)};
      });
  while (const auto chunk = stream.Next()) {
    if (!chunk->status.ok()) return chunk->status;
    bytes += chunk->data.size();
  }
  return bytes;
}

absl::StatusOr<uint64_t> VerifyEverything(World* world) {
  ASSIGN_OR_RETURN(const auto report, VerifyAll(world->store(), world->memory()));
  if (!report.whole()) return absl::DataLossError("the store is damaged");
  return report.bytes;
}

template <absl::StatusOr<uint64_t> (*kRead)(World*)>
void Reading(benchmark::State& state) {
  World* world = World::Get();
  if (world == nullptr) return state.SkipWithError("no store");
  uint64_t bytes = 0;
  Meter meter(state);
  for (auto _ : state) {
    const auto read = kRead(world);
    if (!read.ok()) return state.SkipWithError(read.status().ToString().c_str());
    bytes += *read;
  }
  meter.Report(bytes);
}

// Verify and bare reading in turn, in changing order: `ratio` is the median over the pairs of verify's
// throughput to that of bare reading. One iteration is all pairs.
void VerifyPairs(benchmark::State& state) {
  World* world = World::Get();
  if (world == nullptr) return state.SkipWithError("no store");
  std::vector<double> ratios;
  uint64_t bytes = 0;
  double cpu = 0;
  for (auto _ : state) {
    for (int pair = 0; pair < 21; ++pair) {
      double seconds[2] = {};
      for (const bool verify : {pair % 2 == 0, pair % 2 != 0}) {
        const double cpu_before = CpuSeconds();
        const auto start = std::chrono::steady_clock::now();
        const auto read = verify ? VerifyEverything(world) : ReadEverything(world);
        if (!read.ok()) return state.SkipWithError(read.status().ToString().c_str());
        seconds[verify] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (verify) cpu += CpuSeconds() - cpu_before;
        if (verify) bytes += *read;
      }
      ratios.push_back(seconds[0] / seconds[1]);
    }
  }
  std::sort(ratios.begin(), ratios.end());
  state.counters["pairs"] = static_cast<double>(ratios.size());
  state.counters["ratio"] = ratios[ratios.size() / 2];
  state.counters["ratio_p25"] = ratios[ratios.size() / 4];
  state.counters["ratio_p75"] = ratios[ratios.size() * 3 / 4];
  state.counters["cpu_ms_per_gib"] = 1e3 * cpu / (static_cast<double>(bytes) / (1u << 30));
}

// A commit in which nothing changed: the record of range(1) tiles, and with range(0) == 1 the syncs around
// it.
void CommitRecord(benchmark::State& state) {
  World* world = World::Get();
  if (world == nullptr) return state.SkipWithError("no store");
  const auto store = world->CommitStore(state.range(0) == 1 ? Sync::kPower : Sync::kProcess,
                                        static_cast<uint32_t>(state.range(1)));
  if (!store.ok()) return state.SkipWithError(store.status().ToString().c_str());
  const std::string payload(4096, ' ');
  for (auto _ : state) {
    const absl::Status status = (*store)->CommitNow({1, 1, payload});
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  state.counters["record_bytes"] = static_cast<double>(RecordBytes((*store)->geometry(), payload.size()));
}

BENCHMARK(BareMix)->Name("OptimizerPass/bare")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(StorePass)->Name("OptimizerPass/store")->Arg(0)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(StorePass)
    ->Name("OptimizerPass/store_checksums")
    ->Arg(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(Reading<ReadEverything>)->Name("Read/bare")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(Reading<VerifyEverything>)->Name("Read/verify")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(VerifyPairs)
    ->Name("Read/verify_pairs")
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(CommitRecord)
    ->Name("Commit")
    ->ArgNames({"power", "tiles"})
    ->Args({0, 100})
    ->Args({0, 1000})
    ->Args({1, 100})
    ->Args({1, 1000})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace penstock::swap

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
