// The monitors of DeepSpeed's config in trainings: what stands in their files after steps, kills and resumes.
#include <filesystem>

#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_monitor_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_support;

class MonitorCliTest : public CliTest {
 protected:
  MonitorCliTest() {
    config_ = dir_ + "/ds.json";
    WriteFile(config_, R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
      "csv_monitor": {"enabled": true, "output_path": "csv", "job_name": "job"},
      "tensorboard": {"enabled": true, "output_path": "tb", "job_name": "job"},
      "wandb": {"enabled": false}})");
  }
  Arguments Small(const std::string& state, const Arguments& more) const {
    return Train(state, Arguments{"--seq", "32", "--config", config_} + more);
  }
  std::string Csv(const std::string& name) const { return dir_ + "/csv/job/Train_Samples_" + name + ".csv"; }
  // The first column, without its header.
  std::vector<std::string> Samples(const std::string& name) const {
    std::vector<std::string> samples;
    for (const std::string& line : Lines(ReadFile(Csv(name))))
      samples.push_back(line.substr(0, line.find(',')));
    if (!samples.empty()) samples.erase(samples.begin());
    return samples;
  }
  std::string config_;
};

TEST_F(MonitorCliTest, EveryStepIsThereOnceAcrossAResumeAndALostLine) {
  const std::string state = dir_ + "/state", log = dir_ + "/log";
  const Arguments held_out = {"--eval-data", text_, "--eval-windows", "2"};
  Ran ran = Run(Small(state, Arguments{"--steps", "3", "--log", log} + held_out));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(Samples("train_loss"), ElementsAre("4", "8", "12")) << "of 2 x 2 each";
  EXPECT_THAT(Samples("eval_loss"), ElementsAre("12"));
  // A kill between the commit of step 3 and its line.
  const std::string whole = ReadFile(Csv("train_loss"));
  WriteFile(Csv("train_loss"), whole.substr(0, whole.rfind("\r\n", whole.size() - 3) + 2));
  ASSERT_THAT(Samples("train_loss"), ElementsAre("4", "8"));
  // From here on batches have another size, which the count of samples follows.
  ran = Run(Small(
      state,
      Arguments{"--steps", "5", "--log", log, "--resume", "--batch", "1", "--accumulate", "1"} + held_out));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(Samples("train_loss"), ElementsAre("4", "8", "12", "13", "14"));
  EXPECT_THAT(Samples("lr"), ElementsAre("4", "8", "12", "13", "14"));
  EXPECT_THAT(Samples("eval_loss"), ElementsAre("12", "14"));
  EXPECT_FALSE(std::filesystem::exists(Csv("loss_scale"))) << "only fp16 has one";
  std::vector<double> logged, monitored;
  for (const std::string& line : Lines(ReadFile(log))) {
    if (const json entry = json::parse(line); !entry.contains("windows")) logged.push_back(entry["loss"]);
  }
  for (const std::string& line : Lines(ReadFile(Csv("train_loss")))) {
    if (line[0] != 's') monitored.push_back(std::stod(line.substr(line.find(',') + 1)));
  }
  EXPECT_EQ(monitored, logged);
  // One event file, of this run.
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir_ + "/tb/job"))
    files.push_back(entry.path().filename());
  EXPECT_THAT(files, ElementsAre(AllOf(HasSubstr("events.out.tfevents."),
                                       HasSubstr(json::parse(Lines(ReadFile(log))[0])["run_id"]))));
}

TEST_F(MonitorCliTest, WithoutADriveStepsThatComeAgainAreCutOff) {
  const std::string state = dir_ + "/state";
  const Arguments in_memory = {"--offload", "none", "--checkpoint-every", "2"};
  Program program(dir_, Small(state, Arguments{"--steps", "100000"} + in_memory));
  ASSERT_TRUE(
      WaitForLines(Csv("train_loss"), 8));  // a checkpoint waits for the one before, so the first is whole
  program.Signal(SIGKILL);
  program.Wait();
  const size_t before = Samples("train_loss").size();
  const Ran ran = Run(Small(state, Arguments{"--steps", std::to_string(before + 3), "--resume"} + in_memory));
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::vector<std::string> all;
  for (size_t step = 1; step <= before + 3; ++step) all.push_back(std::to_string(4 * step));
  EXPECT_EQ(Samples("train_loss"), all);
}

TEST_F(MonitorCliTest, AnotherRunIsRefusedItsPlaceAndAReplacedOneGoes) {
  ASSERT_EQ(Run(Small(dir_ + "/a", {"--steps", "2"})).code, 0);
  const std::string before = ReadFile(Csv("lr"));
  const Ran refused = Run(Small(dir_ + "/b", {"--steps", "2"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("csv_monitor"), HasSubstr("csv/job"), HasSubstr("job_name")));
  EXPECT_EQ(ReadFile(Csv("lr")), before);
  ASSERT_EQ(Run(Small(dir_ + "/a", {"--steps", "1", "--overwrite"})).code, 0);
  EXPECT_THAT(Samples("lr"), ElementsAre("4"));
}

TEST_F(MonitorCliTest, WhatHasNoClientHereIsAnsweredWithTheWayOut) {
  WriteFile(config_, R"({"wandb": {"enabled": true, "project": "p"}, "comet": {"enabled": false}})");
  const Ran ran = Run(Small(dir_ + "/state", {"--check"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(
      ran.out,
      AllOf(HasSubstr("wandb.enabled: accepted and ignored: its client is Python's; switch tensorboard on"),
            HasSubstr("wandb sync --sync-tensorboard DIR"), HasSubstr("--log")));
  EXPECT_THAT(ran.out, testing::Not(HasSubstr("comet:")));
}

}  // namespace
}  // namespace penstock::tools::penstock_monitor_test
