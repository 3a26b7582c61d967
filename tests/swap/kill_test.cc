// Kills: a small training is ended by SIGKILL at every named stage and at random moments, started again at
// once, and has to go on bit for bit where it was, without losing a step that it had reported.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "swap/checkpoint.h"
#include "swap/store.h"
#include "tests/soak.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap {
namespace {

// Kills at random moments in each test that makes them.
int RandomKills() { return 30 * tests::Soak(); }

using Clock = std::chrono::steady_clock;

struct Outcome {
  bool killed = false;
  int exit_code = -1;
  int64_t last_step = -1;    // printed last in this run
  bool overwritten = false;  // it found its only version half overwritten and started over
  std::string error;
};

// Runs the harness; kills it `kill_after_us` after its first printed step (below 0: never).
Outcome RunHarness(std::vector<std::string> words, int64_t kill_after_us = -1) {
  Outcome outcome;
  int out[2], err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) return outcome;
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  ::posix_spawn_file_actions_adddup2(&actions, err[1], 2);
  words.insert(words.begin(), STORE_HARNESS);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int spawned = ::posix_spawn(&pid, STORE_HARNESS, &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(out[1]);
  ::close(err[1]);
  if (spawned != 0) {
    outcome.error = "cannot start " STORE_HARNESS;
    ::close(out[0]);
    ::close(err[0]);
    return outcome;
  }
  std::string text;
  std::optional<Clock::time_point> deadline;
  while (true) {
    int wait_ms = -1;
    if (deadline.has_value()) {
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(*deadline - Clock::now()).count();
      if (left <= 0) {
        ::kill(pid, SIGKILL);
        deadline.reset();
        kill_after_us = -1;
        continue;
      }
      wait_ms = left < 1000 ? 0 : static_cast<int>(left / 1000);
    }
    pollfd poll_fd{out[0], POLLIN, 0};
    if (::poll(&poll_fd, 1, wait_ms) <= 0) continue;
    char buffer[4096];
    const ssize_t n = ::read(out[0], buffer, sizeof buffer);
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
    if (kill_after_us >= 0 && !deadline.has_value())
      deadline = Clock::now() + std::chrono::microseconds(kill_after_us);
  }
  char buffer[4096];
  for (ssize_t n; (n = ::read(err[0], buffer, sizeof buffer)) > 0;)
    outcome.error.append(buffer, static_cast<size_t>(n));
  ::close(out[0]);
  ::close(err[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  outcome.killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  outcome.overwritten = text.rfind("overwritten\n", 0) == 0;
  // Only whole lines count: a torn one was never said.
  const size_t end = text.rfind('\n');
  if (end != std::string::npos) {
    const size_t start = text.rfind("step ", end);
    if (start != std::string::npos) outcome.last_step = std::stoll(text.substr(start + 5, end - start - 5));
  }
  return outcome;
}

class KillTest : public ::testing::TestWithParam<Sync> {
 protected:
  std::vector<std::string> Words(int store, int64_t expect, uint64_t steps) {
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
  for (int s = 0; s < kStages; ++s) {
    const std::string stage(StageName(static_cast<Stage>(s)));
    for (int nth : {1, s < static_cast<int>(Stage::kTileSubmitted) ? 2 : 7}) {
      const int store = s * 10 + nth;
      if (stage == "overwrite-removed") {  // reached only where there is something to overwrite
        ASSERT_EQ(RunHarness(Words(store, -1, 1)).exit_code, 0);
      }
      auto words = Words(store, -1, 12);
      if (stage == "overwrite-removed") words.push_back("--fresh");
      words.insert(words.end(), {"--kill-at", stage, "--kill-after", absl::StrCat(nth)});
      const Outcome first = RunHarness(words);
      ASSERT_TRUE(first.killed || first.exit_code == 0) << stage << " " << nth << ": " << first.error;
      kills += first.killed;
      // At once: the kernel may still be finishing what was in flight.
      const Outcome second = RunHarness(Words(store, first.last_step, 12));
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
      const Outcome outcome = RunHarness(Words(store, known, 100000), static_cast<int64_t>(random() % 20000));
      ASSERT_TRUE(outcome.killed) << "store " << store << " run " << i << ": " << outcome.error;
      ++kills;
      known = std::max(known, outcome.last_step);
    }
    const Outcome last = RunHarness(Words(store, known, static_cast<uint64_t>(known + 3)));
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
  const auto words = [&](int64_t expect, uint64_t steps) {
    std::vector<std::string> all = Words(0, expect, steps);
    all.insert(all.end(), {"--slots", "1"});
    return all;
  };
  // At rest after its last commit it is whole: every run that comes to its end proves that to the next.
  int64_t known = -1;
  for (; kills < RandomKills(); ++kills) {
    const Outcome outcome = RunHarness(words(known, 100000), static_cast<int64_t>(random() % 8000));
    ASSERT_TRUE(outcome.killed) << "kill " << kills << ": " << outcome.error;
    refused += outcome.overwritten ? 1 : 0;
    known = outcome.overwritten ? outcome.last_step : std::max(known, outcome.last_step);
    if (kills % 5 != 4) continue;
    const Outcome rest = RunHarness(words(known, 3));
    ASSERT_EQ(rest.exit_code, 0) << rest.error;
    if (rest.overwritten) {
      ++refused;
      EXPECT_EQ(rest.last_step, 3);
      known = 3;
    }
    const Outcome again = RunHarness(words(known, static_cast<uint64_t>(std::max<int64_t>(known, 0)) + 1));
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
    const auto words = [&](int64_t expect, uint64_t steps) {
      return std::vector<std::string>{
          "--dir",    scratch.Sub("run"),   "--seed",  "5", "--steps",       absl::StrCat(steps),
          "--expect", absl::StrCat(expect), "--slots", "3", "--checkpoints", checkpoints};
    };
    int64_t known = -1;
    for (int i = 0; i < 15; ++i, ++kills) {
      const Outcome outcome = RunHarness(words(known, 100000), static_cast<int64_t>(random() % 30000));
      ASSERT_TRUE(outcome.killed) << "kill " << kills << ": " << outcome.error;
      known = std::max(known, outcome.last_step);
    }
    const Outcome last = RunHarness(words(known, static_cast<uint64_t>(known + 20)));
    ASSERT_EQ(last.exit_code, 0) << last.error;
    EXPECT_GE(ListCheckpoints(checkpoints).size(), 1u);
    EXPECT_LE(ListCheckpoints(checkpoints).size(), 2u);
  }
}

INSTANTIATE_TEST_SUITE_P(Sync, KillTest, ::testing::Values(Sync::kProcess, Sync::kPower),
                         [](const auto& kind) { return kind.param == Sync::kPower ? "power" : "process"; });

}  // namespace
}  // namespace penstock::swap
