// Settings by flag and by JSON: the same setting has the same effect, and every flag is in the table.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "run/config_options.h"
#include "run/settings.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/config/modes.h"

namespace penstock::tools::settings_doors_test {
namespace {

using nlohmann::json;

std::vector<const run::Setting*> AllSettings() {
  std::vector<const run::Setting*> all;
  for (const std::string_view section : run::SectionPaths()) {
    for (const run::Setting& setting : run::SectionKeys(section)) all.push_back(&setting);
  }
  for (const run::Setting& setting : run::SettingsWithoutKeys()) all.push_back(&setting);
  return all;
}

std::set<std::string> DeclaredFlags(bool plans) {
  CLI::App app;
  TrainOptions flags;
  DeclareTrainOptions(app, flags, plans);
  std::set<std::string> declared;
  for (const CLI::Option* option : app.get_options()) {
    declared.insert(option->get_name());
    EXPECT_NE(option->get_description(), "") << option->get_name();
  }
  declared.erase("--help");
  return declared;
}

TEST(SettingsDoors, TheFlagsOfTrainAndPlanAreThoseOfTheTable) {
  std::set<std::string> train, plan;
  for (const run::Setting* setting : AllSettings()) {
    if (setting->flag.empty()) continue;
    if (setting->verbs != run::Verb::kPlan) train.emplace(setting->flag);
    if (setting->verbs != run::Verb::kTrain) plan.emplace(setting->flag);
  }
  EXPECT_EQ(DeclaredFlags(false), train);
  EXPECT_EQ(DeclaredFlags(true), plan);
}

class SettingsDoorsTest : public testing_support::ProgramTest {
 protected:
  // What comes of a config.json and flags, as far as a setting can change it.
  json Outcome(const json& config, const std::vector<std::string>& arguments) {
    TrainOptions flags;
    CLI::App app;
    DeclareTrainOptions(app, flags, /*plans=*/false);
    const std::string path = dir_ + "/config.json";
    testing_support::WriteFile(path, config.dump());
    std::vector<std::string> all = {"--model", "gpt-tiny", "--config", path};
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::reverse(all.begin(), all.end());  // as CLI11 takes a vector
    app.parse(all);
    const auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
    EXPECT_TRUE(settings.ok()) << settings.status() << "\n" << config << testing::PrintToString(arguments);
    if (!settings.ok()) return nullptr;
    const zero::EngineOptions& engine = settings->engine;
    json outcome = {{"batch", settings->batch},
                    {"accumulate", settings->accumulate},
                    {"optimizer", settings->to_record},
                    {"schedule", engine.optimizer.schedule->ToJson()},
                    {"host_memory", engine.memory.host_memory_budget_bytes},
                    {"device_memory", engine.memory.device_memory_budget_bytes},
                    {"offload", std::string(zero::Name(engine.storage.offload))},
                    {"saved_activations", static_cast<int>(engine.memory.saved_activations)},
                    {"replan", run::PlansAgain(settings->config.penstock, 1, zero::OffloadDevice::kNvme)},
                    {"resume_ranks", settings->config.penstock.resume_ranks.value_or("same")},
                    {"state_dirs", engine.storage.state_dirs}};
    for (const run::Setting* setting : run::SettingsWithFlags()) {
      if (setting->option != nullptr) outcome[std::string(setting->flag)] = setting->option_of(engine);
    }
    outcome["optimizer"].erase("config_kept");
    return outcome;
  }
};

// A value as a flag and as JSON.
std::pair<std::string, json> ValueOf(const run::Setting& setting, const std::string& directory) {
  switch (setting.type) {
    case run::KeyType::kBool:
      return setting.settled == "true" ? std::pair<std::string, json>("false", false)
                                       : std::pair<std::string, json>("", true);
    case run::KeyType::kWhole:
      return {"3", 3};
    case run::KeyType::kNumber:
      return {"0.25", 0.25};
    case run::KeyType::kSize:
      return {"640MiB", "640MiB"};
    case run::KeyType::kChoice: {
      const std::string last(setting.choices.substr(setting.choices.rfind('|') + 1));
      return {last, last};
    }
    case run::KeyType::kPaths:
      return {directory + "/of-the-setting", json::array({directory + "/of-the-setting"})};
    default:
      ADD_FAILURE() << setting.name << ": a type that no flag had so far";
      return {};
  }
}

TEST_F(SettingsDoorsTest, AFlagAndAKeyOfTheSameSettingHaveTheSameEffect) {
  int compared = 0;
  std::set<std::string> seen;
  for (const std::string_view section : run::SectionPaths()) {
    for (const run::Setting& setting : run::SectionKeys(section)) {
      if (setting.flag.empty()) continue;
      const std::string path = run::PathOf(section, setting);
      if (!seen.insert(path).second) continue;
      SCOPED_TRACE(path);
      ++compared;
      // The budget is given: absent, it is a share of the memory that is free, another at every reading.
      json base = {{"optimizer", {{"type", "AdamW"}, {"params", {{"eps", 1e-7}}}}},
                   {"penstock", {{"host_memory", "2GiB"}}}};
      if (setting.type == run::KeyType::kPaths)
        base["zero_optimization"]["offload_optimizer"]["device"] = "nvme";
      const auto [flag, value] = ValueOf(setting, dir_);
      json with_key = base;
      std::string pointer = "/" + path;
      std::replace(pointer.begin(), pointer.end(), '.', '/');
      with_key[json::json_pointer(pointer)] = value;
      std::vector<std::string> given = {std::string(setting.flag)};
      if (setting.type == run::KeyType::kBool && !flag.empty()) {
        given.front() += "=" + flag;
      } else if (!flag.empty()) {
        given.push_back(flag);
      }
      const json by_key = Outcome(with_key, {}), by_flag = Outcome(base, given);
      EXPECT_EQ(by_key, by_flag);
      if (!setting.without_device.empty()) continue;  // there is no device
      EXPECT_NE(by_key, Outcome(base, {})) << "nothing changes";
    }
  }
  EXPECT_GE(compared, 10);
}

}  // namespace
}  // namespace penstock::tools::settings_doors_test
