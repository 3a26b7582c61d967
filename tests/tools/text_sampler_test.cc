#include "models/data/text_sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

namespace penstock::models::text_sampler_test {
namespace {

const std::vector<float> kLogits = {0.0f, std::log(2.0f), std::log(5.0f),
                                    -std::numeric_limits<float>::infinity()};

TEST(TextSamplerTest, FollowsTheProbabilities) {
  TextSampler sampler(1.0, 0, 3);
  std::map<int64_t, int> counts;
  constexpr int kDraws = 80'000;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.Next(kLogits)];
  // 1 : 2 : 5 : 0; five standard deviations are at most 5 * sqrt(0.25 * n) = 707.
  EXPECT_NEAR(counts[0], kDraws / 8.0, 707);
  EXPECT_NEAR(counts[1], kDraws / 4.0, 707);
  EXPECT_NEAR(counts[2], kDraws * 5 / 8.0, 707);
  EXPECT_EQ(counts.count(3), 0u);
}

TEST(TextSamplerTest, TemperatureSharpensAndTopKCutsOff) {
  TextSampler sharp(0.5, 0, 3);  // squares the odds: 1 : 4 : 25
  TextSampler two(1.0, 2, 3);
  std::map<int64_t, int> of_sharp, of_two;
  for (int i = 0; i < 30'000; ++i) {
    ++of_sharp[sharp.Next(kLogits)];
    ++of_two[two.Next(kLogits)];
  }
  EXPECT_NEAR(of_sharp[2], 25'000, 433);
  EXPECT_EQ(of_two.count(0), 0u);
  EXPECT_NEAR(of_two[1], 30'000 * 2 / 7.0, 433);
}

TEST(TextSamplerTest, TopPKeepsTheFewestThatReachIt) {
  const auto chosen = [](const SamplingOptions& options) {
    TextSampler sampler(options, 3);
    std::map<int64_t, int> counts;
    for (int i = 0; i < 30'000; ++i) ++counts[sampler.Next(kLogits)];
    return counts;
  };
  EXPECT_EQ(chosen({.temperature = 1, .top_p = 0.6}).size(), 1u);
  auto two = chosen({.temperature = 1, .top_p = 0.7});
  EXPECT_EQ(two.count(0), 0u);
  EXPECT_NEAR(two[1], 30'000 * 2 / 7.0, 433);
  EXPECT_EQ(chosen({.temperature = 1, .top_p = 0.9}).size(), 3u);
  // Of what top_k leaves: 5 of 7 are enough.
  EXPECT_EQ(chosen({.temperature = 1, .top_k = 2, .top_p = 0.7}).size(), 1u);
}

TEST(TextSamplerTest, ThePenaltyCountsATokenOnceAndWorksOnBothSidesOfZero) {
  TextSampler sampler({.repetition_penalty = 2}, 1);
  EXPECT_EQ(sampler.Next(std::vector<float>{2.0f, 1.5f}), 0);
  EXPECT_EQ(sampler.Next(std::vector<float>{2.0f, 1.5f}, {std::vector<int64_t>{0}}), 1);
  EXPECT_EQ(sampler.Next(std::vector<float>{2.0f, 0.9f}, {std::vector<int64_t>{0, 0, 0}}), 0);
  EXPECT_EQ(sampler.Next(std::vector<float>{-1.0f, -1.5f}, {std::vector<int64_t>{0}}), 1);
}

TEST(TextSamplerTest, IsRepeatableAndGreedyTakesTheFirstOfEquals) {
  TextSampler a(1.0, 0, 8), b(1.0, 0, 8);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.Next(kLogits), b.Next(kLogits));
  TextSampler greedy(0, 0, 1);
  EXPECT_EQ(greedy.Next(std::vector<float>{1, 7, 7, 2}), 1);
}

TEST(TextSamplerTest, OpenAisPenaltiesCountTheTextAndNotThePrompt) {
  const std::vector<float> logits = {3.0f, 2.0f, 1.0f};
  const std::vector<int64_t> tokens = {0, 0, 1, 1, 1};
  TextSampler present({.presence_penalty = 1.5}, 1), frequent({.frequency_penalty = 0.75}, 1);
  EXPECT_EQ(present.Next(logits, {tokens, 5}), 0);  // all of it is the prompt
  EXPECT_EQ(present.Next(logits, {tokens, 0}), 0);  // 1.5, 0.5, 1
  EXPECT_EQ(present.Next(logits, {tokens, 1}), 0);
  EXPECT_EQ(frequent.Next(logits, {tokens, 0}), 0);  // 1.5, -0.25, 1
  TextSampler both({.presence_penalty = 1.5, .frequency_penalty = 0.75}, 1);
  EXPECT_EQ(both.Next(logits, {tokens, 0}), 2);  // 0, -1.75, 1
  EXPECT_EQ(both.Next(logits, {tokens, 2}), 0);
  TextSampler wanted({.presence_penalty = -2}, 1);
  EXPECT_EQ(wanted.Next(logits, {tokens, 2}), 1);  // 3, 4, 1
}

TEST(TextSamplerTest, ABiasIsAddedAndTheTextDoesNotEndBeforeMinTokens) {
  const std::vector<float> logits = {3.0f, 2.0f, 1.0f};
  TextSampler biased({.logit_bias = {{2, 2.5}, {7, 100}}}, 1);
  EXPECT_EQ(biased.Next(logits), 2);
  TextSampler banned({.logit_bias = {{0, -100}}, .temperature = 1}, 1);
  for (int i = 0; i < 1000; ++i) EXPECT_NE(banned.Next(logits), 0);
  const std::vector<int64_t> tokens = {1, 1, 1}, ends = {0, 1, 9};
  TextSampler holds({.min_tokens = 2}, 1);
  EXPECT_EQ(holds.Next(logits, {tokens, 3, ends}), 2);
  EXPECT_EQ(holds.Next(logits, {tokens, 2, ends}), 2);
  EXPECT_EQ(holds.Next(logits, {tokens, 1, ends}), 0);
}

TEST(TextSamplerTest, MinPKeepsWhatHasThatPartOfTheLikeliest) {
  std::map<double, size_t> kept;
  for (const double min_p : {0.0, 0.19, 0.21, 0.39, 0.41, 1.0}) {
    TextSampler sampler({.temperature = 1, .min_p = min_p}, 3);
    std::map<int64_t, int> counts;
    for (int i = 0; i < 10'000; ++i) ++counts[sampler.Next(kLogits)];
    kept[min_p] = counts.size();
  }
  // 1 : 2 : 5, which are 0.2 and 0.4 of the likeliest.
  EXPECT_EQ(kept, (std::map<double, size_t>{{0.0, 3}, {0.19, 3}, {0.21, 2}, {0.39, 2}, {0.41, 1}, {1.0, 1}}));
}

TEST(TextSamplerTest, LogprobsAreThoseOfTheModel) {
  const TokenLogprobs some = LogprobsOf(kLogits, 0, 2);
  EXPECT_NEAR(some.logprob, std::log(1.0 / 8), 1e-6);
  ASSERT_EQ(some.top.size(), 2u);
  EXPECT_EQ(some.top[0].first, 2);
  EXPECT_NEAR(some.top[0].second, std::log(5.0 / 8), 1e-6);
  EXPECT_EQ(some.top[1].first, 1);
  EXPECT_TRUE(LogprobsOf(kLogits, 2, 0).top.empty());
  EXPECT_EQ(LogprobsOf(kLogits, 2, 20).top.size(), 4u);
  EXPECT_EQ(LogprobsOf(kLogits, 3, 0).logprob, -9999);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isfinite(LogprobsOf(std::vector<float>{nan, nan}, 1, 1).logprob));
}

TEST(TextSamplerTest, ExtremesAreSurvived) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const double temperature : {0.0, 1e-9, 1.0, 1e6}) {
    TextSampler sampler(temperature, 0, 1);
    for (int i = 0; i < 50; ++i) {
      EXPECT_EQ(sampler.Next(std::vector<float>{nan, 1.0f, -inf, nan}), 1);
      EXPECT_EQ(sampler.Next(std::vector<float>{0.0f, inf}), 1);
      const int64_t any = sampler.Next(std::vector<float>{nan, nan, nan});
      EXPECT_TRUE(any >= 0 && any < 3);
    }
  }
}

}  // namespace
}  // namespace penstock::models::text_sampler_test
