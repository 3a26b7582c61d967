// The table of settings keeps its own rules, and what is printed from it is what is committed.
#include "run/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "run/config.h"
#include "run/config_options.h"
#include "run/settings_page.h"
#include "run/unused_keys.h"

namespace penstock::run::settings_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

// A value as CheckedKeys has them.
json ValueOf(const Setting& setting) {
  switch (setting.type) {
    case KeyType::kBool:
      return true;
    case KeyType::kWhole:
    case KeyType::kSize:
      return static_cast<int64_t>(std::max(setting.least, std::min(setting.most, 3.0)));
    case KeyType::kNumber:
      return std::max(setting.least, std::min(setting.most, 0.5));
    case KeyType::kText:
    case KeyType::kPath:
      return "somewhere";
    case KeyType::kChoice:
      return std::string(setting.choices.substr(0, setting.choices.find('|')));
    case KeyType::kPair:
      return {0.5, 0.25};
    case KeyType::kWholes:
      return {2, 4};
    case KeyType::kPaths:
    case KeyType::kNames:
      return {"somewhere", "elsewhere"};
    case KeyType::kObject:
    case KeyType::kAny:
      break;
  }
  return nullptr;
}

TEST(Settings, EachSaysWhatItIsAndChangesTheConfiguration) {
  int settings = 0;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (setting.use != KeyUse::kServed || setting.type == KeyType::kObject || !setting.canonical.empty())
        continue;
      const std::string path = PathOf(section, setting);
      SCOPED_TRACE(path);
      ++settings;
      EXPECT_FALSE(setting.help.empty());
      EXPECT_FALSE(setting.help.ends_with('.'));
      ASSERT_NE(FindKey(path), nullptr);
      EXPECT_EQ(FindKey(path)->name, setting.name);
      EXPECT_EQ(setting.on_resume == OnResume::kByName && setting.record.empty(), false);
      if (path.starts_with("zero_optimization.cpu_offload")) {
        EXPECT_FALSE(setting.HasPlace()) << "an old name, which the check turns into the new one";
        continue;
      }
      Config config;
      Fill({{path, ValueOf(setting)}}, &config);
      EXPECT_FALSE(config == Config()) << "a value that is read and goes nowhere";
      EXPECT_TRUE(setting.Find(Config()).is_null());
      EXPECT_EQ(setting.Find(config), ValueOf(setting)) << "what was put there is found there";
    }
  }
  EXPECT_GT(settings, 100);
  for (const Setting& setting : SettingsWithoutKeys()) {
    EXPECT_FALSE(setting.help.empty()) << setting.flag;
    EXPECT_TRUE(setting.flag.empty() ? !setting.keyword.empty() : setting.flag.starts_with("--"))
        << setting.flag;
  }
}

// A value that is not what the engine does anyhow.
json OtherThan(const json& unasked, const Setting& setting) {
  if (setting.type == KeyType::kChoice) {
    const std::string_view last = setting.choices.substr(setting.choices.rfind('|') + 1);
    if (unasked != last) return std::string(last);
  }
  if (setting.type == KeyType::kBool) return unasked != true;
  return ValueOf(setting);
}

TEST(Settings, AnOptionOfTheEngineIsWhatTheConfigurationSays) {
  std::set<std::string_view> names;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (setting.option == nullptr) continue;
      const std::string path = PathOf(section, setting);
      SCOPED_TRACE(path);
      EXPECT_TRUE(names.insert(setting.name).second) << "Config finds these by name";
      const json unasked = setting.option_of(zero::EngineOptions()), value = OtherThan(unasked, setting);
      ASSERT_NE(value, unasked) << "a test that cannot fail";
      Config config;
      Fill({{path, value}}, &config);
      zero::EngineOptions options, untouched;
      ApplyConfig(config, Door::kPython, &options);
      EXPECT_EQ(setting.option_of(options), value);
      ApplyConfig(Config(), Door::kPython, &untouched);
      EXPECT_EQ(setting.option_of(untouched), unasked);
    }
  }
  EXPECT_GE(names.size(), 8U);
}

TEST(Settings, NoTwoRowsHaveOneFlagOrOneKeyword) {
  std::multiset<std::string_view> spellings;
  const auto add = [&](const Setting& setting) {
    if (!setting.flag.empty()) spellings.insert(setting.flag);
    if (!setting.keyword.empty()) spellings.insert(setting.keyword);
  };
  for (const std::string_view section : SectionPaths()) {
    if (section.find('/') != std::string_view::npos && section != "optimizer.params/AdamW") continue;
    for (const Setting& setting : SectionKeys(section)) add(setting);
  }
  for (const Setting& setting : SettingsWithoutKeys()) add(setting);
  for (const std::string_view spelling : spellings) EXPECT_EQ(spellings.count(spelling), 1U) << spelling;
}

TEST(Settings, TheRecordsNamesAreThoseOfTheirKeys) {
  for (const auto& [record, key] : {std::pair{"batch", "train_micro_batch_size_per_gpu"},
                                    {"accumulate", "gradient_accumulation_steps"},
                                    {"train_batch", "train_batch_size"},
                                    {"clip", "gradient_clipping"},
                                    {"optimizer", "optimizer.type"},
                                    {"optimizer_states", "penstock.optimizer_states"},
                                    {"beta1", "optimizer.params.betas"},
                                    {"beta2", "optimizer.params.betas"},
                                    {"lr", "optimizer.params.lr"},
                                    {"momentum", "optimizer.params.momentum"},
                                    {"dtype", "fp16 or bf16"},
                                    {"loss_scale", "loss scale of fp16"},
                                    {"sync", "penstock.sync"},
                                    {"durability", "penstock.durability"},
                                    {"scheduler", "scheduler"},
                                    {"seq", "seq"}})
    EXPECT_EQ(KeyOfRecord(record), key) << record;
  for (const auto& [record, flag] : {std::pair{"batch", "--batch"},
                                     {"weight_decay", "--weight-decay"},
                                     {"dtype", "--dtype"},
                                     {"optimizer_states", "--optimizer-states"},
                                     {"sync", ""},
                                     {"beta1", ""}})
    EXPECT_EQ(FlagOfRecord(record), flag) << record;
  for (const char* const fixed : {"vocab", "seed", "dtype", "optimizer", "optimizer_states"})
    EXPECT_TRUE(IsFixedInRecord(fixed)) << fixed;
  for (const char* const free : {"lr", "clip", "batch", "seq", "scheduler", "sync", ""})
    EXPECT_FALSE(IsFixedInRecord(free)) << free;
  EXPECT_TRUE(HoldsAsConfigured("aio.block_size"));
  EXPECT_TRUE(HoldsAsConfigured("csv_monitor.output_path"));
  EXPECT_FALSE(HoldsAsConfigured("optimizer.params.lr"));
  EXPECT_FALSE(HoldsAsConfigured("penstock.versions"));
  EXPECT_FALSE(HoldsAsConfigured("zero_optimization.offload_param.nvme_path"));
  EXPECT_FALSE(HoldsAsConfigured("aio.single_submit"));
  EXPECT_FALSE(HoldsAsConfigured("no.such_key"));
}

TEST(Settings, ARecordHasWhatTheConfigurationSaysByName) {
  EXPECT_TRUE(SaidByRecord(Config()).empty());
  Config config;
  Fill({{"gradient_clipping", 0.5},
        {"optimizer.params.lr", 1e-3},
        {"optimizer.params.betas", {0.5, 0.25}},
        {"penstock.optimizer_states", "bf16"},
        {"penstock.sync", "power"},
        {"scheduler.type", "WarmupLR"},
        {"bf16.enabled", true},
        {"aio.queue_depth", 4}},
       &config);
  EXPECT_EQ(json(SaidByRecord(config)), json({{"clip", 0.5},
                                              {"lr", 1e-3},
                                              {"beta1", 0.5},
                                              {"beta2", 0.25},
                                              {"optimizer_states", "bf16"},
                                              {"sync", "power"}}));
  Config copy;
  CopyRecorded(
      config, [](const std::string& name) { return name == "beta1" || name == "lr"; }, &copy);
  EXPECT_EQ(json(SaidByRecord(copy)), json({{"lr", 1e-3}, {"beta1", 0.5}, {"beta2", 0.25}}));
}

TEST(Settings, ARunSettlesWhatIsRecordedWithItAsAWhole) {
  Config config;
  Fill({{"gradient_clipping", 0.5}}, &config);
  std::map<std::string, json> asked;
  ASSERT_TRUE(Settle(
                  [&](const char* name, const json& given, const json& otherwise) -> absl::StatusOr<json> {
                    asked[name] = {given, otherwise};
                    return name == std::string("clip") ? json(0.25) : otherwise;
                  },
                  &config)
                  .ok());
  json wanted = json::object();
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (!setting.settled.empty())
        wanted[std::string(setting.record)] = {nullptr, ScalarOf(setting.settled)};
    }
  }
  wanted["clip"][0] = 0.5;
  EXPECT_EQ(json(asked), wanted);
  EXPECT_GE(wanted.size(), 4U);
  EXPECT_EQ(ValueAt(config, "gradient_clipping"), 0.25);
  EXPECT_EQ(config.penstock.optimizer_states, "fp32");
  const auto damaged = [&](const json& value) {
    return Settle([&](const char*, const json&, const json&) { return absl::StatusOr<json>(value); },
                  &config);
  };
  EXPECT_THAT(std::string(damaged(-1).message()),
              StartsWith("the run's record: clip: must be a number of 0 or more"));
  EXPECT_THAT(std::string(damaged("much").message()), StartsWith("the run's record: clip: must be a number"));
}

TEST(Settings, AMessageNamesSettingsAsItsReaderSpellsThem) {
  struct Case {
    std::string_view message, flags, keywords;
  };
  for (const auto& [message, flags, keywords] : std::initializer_list<Case>{
           {"/x/y is there already: resume that run (`resume`), replace it (`overwrite`), or use another",
            "/x/y is there already: resume that run (--resume), replace it (--overwrite), or use another",
            "/x/y is there already: resume that run (resume=True), replace it (overwrite=True), or use "
            "another"},
           {"with `offload nvme` less would do", "with --offload nvme less would do",
            "with offload='nvme' less would do"},
           {"`device cpu`", "--device cpu", "device='cpu'"},
           {"`host_memory` 1.0 MiB is too small", "--host-memory 1.0 MiB is too small",
            "host_memory 1.0 MiB is too small"},
           {"`gradient_clipping` and `seq`", "--clip and --seq", "gradient_clipping and seq"},
           {"give another `checkpoint_dir`", "give another --checkpoint-dir", "give another checkpoint dir"},
           {"`rank_timeout`", "--rank-timeout", "rank_timeout"},
           {"`penstock generate` reads it, `nothing` and `resume`; raise `ulimit -n`; a ` and `",
            "`penstock generate` reads it, `nothing` and --resume; raise `ulimit -n`; a ` and `",
            "`penstock generate` reads it, `nothing` and resume=True; raise `ulimit -n`; a ` and `"},
           {"odd: ` `resume`", "odd: ` --resume", "odd: ` resume=True"},
           {"/a--resume/`", "/a--resume/`", "/a--resume/`"},
           {"``", "``", "``"},
           {"", "", ""}}) {
    EXPECT_EQ(Spelt(message, Door::kCommandLine), flags);
    EXPECT_EQ(Spelt(message, Door::kPython), keywords);
  }
}

// The page says of these rows that a line names them.
TEST(Settings, WhatHasNoEffectSomewhereIsNamedThere) {
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      const bool works_everywhere = setting.without_device.empty() && setting.python_ignores.empty() &&
                                    setting.command_line_ignores.empty() && setting.without_ranks.empty() &&
                                    setting.without_drive.empty();
      if (works_everywhere) continue;
      const std::string path = PathOf(section, setting);
      Config config;
      config.flops_profiler.enabled = true;
      json value = ValueOf(setting);
      if (!setting.neutral.empty() && value == ScalarOf(setting.neutral)) value = OtherThan(value, setting);
      Fill({{path, value}}, &config);
      const std::string line = absl::StrCat(path, ": accepted and ignored: ");
      if (!setting.command_line_ignores.empty()) {
        EXPECT_THAT(KeysUnusedOnCommandLine(config), ElementsAre(StartsWith(line)));
        EXPECT_TRUE(KeysUnusedOnCommandLine(Config()).empty());
        EXPECT_TRUE(KeysUnusedFromPython(config).empty());
        continue;
      }
      if (!setting.without_device.empty()) {
        EXPECT_THAT(UnusedDeviceKeys(config, "here"), ElementsAre(StartsWith(line)));
        EXPECT_TRUE(KeysUnusedFromPython(config).empty());
        continue;
      }
      if (!setting.without_ranks.empty()) {
        const auto alone = [&config](const GivenValues& flags) {
          return UnusedPlaceKeys(config, 1, OffloadDevice::kNvme, flags);
        };
        EXPECT_THAT(alone({}), ElementsAre(StartsWith(line)));
        EXPECT_THAT(alone({{std::string(setting.flag), true}}), ElementsAre(StartsWith(setting.flag)));
        EXPECT_TRUE(UnusedPlaceKeys(config, 2, OffloadDevice::kNvme).empty());
        EXPECT_TRUE(KeysUnusedFromPython(config).empty());
        continue;
      }
      if (!setting.without_drive.empty()) {
        EXPECT_THAT(UnusedPlaceKeys(config, 2, OffloadDevice::kCpu), ElementsAre(StartsWith(line)));
        EXPECT_TRUE(UnusedPlaceKeys(config, 2, OffloadDevice::kNvme).empty());
        if (!setting.neutral.empty()) {
          Config neutral;
          Fill({{path, ScalarOf(setting.neutral)}}, &neutral);
          EXPECT_TRUE(UnusedPlaceKeys(neutral, 2, OffloadDevice::kCpu).empty());
        }
        continue;
      }
      EXPECT_THAT(KeysUnusedFromPython(config), ElementsAre(StartsWith(line)));
    }
  }
}

TEST(Settings, RanksMayDifferInPlacesMemoryAndWhoTellsWandbAlone) {
  auto config = nlohmann::ordered_json::parse(
      R"({"gradient_clipping": 1, "tensorboard": {"output_path": "a", "enabled": true},
    "csv_monitor": false, "penstock": {"state_dirs": ["a"], "host_memory": 5, "order": "auto"},
    "wandb": {"enabled": true},
    "zero_optimization": {"offload_optimizer": {"nvme_path": "b", "device": "nvme"}, "offload_param": null}})");
  RemoveWhatRanksMayDifferIn(&config);
  EXPECT_EQ(config,
            nlohmann::ordered_json::parse(R"({"gradient_clipping": 1, "tensorboard": {"enabled": true},
    "csv_monitor": false, "penstock": {"order": "auto"},
    "zero_optimization": {"offload_optimizer": {"device": "nvme"}, "offload_param": null}})"));
}

TEST(Settings, RanksCompareWhatTheirConfigurationsSayOfAllOthers) {
  Config config;
  Fill({{"gradient_clipping", 0.5},
        {"penstock.order", "in_backward"},
        {"zero_optimization.stage3_max_live_parameters", 7},
        {"aio.use_gds", true},
        {"aio.queue_depth", 4},
        {"penstock.update_threads", 3},
        {"penstock.host_memory", 1 << 20},
        {"penstock.state_dirs", {"a"}},
        {"wandb.project", "b"}},
       &config);
  EXPECT_EQ(SharedValues(config), json({{"gradient_clipping", 0.5},
                                        {"penstock.order", "in_backward"},
                                        {"zero_optimization.stage3_max_live_parameters", 7},
                                        {"aio.use_gds", true}}));
}

TEST(Settings, OneIsDescribedByAnyOfItsSpellings) {
  const std::string clip = *DescribeSetting("gradient_clipping");
  EXPECT_THAT(clip,
              AllOf(StartsWith("### gradient_clipping\nMaximum global gradient norm"), HasSubstr("`--clip`"),
                    HasSubstr("default: 1.0"), HasSubstr("from the next step on")));
  for (const char* const spelling : {"clip", "--clip"})
    EXPECT_EQ(*DescribeSetting(spelling), clip) << spelling;
  EXPECT_THAT(*DescribeSetting("stage3_gather_16bit_weights_on_model_save"),
              HasSubstr("Accepted without effect"));
  EXPECT_THAT(*DescribeSetting("zero_hpz_partition_size"), HasSubstr("Not served"));
  EXPECT_THAT(*DescribeSetting("zero_quantized_weights"), HasSubstr("with one rank: there is nobody"));
  EXPECT_THAT(DescribeSetting("gradient_cliping").status().message(),
              HasSubstr("(did you mean \"gradient_clipping\"?)"));
  EXPECT_FALSE(DescribeSetting("").ok());
}

void ExpectIs(const std::string& path, const std::string& text) {
  std::ifstream committed(std::string(PENSTOCK_DOCS) + "/" + path);
  std::istringstream printed(text);
  std::string there, wanted;
  while (std::getline(printed, wanted)) {
    ASSERT_TRUE(std::getline(committed, there)) << path << " ends before: " << wanted;
    ASSERT_EQ(there, wanted) << path;
  }
  EXPECT_FALSE(std::getline(committed, there)) << path << ": " << there;
}

// Written anew by `penstock settings > docs/settings.md` and, for Python's keywords,
// `penstock settings --python > python/penstock/_engine/_keywords.py`.
TEST(Settings, TheCommittedPagesAreThoseOfTheTable) {
  ExpectIs("settings.md", SettingsPage());
  ExpectIs("../python/penstock/_engine/_keywords.py", KeywordsModule());
}

}  // namespace
}  // namespace penstock::run::settings_test
