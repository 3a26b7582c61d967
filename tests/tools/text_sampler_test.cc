#include "models/text_sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

namespace penstock::models {
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
  EXPECT_EQ(sampler.Next(std::vector<float>{2.0f, 1.5f}, std::vector<int64_t>{0}), 1);
  EXPECT_EQ(sampler.Next(std::vector<float>{2.0f, 0.9f}, std::vector<int64_t>{0, 0, 0}), 0);
  EXPECT_EQ(sampler.Next(std::vector<float>{-1.0f, -1.5f}, std::vector<int64_t>{0}), 1);
}

TEST(TextSamplerTest, IsRepeatableAndGreedyTakesTheFirstOfEquals) {
  TextSampler a(1.0, 0, 8), b(1.0, 0, 8);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.Next(kLogits), b.Next(kLogits));
  TextSampler greedy(0, 0, 1);
  EXPECT_EQ(greedy.Next(std::vector<float>{1, 7, 7, 2}), 1);
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
}  // namespace penstock::models
