// Whose lines a log takes, cuts and leaves alone.
#include "run/watch/train_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/tampered_call.h"

namespace penstock::tools::train_log_test {
namespace {

using nlohmann::json;

class TrainLogTest : public testing::Test {
 protected:
  TrainLogTest() {
    std::string name = (std::filesystem::temp_directory_path() / "train_log_test.XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
    path_ = dir_ + "/log";
  }
  ~TrainLogTest() override { std::filesystem::remove_all(dir_); }
  void Write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }
  std::string Read() const {
    std::ostringstream text;
    text << std::ifstream(path_, std::ios::binary).rdbuf();
    return text.str();
  }
  // What Open says, having changed nothing.
  absl::Status Try(const run::LogOwner& owner) const {
    const std::string before = Read();
    const absl::Status status = run::TrainLog::Open(path_, owner).status();
    EXPECT_EQ(Read(), before);
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    }
    return status;
  }
  std::string dir_, path_;
};

TEST_F(TrainLogTest, EveryLineHasTheRunsIdAndAnotherRunsLogIsLeftAlone) {
  {
    auto log = run::TrainLog::Open(path_, {.run_id = "mine"});
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_TRUE((*log)->Append({{"step", 1}, {"loss", 0.5}}).ok());
    ASSERT_TRUE((*log)->Append({{"step", 1}, {"loss", 0.25}, {"windows", 3}}).ok());
    EXPECT_EQ((*log)->last_step(), 1);
    EXPECT_EQ((*log)->last_evaluation(), 1);
  }
  EXPECT_EQ(Read(),
            "{\"step\": 1, \"loss\": 0.5, \"run_id\": \"mine\"}\n"
            "{\"step\": 1, \"loss\": 0.25, \"windows\": 3, \"run_id\": \"mine\"}\n");
  EXPECT_EQ(run::TrainLog::RunIdIn(path_).value(), "mine");
  EXPECT_FALSE(Try({.run_id = "mine"}).ok()) << "a new run needs a log of its own";
  EXPECT_FALSE(Try({.run_id = "other", .resumes = true}).ok());
  EXPECT_TRUE(Try({.run_id = "mine", .resumes = true}).ok());
}

TEST_F(TrainLogTest, WhatStandsAsideIsNoStepAndIsCutWithTheStepsBehindIt) {
  const run::LogOwner owner{.run_id = "mine", .resumes = true};
  auto log = run::TrainLog::Open(path_, owner);
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_TRUE((*log)->Append({{"step", 1}, {"loss", 0.5}}).ok());
  (*log)->AppendAside({{"step", 1}, {"seconds", 60.5}, {"stuck", "stuck: a"}});
  ASSERT_TRUE((*log)->Append({{"step", 2}, {"loss", 0.5}}).ok());
  (*log)->AppendAside({{"step", 2}, {"seconds", 61.5}, {"stuck", "stuck: b"}});
  const std::string kept =
      "{\"step\": 1, \"loss\": 0.5, \"run_id\": \"mine\"}\n"
      "{\"step\": 1, \"seconds\": 60.5, \"stuck\": \"stuck: a\", \"run_id\": \"mine\"}\n";
  EXPECT_EQ(Read().substr(0, kept.size()), kept);
  EXPECT_EQ((*log)->last_step(), 2);
  EXPECT_EQ((*log)->last_evaluation(), -1);
  EXPECT_TRUE(Try(owner).ok());
  ASSERT_TRUE((*log)->CutAfter(1).ok());
  EXPECT_EQ(Read(), kept);
}

TEST_F(TrainLogTest, ALogThatCannotBeReadIsNeverCut) {
  std::string lines;
  for (int step = 1; step <= 3000; ++step)
    lines += "{\"step\": " + std::to_string(step) + ", \"loss\": 0.5, \"run_id\": \"mine\"}\n";
  bool reached = true;
  for (size_t at = 0; reached; ++at) {
    Write(lines + "{\"step\": 30");
    const Tampered ran =
        RunTampered({.calls = {SYS_read, SYS_pread64, SYS_readv}, .at = at, .error = EIO}, [&] {
          auto log = run::TrainLog::Open(path_, {.run_id = "mine", .resumes = true});
          absl::Status status = log.status();
          if (status.ok()) status = (*log)->Begin();
          if (status.ok()) status = (*log)->CutAfter(2990);
          if (!status.ok()) return status.message().find(path_) != std::string::npos ? 1 : 2;
          return (*log)->last_step() == 2990 ? 0 : 3;
        });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    reached = ran.reached;
    EXPECT_EQ(ran.code, reached ? 1 : 0) << at;
    EXPECT_TRUE(!reached || Read().substr(0, lines.size()) == lines) << at;
  }
  EXPECT_EQ(Read(), lines.substr(0, lines.find("{\"step\": 2991")));
}

// 6 for a 2: all behind it would go.
TEST_F(TrainLogTest, AFlippedDigitOfAStepCutsNothing) {
  const std::string damaged =
      "{\"step\": 1, \"run_id\": \"mine\"}\n"
      "{\"step\": 6, \"run_id\": \"mine\"}\n"
      "{\"step\": 3, \"run_id\": \"mine\"}\n"
      "{\"step\": 4, \"run_id\": \"mine\"}\n";
  Write(damaged);
  auto log = run::TrainLog::Open(path_, {.run_id = "mine", .resumes = true});
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_TRUE((*log)->Begin().ok());
  const absl::Status status = (*log)->CutAfter(3);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("line 2"), std::string::npos) << status;
  EXPECT_EQ(Read(), damaged);
}

TEST_F(TrainLogTest, ATornLineOfAnotherRunStaysAndOnesOwnGoes) {
  const std::string line = "{\"step\": 1, \"run_id\": \"mine\"}\n";
  Write(line + "{\"step\": 2, \"run_");
  EXPECT_FALSE(Try({.run_id = "other", .resumes = true}).ok());
  const run::LogOwner owner{.run_id = "mine", .resumes = true};
  EXPECT_TRUE(Try(owner).ok());
  ASSERT_TRUE((*run::TrainLog::Open(path_, owner))->Begin().ok());
  EXPECT_EQ(Read(), line);
}

// Another process may write to it until the run is this one's.
TEST_F(TrainLogTest, WhatWasWrittenBetweenOpenAndBeginIsSeen) {
  const run::LogOwner owner{.run_id = "mine", .resumes = true};
  const auto line = [](int step) {
    return "{\"step\": " + std::to_string(step) + ", \"run_id\": \"mine\"}\n";
  };
  Write(line(1) + "{\"step\": 2, ");  // it is just being written
  auto log = run::TrainLog::Open(path_, owner);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ((*log)->last_step(), 1);
  Write(line(1) + line(2) + line(3));
  ASSERT_TRUE((*log)->Begin().ok());
  EXPECT_EQ((*log)->last_step(), 3);
  ASSERT_TRUE((*log)->AddMissing({{"step", 3}}).ok());
  ASSERT_TRUE((*log)->Append({{"step", 4}}).ok());
  EXPECT_EQ(Read(), line(1) + line(2) + line(3) + line(4));
  // Likewise one that was empty, of a new run.
  std::filesystem::remove(path_);
  log = run::TrainLog::Open(path_, {.run_id = "new"});
  ASSERT_TRUE(log.ok()) << log.status();
  Write(line(1));
  EXPECT_TRUE(absl::IsFailedPrecondition((*log)->Begin()));
  EXPECT_EQ(Read(), line(1));
}

TEST_F(TrainLogTest, TheLogOfARunThatIsReplacedGoesWhenTheNewOneBegins) {
  const run::LogOwner owner{.run_id = "new", .replaces = {"old"}};
  const std::string old = "{\"step\": 1, \"run_id\": \"old\"}\n{\"step\": 2, ";
  Write(old);
  auto log = run::TrainLog::Open(path_, owner);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(Read(), old);
  EXPECT_EQ((*log)->last_step(), 0);
  ASSERT_TRUE((*log)->Begin().ok());
  ASSERT_TRUE((*log)->Append({{"step", 1}}).ok());
  EXPECT_EQ(Read(), "{\"step\": 1, \"run_id\": \"new\"}\n");
  for (const char* text :
       {"what is this?\n", "what is this?", "{\"step\": 1, \"run_id\": \"old\"}\nwhat is this?\n",
        "{\"step\": 1, \"run_id\": \"third\"}\n", "{\"step\": 1}\n", "{\"optimizer\": {}}"}) {
    Write(text);
    EXPECT_FALSE(Try(owner).ok()) << text;
    EXPECT_EQ(Read(), text);
  }
}

TEST_F(TrainLogTest, LinesWithoutAnIdAreThoseOfARunFromBeforeThereWereIds) {
  const std::string old = "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"windows\": 4}\n";
  Write(old);
  EXPECT_FALSE(Try({.run_id = "mine", .resumes = true}).ok());
  EXPECT_FALSE(Try({.run_id = "mine", .resumes = true, .nameless_until = 1}).ok());
  {
    auto log = run::TrainLog::Open(path_, {.run_id = "mine", .resumes = true, .nameless_until = 2});
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_TRUE((*log)->Append({{"step", 3}}).ok());
  }
  EXPECT_EQ(Read(), old + "{\"step\": 3, \"run_id\": \"mine\"}\n");
  EXPECT_TRUE(Try({.run_id = "mine", .resumes = true, .nameless_until = 2}).ok());
  // Two runs, one after the other: which of them would be cut?
  Write(old + old);
  EXPECT_FALSE(Try({.run_id = "mine", .resumes = true, .nameless_until = 100}).ok());
  Write("what is this?\n");
  EXPECT_FALSE(Try({.run_id = "mine", .resumes = true, .nameless_until = 100}).ok());
}

TEST_F(TrainLogTest, CutsWhatComesAgainAndAddsWhatIsMissing) {
  auto log = run::TrainLog::Open(path_, {.run_id = "mine"});
  ASSERT_TRUE(log.ok()) << log.status();
  for (int step = 1; step <= 4; ++step) {
    ASSERT_TRUE((*log)->Append({{"step", step}}).ok());
    if (step % 2 == 0) {
      ASSERT_TRUE((*log)->Append({{"step", step}, {"windows", 1}}).ok());
    }
  }
  ASSERT_TRUE((*log)->CutAfter(2).ok());
  EXPECT_EQ((*log)->last_step(), 2);
  EXPECT_EQ((*log)->last_evaluation(), 2);
  ASSERT_TRUE((*log)->AddMissing({{"step", 2}}).ok());
  ASSERT_TRUE((*log)->AddMissing({{"step", 3}}).ok());
  EXPECT_EQ(Read(),
            "{\"step\": 1, \"run_id\": \"mine\"}\n{\"step\": 2, \"run_id\": \"mine\"}\n"
            "{\"step\": 2, \"windows\": 1, \"run_id\": \"mine\"}\n{\"step\": 3, \"run_id\": \"mine\"}\n");
}

TEST_F(TrainLogTest, APipeOrADeviceIsWrittenToAndNotLookedAt) {
  for (const bool resumes : {false, true}) {
    auto log = run::TrainLog::Open("/dev/null", {.run_id = "mine", .resumes = resumes});
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_TRUE((*log)->Append({{"step", 1}}).ok());
  }
}

// It would take lines until it is full, and then hold up the training for ever.
TEST_F(TrainLogTest, APipeThatNothingReadsIsRefused) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  for (const bool resumes : {false, true}) {
    const run::LogOwner owner{.run_id = "mine", .resumes = resumes};
    const absl::Status refused = run::TrainLog::Open(path_, owner).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_NE(refused.message().find("start its reader first"), std::string::npos) << refused;
    const int reader = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ASSERT_GE(reader, 0);
    {
      auto log = run::TrainLog::Open(path_, owner);
      ASSERT_TRUE(log.ok()) << log.status();
      ASSERT_TRUE((*log)->Begin().ok());
      ASSERT_TRUE((*log)->Append({{"step", 1}}).ok());
    }
    char line[64];
    EXPECT_GT(::read(reader, line, sizeof(line)), 0);
    EXPECT_EQ(::read(reader, line, sizeof(line)), 0) << "the end: nothing else has it open for writing";
    ::close(reader);
  }
}

TEST_F(TrainLogTest, OfTwoNewRunsOneHasTheLog) {
  {
    auto one = run::TrainLog::Open(path_, {.run_id = "one"});
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_FALSE(Try({.run_id = "other"}).ok());
    ASSERT_TRUE((*one)->Begin().ok());
    EXPECT_FALSE(Try({.run_id = "other"}).ok());
    ASSERT_TRUE((*one)->Append({{"step", 1}}).ok());
  }
  // Nor has one that goes on with it, or replaces it, while another does.
  const run::LogOwner goes_on{.run_id = "one", .resumes = true};
  auto first = run::TrainLog::Open(path_, goes_on), second = run::TrainLog::Open(path_, goes_on);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE((*first)->Begin().ok());
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    first->reset();
  });
  EXPECT_TRUE((*second)->Begin().ok()) << "one that ends is waited for";
  later.join();
}

}  // namespace
}  // namespace penstock::tools::train_log_test
