// Which experts stay in memory, beside what only a prophet could keep (Belady 1966), on routes of several
// kinds; and which experts a row takes, beside their definition.
#include "generate/expert_use.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "generate/routing.h"

namespace penstock::generate::expert_use_test {
namespace {

using testing::HasSubstr;
using testing::Not;

// By pass and layer: the experts that a pass took.
struct Tape {
  int64_t layers = 0, experts = 0;
  std::vector<std::vector<std::vector<int64_t>>> passes;

  size_t all() const { return static_cast<size_t>(layers * experts); }
  size_t NumberOf(size_t layer, int64_t expert) const {
    return layer * static_cast<size_t>(experts) + static_cast<size_t>(expert);
  }
};

struct TapeKind {
  double skew = 1;   // an expert's popularity is its rank to the power of minus this
  double stays = 0;  // chance that an expert of the token before is taken again
};

Tape MakeTape(const TapeKind& kind, uint64_t seed) {
  constexpr int64_t kLayers = 8, kExperts = 64, kChosen = 4, kPasses = 160;
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(1e-12, 1);
  std::vector<std::vector<double>> popularity(kLayers);
  for (std::vector<double>& layer : popularity) {
    for (int64_t rank = 1; rank <= kExperts; ++rank)
      layer.push_back(-kind.skew * std::log(static_cast<double>(rank)));
    std::shuffle(layer.begin(), layer.end(), random);
  }
  Tape tape{kLayers, kExperts, {}};
  std::vector<std::set<int64_t>> before(kLayers);
  for (int64_t pass = 0; pass < kPasses; ++pass) {
    auto& of_pass = tape.passes.emplace_back();
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      std::set<int64_t> taken;
      for (const int64_t expert : before[static_cast<size_t>(layer)]) {
        if (uniform(random) < kind.stays) taken.insert(expert);
      }
      std::vector<std::pair<double, int64_t>> drawn;  // Gumbel's: without replacement, by popularity
      for (int64_t e = 0; e < kExperts; ++e) {
        const double noise = -std::log(-std::log(uniform(random)));
        drawn.emplace_back(popularity[static_cast<size_t>(layer)][static_cast<size_t>(e)] + noise, e);
      }
      std::sort(drawn.rbegin(), drawn.rend());
      for (size_t i = 0; taken.size() < static_cast<size_t>(kChosen); ++i) taken.insert(drawn[i].second);
      of_pass.emplace_back(taken.begin(), taken.end());
      before[static_cast<size_t>(layer)] = std::move(taken);
    }
  }
  return tape;
}

// The texts of tests/golden/routes.json: experts that the routers of a trained mixture took.
std::vector<Tape> RecordedTexts() {
  std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/routes.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  const auto letters = golden["letters"].get<std::string>();
  const auto chosen = golden["chosen"].get<size_t>();
  std::vector<Tape> texts;
  for (const nlohmann::json& text : golden["texts"]) {
    Tape& tape = texts.emplace_back(Tape{golden["layers"], golden["experts"], {}});
    const auto layers = text.get<std::vector<std::string>>();
    tape.passes.resize(layers.front().size() / chosen);
    for (size_t pass = 0; pass < tape.passes.size(); ++pass) {
      for (const std::string& taken : layers) {
        std::vector<int64_t>& of = tape.passes[pass].emplace_back();
        for (size_t k = 0; k < chosen; ++k)
          of.push_back(static_cast<int64_t>(letters.find(taken[pass * chosen + k])));
      }
    }
  }
  return texts;
}

// One text after the other.
Tape InTurn(const std::vector<Tape>& texts) {
  Tape tape = texts.front();
  for (size_t i = 1; i < texts.size(); ++i)
    tape.passes.insert(tape.passes.end(), texts[i].passes.begin(), texts[i].passes.end());
  return tape;
}

// All texts at once: a pass takes what any of them does.
Tape Together(const std::vector<Tape>& texts) {
  Tape tape = texts.front();
  for (size_t pass = 0; pass < tape.passes.size(); ++pass) {
    for (size_t layer = 0; layer < tape.passes[pass].size(); ++layer) {
      std::set<int64_t> taken;
      for (const Tape& text : texts)
        taken.insert(text.passes[pass][layer].begin(), text.passes[pass][layer].end());
      tape.passes[pass][layer].assign(taken.begin(), taken.end());
    }
  }
  return tape;
}

// Share of uses that are in a memory of `places` experts; `wait(number, pass, layer)`: the larger, the sooner
// an expert is given up. What a layer uses is not given up before the next one.
template <typename Enter, typename Wait>
double HitRate(const Tape& tape, size_t places, const Enter& enter, const Wait& wait) {
  std::set<size_t> held;
  int64_t hits = 0, uses = 0;
  for (size_t pass = 0; pass < tape.passes.size(); ++pass) {
    for (size_t layer = 0; layer < tape.passes[pass].size(); ++layer) {
      enter(pass, layer);
      for (const int64_t expert : tape.passes[pass][layer]) {
        hits += held.insert(tape.NumberOf(layer, expert)).second ? 0 : 1;
        ++uses;
      }
      if (held.size() <= places) continue;
      std::vector<std::pair<double, size_t>> last;
      for (const size_t number : held) last.emplace_back(wait(number, pass, layer), number);
      std::sort(last.rbegin(), last.rend());
      for (size_t i = 0; held.size() > places; ++i) held.erase(last[i].second);
    }
  }
  return static_cast<double>(hits) / static_cast<double>(uses);
}

double HitRateOfUse(const Tape& tape, size_t places) {
  ExpertUse use(tape.layers, tape.experts);
  return HitRate(
      tape, places,
      [&](size_t pass, size_t layer) {
        use.EnterLayer(static_cast<int64_t>(layer));
        for (const int64_t expert : tape.passes[pass][layer]) use.Touch(tape.NumberOf(layer, expert));
      },
      [&](size_t number, size_t, size_t) { return use.ExpectedWait(number); });
}

double HitRateOfBelady(const Tape& tape, size_t places) {
  const auto layers = static_cast<size_t>(tape.layers);
  std::map<size_t, std::vector<size_t>> turns;  // by number: when it is used, in layers from the beginning
  for (size_t pass = 0; pass < tape.passes.size(); ++pass) {
    for (size_t layer = 0; layer < layers; ++layer) {
      for (const int64_t expert : tape.passes[pass][layer])
        turns[tape.NumberOf(layer, expert)].push_back(pass * layers + layer);
    }
  }
  return HitRate(
      tape, places, [](size_t, size_t) {},
      [&](size_t number, size_t pass, size_t layer) {
        const std::vector<size_t>& of = turns[number];
        const auto next = std::upper_bound(of.begin(), of.end(), pass * layers + layer);
        return next == of.end() ? std::numeric_limits<double>::infinity() : static_cast<double>(*next);
      });
}

double HitRateOfTheLatest(const Tape& tape, size_t places) {
  std::map<size_t, size_t> used;
  return HitRate(
      tape, places,
      [&](size_t pass, size_t layer) {
        for (const int64_t expert : tape.passes[pass][layer])
          used[tape.NumberOf(layer, expert)] = pass * static_cast<size_t>(tape.layers) + layer;
      },
      [&](size_t number, size_t, size_t) { return -static_cast<double>(used[number]); });
}

TEST(ExpertUseTest, KeepsNearlyWhatAProphetWouldWhereSomeAreTakenOften) {
  for (const TapeKind& kind : {TapeKind{1.2, 0.3}, TapeKind{1.5, 0}, TapeKind{1.5, 0.5}}) {
    const Tape tape = MakeTape(kind, 5);
    const size_t places = tape.all() / 2;
    EXPECT_GE(HitRateOfUse(tape, places), HitRateOfBelady(tape, places) - 0.05)
        << kind.skew << " " << kind.stays;
  }
}

TEST(ExpertUseTest, IsAboveTheLatestUsedAndBelowAProphetOnAllRoutes) {
  for (const TapeKind& kind : {TapeKind{0, 0}, TapeKind{0.5, 0}, TapeKind{1, 0}, TapeKind{1, 0.3},
                               TapeKind{1.2, 0.3}, TapeKind{0.5, 0.5}}) {
    const Tape tape = MakeTape(kind, 7);
    for (const size_t places : {tape.all() / 10, tape.all() / 4, tape.all() / 2}) {
      const double use = HitRateOfUse(tape, places), best = HitRateOfBelady(tape, places);
      EXPECT_LE(use, best);
      EXPECT_GE(use, HitRateOfTheLatest(tape, places) - 0.01)
          << kind.skew << " " << kind.stays << " " << places;
      RecordProperty(absl::StrCat("skew ", kind.skew, " stays ", kind.stays, " places ", places),
                     absl::StrCat(use, " of ", best));
    }
  }
}

// Of trained routers, one text after the other and all of them at once. In a small memory what comes decides,
// which a prophet knows and nobody else: bench/results/generate.md has the figures.
TEST(ExpertUseTest, OnRecordedRoutesHalfOfAllExpertsHaveWhatAProphetWouldHave) {
  const std::vector<Tape> texts = RecordedTexts();
  ASSERT_GT(texts.size(), 1u);
  for (const auto& [name, tape] :
       {std::pair("in turn", InTurn(texts)), std::pair("together", Together(texts))}) {
    for (const size_t percent : {10, 25, 50, 75}) {
      const size_t places = tape.all() * percent / 100;
      const double use = HitRateOfUse(tape, places), latest = HitRateOfTheLatest(tape, places);
      const double best = HitRateOfBelady(tape, places);
      EXPECT_LE(use, best);
      EXPECT_GE(use, latest) << name << " " << percent;
      const double least = percent >= 50 ? best - 0.01 : percent == 25 ? best - 0.07 : 0;
      EXPECT_GE(use, least) << name << " " << percent;
      RecordProperty(absl::StrCat(name, " ", percent), absl::StrCat(latest, " ", use, " ", best));
    }
  }
}

TEST(ExpertUseTest, WhatHasNeverBeenUsedGoesFirstAndOfTwoAlikeTheLayerThatHasJustPassed) {
  ExpertUse use(3, 4);
  use.EnterLayer(0);
  use.Touch(1);
  use.EnterLayer(1);
  use.Touch(4 + 1);
  use.EnterLayer(2);
  EXPECT_GT(use.ExpectedWait(2), use.ExpectedWait(1));
  EXPECT_GT(use.ExpectedWait(4 + 1), use.ExpectedWait(1)) << "layer 0 comes before layer 1 again";
}

// By the definition, in double.
void ExpectRoutesOf(const std::vector<std::vector<float>>& scores, const RoutingOptions& options) {
  const auto experts = static_cast<int64_t>(scores.front().size());
  auto rows = HostRows::Of(kernels::DType::kFp32, static_cast<int64_t>(scores.size()), experts);
  ASSERT_TRUE(rows.ok());
  for (size_t i = 0; i < scores.size(); ++i)
    std::copy(scores[i].begin(), scores[i].end(), rows->floats() + static_cast<int64_t>(i) * experts);
  const auto routes = Route(*rows, options, "router");
  ASSERT_TRUE(routes.ok()) << routes.status();
  std::map<std::pair<int64_t, int64_t>, RoutedRow> got;  // by row and expert
  for (size_t i = 0; i < routes->experts.size(); ++i) {
    ASSERT_FALSE(routes->rows[i].empty());
    for (const RoutedRow& row : routes->rows[i]) got[{row.row, routes->experts[i]}] = row;
  }
  EXPECT_TRUE(std::is_sorted(routes->experts.begin(), routes->experts.end()));
  EXPECT_TRUE(std::is_permutation(routes->likeliest.begin(), routes->likeliest.end(), routes->experts.begin(),
                                  routes->experts.end()));
  double before = std::numeric_limits<double>::infinity();
  for (const int64_t expert : routes->likeliest) {
    double weight = 0;
    for (const auto& [of, row] : got) weight += of.second == expert ? row.weight : 0;
    EXPECT_LE(weight, before + 1e-5);
    before = weight;
  }
  EXPECT_EQ(got.size(), scores.size() * static_cast<size_t>(options.chosen));
  for (size_t i = 0; i < scores.size(); ++i) {
    std::vector<int64_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return scores[i][static_cast<size_t>(a)] > scores[i][static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(options.chosen));
    double all = 0, chosen = 0;
    for (const float score : scores[i]) all += std::exp(static_cast<double>(score));
    for (const int64_t e : order) chosen += std::exp(static_cast<double>(scores[i][static_cast<size_t>(e)]));
    std::sort(order.begin(), order.end());
    for (size_t k = 0; k < order.size(); ++k) {
      const auto at = got.find({static_cast<int64_t>(i), order[k]});
      ASSERT_NE(at, got.end()) << "row " << i << " takes expert " << order[k];
      EXPECT_EQ(at->second.number, static_cast<int64_t>(k));
      const double weight = std::exp(static_cast<double>(scores[i][static_cast<size_t>(order[k])])) /
                            (options.normalizes ? chosen : all);
      EXPECT_NEAR(at->second.weight, weight, 1e-6);
    }
  }
}

TEST(RoutingTest, ARowTakesTheHighestScoresByTheirSoftmax) {
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  std::normal_distribution<float> normal(0, 3);
  for (int round = 0; round < 100; ++round) {
    const auto experts = static_cast<size_t>(1 + random() % 20);
    std::vector<std::vector<float>> scores(1 + random() % 9, std::vector<float>(experts));
    for (std::vector<float>& row : scores) {
      for (float& score : row) score = round % 5 == 0 ? static_cast<float>(random() % 3) : normal(random);
    }
    ExpectRoutesOf(scores,
                   {.chosen = static_cast<int64_t>(1 + random() % experts), .normalizes = round % 2 == 0});
  }
}

// Where scores are spread, so that no two groups are alike: by DeepSeek's definitions, in double.
TEST(RoutingTest, GroupsLimitTheChoiceAndCorrectionsChangeItAlone) {
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  std::normal_distribution<float> normal(0, 2);
  for (int round = 0; round < 200; ++round) {
    const size_t groups = 1 + random() % 5, each = 2 + random() % 4, experts = groups * each;
    const size_t chosen_groups = 1 + random() % groups;
    std::vector<float> scores(experts), correction(experts);
    for (float& score : scores) score = normal(random);
    for (float& value : correction) value = normal(random);
    RoutingOptions options = {.chosen = static_cast<int64_t>(1 + random() % (chosen_groups * each)),
                              .normalizes = round % 3 == 0,
                              .rounds_weights = false,
                              .sigmoid = round % 2 == 0,
                              .groups = static_cast<int64_t>(groups),
                              .chosen_groups = static_cast<int64_t>(chosen_groups),
                              .sums_two = round % 2 == 0,
                              .scaling = round % 4 == 0 ? 2.5 : 1.0};
    if (options.sigmoid) options.correction = correction;
    std::vector<double> weights(experts), choice(experts);
    double all = 0;
    for (const float score : scores) all += std::exp(double{score});
    for (size_t e = 0; e < experts; ++e) {
      weights[e] =
          options.sigmoid ? 1 / (1 + std::exp(-double{scores[e]})) : std::exp(double{scores[e]}) / all;
      choice[e] = weights[e] + (options.sigmoid ? double{correction[e]} : 0);
    }
    const auto of_group = [&](size_t group) {
      std::vector<double> of(choice.begin() + static_cast<std::ptrdiff_t>(group * each),
                             choice.begin() + static_cast<std::ptrdiff_t>((group + 1) * each));
      std::sort(of.rbegin(), of.rend());
      return options.sums_two ? of[0] + of[1] : of[0];
    };
    std::vector<size_t> by_group(groups), by_choice;
    std::iota(by_group.begin(), by_group.end(), size_t{0});
    std::sort(by_group.begin(), by_group.end(),
              [&](size_t a, size_t b) { return of_group(a) > of_group(b); });
    for (size_t i = 0; i < chosen_groups; ++i) {
      for (size_t e = 0; e < each; ++e) by_choice.push_back(by_group[i] * each + e);
    }
    std::sort(by_choice.begin(), by_choice.end(), [&](size_t a, size_t b) { return choice[a] > choice[b]; });
    by_choice.resize(static_cast<size_t>(options.chosen));
    std::sort(by_choice.begin(), by_choice.end());
    double sum = 0;
    for (const size_t e : by_choice) sum += weights[e];
    auto rows = HostRows::Of(kernels::DType::kFp32, 1, static_cast<int64_t>(experts));
    ASSERT_TRUE(rows.ok());
    std::copy(scores.begin(), scores.end(), rows->floats());
    const auto routes = Route(*rows, options, "router");
    ASSERT_TRUE(routes.ok()) << routes.status();
    ASSERT_EQ(routes->experts, std::vector<int64_t>(by_choice.begin(), by_choice.end())) << round;
    for (size_t k = 0; k < by_choice.size(); ++k) {
      const double weight = weights[by_choice[k]] / (options.normalizes ? sum : 1) * options.scaling;
      EXPECT_NEAR(routes->rows[k].front().weight, weight, 1e-5 * weight);
    }
  }
}

TEST(RoutingTest, AScoreThatIsNoNumberIsDamage) {
  auto rows = HostRows::Of(kernels::DType::kFp32, 1, 3);
  ASSERT_TRUE(rows.ok());
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    rows->floats()[0] = 1;
    rows->floats()[1] = bad;
    rows->floats()[2] = 2;
    const auto routes = Route(*rows, {.chosen = 2}, "model.layers.4.mlp.gate.weight");
    EXPECT_EQ(routes.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(routes.status().message()), HasSubstr("model.layers.4.mlp.gate.weight: "));
    rows->floats()[1] = 0;
    const float correction[] = {0, bad, 0};
    const RoutingOptions corrected = {.chosen = 2,
                                      .sigmoid = true,
                                      .correction = correction,
                                      .correction_name = "gate.e_score_correction_bias"};
    const absl::Status status = Route(*rows, corrected, "gate.weight").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr("gate.e_score_correction_bias: "));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("gate.weight")));
  }
}

}  // namespace
}  // namespace penstock::generate::expert_use_test
