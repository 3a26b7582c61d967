// The simulated disk, and what the engine does on a bad one: all in virtual time, all exact.
#include <cerrno>
#include <random>

#include "aio/sim_disk.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::sim_test {
namespace {

using State = Request::State;

SimDiskOptions Exact() {
  SimDiskOptions sim;
  sim.latency_jitter = 0;
  sim.latency_ns = 100'000;
  sim.read_bytes_per_s = 1024.0 * 1024 * 1024;  // 1 MiB takes 976562.5 ns of the whole disk
  sim.write_bytes_per_s = 1024.0 * 1024 * 1024;
  sim.channels = 1;
  return sim;
}

TEST(SimTest, TimeIsLatencyPlusBytesOverBandwidth) {
  World w(BackendKind::kSim, {}, Exact());
  auto file = w.Open("a", 8 * kMiB);
  Region region = w.Allocate(8 * kMiB);
  ASSERT_OK(w.Read(*file, 0, region.data(), kMiB));
  EXPECT_EQ(w.clock.NowNs(), 976'562 + 100'000);
  const int64_t start = w.clock.NowNs();
  ASSERT_OK(w.Write(*file, 0, region.data(), 8 * kMiB));
  EXPECT_EQ(w.clock.NowNs() - start, 8 * 976'562 + 100'000);
}

TEST(SimTest, NothingMovesUnlessDriven) {
  World w(BackendKind::kSim, {}, Exact());
  auto file = w.Open("a", 4 * kMiB);
  Region region = w.Allocate(4 * kMiB);
  Request request;
  request.PrepareRead(*file, 0, region.data(), 4 * kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  EXPECT_EQ(request.state(), State::kQueued);
  EXPECT_EQ(w.engine->Poll(), 0u);
  EXPECT_EQ(request.state(), State::kActive);
  EXPECT_EQ(w.engine->NextEventNs(), 976'562 + 100'000);
  w.engine->RunUntil(3'000'000);
  EXPECT_EQ(w.clock.NowNs(), 3'000'000);
  EXPECT_EQ(request.done_bytes(), 2 * kMiB);  // the third is done at 3 * 976562 + 100000 = 3029686
  w.engine->RunUntil(10'000'000);
  EXPECT_EQ(request.state(), State::kDone);
  EXPECT_EQ(request.complete_ns(), 4 * 976'562 + 100'000);
  EXPECT_EQ(w.engine->NextEventNs(), Engine::kNever);
}

TEST(SimTest, AWaitWithADeadlineReportsWhatIsStuck) {
  World w(BackendKind::kSim, {}, Exact());
  auto file = w.Open("slow", kMiB);
  Region region = w.Allocate(kMiB);
  w.disk->SlowDown(1000);
  Request request;
  request.PrepareRead(*file, 4096, region.data(), 512 * kKiB);
  ASSERT_OK(w.engine->Submit(&request));
  const absl::Status late = w.engine->Wait(&request, 100);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(std::string(late.message()), testing::HasSubstr("read /sim/slow: offset 4096, 524288 bytes"));
  EXPECT_EQ(w.clock.NowNs(), 100'000'000);
  EXPECT_TRUE(absl::IsDeadlineExceeded(w.engine->Drain(1)));
  EXPECT_OK(w.engine->Wait(&request));
}

TEST(SimTest, StuckRequestsAreReportedAndAgainAtEachDoubling) {
  EngineOptions options;
  options.stuck_after_ms = 100;
  World w(BackendKind::kSim, options, Exact());
  auto file = w.Open("stuck", kMiB);
  Region region = w.Allocate(kMiB);
  w.disk->SlowDown(1000);  // about 1.1 s
  Request request;
  request.PrepareRead(*file, 0, region.data(), kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  for (int i = 1; i <= 100; ++i) w.engine->RunUntil(i * 10'000'000);
  EXPECT_EQ(w.engine->stats().devices[0].stuck_reports, 4u);  // at 0.1, 0.2, 0.4 and 0.8 s
  EXPECT_TRUE(w.log.Has("sim0 is stuck: read /sim/stuck"));
  ASSERT_OK(w.engine->Wait(&request));
}

TEST(SimTest, ADeviceThatSlowsDownIsToldByName) {
  World w(BackendKind::kSim, {}, Exact());
  auto file = w.Open("a", 64 * kMiB);
  Region region = w.Allocate(32 * kMiB);
  for (int i = 0; i < 8; ++i) ASSERT_OK(w.Read(*file, 0, region.data(), 32 * kMiB));
  EXPECT_TRUE(w.log.lines().empty());
  w.disk->SlowDown(100);
  for (int i = 0; i < 8; ++i) ASSERT_OK(w.Read(*file, 0, region.data(), 32 * kMiB));
  EXPECT_TRUE(w.log.Has("sim0 has become slow"));
}

TEST(SimTest, SaturationIsTheTimeWithEnoughInFlight) {
  EngineOptions options;
  options.max_read_bytes_in_flight = 4 * kMiB;
  options.saturating_bytes_in_flight = 4 * kMiB;
  World w(BackendKind::kSim, options, Exact());
  auto file = w.Open("a", 16 * kMiB);
  Region region = w.Allocate(16 * kMiB);
  Request request;
  request.PrepareRead(*file, 0, region.data(), 16 * kMiB);
  request.set_priority(Priority::kPrefetch);
  ASSERT_OK(w.engine->Submit(&request));
  ASSERT_OK(w.engine->Wait(&request));
  const EngineStats stats = w.engine->stats();
  EXPECT_EQ(stats.busy_ns, w.clock.NowNs());
  // Four in flight until the 13th block is done: after that the queue drains.
  EXPECT_NEAR(static_cast<double>(stats.saturated_ns), 13 * 976'562 + 100'000, 10'000);
  EXPECT_EQ(stats.SaturatedBytes(), 13 * kMiB) << "what came after that is not counted";
  // So much is never in flight.
  w.engine->set_saturating_bytes_in_flight(64 * kMiB);
  const int64_t before = w.engine->stats().saturated_ns;
  ASSERT_OK(w.Read(*file, 0, region.data(), 16 * kMiB));
  EXPECT_EQ(w.engine->stats().saturated_ns, before);
  EXPECT_EQ(w.engine->stats().SaturatedBytes(), 13 * kMiB);
}

TEST(SimTest, DemandOvertakesButNobodyStarves) {
  EngineOptions options;
  options.max_read_bytes_in_flight = kMiB;
  World w(BackendKind::kSim, options, Exact());
  auto file = w.Open("a", 64 * kMiB);
  Region region = w.Allocate(kMiB);
  std::vector<Request> prefetch(4), demand(300);
  for (Request& request : prefetch) {
    request.PrepareRead(*file, 0, region.data(), kMiB);
    request.set_priority(Priority::kPrefetch);
    ASSERT_OK(w.engine->Submit(&request));
  }
  w.engine->Poll();
  for (Request& request : demand) {
    request.PrepareRead(*file, 0, region.data(), kMiB);
    ASSERT_OK(w.engine->Submit(&request));
  }
  ASSERT_OK(w.engine->Drain());
  int before_second = 0, before_last = 0;
  for (const Request& request : demand) {
    if (request.complete_ns() < prefetch[1].complete_ns()) ++before_second;
    if (request.complete_ns() < prefetch[3].complete_ns()) ++before_last;
  }
  EXPECT_GE(before_second, 16);  // urgent ones first
  EXPECT_LE(before_second, 40);  // but not for ever
  EXPECT_LT(before_last, 150);
}

// A thousand transfers under every fault that tells the truth: each ends, and success means the bytes are
// right.
TEST(SimTest, HonestFaultsNeverGiveAFalseSuccess) {
  SimDiskOptions sim;
  sim.seed = 99;
  sim.rates.short_transfer = 0.2;
  sim.rates.read_error = 0.05;
  sim.rates.write_error = 0.05;
  sim.rates.no_space = 0.03;
  sim.rates.stall = 0.02;
  World w(BackendKind::kSim, {}, sim);
  auto file = w.Open("a", 8 * kMiB);
  Region region = w.Allocate(4 * kMiB);
  std::mt19937_64 random(4);
  int ok = 0, io_errors = 0, full = 0;
  ASSERT_EQ(w.engine->options().io_error_retries, EngineOptions().io_error_retries);
  for (uint64_t i = 0; i < 500; ++i) {
    if (i % 5 == 0) {
      const bool fails = random() % 4 == 0;
      if (fails) w.disk->FailNext(Op::kSync, EIO);
      Request sync;
      sync.PrepareSync(*file);
      ASSERT_OK(w.engine->Submit(&sync));
      ASSERT_EQ(w.engine->Wait(&sync).ok(), !fails) << "round " << i;
    }
    const uint64_t offset = random() % (4 * kMiB), bytes = 1 + random() % (2 * kMiB);
    std::byte* const data = region.data() + random() % 4096;
    FillPattern(i, offset, data, bytes);
    const absl::Status written = w.Write(*file, offset, data, bytes);
    if (written.ok()) {
      std::memset(data, 0, bytes);
      const absl::Status read = w.Read(*file, offset, data, bytes);
      if (read.ok()) {
        ++ok;
        ASSERT_EQ(Mismatch(i, offset, data, bytes), bytes) << "false success in round " << i;
      } else {
        ASSERT_TRUE(absl::IsDataLoss(read)) << read;
        ++io_errors;
      }
    } else {
      ASSERT_TRUE(absl::IsDataLoss(written) || absl::IsResourceExhausted(written)) << written;
      ++(absl::IsDataLoss(written) ? io_errors : full);
    }
  }
  EXPECT_GT(ok, 100);
  EXPECT_GT(full, 10);
  const SimDiskStats disk = w.disk->stats();
  EXPECT_GT(disk.short_transfers, 100u);
  EXPECT_GT(disk.stalls, 10u);
  EXPECT_EQ(disk.misaligned, 0u);  // the engine never passes on what a disk would refuse
  const EngineStats stats = w.engine->stats();
  EXPECT_EQ(stats.devices[0].short_transfers, disk.short_transfers);
  EXPECT_GT(stats.IoErrorsRetried(), 10u);
}

TEST(SimTest, EioOnceIsRetriedAndForEverIsReported) {
  World w(BackendKind::kSim);
  auto file = w.Open("a", 4 * kMiB);
  Region region = w.Allocate(4 * kMiB);
  w.disk->FailNext(Op::kRead, EIO, 1, "a");
  EXPECT_OK(w.Read(*file, 0, region.data(), 4 * kMiB));
  EXPECT_EQ(w.engine->stats().IoErrorsRetried(), 1u);
  EXPECT_TRUE(w.log.Has("trying again"));
  w.disk->MarkBad("/sim/a", 2 * kMiB, 4096);
  Request request;
  request.PrepareRead(*file, 0, region.data(), 4 * kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  const absl::Status bad = w.engine->Wait(&request);
  EXPECT_TRUE(absl::IsDataLoss(bad)) << bad;
  EXPECT_EQ(request.done_bytes(), 3 * kMiB);
  EXPECT_THAT(std::string(bad.message()), testing::HasSubstr("/sim/a (sim0)"));
  EXPECT_TRUE(w.log.Has("device sim0"));
  w.disk->ClearBadRanges();
  EXPECT_OK(w.Read(*file, 0, region.data(), 4 * kMiB));
}

// Once is enough: what the first sync could not write, a second one knows nothing of.
TEST(SimTest, ASyncThatFailsOnceHasFailed) {
  World w(BackendKind::kSim);
  auto file = w.Open("a", 4 * kMiB);
  ASSERT_GT(w.engine->options().io_error_retries, 0);
  for (const int error : {EIO, ETIMEDOUT, EAGAIN, ENOMEM, ENOSPC}) {
    w.disk->FailNext(Op::kSync, error);
    Request sync;
    sync.PrepareSync(*file);
    ASSERT_OK(w.engine->Submit(&sync));
    EXPECT_FALSE(w.engine->Wait(&sync).ok()) << error;
    EXPECT_EQ(sync.error_number(), error);
    ASSERT_OK(w.engine->Submit(&sync));
    EXPECT_OK(w.engine->Wait(&sync));
  }
  EXPECT_EQ(w.engine->stats().IoErrorsRetried(), 0u);
}

TEST(SimTest, AFullDiskIsSaidInTheMiddleOfAWrite) {
  SimDiskOptions sim;
  sim.capacity_bytes = 4 * kMiB;
  World w(BackendKind::kSim, {}, sim);
  auto file = w.Open("a");
  Region region = w.Allocate(8 * kMiB);
  const absl::Status status = w.Write(*file, 0, region.data(), 8 * kMiB);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("No space left"));
  EXPECT_TRUE(absl::IsResourceExhausted(file->Preallocate(5 * kMiB)));
}

TEST(SimTest, MisalignmentIsRefusedByTheDiskItself) {
  VirtualClock clock;
  SimDiskOptions options;
  options.clock = &clock;
  SimDisk disk(options);
  auto file = disk.OpenFile("/a", true, false, false);
  ASSERT_OK(file.status());
  ASSERT_OK(disk.Resize(**file, kMiB));
  alignas(4096) static std::byte memory[16384];
  const auto result = [&](uint64_t offset, std::byte* data, uint64_t bytes) {
    disk.Start({file->get(), Op::kRead, offset, data, bytes});
    SimDisk::Transfer done;
    clock.AdvanceTo(disk.NextDueNs());
    EXPECT_EQ(disk.Reap(&done, 1), 1u);
    return done.result;
  };
  EXPECT_EQ(result(0, memory, 4096), 4096);
  EXPECT_EQ(result(512, memory, 4096), -EINVAL);
  EXPECT_EQ(result(0, memory, 4097), -EINVAL);
  EXPECT_EQ(result(0, memory + 4, 4096), -EINVAL);
  EXPECT_EQ(disk.stats().misaligned, 3u);
}

TEST(SimTest, LyingDisksLieAsToldAndAreCounted) {
  for (const int kind : {0, 1, 2}) {
    SimDiskOptions sim;
    (kind == 0 ? sim.rates.torn_write : kind == 1 ? sim.rates.lost_write : sim.rates.misdirected_write) = 1;
    World w(BackendKind::kSim, {}, sim);
    auto file = w.Open("a", 8 * kMiB);
    Region region = w.Allocate(kMiB);
    FillPattern(1, 0, region.data(), kMiB);
    ASSERT_OK(w.Write(*file, 0, region.data(), kMiB));  // a false success: this is what checksums are for
    const std::string there = *w.disk->Read("/sim/a", 0, kMiB);
    EXPECT_LT(Mismatch(1, 0, reinterpret_cast<const std::byte*>(there.data()), kMiB), kMiB) << kind;
    const SimDiskStats stats = w.disk->stats();
    EXPECT_EQ(stats.torn_writes + stats.lost_writes + stats.misdirected_writes, 1u);
  }
}

TEST(SimTest, ACrashKeepsASubsetOfSectorsAndTheSeedDecidesWhich) {
  const auto crash = [](uint64_t seed) {
    SimDiskOptions sim = Exact();
    sim.seed = seed;
    World w(BackendKind::kSim, {}, sim);
    auto file = w.Open("a", 4 * kMiB);
    Region region = w.Allocate(4 * kMiB);
    std::memset(region.data(), 0xff, region.bytes());
    Request request;
    request.PrepareWrite(*file, 0, region.data(), 4 * kMiB);
    EXPECT_OK(w.engine->Submit(&request));
    w.engine->RunUntil(2'200'000);  // two blocks are down, two are in flight
    w.disk->Crash();
    EXPECT_TRUE(absl::IsDataLoss(w.engine->Wait(&request)));
    EXPECT_TRUE(absl::IsDataLoss(w.Read(*file, 0, region.data(), 4096)));
    EXPECT_TRUE(absl::IsDataLoss(File::Open(w.NewFile("a")).status()));
    w.disk->Restart();
    EXPECT_TRUE(absl::IsDataLoss(w.Read(*file, 0, region.data(), 4096)));  // opened before the crash
    auto again = w.Open("a");
    EXPECT_OK(again->Lock(0));
    EXPECT_OK(w.Read(*again, 0, region.data(), 4096));
    std::string kept;
    const std::string all = *w.disk->Read("/sim/a", 0, 4 * kMiB);
    for (uint64_t at = 0; at < all.size(); at += 4096) kept += all[at] == '\0' ? '0' : '1';
    return kept;
  };
  const std::string one = crash(1);
  EXPECT_EQ(one, crash(1));
  EXPECT_NE(one, crash(2));
  EXPECT_EQ(one.substr(0, 512), std::string(512, '1'));
  EXPECT_NE(one.substr(512).find('0'), std::string::npos);
  EXPECT_NE(one.substr(512).find('1'), std::string::npos);
}

TEST(SimTest, PowerLossDropsWhatWasNotSynced) {
  SimDiskOptions sim;
  sim.volatile_cache = true;
  World w(BackendKind::kSim, {}, sim);
  auto file = w.Open("a", 2 * kMiB);
  Region region = w.Allocate(2 * kMiB);
  std::memset(region.data(), 1, region.bytes());
  ASSERT_OK(w.Write(*file, 0, region.data(), 2 * kMiB));
  ASSERT_OK(file->SyncData());
  std::memset(region.data(), 2, region.bytes());
  ASSERT_OK(w.Write(*file, kMiB, region.data(), kMiB));
  w.disk->Crash();
  w.disk->Restart();
  const std::string all = *w.disk->Read("/sim/a", 0, 2 * kMiB);
  EXPECT_EQ(std::count(all.begin(), all.begin() + kMiB, 1), static_cast<ptrdiff_t>(kMiB));
  const auto old = std::count(all.begin() + kMiB, all.end(), 1);
  EXPECT_GT(old, 0);
  EXPECT_LT(old, static_cast<ptrdiff_t>(kMiB));
  EXPECT_EQ(w.disk->stats().sectors_dropped_by_crash, static_cast<uint64_t>(old) / 4096);
}

TEST(SimTest, OneSeedIsOneSequenceOfEvents) {
  const auto run = [](uint64_t seed) {
    SimDiskOptions sim;
    sim.seed = seed;
    sim.rates.short_transfer = 0.3;
    sim.rates.stall = 0.1;
    World w(BackendKind::kSim, {}, sim);
    auto file = w.Open("a", 16 * kMiB);
    Region region = w.Allocate(16 * kMiB);
    std::vector<Request> requests(64);
    std::vector<int64_t> times;
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].PrepareWrite(*file, i * 256 * kKiB, region.data() + i * 256 * kKiB, 256 * kKiB);
      EXPECT_OK(w.engine->Submit(&requests[i]));
    }
    EXPECT_OK(w.engine->Drain());
    for (const Request& request : requests) times.push_back(request.complete_ns());
    return times;
  };
  EXPECT_EQ(run(5), run(5));
  EXPECT_NE(run(5), run(6));
}

TEST(SimTest, FilesOutliveEnginesAndCanBeRenamedAndRemoved) {
  World w(BackendKind::kSim);
  Region region = w.Allocate(kMiB);
  FillPattern(8, 0, region.data(), kMiB);
  {
    auto file = w.Open("a", kMiB);
    ASSERT_OK(w.Write(*file, 0, region.data(), kMiB));
  }
  w.engine.reset();
  ASSERT_OK(w.disk->Rename("/sim/a", "/sim/b"));
  EXPECT_EQ(w.disk->ListFiles(), std::vector<std::string>{"/sim/b"});
  const std::string there = *w.disk->Read("/sim/b", 0, kMiB);
  EXPECT_EQ(Mismatch(8, 0, reinterpret_cast<const std::byte*>(there.data()), kMiB), kMiB);
  ASSERT_OK(w.disk->Remove("/sim/b"));
  EXPECT_TRUE(absl::IsNotFound(w.disk->Remove("/sim/b")));
  EXPECT_TRUE(absl::IsNotFound(w.disk->Read("/sim/b", 0, 1).status()));
}

}  // namespace
}  // namespace penstock::aio::sim_test
