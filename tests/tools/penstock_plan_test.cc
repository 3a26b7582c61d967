// What `penstock plan` and `penstock train --check` say of what does not fit.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::penstock_plan_test {
namespace {

using testing::HasSubstr;
using namespace testing_support;

class PlanTest : public ProgramTest {};

TEST_F(PlanTest, CheckTellsABudgetThatIsTooSmall) {
  const Arguments arguments = {"train", "--check", "--model",     "gpt-small",
                               "--seq", "16",      "--state-dir", dir_ + "/state"};
  const Ran small = Run(arguments + Arguments{"--host-memory", "5MiB"});
  EXPECT_EQ(small.code, 2) << small.out;
  EXPECT_THAT(small.err, HasSubstr("5242880 bytes is too small: the least that works is "));
  const size_t at = small.err.find("least that works is ");
  ASSERT_NE(at, std::string::npos) << small.err;
  const std::string least = std::to_string(std::stoll(small.err.substr(at + 20)));
  const Ran enough = Run(arguments + Arguments{"--host-memory", least});
  EXPECT_EQ(enough.code, 0) << enough.err;
  EXPECT_THAT(enough.out, HasSubstr("the flags and the config are right"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/state"));
}

TEST_F(PlanTest, ADriveThatIsTooSmallIsNamed) {
  // 600 layers are 17 G parameters, 400 GB in two versions: as many more as there is room here.
  const uintmax_t layers = 600 * (1 + (std::filesystem::space(dir_).available >> 30) / 370);
  WriteFile(dir_ + "/config.json",
            absl::StrCat(R"({"n_layer": )", layers,
                         R"(, "n_embd": 1536, "n_head": 16, "n_positions": 64, "vocab_size": 256})"));
  const Arguments arguments = {"plan",    "--model", dir_ + "/config.json", "--seq",       "8",
                               "--batch", "1",       "--no-probe",          "--state-dir", dir_ + "/state"};
  const Ran ran = Run(arguments);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, testing::ContainsRegex("which does not fit: .* are free in .* are missing"));
}

TEST_F(PlanTest, DirectoriesGetTheSharesOfTheirWeightsFromFlagsAndConfig) {
  const std::string a = dir_ + "/a", b = dir_ + "/b", report = dir_ + "/report.json";
  const auto bytes = [](const std::string& directory) {
    uint64_t sum = 0;
    for (const auto& file : std::filesystem::recursive_directory_iterator(directory))
      sum += file.is_regular_file() ? file.file_size() : 0;
    return static_cast<double>(sum);
  };
  const auto train = [&](const Arguments& more) {
    return Run(Arguments{"train", "--model", "gpt-tiny", "--data", text_, "--seq", "16", "--batch", "1",
                         "--steps", "1", "--overwrite", "--report", report} +
               more);
  };
  const auto shares = [&] {
    return nlohmann::json::parse(ReadFile(report))["state_dir_shares"].get<std::vector<double>>();
  };
  const Ran ran = train({"--state-dir", a + "=3", "--state-dir", b});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr(" 75%"));
  EXPECT_THAT(ran.err, HasSubstr("by the weights that were given"));
  EXPECT_THAT(shares(), testing::ElementsAre(0.75, 0.25));
  EXPECT_GT(bytes(a), 2 * bytes(b));
  WriteFile(dir_ + "/config",
            absl::StrCat(R"({"penstock": {"state_dirs": [")", a, R"(", ")", b, R"(=3"]}})"));
  ASSERT_EQ(train({"--config", dir_ + "/config"}).code, 0);
  EXPECT_THAT(shares(), testing::ElementsAre(0.25, 0.75));
  EXPECT_GT(bytes(b), 2 * bytes(a));
  // A run that goes on stays where it is.
  const Ran resumed = Run({"train", "--model", "gpt-tiny", "--data", text_, "--seq", "16", "--batch", "1",
                           "--steps", "2", "--resume", "--state-dir", a + "=9", "--state-dir", b});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out + resumed.err, HasSubstr("of no effect on a run that goes on"));
  const Ran plan = Run({"plan", "--model", "gpt-tiny", "--seq", "16", "--no-probe", "--state-dir",
                        dir_ + "/c=4", "--state-dir", dir_ + "/d"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_THAT(plan.out, HasSubstr("/c 80%"));
  const Ran wrong = train({"--state-dir", a + "=0", "--state-dir", b});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--state-dir"));
  EXPECT_THAT(wrong.err, HasSubstr("must be above 0"));
}

TEST_F(PlanTest, HalfAPipelineIsTold) {
  WriteFile(dir_ + "/config",
            R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ")" +
                dir_ + R"(/state", "pipeline_read": false, "pipeline_write": true}}})");
  const Ran ran =
      Run({"train", "--check", "--model", "gpt-tiny", "--seq", "16", "--config", dir_ + "/config"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("pipeline_read false: at most two tiles"));
}

TEST_F(PlanTest, ABudgetOfWearThatWillNotDoIsTold) {
  WriteFile(dir_ + "/config", R"({"penstock": {"wear_budget_tb": 0.01}})");
  const Arguments arguments = {"plan",       "--model",  "gpt-tiny",       "--seq",       "16",
                               "--no-probe", "--config", dir_ + "/config", "--state-dir", dir_ + "/state",
                               "--threads",  "1",        "--steps"};
  const Ran many = Run(arguments + Arguments{"1000000"});
  ASSERT_EQ(many.code, 0) << many.err;
  EXPECT_THAT(many.out, testing::ContainsRegex(
                            "penstock.wear_budget_tb: [0-9.e-]+ TB will have been written by the last "
                            "step, more than 0.01 TB: the run will stop after step [0-9]+ or so; what "
                            "writes less:\n  "));
  const Ran json = Run(arguments + Arguments{"1000000", "--json"});
  EXPECT_THAT(json.out, HasSubstr("\"wear_budget\": [\n"));
  const Ran few = Run(arguments + Arguments{"10"});
  ASSERT_EQ(few.code, 0) << few.err;
  EXPECT_THAT(few.out, testing::Not(HasSubstr("wear_budget_tb")));
}

TEST_F(PlanTest, WhatIsOfNoEffectWithoutADriveIsTold) {
  WriteFile(dir_ + "/config", R"({"penstock": {"prefer": "time"}})");
  const Arguments arguments = {"train",    "--check",        "--model",     "gpt-tiny",      "--seq",    "16",
                               "--config", dir_ + "/config", "--state-dir", dir_ + "/state", "--offload"};
  const Ran ran = Run(arguments + Arguments{"cpu"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(
      ran.out,
      HasSubstr("penstock.prefer: accepted and ignored: without offload to nvme no step reads a drive"));
  EXPECT_THAT(Run(arguments + Arguments{"nvme"}).out, testing::Not(HasSubstr("penstock.prefer")));
}

}  // namespace
}  // namespace penstock::tools::penstock_plan_test
