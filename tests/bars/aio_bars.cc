// The engine against a bare loop of raw system calls, in interleaved pairs, on the disk at hand; and how long
// a disk's measurement takes: part of `make bench-check`. Absolute speed is never judged: disks drift and
// machines are shared. What may not grow is the CPU per byte beside the bare loop's and the number of system
// calls, and what may not shrink is the ratio.
//
// How a shared machine is borne. A neighbour makes both of a pair slower, or one of them by chance; a defect
// makes the engine slower in every pair. So the time is judged by the pairs in which the engine did best, a
// quarter of all: a real regression shows there too. CPU is counted for both in the same pairs, as a cache
// that others empty or a slower clock costs both; milliseconds alone would measure the machine.
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "aio/profile.h"
#include "bench/aio_bare_loop.h"
#include "tests/aio/test_support.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kBytes = 128 * kMiB;
constexpr int kPairs = 15;
constexpr int kAttempts = 3;
// Of the best quarter of pairs: 0.98 to 1.12 with six other processes on two processors (2026-11-23), where
// the median of a series went down to 0.83 on a virtual disk that others were busy on.
constexpr double kRatioMin = 0.85;
// The engine's CPU over the bare loop's: 1.09 to 1.24 there.
constexpr double kCpuMax = 1.6;
constexpr double kSyscallsMax = 1.5;  // per 4 MiB: below 1 on an idle machine

double CpuMs() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-3;
}

// Of all pairs so far, in every attempt.
struct Outcome {
  std::vector<double> time_ratios;  // the bare loop's time over the engine's, a pair
  double engine_cpu_ms = 0, bare_cpu_ms = 0;
  double syscalls = 0;

  double gib() const { return static_cast<double>(time_ratios.size() * kBytes) / static_cast<double>(kGiB); }
  // What the best quarter of pairs reach at the least.
  double TimeRatio() const {
    std::vector<double> sorted = time_ratios;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() * 3 / 4];
  }
  double CpuRatio() const { return engine_cpu_ms / bare_cpu_ms; }
  double SyscallsPer4Mib() const { return syscalls / (gib() * 256); }
  bool Good() const {
    return TimeRatio() >= kRatioMin && CpuRatio() <= kCpuMax && SyscallsPer4Mib() <= kSyscallsMax;
  }
};

void Compare(bool write, Outcome* outcome) {
  EngineOptions options;
  World w(BackendKind::kIoUring, options);
  EXPECT_EQ(w.skip, "");
  auto file = w.Open("speed", kBytes);
  auto ring = bench::BareRing::Make(w.arena->data(), w.arena->bytes(), true);
  EXPECT_NE(ring, nullptr);
  const std::vector<Segment> segments(kBytes / (32 * kMiB), Segment{w.arena->data(), 32 * kMiB});
  Request request;
  request.set_priority(Priority::kPrefetch);
  const auto ours = [&] {
    write ? request.PrepareWrite(*file, 0, segments) : request.PrepareRead(*file, 0, segments);
    EXPECT_OK(w.engine->Submit(&request));
    EXPECT_OK(w.engine->Wait(&request));
  };
  const auto theirs = [&] {
    EXPECT_TRUE(
        ring->Run(file->fd(), write ? bench::BareOp::kWrite : bench::BareOp::kRead, kBytes, kMiB, 16));
  };
  request.PrepareWrite(*file, 0, segments);  // every block written once
  EXPECT_OK(w.engine->Submit(&request));
  EXPECT_OK(w.engine->Wait(&request));
  ours();
  theirs();
  const uint64_t syscalls = w.engine->stats().devices[0].syscalls;
  for (int pair = 0; pair < kPairs; ++pair) {
    double seconds[2] = {};
    for (const bool engine : {pair % 2 == 0, pair % 2 != 0}) {
      const double cpu = CpuMs();
      const int64_t start = SteadyClock::Get().NowNs();
      engine ? ours() : theirs();
      seconds[engine] = static_cast<double>(SteadyClock::Get().NowNs() - start);
      (engine ? outcome->engine_cpu_ms : outcome->bare_cpu_ms) += CpuMs() - cpu;
    }
    outcome->time_ratios.push_back(seconds[0] / seconds[1]);
  }
  outcome->syscalls += static_cast<double>(w.engine->stats().devices[0].syscalls - syscalls);
}

class SpeedTest : public testing::TestWithParam<bool> {};

TEST_P(SpeedTest, KeepsUpWithABareLoop) {
  {
    World w(BackendKind::kIoUring);
    if (!w.skip.empty()) GTEST_SKIP() << w.skip;
    if (w.arena->page_kind() == PageKind::kSmall) GTEST_SKIP() << "no huge pages here";
    // What the numbers rest on may be missing: an older kernel's rings, or the right to lock memory.
    if (w.log.Has(" refused: ") || w.log.Has("ulimit -l")) GTEST_SKIP() << w.log.lines()[0];
  }
  Outcome outcome;
  for (int attempt = 0; attempt < kAttempts && (attempt == 0 || !outcome.Good()); ++attempt) {
    Compare(GetParam(), &outcome);
    std::printf("time ratio %.3f, CPU ratio %.2f (%.1f ms per GiB to %.1f), %.2f system calls per 4 MiB\n",
                outcome.TimeRatio(), outcome.CpuRatio(), outcome.engine_cpu_ms / outcome.gib(),
                outcome.bare_cpu_ms / outcome.gib(), outcome.SyscallsPer4Mib());
  }
  EXPECT_GE(outcome.TimeRatio(), kRatioMin);
  EXPECT_LE(outcome.CpuRatio(), kCpuMax);
  EXPECT_LE(outcome.SyscallsPer4Mib(), kSyscallsMax);
}

INSTANTIATE_TEST_SUITE_P(Ops, SpeedTest, testing::Bool(),
                         [](const auto& suite) { return suite.param ? "write" : "read"; });

// The budget is 0.7 s, and as much again where samples differ. The quickest of three, as a disk may stall.
TEST(ProbeSpeedTest, ADiskIsMeasuredInAboutItsBudget) {
  ScratchDirectory directory;
  ProbeOptions options;
  options.directory = directory.path();
  double best = std::numeric_limits<double>::max();
  for (int attempt = 0; attempt < kAttempts && best > 5.0; ++attempt) {
    const int64_t start = SteadyClock::Get().NowNs();
    ASSERT_OK(MeasureDevice(options).status());
    best = std::min(best, static_cast<double>(SteadyClock::Get().NowNs() - start) * 1e-9);
    std::printf("%.3f s\n", best);
  }
  EXPECT_LE(best, 5.0);
}

}  // namespace
}  // namespace penstock::aio
