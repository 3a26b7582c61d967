// What a training says of itself while it runs, seen from outside: operations that hang, on a file system
// that is frozen.
#include "tests/aio/loop_device.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools {
namespace {

using nlohmann::json;
using testing::ContainsRegex;
using testing::HasSubstr;
using namespace testing_support;

class WatchCliTest : public CliTest {
 protected:
  Arguments Small(const std::string& state, const std::string& config, const Arguments& more = {}) {
    WriteFile(dir_ + "/config.json", config);
    return Train(state, Arguments{"--seq", "32", "--config", dir_ + "/config.json"} + more);
  }
  // What stands on stderr by the time that it has `text`; empty: it does not come.
  static std::string SaidUntil(const Program& program, const std::string& text) {
    for (int i = 0; i < 6000; ++i) {
      std::string said = ReadFile(program.prefix() + ".err");
      if (said.find(text) != std::string::npos) return said;
      usleep(10'000);
    }
    return "";
  }
};

// Frozen until this goes.
class Frozen {
 public:
  explicit Frozen(const aio::LoopDevice& disk) : disk_(disk), frozen_(disk.Freeze()) {}
  ~Frozen() { Thaw(); }
  bool frozen() const { return frozen_; }
  void Thaw() {
    if (std::exchange(frozen_, false)) disk_.Thaw();
  }

 private:
  const aio::LoopDevice& disk_;
  bool frozen_;
};

TEST_F(WatchCliTest, ADriveThatHangsIsNamedOnStderrAndInTheLogAndTheRunGoesOn) {
  const aio::LoopDevice disk({.bytes = 32 << 20});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string state = disk.directory() + "/state", log = dir_ + "/log";
  const Arguments arguments =
      Small(state, R"({"penstock": {"watchdog_seconds": 0.5}})", {"--steps", "40", "--log", log});
  Program program(dir_, arguments);
  ASSERT_TRUE(WaitForLines(log, 2));
  Frozen frozen(disk);
  ASSERT_TRUE(frozen.frozen());
  const std::string said = SaidUntil(program, "stuck: ");
  EXPECT_THAT(said, ContainsRegex("stuck: [a-z ]+.* step [0-9]+: [0-9.]+ s on .*/state.*sign of life"));
  EXPECT_THAT(said, HasSubstr("the run waits (penstock.watchdog_abort_seconds would end it)"));
  frozen.Thaw();
  const Ran ran = program.Wait();
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("no longer stuck: "));
  // The log has it beside the steps, which are all there once.
  std::vector<int64_t> steps;
  size_t stuck = 0;
  for (const std::string& line : Lines(ReadFile(log))) {
    const json entry = json::parse(line);
    if (!entry.contains("stuck")) {
      steps.push_back(entry["step"]);
      continue;
    }
    ++stuck;
    EXPECT_EQ(entry["step"], steps.back());
    EXPECT_TRUE(entry["seconds"].is_number());
    EXPECT_TRUE(entry["run_id"].is_string());
  }
  EXPECT_GE(stuck, 2u);
  ASSERT_EQ(steps.size(), 40u);
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], static_cast<int64_t>(i) + 1);
  // Whoever reads such a log takes it: the run itself, and its page.
  EXPECT_EQ(Run(arguments + Arguments{"--resume", "--steps", "41"}).code, 0);
  EXPECT_EQ(Run({"report", log, "--html", dir_ + "/page.html"}).code, 0);
}

TEST_F(WatchCliTest, ARunThatHangsInTheKernelEndsItselfAndItsLastCommitStands) {
  const aio::LoopDevice disk({.bytes = 32 << 20});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string state = disk.directory() + "/state", log = dir_ + "/log";
  const Arguments arguments =
      Small(state, R"({"penstock": {"watchdog_seconds": 0.3, "watchdog_abort_seconds": 1}})", {"--log", log});
  Program program(dir_, arguments + Arguments{"--steps", "100000"});
  ASSERT_TRUE(WaitForLines(log, 2));
  Frozen frozen(disk);
  ASSERT_TRUE(frozen.frozen());
  const std::string said = SaidUntil(program, "ended by penstock.watchdog_abort_seconds");
  EXPECT_THAT(said, HasSubstr("the run ends itself after 1 s of that, and leaves the last committed step"));
  EXPECT_THAT(said, HasSubstr("the last committed step stands, --resume goes on from there"));
  // The kernel keeps the process until its drive answers.
  frozen.Thaw();
  const Ran ran = program.Wait();
  EXPECT_EQ(ran.code, 1);
  size_t logged = 0;
  for (const std::string& line : Lines(ReadFile(log))) logged += json::parse(line).contains("stuck") ? 0 : 1;
  const Ran rest = Run(
      arguments + Arguments{"--resume", "--steps", std::to_string(logged + 3), "--report", dir_ + "/report"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_GE(json::parse(ReadFile(dir_ + "/report"))["resumed_from_step"].get<size_t>(), logged);
}

}  // namespace
}  // namespace penstock::tools
