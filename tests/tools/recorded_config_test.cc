// What --config said holds when the run goes on without it.
#include "run/record/recorded_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "run/settings.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::recorded_config_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace testing_support;

class RecordedConfigTest : public ProgramTest {
 protected:
  Arguments Small(const std::string& state, const Arguments& more) const {
    return Arguments{"train", "--model", "gpt-tiny", "--dtype", "fp32",        "--threads", "1",
                     "--seq", "16",      "--data",   text_,     "--state-dir", dir_ + state} +
           more;
  }
  size_t MonitoredSteps() const {
    return Lines(ReadFile(dir_ + "/csv/job/Train_Samples_train_loss.csv")).size() - 1;  // a header
  }
  json RecordOf(const std::string& state) {
    return json::parse(Run({"inspect", dir_ + state, "--json"}).out)["run"];
  }
};

TEST_F(RecordedConfigTest, MonitorsWatchdogAndPreferenceGoOnWithoutTheConfig) {
  WriteFile(dir_ + "/ds.json", R"({"csv_monitor": {"enabled": true, "output_path": "csv", "job_name": "job"},
    "wall_clock_breakdown": true, "aio": {"queue_depth": 8}, "train_micro_batch_size_per_gpu": 2,
    "penstock": {"prefer": "time", "watchdog_seconds": 17, "sync": "power"}})");
  const Arguments on_drive = {"--offload", "nvme"};
  const Ran begun = Run(Small("/state", Arguments{"--steps", "2", "--config", "ds.json"} + on_drive));
  ASSERT_EQ(begun.code, 0) << begun.err;
  EXPECT_EQ(MonitoredSteps(), 2u);
  EXPECT_EQ(RecordOf("/state")["config_kept"], (json{{"csv_monitor.enabled", true},
                                                     {"csv_monitor.output_path", dir_ + "/csv"},
                                                     {"csv_monitor.job_name", "job"},
                                                     {"wall_clock_breakdown", true},
                                                     {"aio.queue_depth", 8},
                                                     {"penstock.prefer", "time"},
                                                     {"penstock.watchdog_seconds", 17.0}}));
  // From another directory.
  std::filesystem::create_directory(dir_ + "/elsewhere");
  const Arguments further = {"--resume", "--steps", "4"};
  const Ran resumed = Program(dir_ + "/elsewhere", Small("/state", further)).Wait();
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out,
              HasSubstr("as this run's last --config said: aio.queue_depth, csv_monitor.enabled"));
  EXPECT_EQ(MonitoredSteps(), 4u);
  EXPECT_THAT(resumed.err + resumed.out, HasSubstr("step 4 time (ms) | fwd")) << "the breakdown of a step";
  // Another config takes its place, and what that one has not is gone.
  WriteFile(dir_ + "/other.json", R"({"penstock": {"prefer": "wear"}})");
  const Ran other = Run(Small("/state", {"--resume", "--steps", "5", "--config", "other.json"}));
  ASSERT_EQ(other.code, 0) << other.err;
  const Ran last = Run(Small("/state", {"--resume", "--steps", "6"}));
  ASSERT_EQ(last.code, 0) << last.err;
  EXPECT_THAT(last.out, AllOf(HasSubstr("last --config said: penstock.prefer\n"), Not(HasSubstr("aio"))));
  EXPECT_EQ(MonitoredSteps(), 4u);
}

TEST_F(RecordedConfigTest, ABudgetOfWearStopsAResumedRunToo) {
  WriteFile(dir_ + "/ds.json", R"({"penstock": {"wear_budget_tb": 1e-9}})");
  const Ran begun = Run(Small("/state", {"--steps", "3", "--config", "ds.json"}));
  EXPECT_EQ(begun.code, 1);
  EXPECT_THAT(begun.err, HasSubstr("penstock.wear_budget_tb"));
  const Ran resumed = Run(Small("/state", {"--steps", "3", "--resume"}));
  EXPECT_EQ(resumed.code, 1);
  EXPECT_THAT(resumed.err, HasSubstr("penstock.wear_budget_tb"));
  WriteFile(dir_ + "/more.json", R"({"penstock": {"wear_budget_tb": 10}})");
  const Ran more = Run(Small("/state", {"--steps", "3", "--resume", "--config", "more.json"}));
  EXPECT_EQ(more.code, 0) << more.err;
}

TEST_F(RecordedConfigTest, ARunWithoutAConfigHasNothingToKeep) {
  ASSERT_EQ(Run(Small("/state", {"--steps", "1"})).code, 0);
  EXPECT_FALSE(RecordOf("/state").contains("config_kept"));
  const Ran resumed = Run(Small("/state", {"--steps", "2", "--resume"}));
  EXPECT_THAT(resumed.out, Not(HasSubstr("last --config said")));
}

// A value that a key of the table may have.
json AValueOf(const run::Setting& key) {
  switch (key.type) {
    case run::KeyType::kBool:
      return true;
    case run::KeyType::kChoice:
      return std::string(key.choices.substr(0, key.choices.find('|')));
    case run::KeyType::kText:
    case run::KeyType::kPath:
      return "/a/path";
    case run::KeyType::kNumber:
    case run::KeyType::kWhole:
    case run::KeyType::kSize:
      return std::max(key.least, std::min(key.most, 4096.0));
    default:
      return nullptr;
  }
}

// A served key is told apart by its name in the record, or is recorded: none is dropped in silence.
TEST_F(RecordedConfigTest, EveryServedKeyThatIsKeptComesBackAsItWas) {
  for (const std::string_view section : run::SectionPaths()) {
    if (section.find('/') != std::string_view::npos) continue;  // parameters of optimizers and schedules
    for (const run::Setting& key : run::SectionKeys(section)) {
      if (key.use != run::KeyUse::kServed || !key.canonical.empty()) continue;
      const std::string path =
          section.empty() ? std::string(key.name) : std::string(section) + "." + std::string(key.name);
      const json value = AValueOf(key);
      if (!run::HoldsAsConfigured(path) || value.is_null()) continue;
      SCOPED_TRACE(path);
      json config;
      std::string pointer = "/" + path;
      std::replace(pointer.begin(), pointer.end(), '.', '/');
      config[json::json_pointer(pointer)] = value;
      WriteFile(dir_ + "/one.json", config.dump());
      const auto recorded = run::ConfigToRecord(dir_ + "/one.json");
      ASSERT_TRUE(recorded.ok()) << recorded.status();
      ASSERT_TRUE(recorded->contains(path)) << *recorded;
      const auto again = run::ConfigFromRecord(*recorded);
      ASSERT_TRUE(again.ok()) << again.status();
      // What is read from it is what is kept of it.
      json said;
      for (const auto& [name, what] : recorded->items()) {
        std::string at = "/" + name;
        std::replace(at.begin(), at.end(), '.', '/');
        said[json::json_pointer(at)] = what;
      }
      WriteFile(dir_ + "/two.json", said.dump());
      EXPECT_EQ(*run::ConfigToRecord(dir_ + "/two.json"), *recorded);
    }
  }
}

TEST_F(RecordedConfigTest, WhatTheRecordHasByNameIsNotKeptTwice) {
  WriteFile(dir_ + "/ds.json",
            R"({"train_batch_size": 4, "gradient_clipping": 0.5, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}},
    "penstock": {"sync": "power", "durability": "step", "optimizer_states": "fp32", "versions": 2},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 4},
                          "stage3_max_live_parameters": "auto"}})");
  EXPECT_EQ(*run::ConfigToRecord(dir_ + "/ds.json"),
            (json{{"zero_optimization.stage", 3}, {"zero_optimization.offload_optimizer.buffer_count", 4}}));
}

TEST_F(RecordedConfigTest, WhatALaterVersionKeptIsNamedWithTheWayOut) {
  const auto config = run::ConfigFromRecord(json{{"penstock.of_times_to_come", 1}});
  ASSERT_FALSE(config.ok());
  EXPECT_TRUE(absl::IsDataLoss(config.status()));
  EXPECT_THAT(config.status().message(), AllOf(HasSubstr("of_times_to_come"), HasSubstr("`config` FILE")));
}

}  // namespace
}  // namespace penstock::tools::recorded_config_test
