// What a training says of itself while it runs, seen from outside: operations that hang, on a file system
// that is frozen; figures for Prometheus; where the time went; what was computed, exchanged and
// written.
#include <map>
#include <set>

#include "tests/aio/loop_device.h"
#include "tests/tools/penstock_state.h"
#include "tests/tools/rank_programs.h"

namespace penstock::tools::penstock_watch_test {
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
  // Of one process and one run all counts are one.
  for (const char* name : {"penstock_written_bytes_total", "penstock_run_written_bytes_total"})
    EXPECT_EQ(sample(name), ran["totals"]["nvme_write_bytes"].get<double>()) << name;
  EXPECT_EQ(sample("penstock_read_bytes_total"), ran["totals"]["nvme_read_bytes"].get<double>());
  EXPECT_EQ(ran["totals"]["run_nvme_write_bytes"], ran["totals"]["nvme_write_bytes"]);
  // Steps are a part of it, and the first ones' state is no step's.
  int64_t in_steps = 0;
  for (const json& step : ran["steps"]) in_steps += step["nvme_write_bytes"].get<int64_t>();
  EXPECT_EQ(ran["totals"]["step_nvme_write_bytes"], in_steps);
  EXPECT_LT(in_steps, ran["totals"]["nvme_write_bytes"].get<int64_t>());
  EXPECT_EQ(ran["totals"]["steps"], 5);
  EXPECT_EQ(ran["totals"]["skipped_steps"], 0);
  EXPECT_GT(ran["totals"]["compute_seconds"], 0);
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
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "6", "--resume", "--report", report}).code, 0);
  const json again = json::parse(ReadFile(report))["totals"];
  EXPECT_EQ(sample("penstock_step"), 6);
  EXPECT_EQ(sample("penstock_written_bytes_total"), again["nvme_write_bytes"].get<double>());
  EXPECT_EQ(sample("penstock_run_written_bytes_total"), again["run_nvme_write_bytes"].get<double>());
  EXPECT_LT(again["nvme_write_bytes"], again["run_nvme_write_bytes"]);
  EXPECT_EQ(again["steps"], 1);
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

TEST_F(WatchCliTest, TheProfileOfAStepCountsItsMatrixProducts) {
  const std::string profile = dir_ + "/profile", report = dir_ + "/report";
  const Ran ran = Run(Small(dir_ + "/state",
                            R"({"zero_optimization": {}, "train_micro_batch_size_per_gpu": 2,
      "gradient_accumulation_steps": 2,
      "flops_profiler": {"enabled": true, "profile_step": 2, "top_modules": 2, "output_file": ")" +
                                profile + R"("}})",
                            {"--steps", "3", "--report", report}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("flops profile of step 2 in " + profile));
  // gpt-tiny: 4 layers of 64, 256 tokens. 4 sequences of 32.
  const int64_t matrices = 4 * (4 * 64 * 64 + 2 * 64 * 256) + 256 * 64, tokens = 4 * 32;
  const int64_t forward = 2 * matrices * tokens + 4 * (4 * 64 * (4 * 32 * 33 / 2));
  EXPECT_EQ(forward, 56'688'640);
  const std::string text = ReadFile(profile);
  EXPECT_THAT(text, ContainsRegex("flops profile of step 2: .* parameters, 128 tokens in sequences of 32"));
  EXPECT_THAT(text, ContainsRegex("  forward +56.69 MFLOP: "));
  EXPECT_THAT(text, ContainsRegex("  backward +113.4 MFLOP: "));
  EXPECT_THAT(text, ContainsRegex("  that is [0-9.]+% of the [0-9.]+ [GT]FLOP/s that a product of matrices|  "
                                  "other work disturbed the product of matrices"));
  EXPECT_THAT(text, ContainsRegex("  most time +[a-z0-9.]+ [0-9.e-]+ s, [a-z0-9.]+ "));
  for (const char* stage : {"embed", "h.0", "h.3", "loss"})
    EXPECT_THAT(text, ContainsRegex(std::string("\n  ") + stage + " +[0-9]+ +[0-9.]+ [M]*FLOP +[0-9]"))
        << text;
  EXPECT_THAT(text, ContainsRegex("\n  h.1 +49152 +13.12 MFLOP ")) << "2 x 49152 x 128 and its attention";
  const json said = json::parse(ReadFile(report));
  EXPECT_EQ(said["model_flops_per_step"].get<int64_t>(), 3 * forward);
  EXPECT_GT(said["model_flops_per_second"].get<double>(), 0);
  // A small model on a busy machine: the share is one, or there is none.
  const double product = said["product_flops_per_second"].get<double>();
  EXPECT_GT(product, 0);
  if (!said["mfu"].is_null()) {
    EXPECT_NEAR(said["mfu"].get<double>(), said["model_flops_per_second"].get<double>() / product, 1e-9);
  }

  // Without a file it is told; module_depth 0 is the model alone.
  const std::string brief =
      Run(Small(dir_ + "/other", R"({"flops_profiler": {"enabled": true, "module_depth": 0}})",
                {"--steps", "2"}))
          .err;
  EXPECT_THAT(brief, HasSubstr("flops profile of step 1: "));
  EXPECT_THAT(brief, testing::Not(HasSubstr("h.1")));
}

TEST_F(WatchCliTest, AProfileOfAStepThatNeverCameIsMissed) {
  const Ran ran = Run(Small(dir_ + "/state", R"({"flops_profiler": {"enabled": true, "profile_step": 7}})",
                            {"--steps", "2", "--report", dir_ + "/report"}));
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("flops_profiler.profile_step: step 7 was never reached, the last one was 2: "
                                 "no profile was made"));
  EXPECT_THAT(ran.err, testing::Not(HasSubstr("flops profile of step")));
}

TEST_F(WatchCliTest, ATraceNamesItsRun) {
  const std::string trace = dir_ + "/trace", log = dir_ + "/log", page = dir_ + "/page.html";
  ASSERT_EQ(Run(Train(dir_ + "/state", {"--seq", "32", "--steps", "3", "--trace", trace, "--log", log})).code,
            0);
  const json events = json::parse(ReadFile(trace));
  EXPECT_EQ(events[0]["args"]["run_id"], json::parse(Lines(ReadFile(log)).back())["run_id"]);
  EXPECT_EQ(Run({"report", log, trace, "--html", page}).code, 0);
  EXPECT_THAT(ReadFile(page), HasSubstr("The lanes of step 2"));
  WriteFile(dir_ + "/other.json", R"({"status": "ok", "run_id": "another"})");
  const Ran ran = Run({"report", dir_ + "/other.json", trace, "--html", page});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("no report or log here is of that run"));
}

TEST_F(WatchCliTest, APlansPageReplacesNothingThatItIsDrawnFrom) {
  const std::string config = dir_ + "/config.json";
  WriteFile(config, "{}");
  const Ran ran = Run({"plan", "--model", "gpt-tiny", "--config", config, "--html",
                       dir_ + "/../" + std::filesystem::path(dir_).filename().string() + "/config.json"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("this would replace " + config + ", that is read: give another name"));
  EXPECT_EQ(ReadFile(config), "{}");
}

TEST_F(WatchCliTest, WhatRanksExchangedIsATableAtTheEnd) {
  const Arguments arguments = Small(
      dir_ + "/state", R"({"zero_optimization": {}, "comms_logger": {"enabled": true}})", {"--steps", "2"});
  const std::vector<Ran> ranks = WaitForAll(StartRanks(dir_, {arguments, arguments}));
  for (const Ran& ran : ranks) ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ranks[0].err, ContainsRegex("exchanges of this rank +count +bytes +seconds"));
  EXPECT_THAT(ranks[0].err,
              ContainsRegex("all-gather weights +[1-9][0-9]* +[0-9.]+ [KM]iB +[0-9.e-]+ .*B/s"));
  EXPECT_THAT(ranks[0].err, ContainsRegex("reduce-scatter gradient +[1-9]"));
  EXPECT_THAT(ranks[0].err, ContainsRegex("exchange norms +2 +-"));
  EXPECT_THAT(ranks[1].err, testing::Not(HasSubstr("exchanges"))) << "one speaks for all";
  EXPECT_THAT(Run(Small(dir_ + "/alone", R"({"comms_logger": {"enabled": true}})", {"--steps", "1"})).err,
              HasSubstr("exchanges between ranks: none"));
}

TEST_F(WatchCliTest, AnElasticBatchIsToldAndTrainedByAnyNumberOfRanksThatCanShareIt) {
  const std::string elastic = R"({"elasticity": {"enabled": true, "max_train_batch_size": 13,
      "micro_batch_sizes": [2, 3], "max_gpus": 4}, "zero_optimization": {"offload_optimizer": {"device": "nvme",
      "nvme_path": "state"}}})";
  const std::string told = "elasticity: 12 sequences a step, for 1, 2, 3, 4 ranks; each of ";
  const Ran check = Run(Small("state", elastic, {"--check"}));
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_THAT(check.out, HasSubstr(told + "1 has --batch 3 --accumulate 4"));
  const std::string log = dir_ + "/log";
  Arguments arguments = {
      "train",  "--model", "gpt-tiny", "--dtype", "fp32",     "--threads",           "1",     "--quiet",
      "--data", text_,     "--seq",    "32",      "--config", dir_ + "/config.json", "--log", log};
  for (const Ran& ran : WaitForAll(StartRanks(
           dir_, std::vector<Arguments>(2, arguments + Arguments{"--steps", "2", "--offload", "none",
                                                                 "--checkpoint-dir", dir_ + "/kept"}))))
    ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(json::parse(Lines(ReadFile(log)).back())["tokens"], 12 * 32);
  // Goes on with one rank, and the same steps.
  const Ran one = Run(arguments + Arguments{"--steps", "3", "--resume", "--offload", "none",
                                            "--checkpoint-dir", dir_ + "/kept"});
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(json::parse(Lines(ReadFile(log)).back())["tokens"], 12 * 32);
  const Ran flag = Run(arguments + Arguments{"--batch", "2", "--check"});
  EXPECT_EQ(flag.code, 2);
  EXPECT_THAT(flag.err, HasSubstr("--batch: elasticity of --config chooses it"));
  // So many ranks cannot share it; whoever only plans is told what others would have.
  std::string four = elastic;
  four.replace(four.find("\"max_gpus\": 4"), 13, "\"min_gpus\": 4");
  const Ran refused = Run(Small(dir_ + "/four", four, {"--steps", "1"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("elasticity: 1 rank cannot share the batch of 12 evenly; start 4, 6"));
  EXPECT_THAT(Run(Small(dir_ + "/four", four, {"--check"})).out,
              HasSubstr("each of 4 (1 cannot share it) has --batch 3"));
}

TEST_F(WatchCliTest, ARunThatWouldWearItsDrivesTooMuchIsToldAndStopsInGoodOrder) {
  const auto arguments_of = [&](const std::string& state, const Arguments& more) {
    return Arguments{"train",     "--model", "gpt-small", "--data", text_,         "--dtype", "fp32",
                     "--threads", "1",       "--seq",     "16",     "--state-dir", state,     "--quiet"} +
           more;
  };
  const std::string state = dir_ + "/state", report = dir_ + "/report";
  ASSERT_EQ(Run(arguments_of(dir_ + "/plain", {"--steps", "4", "--report", report})).code, 0);
  const json plain = json::parse(ReadFile(report));
  double a_step = 0;
  for (const json& step : plain["steps"]) a_step = std::max(a_step, step["nvme_write_bytes"].get<double>());
  // Measuring the drive writes what it can in its time, 0.2 to 0.5 GB: less than six steps.
  ASSERT_GT(a_step, 1e8);
  const auto budget = [&](double bytes) {
    char text[64];
    std::snprintf(text, sizeof(text), R"({"penstock": {"wear_budget_tb": %.9e}})", bytes * 1e-12);
    return std::string(text);
  };
  WriteFile(dir_ + "/config.json", budget(11 * a_step));
  const Arguments arguments =
      arguments_of(state, {"--config", dir_ + "/config.json", "--steps", "20", "--log", dir_ + "/log"});
  const Ran ran = Run(arguments);
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_THAT(
      ran.err,
      ContainsRegex("wear_budget_tb: [0-9.e-]+ TB will have been written by the last step, more than"));
  EXPECT_THAT(ran.err, HasSubstr("--optimizer-states 8bit, of a new run: "));
  EXPECT_THAT(ran.err, HasSubstr("and half the --steps: "));
  EXPECT_THAT(ran.err, ContainsRegex(
                           "after step [0-9]+, which is committed in .*: penstock.wear_budget_tb: the run has"
                           " written [0-9.e-]+ TB to its drives, of [0-9.e-]+ TB that it may"));
  const size_t made = Lines(ReadFile(dir_ + "/log")).size();
  EXPECT_GE(made, 3u);
  EXPECT_LT(made, 20u);
  // What was written counts for those who go on, too: nothing is trained, and nothing is lost.
  const Ran again = Run(arguments + Arguments{"--resume"});
  EXPECT_EQ(again.code, 1);
  EXPECT_EQ(Lines(ReadFile(dir_ + "/log")).size(), made);
  WriteFile(dir_ + "/config.json", budget(1e12));
  EXPECT_EQ(Run(arguments + Arguments{"--resume", "--steps", std::to_string(made + 2)}).code, 0);
  EXPECT_EQ(Lines(ReadFile(dir_ + "/log")).size(), made + 2);
}

// State in memory is written to keep it: what the stop says is what the report counts.
TEST_F(WatchCliTest, TheBudgetOfWearCountsTheCheckpointThatARunEndsWith) {
  const std::string report = dir_ + "/report";
  const auto arguments_of = [&](const std::string& place, const Arguments& more) {
    return Train(dir_ + "/state",
                 {"--offload", "cpu", "--checkpoint-dir", dir_ + place, "--report", report}) +
           more;
  };
  ASSERT_EQ(Run(arguments_of("/plain", {"--steps", "1"})).code, 0);
  const auto kept = json::parse(ReadFile(report))["totals"]["nvme_write_bytes"].get<double>();
  ASSERT_GT(kept, 0);
  const auto budget = [&](double bytes) {
    WriteFile(dir_ + "/config.json", json{{"penstock", {{"wear_budget_tb", bytes * 1e-12}}}}.dump());
    return Arguments{"--config", dir_ + "/config.json"};
  };
  const Ran ran =
      Run(arguments_of("/often", budget(1.5 * kept)) + Arguments{"--steps", "20", "--checkpoint-every", "1"});
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("twice the --checkpoint-every: "));
  const auto written = json::parse(ReadFile(report))["totals"]["nvme_write_bytes"].get<double>();
  char told[64];
  std::snprintf(told, sizeof(told), "the run has written %.4g TB to its drives", written * 1e-12);
  EXPECT_THAT(ran.err, HasSubstr(told));
  // What it ends with is all that it writes: there is nothing to offer.
  const Ran once = Run(arguments_of("/once", budget(0.5 * kept)) + Arguments{"--steps", "3"});
  EXPECT_EQ(once.code, 0) << once.err;
  EXPECT_THAT(once.err,
              HasSubstr("what is kept at the end is more than is left; what writes less is not known: "
                        "raise the budget"));
}

}  // namespace
}  // namespace penstock::tools::penstock_watch_test
