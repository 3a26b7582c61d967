// Whatever the text: a configuration or one line, never a crash. And the table keeps its own rules.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "run/config.h"
#include "run/given_values.h"
#include "run/settings.h"
#include "zero/config/config_json.h"

namespace penstock::run::config_property_test {
namespace {

using Json = nlohmann::ordered_json;

// A value that the key accepts.
Json Example(const Setting& spec) {
  const auto within = [&spec](double wish) { return std::min(std::max(wish, spec.least), spec.most); };
  switch (spec.type) {
    case KeyType::kBool:
      return spec.neutral == "false";  // of which nothing is said
    case KeyType::kWhole:
      return static_cast<int64_t>(within(1));
    case KeyType::kNumber:
      return within(0.5);
    case KeyType::kText:
    case KeyType::kPath:
      return "/somewhere";
    case KeyType::kChoice:
      return std::string(spec.choices.substr(0, spec.choices.find('|')));
    case KeyType::kSize:
      return "1GiB";
    case KeyType::kPair:
      return Json::array({0.9, 0.99});
    case KeyType::kWholes:
      return Json::array({2, 4});
    case KeyType::kPaths:
      return Json::array({"/somewhere", "/elsewhere=2"});
    case KeyType::kNames:
      return Json::array({"layers.0", ""});
    case KeyType::kObject:
      return Json::object();
    case KeyType::kAny:
      return 1;
  }
  return nullptr;
}

// The configuration that gives `key` alone, with what its section needs.
Json Around(const std::string& section, const std::string& key, const Json& value) {
  if (section.empty()) return {{key, value}};
  if (section.starts_with("scheduler.params/")) {
    Json params = {{key, value}};
    if (section.ends_with("OneCycle") && key != "cycle_min_lr") params["cycle_min_lr"] = 0.1;
    if (section.ends_with("OneCycle") && key != "cycle_max_lr") params["cycle_max_lr"] = 0.9;
    if (key == "cycle_min_mom") params["cycle_max_mom"] = 0.99;
    if (key == "cycle_max_mom") params["cycle_min_mom"] = 0.1;
    return {{"scheduler", {{"type", section.substr(section.find('/') + 1)}, {"params", params}}}};
  }
  if (section.starts_with("optimizer.params/")) {
    Json params = {{key, value}};
    if (key == "nesterov") params["momentum"] = 0.9;
    return {{"optimizer", {{"type", section.substr(section.find('/') + 1)}, {"params", params}}}};
  }
  Json inner = {{key, value}};
  if (section == "optimizer" && key != "type") inner["type"] = "Adam";
  if (section == "scheduler" && key != "type") inner["type"] = "WarmupLR";
  if (section == "elasticity" && key == "enabled") {
    inner["max_train_batch_size"] = 16;
    inner["micro_batch_sizes"] = {2, 4};
  }
  const size_t dot = section.find('.');
  if (dot == std::string::npos) return {{section, inner}};
  return {{section.substr(0, dot), {{section.substr(dot + 1), inner}}}};
}

TEST(ConfigTable, EveryKeyHasTheFateThatItIsGiven) {
  int keys = 0;
  for (const std::string_view section : SectionPaths()) {
    std::set<std::string_view> names;
    for (const Setting& spec : SectionKeys(section)) {
      ++keys;
      const std::string name(spec.name);
      EXPECT_TRUE(names.insert(spec.name).second) << section << "." << name << " stands twice in the table";
      EXPECT_EQ(spec.use == KeyUse::kServed, spec.why.empty()) << name;
      const auto parsed = ParseConfig(Around(std::string(section), name, Example(spec)).dump());
      if (spec.use == KeyUse::kRefused) {
        // 1 is on for a switch, but may be the neutral value of a number.
        if (spec.neutral == "1") continue;
        ASSERT_FALSE(parsed.ok()) << section << "." << name;
        EXPECT_NE(std::string(parsed.status().message()).find(": not served: " + std::string(spec.why)),
                  std::string::npos)
            << parsed.status();
        continue;
      }
      ASSERT_TRUE(parsed.ok()) << section << "." << name << ": " << parsed.status();
      const bool said = !parsed->notes.empty();
      if (spec.use != KeyUse::kServed) {
        EXPECT_TRUE(said) << name;
      }
    }
  }
  EXPECT_GT(keys, 180);
}

TEST(ConfigTable, CanonicalSpellingsExistAndBehaveAlike) {
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& spec : SectionKeys(section)) {
      if (spec.canonical.empty()) continue;
      bool found = false;
      for (const Setting& other : SectionKeys(section)) {
        if (other.name != spec.canonical) continue;
        found = true;
        EXPECT_EQ(other.use, spec.use) << spec.name;
        EXPECT_EQ(other.type, spec.type) << spec.name;
        EXPECT_TRUE(other.canonical.empty()) << spec.name;
      }
      EXPECT_TRUE(found) << spec.name << " -> " << spec.canonical;
    }
  }
}

TEST(ConfigTable, ServedKeysRefuseEveryOtherType) {
  const std::vector<Json> values = {true, -1.5, "zebra", Json::array({1}), {{"zebra", 1}}};
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& spec : SectionKeys(section)) {
      if (spec.use != KeyUse::kServed) continue;
      int accepted = 0;
      for (const Json& value : values) {
        const auto parsed = ParseConfig(Around(std::string(section), std::string(spec.name), value).dump());
        accepted += parsed.ok();
        if (!parsed.ok()) {
          EXPECT_NE(std::string(parsed.status().message()).find(std::string(spec.name)), std::string::npos)
              << parsed.status();
        }
      }
      const bool takes_one = spec.type == KeyType::kBool || spec.type == KeyType::kText ||
                             spec.type == KeyType::kPath || spec.type == KeyType::kWholes;
      EXPECT_EQ(accepted, takes_one ? 1 : 0) << section << "." << spec.name;
    }
  }
}

// Values beyond the bounds of a setting, each with the bound as messages write it.
std::vector<std::pair<Json, std::string>> Beyond(const Setting& spec) {
  std::vector<std::pair<Json, std::string>> beyond;
  const auto add = [&](double value, double bound) {
    Json wrong = value;
    if (spec.type != KeyType::kNumber) wrong = static_cast<int64_t>(value);
    beyond.emplace_back(std::move(wrong), absl::StrFormat("%.10g", bound));
  };
  if (spec.type == KeyType::kChoice) beyond.emplace_back("zebra", ChoicesOf(spec));
  if (spec.type != KeyType::kWhole && spec.type != KeyType::kNumber) return beyond;
  if (spec.least > -0x1p62) add(spec.least - 1, spec.least);
  if (spec.most < 0x1p62) add(spec.most * 2, spec.most);
  return beyond;
}

TEST(ConfigTable, AValueOutOfBoundsIsNamedWithItsBoundAtEveryDoor) {
  int by_key = 0, by_other = 0;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& spec : SectionKeys(section)) {
      if (spec.use != KeyUse::kServed) continue;
      for (const auto& [value, bound] : Beyond(spec)) {
        const auto expect = [&](const absl::Status& status, const std::string& spelling) {
          const std::string told(status.message());
          EXPECT_TRUE(told.starts_with(spelling + ": ")) << spelling << ": " << status;
          EXPECT_NE(told.find(bound), std::string::npos) << bound << ": " << status;
          EXPECT_NE(told.find(zero::ShowValue(value)), std::string::npos) << value << ": " << status;
        };
        std::string path(section.substr(0, section.find('/')));
        path += absl::StrCat(path.empty() ? "" : ".", std::string(spec.name));
        const bool is_optimizer = path == "optimizer.type";  // of which others are named with their reason
        if (!is_optimizer) {
          expect(ParseConfig(Around(std::string(section), std::string(spec.name), value).dump()).status(),
                 path);
          ++by_key;
        }
        for (const std::string& spelling : {std::string(spec.flag), std::string(spec.keyword)}) {
          if (spelling.empty()) continue;
          Config config;
          expect(TakeGiven({{spelling, value}}, &config), spelling);
          ++by_other;
        }
      }
    }
  }
  EXPECT_GT(by_key, 90);
  EXPECT_GT(by_other, 15);
}

TEST(ConfigTable, AMisspeltKeyIsToldTheNearestOne) {
  int slips = 0;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& spec : SectionKeys(section)) {
      std::string slip(spec.name);
      if (spec.use == KeyUse::kRefused || slip.size() < 6) continue;
      slip.erase(slip.size() / 2, 1);
      const auto parsed = ParseConfig(Around(std::string(section), slip, Example(spec)).dump());
      ASSERT_FALSE(parsed.ok()) << section << "." << slip;
      EXPECT_NE(std::string(parsed.status().message()).find(": no such key (did you mean \""),
                std::string::npos)
          << parsed.status();
      ++slips;
    }
  }
  EXPECT_GT(slips, 150);
}

// ---- Mutations.
// -------------------------------------------------------------------------------------------------------

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  // Text: flipped, dropped, doubled and swapped bytes.
  std::string Bytes(std::string text) {
    for (size_t n = 1 + Below(4); n > 0 && !text.empty(); --n) {
      const size_t at = Below(text.size());
      switch (Below(5)) {
        case 0:
          text[at] = static_cast<char>(Below(256));
          break;
        case 1:
          text.erase(at, 1 + Below(8));
          break;
        case 2:
          text.insert(at, text.substr(Below(text.size()), Below(40)));
          break;
        case 3:
          std::swap(text[at], text[Below(text.size())]);
          break;
        default:
          text.insert(at, kTokens[Below(kTokens.size())]);
      }
    }
    return text;
  }

  // Trees: values replaced, keys renamed and moved, everywhere.
  Json Tree(Json value, int depth = 0) {
    if (Below(12) == 0) return Any();
    if (!value.is_object() || depth > 6) return value;
    Json result = Json::object();
    for (const auto& [name, inner] : value.items()) {
      std::string key = name;
      if (Below(15) == 0) key = Bytes(key);
      if (Below(15) == 0) {
        const auto sections = SectionPaths();
        const auto keys = SectionKeys(sections[Below(sections.size())]);
        key = std::string(keys[Below(keys.size())].name);
      }
      if (Below(20) != 0) result[key] = Tree(inner, depth + 1);
    }
    return result;
  }

  size_t Below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

 private:
  Json Any() {
    switch (Below(10)) {
      case 0:
        return nullptr;
      case 1:
        return Below(2) == 0;
      case 2:
        return static_cast<int64_t>(Below(1 << 20)) - 10;
      case 3:
        return std::numeric_limits<int64_t>::min();
      case 4:
        return std::numeric_limits<uint64_t>::max();
      case 5:
        return 1e308 * (Below(2) == 0 ? 1 : -1);
      case 6:
        return "auto";
      case 7:
        return Json::array({Json::object(), 1, "x"});
      case 8:
        return Json::object({{"enabled", Below(2) == 0}});
      default:
        return std::string(Below(30), 'z');
    }
  }
  static inline const std::vector<std::string> kTokens = {"{", "}",    "[",   "]",  "\"", ",",
                                                          ":", "null", "1e9", "//", "/*", "\\"};
  std::mt19937 random_;
};

const std::vector<std::string>& Corpus() {
  static const std::vector<std::string> corpus = {
      R"({"train_batch_size": 16, "gradient_clipping": 1.0, "bf16": {"enabled": true},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
          "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n", "buffer_size": 1e8},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "pipeline_read": true}},
          "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1}})",
      R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
          "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
          "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 100, "decay_step_size": 10, "decay_lr_rate": 0.1}},
          "zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": 5e8}})",
      R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}},
          "activation_checkpointing": {"cpu_checkpointing": true}, "checkpoint": {"tag_validation": "fail"},
          "penstock": {"host_memory": "512MiB", "durability": "step", "sync": "process", "order": "next_forward",
            "tile_bytes": "4MiB", "io_threads": 2}, "elasticity": {"enabled": false}, "wandb": {"enabled": true}})"};
  return corpus;
}

void MustBehave(const std::string& text) {
  const auto parsed = ParseConfig(text);
  if (parsed.ok()) {
    for (const std::string& note : parsed->notes) {
      ASSERT_EQ(note.find('\n'), std::string::npos) << note;
    }
    // What is accepted must also work further on, whatever the values.
    const Config& c = parsed->config;
    if (c.scheduler) {
      const auto schedule = MakeSchedule(*c.scheduler, c.optimizer.lr.value_or(1e-3), 1000);
      ASSERT_TRUE(schedule.ok()) << schedule.status() << "\n" << text;
      (void)schedule->At(17);
    }
    if (c.fp16.enabled.value_or(false)) {
      ASSERT_TRUE(MakeLossScaler(c.fp16).ok()) << text;
    }
    (void)ResolveBatch({.train_batch = c.train_batch_size,
                        .micro_batch = c.micro_batch_per_rank,
                        .accumulation = c.gradient_accumulation_steps},
                       2, 1);
    return;
  }
  ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  const std::string message(parsed.status().message());
  ASSERT_FALSE(message.empty());
  ASSERT_LT(message.size(), 1000u) << message;
  for (const char c : message) {
    ASSERT_TRUE(c >= 0x20 && c < 0x7f) << "unprintable byte in: " << message;
  }
}

TEST(ConfigMutation, BytesOfAValidText) {
  for (const std::string& text : Corpus()) ASSERT_TRUE(ParseConfig(text).ok()) << ParseConfig(text).status();
  Mutator mutator(1);
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_NO_FATAL_FAILURE(MustBehave(mutator.Bytes(Corpus()[mutator.Below(Corpus().size())])));
  }
}

TEST(ConfigMutation, TreesOfAValidConfiguration) {
  Mutator mutator(2);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    const Json tree = mutator.Tree(Json::parse(Corpus()[mutator.Below(Corpus().size())]));
    const std::string text = tree.dump(-1, ' ', false, Json::error_handler_t::replace);
    ASSERT_NO_FATAL_FAILURE(MustBehave(text));
    accepted += ParseConfig(text).ok();
  }
  // The mutations reach both sides of the line.
  EXPECT_GT(accepted, 200);
  EXPECT_LT(accepted, 19'000);
}

}  // namespace
}  // namespace penstock::run::config_property_test
