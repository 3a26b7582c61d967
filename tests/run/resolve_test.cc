// What scripts train with: a keyword and a key of the same setting have the same effect, and what is wrong is
// named as its caller spelt it.
#include "run/resolve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "run/settings.h"

namespace penstock::run::resolve_test {
namespace {

using nlohmann::ordered_json;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// All that follows from a resolved training, as far as settings have keywords: what Resolve makes of several
// of them, and the values of all.
ordered_json Outcome(const absl::StatusOr<Resolved>& resolved) {
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  if (!resolved.ok()) return nullptr;
  ordered_json outcome = {
      {"dtype", static_cast<int>(resolved->dtype)}, {"offload", static_cast<int>(resolved->offload)},
      {"state_dirs", resolved->directories.paths},  {"weights", resolved->directories.weights},
      {"micro_batches", resolved->micro_batches},   {"forwards", resolved->forwards}};
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      const std::string path = PathOf(section, setting);
      // What these come to is there already.
      const bool is_there = setting.keyword == "dtype" || setting.keyword == "offload";
      if (!setting.keyword.empty() && !is_there) outcome[path] = setting.Find(resolved->config);
    }
  }
  return outcome;
}

ordered_json ValueOf(const Setting& setting) {
  switch (setting.type) {
    case KeyType::kWhole:
      return 3;
    case KeyType::kNumber:
      return 2.5;
    case KeyType::kText:
      return "cpu";
    case KeyType::kBool:
      return setting.settled != "true";
    case KeyType::kSize:
      return "640MiB";
    case KeyType::kChoice:
      // The second one: the first is what some have anyhow. offload's second wants a directory.
      {
        std::string_view choices = setting.choices;
        if (setting.keyword != "offload") choices.remove_prefix(choices.find('|') + 1);
        return choices.substr(0, choices.find('|'));
      }
    case KeyType::kPath:
      return "there";
    case KeyType::kPaths:
      return {"here=2", "there"};
    case KeyType::kNames:
      return {"layers.0", ""};
    default:
      ADD_FAILURE() << setting.name << ": a type that no keyword had so far";
      return nullptr;
  }
}

TEST(Resolve, AKeywordAndAKeyOfTheSameSettingHaveTheSameEffect) {
  int compared = 0;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (setting.keyword.empty()) continue;
      const std::string path = PathOf(section, setting), keyword(setting.keyword);
      SCOPED_TRACE(path);
      ++compared;
      EXPECT_EQ(FindKeyword(keyword), (std::pair{&setting, path}));
      // nvme_path: for the settings that are no places themselves.
      const ordered_json base = {
          {"zero_optimization",
           {{"stage", 3}, {"offload_param", {{"device", "none"}, {"nvme_path", "somewhere"}}}}}};
      ordered_json with_key = base;
      std::string pointer = "/" + path;
      std::replace(pointer.begin(), pointer.end(), '.', '/');
      with_key[ordered_json::json_pointer(pointer)] = ValueOf(setting);
      // A directory is for state on a drive.
      if (keyword == "state_dir") with_key["zero_optimization"]["offload_param"]["device"] = "nvme";
      const ordered_json by_keyword = Outcome(Resolve(&base, {{keyword, ValueOf(setting)}}, 1, true));
      EXPECT_EQ(Outcome(Resolve(&with_key, {}, 1, true)), by_keyword);
      EXPECT_EQ(Outcome(Resolve(&with_key, {{keyword, ValueOf(setting)}}, 1, true)), by_keyword);
      EXPECT_EQ(Outcome(Resolve(&with_key, {{keyword, nullptr}}, 1, true)), by_keyword)
          << "null is not given";
      if (keyword != "offload") {
        EXPECT_NE(by_keyword, Outcome(Resolve(&base, {}, 1, true))) << "nothing changes";
      }
    }
  }
  EXPECT_GE(compared, 7);
}

TEST(Resolve, KeywordsWinOverTheConfiguration) {
  const ordered_json config = ordered_json::parse(
      R"({"gradient_clipping": 2, "bf16": {"enabled": true}, "penstock": {"host_memory": "1GiB"},
          "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "there"}}})");
  const auto made = Resolve(
      &config, {{"gradient_clipping", 0.5}, {"dtype", "fp16"}, {"host_memory", 1 << 20}, {"offload", "cpu"}},
      1, true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(ValueAt(made->config, "gradient_clipping"), 0.5);
  EXPECT_EQ(made->dtype, kernels::DType::kFp16);
  EXPECT_EQ(made->config.penstock.host_memory_budget_bytes, 1 << 20);
  EXPECT_EQ(made->offload, OffloadDevice::kCpu);
  EXPECT_TRUE(made->directories.paths.empty());
  // What a keyword says is not told as DeepSpeed's.
  const ordered_json open = {{"train_batch_size", 4}};
  EXPECT_THAT(Resolve(&open, {{"gradient_clipping", 0.5}}, 1, true)->notes,
              Not(Contains(StartsWith("gradient_clipping"))));
  EXPECT_THAT(Resolve(&open, {}, 1, true)->notes, Contains(StartsWith("gradient_clipping: 1")));
}

TEST(Resolve, WithoutAConfigurationNothingIsClippedAndStateIsOnADrive) {
  const auto made = Resolve(nullptr, {{"state_dir", "here"}}, 1, true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(ValueAt(made->config, "gradient_clipping"), 0);
  EXPECT_EQ(made->offload, OffloadDevice::kNvme);
  EXPECT_EQ(made->dtype, kernels::DType::kFp32);
  EXPECT_TRUE(made->notes.empty());
  EXPECT_EQ(made->micro_batch_size, std::nullopt);
  EXPECT_THAT(Resolve(nullptr, {}, 1, true).status().message(), HasSubstr("give state_dir="));
  EXPECT_TRUE(Resolve(nullptr, {}, 1, false).ok());
  EXPECT_TRUE(Resolve(nullptr, {{"offload", "none"}}, 1, true).ok());
  // DeepSpeed's answer to a configuration without offload, and Penstock's own keys clip nothing.
  const ordered_json own = {{"penstock", {{"sync", "power"}}}};
  EXPECT_EQ(Resolve(&own, {}, 1, true)->offload, OffloadDevice::kNone);
  EXPECT_EQ(ValueAt(Resolve(&own, {}, 1, true)->config, "gradient_clipping"), 0);
  // A keyword wins over the key of its name.
  const ordered_json half = {{"penstock", {{"dtype", "bf16"}, {"seed", 7}}}};
  EXPECT_EQ(Resolve(&half, {}, 1, true)->dtype, kernels::DType::kBf16);
  EXPECT_EQ(Resolve(&half, {{"dtype", "fp32"}}, 1, true)->dtype, kernels::DType::kFp32);
  EXPECT_EQ(Resolve(&half, {}, 1, true)->config.penstock.seed, 7);
  EXPECT_EQ(Resolve(&half, {{"seed", 3}}, 1, true)->config.penstock.seed, 3);
  const ordered_json empty = ordered_json::object();
  EXPECT_EQ(ValueAt(Resolve(&empty, {}, 1, true)->config, "gradient_clipping"), 1);
}

TEST(Resolve, WhatIsWrongIsNamedAsItsCallerSpeltIt) {
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const double kInfinite = std::numeric_limits<double>::infinity();
  for (const auto& [keyword, value, told] :
       {std::tuple<std::string, ordered_json, std::string>{"host_memory", 0, "host_memory: must be a size"},
        {"host_memory", "4 apples", "host_memory: "},
        {"gradient_clipping", -1, "gradient_clipping: must be a number of 0 or more, not -1"},
        {"gradient_clipping", kNan, "gradient_clipping is nan: must be a number of 0 or more"},
        {"gradient_clipping", -kInfinite, "gradient_clipping is -inf: must be"},
        {"gradient_accumulation_steps", 0, "gradient_accumulation_steps: must be a whole number"},
        {"forwards_per_step", 0.5, "forwards_per_step: must be a whole number"},
        {"offload", "disk", "offload: must be one of none, cpu, nvme, not \"disk\""},
        {"dtype", "fp8", "dtype is \"fp8\": fp32, bf16 and fp16 are served"},
        {"blocks", "layers", "blocks: must be a list of names"},
        {"logits_chunk_size", -1, "logits_chunk_size: must be a whole number"},
        {"chunked_modules", "mlp", "chunked_modules: must be a list of names"},
        {"chunk_size", 0, "chunk_size: must be a whole number"},
        {"state_dir", ordered_json::array(), "state_dir: must be a list of directories"},
        {"state_dir", "here=-1", "state_dir: "},
        {"learning_rate", 1, "there is no setting learning_rate"}}) {
    Keywords keywords = {{keyword, value}};
    keywords.try_emplace("offload", keyword == "state_dir" ? "nvme" : "none");
    EXPECT_THAT(std::string(Resolve(nullptr, keywords, 1, true).status().message()),
                AllOf(StartsWith(told), Not(HasSubstr("\n"))));
  }
  // torch's clip_grad_norm_ takes it for no bound.
  EXPECT_EQ(
      ValueAt(Resolve(nullptr, {{"offload", "none"}, {"gradient_clipping", kInfinite}}, 1, true)->config,
              "gradient_clipping"),
      0);
  const ordered_json config = {{"train_batch_size", 8}, {"train_micro_batch_size_per_gpu", 4}};
  EXPECT_EQ(Resolve(&config, {}, 2, true)->micro_batches, 1);
  EXPECT_THAT(Resolve(&config, {{"gradient_accumulation_steps", 4}}, 1, true).status().message(),
              HasSubstr("is not a micro-batch of 4 x 4 accumulation steps"));
}

}  // namespace
}  // namespace penstock::run::resolve_test
