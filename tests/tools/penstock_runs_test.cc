// What a training leaves behind and tells of itself: the last step of a run without a drive, evaluations, its
// log, how it was stopped, what was changed when it was resumed.
#include <signal.h>
#include <sys/statfs.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_runs_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using namespace testing_support;

std::vector<json> Entries(const std::string& log, bool evaluations) {
  std::vector<json> entries;
  for (const std::string& line : Lines(ReadFile(log))) {
    const json entry = json::parse(line);
    if (entry.contains("windows") == evaluations) entries.push_back(entry);
  }
  return entries;
}

std::vector<double> Of(const std::vector<json>& entries, const char* key) {
  std::vector<double> values;
  for (const json& entry : entries) values.push_back(entry[key]);
  return values;
}

class RunsTest : public CliTest {
 protected:
  Arguments Small(const std::string& state, const Arguments& more) const {
    return Train(state, Arguments{"--seq", "32", "--batch", "1"} + more);
  }
  // Blocks until the program's stderr has the text; false after a minute.
  bool WaitForText(const std::string& path, const std::string& text) {
    for (int i = 0; i < 12000; ++i) {
      if (ReadFile(path).find(text) != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
};

TEST_F(RunsTest, WithoutADriveTheLastStepIsKeptWhereverItIsLookedFor) {
  const auto both = [&](const std::string& state, const Arguments& more) {
    Ran ran = Run(Small(state, Arguments{"--steps", "3", "--log", state + ".log"} + more));
    EXPECT_EQ(ran.code, 0) << ran.err;
    ran = Run(Small(state, Arguments{"--steps", "5", "--log", state + ".log", "--resume"} + more));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return Losses(state + ".log");
  };
  const std::vector<std::string> losses = both(dir_ + "/nvme", {});
  ASSERT_EQ(losses.size(), 5u);
  for (const std::string offload : {"none", "cpu"}) {
    SCOPED_TRACE(offload);
    const std::string state = dir_ + "/" + offload;
    EXPECT_EQ(both(state, {"--offload", offload}), losses);
    EXPECT_EQ(Inspect(state)["step"], 5);
    EXPECT_EQ(Inspect(state + "/checkpoints")["step"], 5);
    EXPECT_EQ(Run({"export", state, state + ".safetensors", "--quiet"}).code, 0);
    const Ran refused = Run(Small(state, {"--offload", offload, "--steps", "3"}));
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, AllOf(HasSubstr("step 5"), HasSubstr("--resume"), HasSubstr("--overwrite")));
  }
  // The drive's own run wrote nothing twice.
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/nvme/checkpoints"));
  // A run with a drive does not pass over it either.
  const Ran drive = Run(Small(dir_ + "/cpu", {"--resume", "--steps", "6"}));
  EXPECT_EQ(drive.code, 2);
  EXPECT_THAT(drive.err, HasSubstr("--checkpoint-dir " + dir_ + "/cpu/checkpoints"));
}

TEST_F(RunsTest, AStopKeepsWhatWasTrainedAndSaysWhere) {
  for (const std::string offload : {"nvme", "cpu"}) {
    SCOPED_TRACE(offload);
    const std::string state = dir_ + "/" + offload, log = state + ".log", report = state + ".json";
    Program stopped(
        dir_, Small(state, {"--offload", offload, "--steps", "1000000", "--log", log, "--report", report}));
    ASSERT_TRUE(WaitForLines(log, 3));
    // As launchers do: both, and one of them twice.
    stopped.Signal(SIGINT);
    stopped.Signal(SIGTERM);
    stopped.Signal(SIGINT);
    const Ran ran = stopped.Wait();
    ASSERT_EQ(ran.code, 0) << ran.err;
    const json told = json::parse(ReadFile(report));
    EXPECT_THAT(told["stopped_by"].get<std::string>(), testing::AnyOf("SIGINT", "SIGTERM"));
    EXPECT_EQ(told["status"], "ok");
    const size_t done = Lines(ReadFile(log)).size();
    EXPECT_EQ(Inspect(state)["step"], done);
    EXPECT_THAT(ran.err, HasSubstr(": stopping after this step"));
    EXPECT_THAT(ran.err,
                HasSubstr("after step " + std::to_string(done) +
                          (offload == "cpu" ? ", which is kept in " : ", which is committed in ") + state));
    // One id for report and log, also after resuming.
    const Ran rest = Run(Small(state, {"--offload", offload, "--resume", "--steps", std::to_string(done + 2),
                                       "--log", log, "--report", report}));
    ASSERT_EQ(rest.code, 0) << rest.err;
    const json again = json::parse(ReadFile(report));
    EXPECT_TRUE(again["stopped_by"].is_null());
    EXPECT_EQ(again["run_id"], told["run_id"]);
    EXPECT_EQ(Lines(ReadFile(log)).size(), done + 2);
    for (const json& step : Entries(log, false)) EXPECT_EQ(step["run_id"], told["run_id"]);
  }
}

TEST_F(RunsTest, ASecondSignalAfterAWhileStopsAtOnce) {
  const std::string model = dir_ + "/model.json";
  WriteFile(model, R"({"n_layer": 2, "n_embd": 512, "n_head": 8, "n_positions": 128, "vocab_size": 256})");
  // Steps that take longer than anybody waits.
  Arguments arguments = Train(dir_ + "/state", {"--steps", "3", "--batch", "16", "--accumulate", "8"});
  arguments[2] = model;
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--quiet"));
  Program busy(dir_, arguments);
  const std::string err = busy.prefix() + ".err";
  ASSERT_TRUE(WaitForText(err, "step 0/3"));
  busy.Signal(SIGTERM);
  ASSERT_TRUE(WaitForText(err, "SIGTERM: stopping after this step")) << "it is acknowledged at once";
  EXPECT_FALSE(busy.EndsWithin(1.6)) << "the step was to be finished";
  busy.Signal(SIGTERM);
  const Ran ran = busy.Wait();
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("stopped at once"));
}

TEST_F(RunsTest, APlaceThatCannotHoldTheLastStepIsRefusedBeforeTheTraining) {
  std::vector<Arguments> arguments = {
      Small("unused", {"--offload", "cpu", "--steps", "2", "--checkpoint-dir", text_ + "/below"})};
  struct statfs info {};
  constexpr long kTmpfs = 0x01021994;
  const std::string tmpfs = "/dev/shm/penstock_runs_test." + std::to_string(::getpid());
  if (::statfs("/dev/shm", &info) == 0 && info.f_type == kTmpfs)
    arguments.push_back(Small("unused", {"--offload", "none", "--steps", "2", "--checkpoint-dir", tmpfs}));
  for (const Ran& ran : RunAll(arguments)) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("--checkpoint-dir"), HasSubstr("give another")));
  }
  std::filesystem::remove_all(tmpfs);
}

// The newest checkpoint is there and cannot be read: nothing is started over, which would remove the older
// ones.
TEST_F(RunsTest, ADamagedCheckpointIsNoReasonToStartOver) {
  const std::string state = dir_ + "/cpu", checkpoints = state + "/checkpoints";
  const Arguments arguments = {"--offload", "cpu", "--checkpoint-every", "2"};
  Ran ran = Run(Small(state, Arguments{"--steps", "4"} + arguments));
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::filesystem::resize_file(checkpoints + "/step-00000004/penstock.store", 0);
  ran = Run(Small(state, Arguments{"--steps", "6", "--resume"} + arguments));
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, AllOf(HasSubstr("step-00000004"), HasSubstr("damaged")));
  EXPECT_EQ(Inspect(checkpoints + "/step-00000002")["step"], 2);
  std::filesystem::remove_all(checkpoints + "/step-00000004");
  ran = Run(Small(state, Arguments{"--steps", "6", "--resume"} + arguments));
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Inspect(checkpoints)["step"], 6);
}

// An evaluation that fails after the last step costs the evaluation.
TEST_F(RunsTest, WhatIsWrongAfterTheTrainingCostsNoModel) {
  std::string tokens, foreign;
  for (int i = 0; i < 4000; ++i) {
    for (std::string* file : {&tokens, &foreign}) {
      const uint16_t token = file == &foreign && i == 2000 ? 60000 : static_cast<uint16_t>(i % 200);
      file->append(reinterpret_cast<const char*>(&token), sizeof(token));
    }
  }
  WriteFile(dir_ + "/train.bin", tokens);
  WriteFile(dir_ + "/eval.bin", foreign);
  const std::string state = dir_ + "/cpu";
  const Ran ran = Run({"train",
                       "--model",
                       "gpt-tiny",
                       "--vocab",
                       "256",
                       "--data",
                       dir_ + "/train.bin",
                       "--eval-data",
                       dir_ + "/eval.bin",
                       "--offload",
                       "cpu",
                       "--state-dir",
                       state,
                       "--seq",
                       "32",
                       "--batch",
                       "1",
                       "--steps",
                       "3",
                       "--quiet"});
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_EQ(Inspect(state + "/checkpoints")["step"], 3);
}

// A config without a scheduler trains at one rate, which its user may change.
TEST_F(RunsTest, AConstantRateMayBeChangedOnResume) {
  WriteFile(dir_ + "/ds.json", R"({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})");
  const std::string state = dir_ + "/nvme", log = dir_ + "/log";
  const Arguments arguments = {"--config", dir_ + "/ds.json", "--log", log};
  Ran ran = Run(Small(state, Arguments{"--steps", "2"} + arguments));
  ASSERT_EQ(ran.code, 0) << ran.err;
  ran = Run(Small(state, Arguments{"--steps", "4", "--resume", "--lr", "1e-4"} + arguments));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(Of(Entries(log, false), "lr"), ElementsAre(1e-3, 1e-3, 1e-4, 1e-4));
}

TEST_F(RunsTest, FilesThatCannotBeWrittenAreFoundBeforeTheTraining) {
  const std::string state = dir_ + "/state";
  std::vector<Arguments> arguments;
  for (const char* flag : {"--report", "--log", "--trace"}) {
    arguments.push_back(Small(state, {"--steps", "1", flag, dir_ + "/nowhere/file"}));
    arguments.push_back(Small(state, {"--steps", "1", flag, dir_}));
  }
  for (const Ran& ran : RunAll(arguments)) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("cannot be written"));
  }
  EXPECT_FALSE(std::filesystem::exists(state));
}

TEST_F(RunsTest, EvaluationsAreOfTheWholeTextAndTheSameForEveryBatch) {
  std::set<std::string> losses;
  const std::string held_out = dir_ + "/held-out";
  WriteFile(held_out, ReadFile(text_).substr(0, 41 * 32 + 5));
  for (const std::string batch : {"1", "3", "16"}) {
    SCOPED_TRACE(batch);
    const std::string log = dir_ + "/log-" + batch, report = dir_ + "/report-" + batch;
    // At rate 0 the model is the same, whatever it is trained on.
    const Ran ran =
        Run(Train(dir_ + "/state-" + batch,
                  {"--seq", "32", "--batch", batch, "--steps", "5", "--lr", "0", "--weight-decay", "0",
                   "--eval-data", held_out, "--eval-every", "2", "--log", log, "--report", report}));
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.err, "");
    const json told = json::parse(ReadFile(report));
    ASSERT_EQ(told["evaluations"].size(), 3u);
    double seconds = 0;
    for (const json& evaluation : told["evaluations"]) {
      EXPECT_EQ(evaluation["windows"], 41);
      EXPECT_GT(evaluation["seconds"].get<double>(), 0);
      seconds += evaluation["seconds"].get<double>();
    }
    EXPECT_EQ(Of(told["evaluations"], "step"), (std::vector<double>{2, 4, 5}));
    EXPECT_GT(told["totals"]["evaluation_seconds"].get<double>(), seconds / 2) << "the last one too";
    EXPECT_EQ(Of(Entries(log, true), "step"), (std::vector<double>{2, 4, 5}));
    EXPECT_EQ(Of(Entries(log, false), "step"), (std::vector<double>{1, 2, 3, 4, 5}));
    // Each after its step.
    const std::vector<std::string> lines = Lines(ReadFile(log));
    EXPECT_TRUE(json::parse(lines[2]).contains("windows"));
    for (const std::string& line : lines) EXPECT_EQ(json::parse(line)["run_id"], told["run_id"]);
    for (const json& evaluation : Entries(log, true)) losses.insert(evaluation["loss"].dump());
  }
  EXPECT_EQ(losses.size(), 1u);
  const Ran fewer = Run(Small(dir_ + "/fewer", {"--steps", "1", "--eval-data", held_out, "--eval-windows",
                                                "7", "--report", dir_ + "/fewer.json"}));
  ASSERT_EQ(fewer.code, 0) << fewer.err;
  EXPECT_EQ(json::parse(ReadFile(dir_ + "/fewer.json"))["evaluations"][0]["windows"], 7);
}

TEST_F(RunsTest, EvaluationsInTheLogAreNeitherLostNorDoubled) {
  const auto arguments = [&](const std::string& name) {
    return Small(dir_ + "/" + name, {"--steps", "24", "--eval-data", text_, "--eval-every", "2",
                                     "--eval-windows", "40", "--log", dir_ + "/" + name + ".log"});
  };
  const auto without_times = [&](const std::string& name) {
    std::vector<std::string> lines;
    for (const std::string& line : Lines(ReadFile(dir_ + "/" + name + ".log"))) {
      const json entry = json::parse(line);
      lines.push_back(entry["step"].dump() + (entry.contains("windows") ? " evaluation " : " ") +
                      entry["loss"].dump());
    }
    return lines;
  };
  ASSERT_EQ(Run(arguments("whole")).code, 0);
  ASSERT_EQ(without_times("whole").size(), 36u);
  for (const size_t lines : {5u, 13u, 21u}) {
    Program killed(dir_, arguments("killed") + (lines == 5 ? Arguments{} : Arguments{"--resume"}));
    ASSERT_TRUE(WaitForLines(dir_ + "/killed.log", lines));
    killed.Signal(SIGKILL);
    killed.Wait();
  }
  // Twice: the second one has nothing to do, and says nothing twice.
  for (int i = 0; i < 2; ++i) {
    const Ran rest = Run(arguments("killed") + Arguments{"--resume"});
    ASSERT_EQ(rest.code, 0) << rest.err;
    EXPECT_EQ(without_times("killed"), without_times("whole"));
  }
  // A kill between a step and its evaluation: the line that is missing comes first.
  std::string log = ReadFile(dir_ + "/killed.log");
  log.resize(log.rfind('\n', log.size() - 2) + 1);
  WriteFile(dir_ + "/killed.log", log);
  ASSERT_EQ(Run(arguments("killed") + Arguments{"--resume"}).code, 0);
  EXPECT_EQ(without_times("killed"), without_times("whole"));
}

TEST_F(RunsTest, ALogBelongsToOneRun) {
  const std::string a = dir_ + "/a", b = dir_ + "/b", log = dir_ + "/log";
  const Arguments kept = {"--checkpoint-dir", dir_ + "/kept", "--checkpoint-every", "2"};
  ASSERT_EQ(Run(Small(a, Arguments{"--steps", "5", "--log", log} + kept)).code, 0);
  ASSERT_EQ(Run(Small(b, {"--steps", "3"})).code, 0);
  const std::string before = ReadFile(log);
  for (const Ran& ran :
       RunAll({Small(dir_ + "/new", {"--steps", "2", "--log", log}),
               Small(b, {"--steps", "6", "--log", log, "--resume"}),
               // Going on from nothing without a drive: another run.
               Small(dir_ + "/cpu", {"--offload", "cpu", "--steps", "2", "--log", log, "--resume"})})) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("--log " + log), HasSubstr("move that one away")));
  }
  EXPECT_EQ(ReadFile(log), before);
  // Its own checkpoint cuts what comes again.
  std::filesystem::remove_all(a);
  const Ran back = Run(Small(a, Arguments{"--steps", "5", "--log", log, "--resume"} + kept));
  ASSERT_EQ(back.code, 0) << back.err;
  EXPECT_EQ(Of(Entries(log, false), "step"), (std::vector<double>{1, 2, 3, 4, 5}));
}

TEST_F(RunsTest, ARunInMemoryThatLeftNothingStartsItsLogOver) {
  const std::string state = dir_ + "/state", log = dir_ + "/log";
  const Arguments arguments = Small(state, {"--offload", "cpu", "--steps", "30", "--log", log});
  Program killed(dir_, arguments);
  ASSERT_TRUE(WaitForLines(log, 2));
  killed.Signal(SIGKILL);
  killed.Wait();
  const Ran ran = Run(arguments + Arguments{"--resume"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(Lines(ReadFile(log)).size(), 30u);
}

TEST_F(RunsTest, WhatAUserChangesOnResumeIsToldAndRecorded) {
  const std::string state = dir_ + "/state", log = dir_ + "/log", other = dir_ + "/other";
  WriteFile(other, ReadFile(text_).substr(1));
  const auto resume = [&](const std::string& steps, const Arguments& more) {
    Arguments arguments = {"train", "--state-dir", state,     "--resume", "--quiet",
                           "--log", log,           "--steps", steps};
    const bool data = std::find(more.begin(), more.end(), "--data") != more.end();
    return Run(arguments + (data ? Arguments{} : Arguments{"--data", text_}) + more);
  };
  const auto lr = [&](size_t step) { return Entries(log, false)[step - 1]["lr"].get<double>(); };
  ASSERT_EQ(Run(Small(state, {"--steps", "4", "--lr", "0.001", "--log", log})).code, 0);

  Ran ran = resume("6", {"--lr", "0.004", "--clip", "0.5"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("changed from step 5 on: lr 0.001 -> 0.004 (--lr)"));
  EXPECT_THAT(ran.err, HasSubstr("changed from step 5 on: clip 1.0 -> 0.5 (--clip)"));
  EXPECT_EQ(Lines(ran.err).size(), 2u) << ran.err;
  EXPECT_DOUBLE_EQ(lr(6), 0.0004) << "beyond the horizon, a tenth";
  // Nobody says anything: it stays so, and repeating it is no change.
  for (const auto& [steps, more] :
       std::vector<std::pair<std::string, Arguments>>{{"7", {}}, {"8", {"--lr", "0.004", "--clip", "0.5"}}}) {
    ran = resume(steps, more);
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.err, "");
    EXPECT_DOUBLE_EQ(lr(8 - (steps == "7")), 0.0004);
  }
  EXPECT_EQ(Inspect(state)["run"]["clip"], 0.5);

  ran = resume("9", {"--batch", "3", "--accumulate", "2", "--seq", "16", "--weight-decay", "0.1"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* text :
       {"batch 1 -> 3 (--batch)", "accumulate 1 -> 2", "seq 32 -> 16", "weight_decay 0.01 -> 0.1"})
    EXPECT_THAT(ran.err, HasSubstr(text));
  EXPECT_EQ(Entries(log, false).back()["tokens"], 3 * 2 * 16);
  ran = resume("10", {"--data", other});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("changed from step 10 on: the text"));
  EXPECT_EQ(Entries(log, false).back()["tokens"], 3 * 2 * 16);
  ran = resume("11", {"--data", other});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.err, "");

  // What the state is made of stays.
  for (const Arguments& arguments :
       {Arguments{"--seed", "2"}, {"--dtype", "bf16"}, {"--optimizer-states", "bf16"}}) {
    ran = resume("12", arguments);
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err,
                AllOf(HasSubstr(arguments[0] + " "), HasSubstr("created with"), HasSubstr("--state-dir")));
  }
  EXPECT_EQ(Inspect(state)["step"], 11);
}

TEST_F(RunsTest, AWarmupOnResumeIsTakenAndTheHorizonStays) {
  const auto run = [&](const std::string& name, const Arguments& more) {
    const Ran ran = Run(Small(dir_ + "/" + name, Arguments{"--log", dir_ + "/" + name + ".log"} + more));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran;
  };
  // Stopped before its first step is over: all of its steps are those after the change.
  run("whole", {"--steps", "12", "--warmup", "6"});
  run("short",
      {"--steps", "12", "--warmup", "1", "--checkpoint-dir", dir_ + "/kept", "--checkpoint-every", "3"});
  const std::vector<double> whole = Of(Entries(dir_ + "/whole.log", false), "lr");
  const Arguments back = {"--checkpoint-dir", dir_ + "/kept/step-00000003", "--resume"};
  const Ran ran = run("back", back + Arguments{"--warmup", "6"});
  EXPECT_THAT(ran.err, HasSubstr("changed from step 4 on: warmup 1 -> 6 (--warmup)"));
  const std::vector<double> rates = Of(Entries(dir_ + "/back.log", false), "lr");
  EXPECT_EQ(std::vector<double>(rates.begin() + 1, rates.end()),
            std::vector<double>(whole.begin() + 3, whole.end()));
  // More steps change no rate before the horizon.
  run("more", back + Arguments{"--steps", "15"});
  const std::vector<double> more = Of(Entries(dir_ + "/more.log", false), "lr");
  const std::vector<double> first = Of(Entries(dir_ + "/short.log", false), "lr");
  ASSERT_EQ(more.size(), 13u);
  for (size_t step = 3; step <= 12; ++step) EXPECT_EQ(more[step - 3], first[step - 1]) << step;
  EXPECT_EQ(more[12], first[11]);
  Arguments loud = Small(dir_ + "/more", {"--resume", "--steps", "16"});
  loud.erase(std::find(loud.begin(), loud.end(), "--quiet"));
  EXPECT_THAT(Run(loud).out, HasSubstr("made for 12 steps"));
}

TEST_F(RunsTest, AConfigThatSaysSomethingElseChangesTheRunAndAFlagThatWonOverItDoesNot) {
  const std::string state = dir_ + "/state", config = dir_ + "/config.json", log = dir_ + "/log";
  const auto write = [&](const std::string& lr, const std::string& clip, const std::string& scheduler) {
    WriteFile(config, R"({"optimizer": {"type": "AdamW", "params": {"lr": )" + lr +
                          R"(, "betas": [0.9, 0.95]}}, )" + R"("gradient_clipping": )" + clip +
                          R"(, "scheduler": {"type": "WarmupLR", "params": )" + scheduler + "}}");
  };
  const auto resume = [&](const std::string& steps) {
    return Run({"train", "--data", text_, "--state-dir", state, "--resume", "--quiet", "--log", log,
                "--config", config, "--steps", steps});
  };
  const std::string scheduler = R"({"warmup_num_steps": 2, "warmup_type": "linear"})";
  write("0.001", "1.0", scheduler);
  ASSERT_EQ(Run(Small(state, {"--steps", "4", "--config", config, "--lr", "0.002", "--log", log})).code, 0);
  Ran ran = resume("5");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.err, "") << "the file says what it said";
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.002);
  write("0.001", "0.25", scheduler);
  ran = resume("6");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("changed from step 6 on: clip 1.0 -> 0.25 (gradient_clipping in --config)"));
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  ran = resume("7");
  EXPECT_EQ(ran.err, "") << "it is recorded";
  write("0.008", "0.25", scheduler);
  ran = resume("8");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("lr 0.002 -> 0.008 (optimizer.params.lr in --config)"));
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.008);
  write("0.008", "0.25", R"({"warmup_num_steps": 2, "warmup_max_lr": 0.001})");
  ran = resume("9");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("changed from step 9 on: scheduler "));
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.001);
  EXPECT_EQ(resume("10").err, "");
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.001);
  // What the state is made of is named by its key.
  std::string lion = ReadFile(config);
  lion.replace(lion.find("AdamW"), 5, "Lion");
  WriteFile(config, lion);
  ran = resume("11");
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, AllOf(HasSubstr("optimizer.type \"Lion\""), HasSubstr("created with \"AdamW\"")));
}

// A key that the config has lost is what it is without it: told once, and recorded.
TEST_F(RunsTest, WhatAConfigNoLongerSaysIsChangedAndTold) {
  const std::string state = dir_ + "/state", config = dir_ + "/config.json", log = dir_ + "/log";
  int64_t steps = 2;
  const auto go_on = [&](const std::string& text, const Arguments& more) {
    WriteFile(config, text);
    const Ran ran = Run(Arguments{"train", "--data", text_, "--state-dir", state, "--resume", "--quiet",
                                  "--log", log, "--steps", std::to_string(++steps)} +
                        (text.empty() ? Arguments{} : Arguments{"--config", config}) + more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.err;
  };
  const std::string adam = R"("optimizer": {"type": "AdamW", "params": {"lr": 0.004, "weight_decay": 0.25}})";
  const std::string power = R"("penstock": {"sync": "power", "durability": "checkpoint"})";
  WriteFile(config, "{" + adam + R"(, "gradient_clipping": 0.25, "scheduler": {"type": "WarmupLR",
    "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 2}}, )" +
                        power + "}");
  ASSERT_EQ(Run(Small(state, {"--steps", "2", "--config", config, "--log", log})).code, 0);
  EXPECT_EQ(Inspect(state)["run"]["sync"], "power");
  EXPECT_EQ(Inspect(state)["run"]["durability"], "checkpoint");
  EXPECT_EQ(Inspect(state)["run"]["data_order"], "a hash of seed, step and row");
  // Nothing is said: nothing changes, though the defaults are others.
  EXPECT_EQ(go_on("", {}), "");
  EXPECT_EQ(Inspect(state)["run"]["sync"], "power");
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.002);

  const std::string told = go_on("{" + adam + "}", {});
  EXPECT_THAT(
      told,
      HasSubstr("changed from step 4 on: clip 0.25 -> 1.0 (no gradient_clipping in --config any more)"));
  EXPECT_THAT(told, HasSubstr("(no scheduler in --config any more)"));
  EXPECT_THAT(told, HasSubstr("sync \"power\" -> \"process\" (no penstock.sync in --config any more)"));
  EXPECT_THAT(
      told, HasSubstr("durability \"checkpoint\" -> \"step\" (no penstock.durability in --config any more)"));
  EXPECT_EQ(Lines(told).size(), 4u) << told;
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.004) << "the optimizer's, all the time";
  EXPECT_EQ(go_on("{" + adam + "}", {}), "") << "it is recorded";
  EXPECT_EQ(Inspect(state)["run"]["clip"], 1.0);
  EXPECT_EQ(Inspect(state)["run"]["sync"], "process");

  EXPECT_THAT(go_on("{" + adam + ", " + power + "}", {}),
              AllOf(HasSubstr("sync \"process\" -> \"power\" (penstock.sync in --config)"),
                    HasSubstr("durability \"step\" -> \"checkpoint\" (penstock.durability in --config)")));
  const std::string bare = go_on(R"({"optimizer": {"type": "AdamW"}, )" + power + "}", {});
  EXPECT_THAT(bare, AllOf(HasSubstr("lr 0.004 -> 0.001 (no optimizer.params.lr in --config any more)"),
                          HasSubstr("weight_decay 0.25 -> 0.0 (no optimizer.params.weight_decay")));
  EXPECT_EQ(Lines(bare).size(), 2u) << bare;
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.001);
}

// A flag in an open place of the config is no word of the config.
TEST_F(RunsTest, AFlagThatFillsAKeyIsNotRecordedAsTheConfigsWord) {
  const std::string state = dir_ + "/state", config = dir_ + "/config.json", log = dir_ + "/log";
  const auto lr = [&](const std::string& text) {
    WriteFile(config, R"({"optimizer": {"type": "AdamW", "params": {"lr": )" + text + "}}}");
  };
  const Arguments arguments = {"--config", config, "--log", log};
  lr(R"("auto")");
  ASSERT_EQ(Run(Small(state, Arguments{"--steps", "2", "--lr", "0.002"} + arguments)).code, 0);
  EXPECT_FALSE(Inspect(state)["run"]["config"].contains("lr"));
  ASSERT_EQ(Run(Small(state, Arguments{"--steps", "3", "--lr", "0.004", "--resume"} + arguments)).code, 0);
  lr("0.002");
  const Ran ran = Run(Small(state, Arguments{"--steps", "4", "--resume"} + arguments));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("lr 0.004 -> 0.002 (optimizer.params.lr in --config)"));
  EXPECT_EQ(Of(Entries(log, false), "lr").back(), 0.002);
}

TEST_F(RunsTest, ALossScaleThatTheConfigChangesIsTakenToldAndRecorded) {
  const std::string state = dir_ + "/state", config = dir_ + "/config.json", log = dir_ + "/log";
  const auto fp16 = [&](const std::string& keys) {
    WriteFile(config, R"({"fp16": {"enabled": true)" + keys + "}}");
  };
  const auto scale = [&] { return Of(Entries(log, false), "loss_scale").back(); };
  const auto go_on = [&](const std::string& steps) {
    const Ran ran = Run({"train", "--data", text_, "--state-dir", state, "--resume", "--quiet", "--log", log,
                         "--steps", steps, "--config", config});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.err;
  };
  fp16(R"(, "initial_scale_power": 8)");
  Arguments arguments = Small(state, {"--steps", "2", "--config", config, "--log", log});
  *std::find(arguments.begin(), arguments.end(), "fp32") = "fp16";
  ASSERT_EQ(Run(arguments).code, 0);
  EXPECT_EQ(scale(), 256);
  EXPECT_EQ(go_on("3"), "");
  // The window alone: the scale stays where it is, and rises sooner.
  fp16(R"(, "initial_scale_power": 8, "loss_scale_window": 2)");
  EXPECT_THAT(
      go_on("8"),
      HasSubstr("changed from step 4 on: loss scale: window 1000 -> 2 (loss scale of fp16 in --config)"));
  EXPECT_GT(scale(), 256);
  fp16(R"(, "loss_scale": 32)");
  EXPECT_THAT(go_on("9"),
              AllOf(HasSubstr("dynamic true -> false"), HasSubstr("initial_scale 256.0 -> 32.0")));
  EXPECT_EQ(scale(), 32);
  EXPECT_EQ(go_on("10"), "");
  EXPECT_EQ(scale(), 32);
  fp16("");
  EXPECT_THAT(go_on("11"), HasSubstr("dynamic false -> true (no loss scale of fp16 in --config any more)"));
  EXPECT_EQ(scale(), 65536);
}

TEST_F(RunsTest, GradientsThatStayNotFiniteEndTheRunAndHarmNothing) {
  for (const std::string offload : {"nvme", "cpu"}) {
    SCOPED_TRACE(offload);
    const std::string state = dir_ + "/" + offload, report = state + ".json";
    // Every update multiplies the weights by a thousand billion.
    const Arguments arguments = {"--offload", offload, "--report", report};
    const Ran ran = Run(Small(
        state,
        Arguments{"--steps", "100", "--lr", "1e6", "--weight-decay", "1e6", "--warmup", "0"} + arguments));
    EXPECT_EQ(ran.code, 1);
    EXPECT_THAT(Lines(ran.err).back(),
                AllOf(HasSubstr("last 10 steps"), HasSubstr("not finite"), HasSubstr("--lr")));
    json told = json::parse(ReadFile(report));
    EXPECT_EQ(told["status"], "failed");
    const int64_t step = told["steps"].back()["step"];
    EXPECT_LT(step, 100);
    EXPECT_EQ(Inspect(state)["step"], step);
    EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
    // A few more, none of which does anything.
    const Ran more =
        Run(Small(state, Arguments{"--resume", "--steps", std::to_string(step + 3)} + arguments));
    EXPECT_EQ(more.code, 1);
    EXPECT_THAT(Lines(more.err).back(), HasSubstr("last 3 steps"));
    EXPECT_EQ(Inspect(state)["step"], step + 3);
  }
}

TEST_F(RunsTest, AStateThatIsTrainedPointsToItsCheckpoints) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept", log = dir_ + "/log";
  Program training(dir_, Small(state, {"--steps", "1000000", "--log", log, "--checkpoint-dir", kept,
                                       "--checkpoint-every", "20", "--checkpoint-keep", "50"}));
  ASSERT_TRUE(WaitForLines(log, 2));
  while (!std::filesystem::exists(kept + "/latest")) ASSERT_FALSE(training.EndsWithin(0.02));
  for (const Ran& ran : RunAll({{"sample", state, "--tokens", "2"}, {"export", state, dir_ + "/out"}})) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("in use by another process"), HasSubstr(kept + "/step-")));
  }
  EXPECT_EQ(Run({"export", kept, dir_ + "/out", "--quiet"}).code, 0);
  training.Signal(SIGTERM);
  EXPECT_EQ(training.Wait().code, 0);
}

// One directory of checkpoints is one run's at a time, whichever way it keeps them.
TEST_F(RunsTest, ADirectoryOfCheckpointsIsOneRunsAtATime) {
  const std::string state = dir_ + "/state", kept = state + "/checkpoints", log = dir_ + "/log";
  const Arguments in_memory = {"--offload", "cpu", "--steps", "1000000"};
  Program first(dir_, Small(state, in_memory + Arguments{"--log", log}));
  ASSERT_TRUE(WaitForLines(log, 1));
  const Arguments on_drive = {"--checkpoint-dir", kept, "--checkpoint-every", "1", "--steps", "3"};
  for (const Ran& ran :
       RunAll({Small(state, {"--offload", "cpu", "--steps", "3"}),
               Small(state, {"--offload", "none", "--steps", "3", "--resume"}),
               Small(state, {"--offload", "cpu", "--steps", "3", "--overwrite"}),
               Small(dir_ + "/drive", on_drive), Small(dir_ + "/drive", on_drive + Arguments{"--resume"}),
               Small(dir_ + "/drive", on_drive + Arguments{"--overwrite"})})) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("checkpoints go to " + kept), HasSubstr("in use by another process"),
                               HasSubstr("give another --checkpoint-dir")));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/drive"));
  EXPECT_FALSE(first.EndsWithin(0.02)) << first.Wait().err;
  // Reading needs no leave.
  const Ran elsewhere = Run(Small(dir_ + "/other", {"--offload", "cpu", "--steps", "2"}));
  EXPECT_EQ(elsewhere.code, 0) << elsewhere.err;
  // A killed one keeps nobody out.
  first.Signal(SIGKILL);
  first.Wait();
  const Ran next = Run(Small(state, {"--offload", "cpu", "--steps", "3", "--resume"}));
  ASSERT_EQ(next.code, 0) << next.err;
  EXPECT_EQ(Inspect(kept)["step"], 3);
}

// Whoever reads along may go: the run stays, and ends as if somebody had read to the end.
TEST_F(RunsTest, AReaderThatGoesAwayStopsNoTraining) {
  const std::string state = dir_ + "/state", log = dir_ + "/log";
  Arguments arguments = Small(state, {"--steps", "6", "--log", log});
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--quiet"));
  // stdout and stderr are a pipe that is read to its first byte.
  const Arguments piped = {"bash", "-c", "set -o pipefail; \"$0\" \"$@\" 2>&1 | head -c 1"};
  const Ran ran = Program(dir_, arguments, piped).Wait();
  EXPECT_EQ(ran.code, 0) << "the program's, by pipefail; 141: ended by SIGPIPE";
  EXPECT_EQ(ran.out.size(), 1u);
  EXPECT_EQ(Lines(ReadFile(log)).size(), 6u);
  EXPECT_EQ(Inspect(state)["step"], 6);
  EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
}

// What only looks leaves nothing behind, and changes nothing that is there.
TEST_F(RunsTest, PlansAndChecksOfAResumedRunWriteNothing) {
  const auto everything = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_)) {
      const std::string path = entry.path();
      if (path.rfind(dir_ + "/program.", 0) == 0) continue;  // what the programs say
      files[path] = entry.is_regular_file() ? ReadFile(path) : "";
    }
    return files;
  };
  const std::string state = dir_ + "/state", gone = dir_ + "/gone", kept = dir_ + "/kept",
                    memory = dir_ + "/memory";
  const Arguments checkpoints = {"--checkpoint-dir", kept, "--checkpoint-every", "2"};
  ASSERT_EQ(Run(Small(state, Arguments{"--steps", "2"} + checkpoints)).code, 0);
  ASSERT_EQ(Run(Small(memory, {"--offload", "cpu", "--steps", "2"})).code, 0);
  const auto before = everything();
  ASSERT_GT(before.size(), 5u);
  std::vector<Arguments> all;
  for (const Arguments& arguments :
       {Arguments{"--state-dir", state}, Arguments{"--state-dir", state, "--lr", "0.5"} + checkpoints,
        // Training would restore it here.
        Arguments{"--state-dir", gone} + checkpoints, Arguments{"--state-dir", memory, "--offload", "cpu"},
        Arguments{"--state-dir", gone, "--offload", "cpu"}}) {
    const Arguments resume = Arguments{"--resume", "--steps", "5", "--threads", "1"} + arguments;
    all.push_back(Arguments{"plan", "--no-probe"} + resume);
    all.push_back(Arguments{"train", "--check", "--data", text_} + resume);
  }
  for (const Ran& ran : RunAll(all)) EXPECT_EQ(ran.code, 0) << ran.err;
  const auto after = everything();
  for (const auto& [path, bytes] : after) {
    const auto found = before.find(path);
    EXPECT_TRUE(found != before.end() && found->second == bytes) << path;
  }
  EXPECT_EQ(after.size(), before.size());
}

// Batch sizes that the file has lost are those of a file that never had them; what a flag had said stays.
TEST_F(RunsTest, WhatTheConfigLosesOfBatchSizesAndWhatAFlagHadWonOver) {
  const std::string config = dir_ + "/ds.json", report = dir_ + "/report";
  const auto run = [&](const std::string& state, const std::string& text, const Arguments& more) {
    WriteFile(config, text);
    const Ran ran = Run(Arguments{"train", "--model", "gpt-tiny", "--data", text_, "--state-dir", state,
                                  "--seq", "16", "--config", config, "--report", report, "--quiet"} +
                        more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.err;
  };
  const auto recorded = [&](const std::string& state) { return Inspect(state)["run"]; };
  const std::string state = dir_ + "/state";
  run(state, R"({"train_batch_size": 8, "gradient_accumulation_steps": 4})", {"--steps", "2"});
  EXPECT_EQ(recorded(state)["batch"], 2);
  const std::string lost = run(state, R"({"train_batch_size": 8})", {"--steps", "3", "--resume"});
  EXPECT_EQ(recorded(state)["batch"].get<int>() * recorded(state)["accumulate"].get<int>(), 8) << lost;

  const std::string won = dir_ + "/won";
  run(won, R"({"gradient_clipping": 0.5})", {"--steps", "2", "--clip", "0.25"});
  EXPECT_EQ(run(won, "{}", {"--steps", "3", "--resume"}), "");
  EXPECT_EQ(recorded(won)["clip"], 0.25);
}

TEST_F(RunsTest, AStoreOfOneVersionKeepsCheckpointsOnlyWhateverTheConfigSays) {
  const std::string config = dir_ + "/ds.json", state = dir_ + "/state";
  const auto arguments = [&](const std::string& text, const Arguments& more) {
    WriteFile(config, text);
    return Small(state, Arguments{"--config", config, "--checkpoint-dir", dir_ + "/kept"} + more);
  };
  ASSERT_EQ(Run(arguments(R"({"penstock": {"versions": 1}})", {"--steps", "2"})).code, 0);
  const Ran gone = Run(arguments(R"({"penstock": {}})", {"--steps", "3", "--resume"}));
  EXPECT_EQ(gone.code, 0) << gone.err;
  EXPECT_THAT(gone.err, testing::Not(HasSubstr("durability")));
  const Ran refused = Run(arguments(R"({"penstock": {"durability": "step"}})", {"--steps", "4", "--resume"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("one version of everything"));
}

// How many versions a store keeps is how its file is laid out: not a thing that --resume changes.
TEST_F(RunsTest, AnotherNumberOfVersionsIsRefusedWhereTheStoreIsThere) {
  const std::string config = dir_ + "/ds.json", state = dir_ + "/state", kept = dir_ + "/kept";
  const auto arguments = [&](const std::string& penstock, const Arguments& more) {
    WriteFile(config, R"({"penstock": )" + penstock + "}");
    return Small(state, Arguments{"--config", config} + more);
  };
  ASSERT_EQ(Run(arguments("{}", {"--steps", "2"})).code, 0);
  for (const int other : {1, 3}) {
    const std::string said = R"({"versions": )" + std::to_string(other) + "}";
    const Ran refused = Run(arguments(said, {"--steps", "3", "--resume"}));
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err,
                testing::AllOf(HasSubstr("penstock.versions"), HasSubstr("2 versions"), HasSubstr(state)));
    EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
  }
  EXPECT_EQ(Inspect(state)["step"], 2);
  const Ran same = Run(arguments(R"({"versions": 2})", {"--steps", "3", "--resume", "--checkpoint-dir", kept,
                                                        "--checkpoint-every", "3"}));
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(same.err.find("versions"), std::string::npos) << same.err;
  // A checkpoint goes on in as many as the config says.
  std::filesystem::remove_all(state);
  const Ran restored =
      Run(arguments(R"({"versions": 3})", {"--steps", "4", "--resume", "--checkpoint-dir", kept}));
  EXPECT_EQ(restored.code, 0) << restored.err;
  EXPECT_EQ(Inspect(state)["versions"], 3);
}

// Both find an empty directory. The one that comes to it later finds the other's run there, and leaves it.
TEST_F(RunsTest, OfTwoThatResumeNothingTheLaterOneLeavesTheOthersRun) {
  std::string state;
  Arguments arguments;
  std::optional<Program> later;
  // It has looked, and is stopped before it makes a run; on a busy machine perhaps not the first time.
  for (int i = 0; i < 20 && (i == 0 || std::filesystem::exists(state)); ++i) {
    state = dir_ + "/state" + std::to_string(i);
    arguments = Small(state, {"--steps", "3", "--resume"});
    arguments.erase(std::find(arguments.begin(), arguments.end(), "--quiet"));
    later.emplace(dir_, arguments);
    ASSERT_TRUE(WaitForLines(later->prefix() + ".out", 1));
    later->Signal(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it has stopped
  }
  ASSERT_FALSE(std::filesystem::exists(state));
  const Ran first = Run(Small(state, {"--steps", "2", "--resume"}));
  ASSERT_EQ(first.code, 0) << first.err;
  const json before = Inspect(state);
  later->Signal(SIGCONT);
  const Ran refused = later->Wait();
  EXPECT_EQ(refused.code, 2) << refused.out << refused.err;
  EXPECT_THAT(refused.err, testing::AllOf(HasSubstr(state), HasSubstr("another"), HasSubstr("step 2"),
                                          HasSubstr("start this one again")));
  EXPECT_EQ(Inspect(state)["run"]["run_id"], before["run"]["run_id"]);
  EXPECT_EQ(Inspect(state)["step"], 2);
  EXPECT_EQ(Run(Small(state, {"--steps", "3", "--resume"})).code, 0);
}

// --overwrite replaces a run, and so its log; nothing that is no log.
TEST_F(RunsTest, ReplacingARunReplacesItsLog) {
  const std::string state = dir_ + "/state", log = dir_ + "/log";
  const Arguments arguments = Small(state, {"--steps", "3", "--overwrite", "--log", log});
  ASSERT_EQ(Run(arguments).code, 0);
  const std::string first = Lines(ReadFile(log)).front();
  const Ran again = Run(arguments);
  ASSERT_EQ(again.code, 0) << again.err;
  const std::vector<std::string> lines = Lines(ReadFile(log));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_NE(json::parse(lines.front())["run_id"], json::parse(first)["run_id"]);
  EXPECT_EQ(json::parse(lines.front())["step"], 1);
  // The log of a run that is not replaced is not this one's to empty.
  ASSERT_EQ(Run(Small(dir_ + "/other", {"--steps", "2", "--log", dir_ + "/other.log"})).code, 0);
  const std::string other = ReadFile(dir_ + "/other.log");
  EXPECT_EQ(Run(Small(state, {"--steps", "3", "--overwrite", "--log", dir_ + "/other.log"})).code, 2);
  EXPECT_EQ(ReadFile(dir_ + "/other.log"), other);
  // A refused one replaces nothing.
  EXPECT_EQ(Run(arguments + Arguments{"--host-memory", "1MiB"}).code, 2);
  EXPECT_EQ(Lines(ReadFile(log)), lines);
  for (const std::string text : {"a thesis\n", "a thesis without an end"}) {
    WriteFile(dir_ + "/thesis", text);
    const Ran refused = Run(Small(state, {"--steps", "3", "--overwrite", "--log", dir_ + "/thesis"}));
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr("is no log of a training"));
    EXPECT_EQ(ReadFile(dir_ + "/thesis"), text);
  }
  EXPECT_EQ(Inspect(state)["step"], 3);
}

// What the drive moved while it was saturated is not all that it moved.
TEST_F(RunsTest, TheRateWhileSaturatedCountsWhatCameWhileSaturated) {
  const std::string report = dir_ + "/report";
  const Ran ran = Run(Train(dir_ + "/state", {"--host-memory", "24MiB", "--steps", "8", "--report", report}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json told = json::parse(ReadFile(report));
  double bytes = 0;
  for (size_t i = 1; i < 8; ++i) {
    bytes += told["steps"][i]["nvme_read_bytes"].get<double>() +
             told["steps"][i]["nvme_write_bytes"].get<double>();
  }
  const double saturated = told["io_saturated_seconds"], rate = told["io_gbps_achieved"];
  EXPECT_GT(bytes, 0);
  EXPECT_LT(rate * saturated * 1e9, 0.999 * bytes) << "a model of this size is read in between";
}

TEST_F(RunsTest, AKilledRunLeavesNoReportOfAnEarlierOne) {
  const std::string log = dir_ + "/log", report = dir_ + "/report";
  const Arguments arguments = Train(dir_ + "/state", {"--log", log, "--report", report, "--steps"});
  ASSERT_EQ(Run(arguments + Arguments{"2"}).code, 0);
  ASSERT_TRUE(std::filesystem::exists(report));
  // One that is refused has not begun, and takes nothing away.
  ASSERT_EQ(Run(arguments + Arguments{"4"}).code, 2);
  EXPECT_TRUE(std::filesystem::exists(report));
  Program killed(dir_, arguments + Arguments{"1000000", "--resume"});
  ASSERT_TRUE(WaitForLines(log, 5));
  killed.Signal(SIGKILL);
  killed.Wait();
  EXPECT_FALSE(std::filesystem::exists(report));
}

}  // namespace
}  // namespace penstock::tools::penstock_runs_test
