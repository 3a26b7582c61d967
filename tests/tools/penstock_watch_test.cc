// What a training says of itself while it runs, seen from outside: operations that hang, on a file system
// that is frozen; figures for Prometheus; where the time went.
#include <map>
#include <set>

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

// The samples of a page: name and labels -> value.
std::map<std::string, double> Samples(const std::string& page) {
  std::map<std::string, double> samples;
  for (const std::string& line : Lines(page)) {
    if (line.empty() || line[0] == '#') continue;
    const size_t end = line.rfind(' ');
    EXPECT_TRUE(samples.emplace(line.substr(0, end), std::stod(line.substr(end + 1))).second) << line;
  }
  return samples;
}

TEST_F(WatchCliTest, ThePrometheusFileHasTheFiguresOfTheLastCommit) {
  const std::string page = dir_ + "/run.prom", log = dir_ + "/log", report = dir_ + "/report";
  const Arguments arguments = Train(dir_ + "/state", {"--seq", "32", "--prometheus", page, "--log", log});
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "5", "--report", report}).code, 0);
  const json last = json::parse(Lines(ReadFile(log)).back()), ran = json::parse(ReadFile(report));
  const std::string labels = "{run_id=\"" + last["run_id"].get<std::string>() + "\",rank=\"0\"";
  const auto sample = [&](const char* name) {
    const auto all = Samples(ReadFile(page));
    const auto found = all.find(name + labels + "}");
    EXPECT_NE(found, all.end()) << name;
    return found == all.end() ? -1 : found->second;
  };
  EXPECT_EQ(sample("penstock_step"), 5);
  EXPECT_EQ(sample("penstock_loss"), last["loss"].get<double>());
  EXPECT_EQ(sample("penstock_learning_rate"), last["lr"].get<double>());
  EXPECT_EQ(sample("penstock_gradient_norm"), last["grad_norm"].get<double>());
  EXPECT_EQ(sample("penstock_tokens_total"), 5 * 2 * 32);
  EXPECT_GT(sample("penstock_seconds_total"), sample("penstock_step_seconds"));
  EXPECT_GT(sample("penstock_written_bytes_total"), 0);
  EXPECT_LE(sample("penstock_written_bytes_total"), ran["totals"]["nvme_write_bytes"].get<double>());
  EXPECT_GT(sample("penstock_peak_managed_bytes"), 0);
  EXPECT_EQ(Samples(ReadFile(page)).count("penstock_stall_seconds_total" + labels + ",cause=\"read\"}"), 1u);
  // Each figure is told with what it is, before its samples.
  std::set<std::string> told;
  for (const std::string& line : Lines(ReadFile(page))) {
    if (line.rfind("# TYPE ", 0) == 0) told.insert(line.substr(7, line.rfind(' ') - 7));
    if (line[0] != '#') {
      EXPECT_EQ(told.count(line.substr(0, line.find('{'))), 1u) << line;
    }
  }
  // Wear is counted across processes; what is of a process begins anew.
  const double before = sample("penstock_run_written_bytes_total");
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "6", "--resume"}).code, 0);
  EXPECT_EQ(sample("penstock_step"), 6);
  EXPECT_EQ(sample("penstock_tokens_total"), 2 * 32);
  EXPECT_GT(sample("penstock_run_written_bytes_total"), before);
  EXPECT_GE(sample("penstock_run_written_bytes_total"), sample("penstock_written_bytes_total"));
}

TEST_F(WatchCliTest, WithoutTheFiguresPlaceTrainingGoesOnAndSaysSoOnce) {
  const std::string place = dir_ + "/place", log = dir_ + "/log";
  std::filesystem::create_directory(place);
  const Arguments arguments = Train(dir_ + "/state", {"--seq", "32", "--log", log, "--prometheus"});
  EXPECT_EQ(Run(arguments + Arguments{dir_ + "/nowhere/run.prom", "--steps", "1"}).code, 2);
  Program program(dir_, arguments + Arguments{place + "/run.prom", "--steps", "60"});
  ASSERT_TRUE(WaitForLines(log, 2));
  program.Signal(SIGSTOP);
  EXPECT_LT(Lines(ReadFile(log)).size(), 50u) << "it was too fast";
  std::filesystem::remove_all(place);
  program.Signal(SIGCONT);
  const Ran ran = program.Wait();
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_THAT(ran.err, ContainsRegex("--prometheus .*/place/run.prom: .*; training goes on"));
  EXPECT_EQ(Lines(ReadFile(log)).size(), 60u);
}

TEST_F(WatchCliTest, OnAFullDiskTheOldFiguresStandAndTrainingGoesOn) {
  const aio::LoopDevice disk({.bytes = 8 << 20, .journal = false});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string page = disk.directory() + "/run.prom", log = dir_ + "/log";
  Program program(
      dir_, Train(dir_ + "/state", {"--seq", "32", "--log", log, "--prometheus", page, "--steps", "60"}));
  ASSERT_TRUE(WaitForLines(log, 2));
  program.Signal(SIGSTOP);
  ASSERT_TRUE(disk.Fill());
  EXPECT_LT(Lines(ReadFile(log)).size(), 50u) << "it was too fast";
  program.Signal(SIGCONT);
  const Ran ran = program.Wait();
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_THAT(ran.err, ContainsRegex("--prometheus .*No space left on device.*; training goes on"));
  EXPECT_THAT(Samples(ReadFile(page)), testing::SizeIs(testing::Gt(20u))) << "whole, of an earlier step";
  EXPECT_EQ(Lines(ReadFile(log)).size(), 60u);
}

TEST_F(WatchCliTest, TheBreakdownOfEachStepAddsUpToIt) {
  const std::string state = dir_ + "/state";
  const Ran ran =
      Run(Small(state, R"({"wall_clock_breakdown": true, "zero_optimization": {"offload_optimizer":
                                   {"device": "nvme", "nvme_path": "nvme"}}})",
                {"--steps", "6", "--dtype", "fp32"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<std::string> lines = Lines(ran.err);
  ASSERT_EQ(lines.size(), 6u) << ran.err;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::smatch found;
    ASSERT_TRUE(
        std::regex_match(lines[i], found,
                         std::regex("step ([0-9]+) time \\(ms\\) \\| fwd: ([0-9.]+) \\| bwd: ([0-9.]+) \\| "
                                    "step: ([0-9.]+)(.*) \\| all: ([0-9.]+)")))
        << lines[i];
    EXPECT_EQ(std::stoul(found[1]), i + 1);
    double sum = std::stod(found[2]) + std::stod(found[3]);
    EXPECT_GT(std::stod(found[2]), 0);
    EXPECT_GT(std::stod(found[3]), 0);
    const std::string waits = found[5];
    const std::regex wait(" \\| wait [a-z]+: ([0-9.]+)");
    for (std::sregex_iterator it(waits.begin(), waits.end(), wait), end; it != end; ++it)
      sum += std::stod((*it)[1]);
    // The first step also made the engine's first buffers; what is behind the last backward is no wait yet.
    EXPECT_LE(sum, std::stod(found[6]) * 1.02 + 20) << lines[i];
    EXPECT_GE(sum, std::stod(found[6]) * 0.1) << lines[i];
  }
  EXPECT_THAT(Run(Small(dir_ + "/other", R"({"wall_clock_breakdown": false})", {"--steps", "2"})).err,
              testing::Not(HasSubstr("time (ms)")));
}

}  // namespace
}  // namespace penstock::tools
