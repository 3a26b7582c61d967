// Power cuts under a real file system: a small training on ext4 is killed, started again, and loses the power
// of its disk, which then holds what was flushed and any part of the rest. Nothing that was reported as
// committed with `sync: power` may be lost, and nothing wrong may ever be taken for right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "swap/checkpoint.h"
#include "swap/store.h"
#include "tests/soak.h"
#include "tests/swap/harness_process.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/power_cut_disk.h"

namespace penstock::swap::power_cut_test {
namespace {

struct Mode {
  const char* name;
  Sync sync;
  int slots;
  bool checkpoints;
};

class PowerCutTest : public ::testing::TestWithParam<Mode> {
 protected:
  std::vector<std::string> Arguments(uint64_t steps) const {
    const std::string root = absl::StrCat(disk_.directory(), "/", run_);
    std::vector<std::string> arguments = {"--dir",    root + "-a",
                                          "--dir",    root + "-b",
                                          "--seed",   absl::StrCat(run_ + 1),
                                          "--steps",  absl::StrCat(steps),
                                          "--expect", absl::StrCat(known_),
                                          "--slots",  absl::StrCat(GetParam().slots),
                                          "--sync",   GetParam().sync == Sync::kPower ? "power" : "process"};
    if (GetParam().checkpoints) {
      arguments.insert(arguments.end(), {"--checkpoints", root + "-checkpoints", "--expect-checkpoint",
                                         absl::StrCat(known_checkpoint_)});
    }
    return arguments;
  }
  void StartOver() {
    for (const char* what : {"-a", "-b", "-checkpoints"})
      std::filesystem::remove_all(absl::StrCat(disk_.directory(), "/", run_, what));
    ++run_;
    known_ = known_checkpoint_ = -1;
  }
  // What a process said before it ended is known from then on.
  void Take(const HarnessOutcome& outcome) {
    if (outcome.overwritten) {
      ++gone_;
      known_ = -1;
    }
    known_ = std::max(known_, outcome.last_step);
    known_checkpoint_ = std::max(known_checkpoint_, outcome.last_checkpoint);
  }
  // With the power on, and ended at a stage of a commit or at any moment.
  void KillOnce() {
    static constexpr CrashPoint kEnds[] = {CrashPoint::kTileWritten,       CrashPoint::kCommitBegin,
                                           CrashPoint::kCommitTilesSynced, CrashPoint::kCommitSubmitted,
                                           CrashPoint::kCommitWritten,     CrashPoint::kCommitWritten,
                                           CrashPoint::kCommitSynced,      CrashPoint::kCommitDone};
    std::vector<std::string> arguments = Arguments(100000);
    int64_t after_us = -1;
    if (random_() % 4 == 0) {
      after_us = static_cast<int64_t>(random_() % 10'000);
    } else {
      arguments.insert(arguments.end(),
                       {"--kill-at", std::string(CrashPointName(kEnds[random_() % std::size(kEnds)])),
                        "--kill-after", absl::StrCat(1 + random_() % 3)});
    }
    const HarnessOutcome outcome = RunHarness(arguments, after_us);
    ASSERT_TRUE(outcome.killed) << outcome.error;
    Take(outcome);
    ++kills_;
  }
  // Half of the cuts come while the store is opened or in its first step.
  void CutOnce() {
    disk_.CutAfter(1 + random_() % (random_() % 2 == 0 ? 24 : 160));
    HarnessProcess process(Arguments(100000));
    while (!disk_.off() && process.Listen(1)) continue;
    ASSERT_TRUE(disk_.off()) << process.End().error;
    process.Kill();
    Take(process.End());
    ASSERT_TRUE(disk_.PowerOn()) << "ext4 cannot be mounted after a cut";
  }

  const uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  PowerCutDisk disk_{seed_};
  int run_ = 0;
  int64_t known_ = -1, known_checkpoint_ = -1;
  int kills_ = 0, gone_ = 0;
};

TEST_P(PowerCutTest, WhatWasAcknowledgedIsThereAndRight) {
  if (!disk_.skip().empty()) GTEST_SKIP() << disk_.skip();
  const bool durable = GetParam().sync == Sync::kPower;
  int damaged = 0;
  // A cut may find everything written: some more then, since those tell nothing.
  for (int cut = 0; cut < 3 * tests::Soak() || (disk_.lost_sectors() == 0 && cut < 30); ++cut) {
    SCOPED_TRACE(absl::StrCat("seed ", seed_, " cut ", cut));
    if (cut % 12 == 0) StartOver();
    for (uint64_t kills = random_() % 3; kills > 0; --kills) ASSERT_NO_FATAL_FAILURE(KillOnce());
    // Without a sync the file system itself forgets all that is younger than some seconds.
    if (!durable && random_() % 2 == 0) {
      ASSERT_TRUE(disk_.SyncFileSystem());
    }
    ASSERT_NO_FATAL_FAILURE(CutOnce());
    if (!durable) known_ = -1;  // nothing was promised
    const HarnessOutcome after =
        RunHarness(Arguments(static_cast<uint64_t>(std::max<int64_t>(known_, 0)) + 1));
    if (after.exit_code == 0) {
      Take(after);
      continue;
    }
    // Found, not believed.
    ASSERT_TRUE(!durable && absl::StrContains(after.error, "DATA_LOSS")) << after.error;
    ++damaged;
    StartOver();
  }
  std::printf(
      "%s: %d power cuts, %d kills before them, %d sectors lost; damage named %d times, the only version "
      "gone %d\n",
      GetParam().name, static_cast<int>(disk_.cuts()), kills_, static_cast<int>(disk_.lost_sectors()),
      damaged, gone_);
  EXPECT_GT(disk_.lost_sectors(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Modes, PowerCutTest,
                         ::testing::Values(Mode{"power", Sync::kPower, 2, false},
                                           Mode{"power_checkpoints", Sync::kPower, 3, true},
                                           Mode{"power_one_version", Sync::kPower, 1, false},
                                           Mode{"power_one_version_checkpoints", Sync::kPower, 1, true},
                                           Mode{"process", Sync::kProcess, 2, false},
                                           Mode{"process_checkpoints", Sync::kProcess, 3, true}),
                         [](const auto& mode) { return std::string(mode.param.name); });

}  // namespace
}  // namespace penstock::swap::power_cut_test
