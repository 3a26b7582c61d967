// Kills: a small training is ended by SIGKILL at every named stage and at random moments, started again at
// once, and has to go on bit for bit where it was, without losing a step that it had reported.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "swap/checkpoint.h"
#include "swap/store.h"
#include "tests/soak.h"
#include "tests/swap/harness_process.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap::kill_test {
namespace {

// Kills at random moments in each test that makes them.
int RandomKills() { return 30 * tests::Soak(); }

using Outcome = HarnessOutcome;

class KillTest : public ::testing::TestWithParam<Sync> {
 protected:
  std::vector<std::string> Arguments(int store, int64_t expect, uint64_t steps) {
    return {"--dir",    scratch_.Sub(absl::StrCat("a", store)),
            "--dir",    scratch_.Sub(absl::StrCat("b", store)),
            "--seed",   absl::StrCat(store + 1),
            "--steps",  absl::StrCat(steps),
            "--expect", absl::StrCat(expect),
            "--sync",   GetParam() == Sync::kPower ? "power" : "process"};
  }
  ScratchDirectory scratch_;
};

TEST_P(KillTest, EveryNamedStageOfCreationAndCommit) {
  int kills = 0;
  for (int s = 0; s < kCrashPoints; ++s) {
    const std::string stage(CrashPointName(static_cast<CrashPoint>(s)));
    for (int nth : {1, s < static_cast<int>(CrashPoint::kTileSubmitted) ? 2 : 7}) {
      const int store = s * 10 + nth;
      if (stage == "overwrite-removed") {  // reached only where there is something to overwrite
        ASSERT_EQ(RunHarness(Arguments(store, -1, 1)).exit_code, 0);
      }
      auto arguments = Arguments(store, -1, 12);
      if (stage == "overwrite-removed") arguments.push_back("--fresh");
      arguments.insert(arguments.end(), {"--kill-at", stage, "--kill-after", absl::StrCat(nth)});
      const Outcome first = RunHarness(arguments);
      ASSERT_TRUE(first.killed || first.exit_code == 0) << stage << " " << nth << ": " << first.error;
      kills += first.killed;
      // At once: the kernel may still be finishing what was in flight.
      const Outcome second = RunHarness(Arguments(store, first.last_step, 12));
      ASSERT_EQ(second.exit_code, 0) << stage << " " << nth << ": " << second.error;
      ASSERT_TRUE(second.last_step == 12 || first.last_step == 12);
      if (nth == 1) {
        EXPECT_TRUE(first.killed) << stage << " was never reached";
      }
    }
  }
  EXPECT_GE(kills, 20);
}

TEST_P(KillTest, RandomMoments) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  int kills = 0;
  for (int store = 1000; kills < RandomKills(); ++store) {
    int64_t known = -1;
    for (int i = 0; i < 20 && kills < RandomKills(); ++i) {
      const Outcome outcome =
          RunHarness(Arguments(store, known, 100000), static_cast<int64_t>(random() % 20000));
      ASSERT_TRUE(outcome.killed) << "store " << store << " run " << i << ": " << outcome.error;
      ++kills;
      known = std::max(known, outcome.last_step);
    }
    const Outcome last = RunHarness(Arguments(store, known, static_cast<uint64_t>(known + 3)));
    ASSERT_EQ(last.exit_code, 0) << last.error;
  }
  std::printf("%d random kills\n", kills);
}

// One slot a tile: a kill costs everything, or nothing; never is anything in between taken for a run.
TEST_P(KillTest, WithOneVersionItIsWholeOrRefused) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  int kills = 0, refused = 0;
  const auto arguments = [&](int64_t expect, uint64_t steps) {
    std::vector<std::string> all = Arguments(0, expect, steps);
    all.insert(all.end(), {"--slots", "1"});
    return all;
  };
  // At rest after its last commit it is whole: every run that comes to its end proves that to the next.
  int64_t known = -1;
  for (; kills < RandomKills(); ++kills) {
    const Outcome outcome = RunHarness(arguments(known, 100000), static_cast<int64_t>(random() % 8000));
    ASSERT_TRUE(outcome.killed) << "kill " << kills << ": " << outcome.error;
    refused += outcome.overwritten ? 1 : 0;
    known = outcome.overwritten ? outcome.last_step : std::max(known, outcome.last_step);
    if (kills % 5 != 4) continue;
    const Outcome rest = RunHarness(arguments(known, 3));
    ASSERT_EQ(rest.exit_code, 0) << rest.error;
    if (rest.overwritten) {
      ++refused;
      EXPECT_EQ(rest.last_step, 3);
      known = 3;
    }
    const Outcome again =
        RunHarness(arguments(known, static_cast<uint64_t>(std::max<int64_t>(known, 0)) + 1));
    ASSERT_EQ(again.exit_code, 0) << again.error;
    EXPECT_FALSE(again.overwritten) << "a run that ended with a commit was not whole";
    known = std::max(known, again.last_step);
  }
  std::printf("%d random kills, %d of which cost the state\n", kills, refused);
  EXPECT_GT(refused, 0);
}

TEST(CheckpointKillTest, RandomMomentsWithACheckpointOnItsWay) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int kills = 0; kills < RandomKills();) {
    ScratchDirectory scratch;  // a new run now and then: the oracle is computed from its beginning
    const std::string checkpoints = scratch.Sub("checkpoints");
    const auto arguments = [&](int64_t expect, uint64_t steps) {
      return std::vector<std::string>{
          "--dir",    scratch.Sub("run"),   "--seed",  "5", "--steps",       absl::StrCat(steps),
          "--expect", absl::StrCat(expect), "--slots", "3", "--checkpoints", checkpoints};
    };
    int64_t known = -1;
    for (int i = 0; i < 15; ++i, ++kills) {
      const Outcome outcome = RunHarness(arguments(known, 100000), static_cast<int64_t>(random() % 30000));
      ASSERT_TRUE(outcome.killed) << "kill " << kills << ": " << outcome.error;
      known = std::max(known, outcome.last_step);
    }
    const Outcome last = RunHarness(arguments(known, static_cast<uint64_t>(known + 20)));
    ASSERT_EQ(last.exit_code, 0) << last.error;
    EXPECT_GE(ListCheckpoints(checkpoints)->size(), 1u);
    EXPECT_LE(ListCheckpoints(checkpoints)->size(), 2u);
  }
}

// Two starts at the same instant, each told to overwrite what is there: one of them has the directory, and
// what it commits is there afterwards; the other is refused in a line.
TEST(TwoStartsTest, OverwritingAtTheSameInstantOneHasItAndKeepsIt) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  ScratchDirectory scratch;
  for (int pair = 0; pair < 15 * tests::Soak(); ++pair) {
    SCOPED_TRACE(absl::StrCat("pair ", pair));
    const std::string dir = scratch.Sub("run");
    const auto arguments = [&](int64_t harness_seed, std::vector<std::string> more) {
      more.insert(more.begin(),
                  {"--dir", dir, "--seed", absl::StrCat(pair * 2 + harness_seed), "--steps", "3"});
      return more;
    };
    // 30 ms from now, when both are certain to be waiting, and up to 2 ms apart.
    const int64_t at =
        (std::chrono::steady_clock::now().time_since_epoch() + std::chrono::milliseconds(30)).count();
    const auto has_own_memory = static_cast<int64_t>(random() % (pair % 2 == 0 ? 200'000 : 2'000'000));
    HarnessProcess first(arguments(0, {"--overwrite-at", absl::StrCat(at), "--hold"}));
    HarnessProcess second(arguments(1, {"--overwrite-at", absl::StrCat(at + has_own_memory), "--hold"}));
    int winners = 0, winner = -1;
    for (HarnessProcess* process : {&first, &second}) {
      bool lives = true;
      while (lives && process->Last("step") < 3) lives = process->Listen();
      if (!lives) continue;
      ++winners;
      winner = process == &first ? 0 : 1;
    }
    for (HarnessProcess* process : {&first, &second}) {
      const Outcome outcome = process->End();
      const bool won = outcome.last_step == 3;
      ASSERT_EQ(outcome.exit_code, won ? 0 : 1) << outcome.error;
      ASSERT_EQ(std::count(outcome.error.begin(), outcome.error.end(), '\n'), won ? 0 : 1) << outcome.error;
    }
    ASSERT_EQ(winners, 1);
    const Outcome after = RunHarness(arguments(winner, {"--expect", "3"}));
    ASSERT_EQ(after.exit_code, 0) << after.error;
  }
}

INSTANTIATE_TEST_SUITE_P(Sync, KillTest, ::testing::Values(Sync::kProcess, Sync::kPower),
                         [](const auto& kind) { return kind.param == Sync::kPower ? "power" : "process"; });

}  // namespace
}  // namespace penstock::swap::kill_test
