// The engine against a bare loop of raw system calls, in interleaved pairs, on the disk at hand. Absolute
// speed is never judged: disks drift and machines are shared. What may not grow is the CPU per byte and the
// number of system calls, and what may not shrink is the ratio.
#include <sys/resource.h>

#include <algorithm>

#include "bench/aio_bare_loop.h"
#include "tests/aio/test_support.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kBytes = 128 * kMiB;
constexpr int kPairs = 15;
// 0.98 and more where nothing else runs (aio_bench measures it). The same engine stood between 0.83 and 0.96
// within ten minutes on a virtual disk that others were busy on (2026-11-22): a gate above that tests the
// disk.
constexpr double kRatioMin = 0.80;
constexpr double kCpuMax = 12;        // ms per GiB: 4 to 6 there
constexpr double kSyscallsMax = 1.5;  // per 4 MiB: below 1 there

double CpuMs() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-3;
}

struct Outcome {
  double ratio = 0;  // median
  double cpu_ms_per_gib = 0;
  double syscalls_per_4mib = 0;
};

Outcome Compare(bool write) {
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
  std::vector<double> ratios;
  double cpu_ms = 0;
  const uint64_t syscalls = w.engine->stats().devices[0].syscalls;
  for (int pair = 0; pair < kPairs; ++pair) {
    double seconds[2] = {};
    for (const bool engine : {pair % 2 == 0, pair % 2 != 0}) {
      const double cpu = CpuMs();
      const int64_t start = SteadyClock::Get().NowNs();
      engine ? ours() : theirs();
      seconds[engine] = static_cast<double>(SteadyClock::Get().NowNs() - start);
      if (engine) cpu_ms += CpuMs() - cpu;
    }
    ratios.push_back(seconds[0] / seconds[1]);
  }
  std::sort(ratios.begin(), ratios.end());
  Outcome outcome;
  outcome.ratio = ratios[kPairs / 2];
  outcome.cpu_ms_per_gib =
      cpu_ms / (static_cast<double>(kPairs) * static_cast<double>(kBytes) / static_cast<double>(kGiB));
  outcome.syscalls_per_4mib = static_cast<double>(w.engine->stats().devices[0].syscalls - syscalls) /
                              (kPairs * static_cast<double>(kBytes) / static_cast<double>(4 * kMiB));
  return outcome;
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
  // A neighbour on the machine can spoil a series; three in a row are not bad luck.
  Outcome outcome;
  for (int attempt = 0; attempt < 3; ++attempt) {
    outcome = Compare(GetParam());
    std::printf("ratio %.3f, %.1f ms of CPU per GiB, %.2f system calls per 4 MiB\n", outcome.ratio,
                outcome.cpu_ms_per_gib, outcome.syscalls_per_4mib);
    if (outcome.ratio >= kRatioMin && outcome.cpu_ms_per_gib <= kCpuMax &&
        outcome.syscalls_per_4mib <= kSyscallsMax)
      return;
  }
  EXPECT_GE(outcome.ratio, kRatioMin);
  EXPECT_LE(outcome.cpu_ms_per_gib, kCpuMax);
  EXPECT_LE(outcome.syscalls_per_4mib, kSyscallsMax);
}

INSTANTIATE_TEST_SUITE_P(Ops, SpeedTest, testing::Bool(),
                         [](const auto& suite) { return suite.param ? "write" : "read"; });

}  // namespace
}  // namespace penstock::aio
