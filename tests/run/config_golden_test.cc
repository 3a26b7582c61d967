// Configurations as DeepSpeed and Hugging Face's Trainer answer them. tests/golden has their answers;
// tests/golden/make asks them.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "run/config.h"
#include "run/elasticity.h"
#include "run/settings.h"
#include "zero/config/config_json.h"

namespace penstock::run::config_golden_test {

using zero::ParseHjson;
namespace {

using nlohmann::json;

json Golden(const std::string& name) {
  std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/" + name);
  const json golden = json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(golden.is_object()) << name;
  return golden;
}

std::string DtypeOf(const Config& c) {
  return c.bf16.value_or(false) ? "bf16" : c.fp16.enabled.value_or(false) ? "fp16" : "fp32";
}

void ExpectOptimizer(const OptimizerConfig& o, const json& theirs) {
  ASSERT_EQ(o.type.has_value(), !theirs.is_null());
  if (theirs.is_null()) return;
  EXPECT_EQ(o.lr, theirs["lr"].get<double>());
  EXPECT_EQ(o.weight_decay, theirs["weight_decay"].get<double>());
  if (theirs.contains("betas")) {
    EXPECT_EQ(o.beta1, theirs["betas"][0].get<double>());
    EXPECT_EQ(o.beta2, theirs["betas"][1].get<double>());
  }
  if (theirs.contains("eps")) {
    EXPECT_EQ(o.eps, theirs["eps"].get<double>());
  }
  if (theirs.contains("momentum")) {
    EXPECT_EQ(o.momentum, theirs["momentum"].get<double>());
  }
}

TEST(ConfigGolden, WhatIsLeftOpenIsAsInDeepSpeed) {
  const json golden = Golden("configs.json");
  const auto steps = golden["steps"].get<int64_t>();
  int schedules = 0, refused = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>() + ": " + c["text"].get<std::string>());
    const json& answer = c["answer"];
    const auto parsed = ParseConfig(c["text"].get<std::string>());
    ASSERT_EQ(parsed.ok(), !answer.contains("refused")) << parsed.status() << answer;
    if (!parsed.ok()) {
      ++refused;
      continue;
    }
    Config config = parsed->config;
    FillDefaults(parsed->autos, steps, golden["warmup"], &config);
    const auto batch = ResolveBatch(
        {config.train_batch_size, config.micro_batch_per_rank, config.gradient_accumulation_steps}, 1, 2);
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(batch->train_batch, answer["train_batch_size"]);
    EXPECT_EQ(batch->micro_batch, answer["micro_batch"]);
    EXPECT_EQ(batch->accumulation, answer["accumulation"]);
    EXPECT_EQ(ValueAt(config, "gradient_clipping"), answer["gradient_clipping"]);
    EXPECT_EQ(DtypeOf(config), answer["dtype"].get<std::string>());
    EXPECT_EQ(config.zero.stage.value_or(0), answer["stage"]);
    const auto device = [](const std::optional<OffloadDevice>& d) {
      return d.has_value() ? json(std::string(Name(*d))) : json();
    };
    EXPECT_EQ(device(config.zero.offload_param.device), answer["offload_param"]);
    EXPECT_EQ(device(config.zero.offload_optimizer.device), answer["offload_optimizer"]);
    ExpectOptimizer(config.optimizer, answer["optimizer"]);
    ASSERT_EQ(config.scheduler.has_value(), answer.contains("rates"));
    if (!config.scheduler.has_value()) continue;
    ++schedules;
    const double lr = config.optimizer.lr.value_or(golden["rate_without_optimizer"].get<double>());
    const auto schedule = MakeSchedule(*config.scheduler, lr, steps);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    for (size_t i = 0; i < golden["updates"].size(); ++i) {
      const zero::ScheduledRates rates = schedule->At(golden["updates"][i]);
      const double rate = answer["rates"][i];
      EXPECT_NEAR(rates.lr, rate, 1e-12 * std::max(rate, 1e-3)) << "update " << golden["updates"][i];
      EXPECT_EQ(rates.beta1.has_value(), answer.contains("beta1"));
      if (rates.beta1.has_value()) {
        EXPECT_NEAR(*rates.beta1, answer["beta1"][i].get<double>(), 1e-12);
      }
    }
    // With every default written out the answer is the same without them.
    const auto plain = MakeSchedule(*parsed->config.scheduler, lr, steps);
    ASSERT_TRUE(plain.ok()) << plain.status();
    for (int64_t update = 1; update <= 2 * steps && parsed->autos.empty(); ++update)
      EXPECT_EQ(plain->At(update).lr, schedule->At(update).lr) << update;
  }
  EXPECT_GT(schedules, 40);
  EXPECT_GT(refused, 4);
}

TEST(ConfigGolden, EveryKeyOfDeepSpeedIsKnown) {
  int known = 0;
  const json golden = Golden("keys.json");
  for (const json& section : golden["sections"]) {
    const auto path = section[0].get<std::string>();
    for (const json& key : section[1]) {
      const auto keys = SectionKeys(path);
      EXPECT_TRUE(
          std::any_of(keys.begin(), keys.end(), [&](const Setting& spec) { return key == spec.name; }))
          << path << ": " << key;
      ++known;
    }
  }
  EXPECT_GT(known, 180);
}

TEST(ConfigGolden, ElasticBatchesAreDeepSpeeds) {
  int answered = 0, refused = 0;
  const json golden = Golden("elasticity.json");
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c.dump());
    json section = c["config"];
    section["enabled"] = true;
    section["version"] = 0.1;
    const auto parsed = ParseConfig(json{{"elasticity", section}}.dump());
    ASSERT_EQ(parsed.ok(), !c.contains("refused")) << parsed.status();
    if (!parsed.ok()) {
      EXPECT_EQ(std::string(parsed.status().message()).rfind("elasticity", 0), 0u) << parsed.status();
      ++refused;
      continue;
    }
    const ElasticityConfig& config = parsed->config.elasticity;
    const auto batch = ComputeElasticBatch(config);
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(batch->train_batch, c["batch"].get<int64_t>());
    ASSERT_EQ(batch->ranks.size(), c["ranks"].get<size_t>());
    EXPECT_EQ(std::accumulate(batch->ranks.begin(), batch->ranks.end(), int64_t{0}), c["sum"].get<int64_t>());
    const auto first = c["first"].get<std::vector<int64_t>>();
    EXPECT_TRUE(std::equal(first.begin(), first.end(), batch->ranks.begin()));
    for (const json& micro : c["micro"]) {
      const auto ours = ElasticMicroBatch(config, *batch, micro[0].get<int64_t>());
      ASSERT_TRUE(ours.ok()) << ours.status();
      EXPECT_EQ(*ours, micro[1].get<int64_t>());
    }
    ++answered;
  }
  EXPECT_GT(answered, 60);
  EXPECT_GT(refused, 0);
}

TEST(ConfigGolden, TextsAreReadAsByHjson) {
  int read = 0, refused = 0;
  const json golden = Golden("hjson.json");
  for (const json& c : golden["cases"]) {
    const auto text = c["text"].get<std::string>();
    const auto ours = ParseHjson(text);
    ASSERT_EQ(ours.ok(), c.contains("value")) << text << "\n" << ours.status() << "\n" << c;
    if (ours.ok()) {
      EXPECT_EQ(json(*ours), c["value"]) << text;
      ++read;
    } else {
      EXPECT_EQ(ours.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(std::string(ours.status().message()).find('\n'), std::string::npos);
      ++refused;
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace penstock::run::config_golden_test
