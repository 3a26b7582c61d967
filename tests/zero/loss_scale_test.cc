#include "zero/config/loss_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace penstock::zero::loss_scale_test {
namespace {

LossScaler Dynamic(LossScaleOptions options) {
  options.dynamic = true;
  auto scaler = LossScaler::Create(options);
  EXPECT_TRUE(scaler.ok()) << scaler.status();
  return *scaler;
}

TEST(LossScaler, DefaultIsOneForEver) {
  LossScaler scaler;
  EXPECT_EQ(scaler.scale(), 1.0);
  EXPECT_TRUE(scaler.Update(true).ok());
  EXPECT_TRUE(scaler.Update(false).ok());
  EXPECT_EQ(scaler.scale(), 1.0);
}

TEST(LossScaler, StaticScaleNeverChanges) {
  auto scaler = LossScaler::Create({.dynamic = false, .initial_scale = 128});
  ASSERT_TRUE(scaler.ok());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(scaler->Update(i % 2 == 0).ok());
  EXPECT_EQ(scaler->scale(), 128);
}

TEST(LossScaler, FirstOverflowSpendsTheHysteresisSecondHalves) {
  LossScaler scaler = Dynamic({.initial_scale = 65536, .window = 1000, .hysteresis = 2});
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 65536);
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 32768);
  ASSERT_TRUE(scaler.Update(true).ok());  // spent: every further one halves at once
  EXPECT_EQ(scaler.scale(), 16384);
  ASSERT_TRUE(scaler.Update(false).ok());  // without consecutive_hysteresis a clean step restores nothing
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 8192);
}

TEST(LossScaler, ConsecutiveHysteresisIsRestoredByACleanIteration) {
  LossScaler scaler = Dynamic({.initial_scale = 1024, .hysteresis = 2, .consecutive_hysteresis = true});
  ASSERT_TRUE(scaler.Update(true).ok());
  ASSERT_TRUE(scaler.Update(false).ok());
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 1024);
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 512);
}

TEST(LossScaler, DoublesAfterAWindowAsDeepSpeedCounts) {
  // Iterations 0..; the last overflow counts as -1, so with a window of 4 iteration 4 is the first to double.
  LossScaler scaler = Dynamic({.initial_scale = 8, .window = 4, .hysteresis = 1});
  std::vector<double> scales;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(scaler.Update(false).ok());
    scales.push_back(scaler.scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 8, 8, 16, 16, 16, 16, 32, 32}));
  ASSERT_TRUE(scaler.Update(true).ok());  // iteration 10
  EXPECT_EQ(scaler.scale(), 16);
  for (int i = 11; i <= 14; ++i) {
    ASSERT_TRUE(scaler.Update(false).ok());
    EXPECT_EQ(scaler.scale(), 16) << i;
  }
  ASSERT_TRUE(scaler.Update(false).ok());  // 15 - 10 - 1 = 4
  EXPECT_EQ(scaler.scale(), 32);
}

TEST(LossScaler, ADoublingRestoresTheHysteresis) {
  LossScaler scaler = Dynamic({.initial_scale = 8, .window = 2, .hysteresis = 2});
  ASSERT_TRUE(scaler.Update(true).ok());                               // spends it
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(scaler.Update(false).ok());  // doubles at the third
  EXPECT_EQ(scaler.scale(), 16);
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 16);  // tolerated again
}

TEST(LossScaler, FailsWhenItCannotFall) {
  LossScaler scaler = Dynamic({.initial_scale = 4, .min_scale = 1.5, .hysteresis = 1});
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 2);
  ASSERT_TRUE(scaler.Update(true).ok());
  EXPECT_EQ(scaler.scale(), 1.5);
  const absl::Status status = scaler.Update(true);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
  EXPECT_EQ(scaler.scale(), 1.5);
}

TEST(LossScaler, StopsAtTheLargestPowerOfTwo) {
  LossScaler scaler = Dynamic({.initial_scale = 0x1p126, .window = 1, .hysteresis = 1});
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(scaler.Update(false).ok());
  EXPECT_EQ(scaler.scale(), LossScaler::kMaxScale);
  EXPECT_TRUE(std::isfinite(static_cast<float>(scaler.scale())));
}

TEST(LossScaler, OtherOptionsKeepTheScaleThatWasFound) {
  const LossScaleOptions options = {.initial_scale = 256, .hysteresis = 1};
  LossScaler scaler = Dynamic(options);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(scaler.Update(true).ok());
  ASSERT_EQ(scaler.scale(), 32);
  const auto with = [&](LossScaleOptions now) {
    now.dynamic = now.dynamic || now.window != 1;
    absl::StatusOr<LossScaler> changed = scaler.With(now);
    EXPECT_TRUE(changed.ok()) << changed.status();
    EXPECT_EQ(LossScaler::FromJson(changed->ToJson())->ToJson(), changed->ToJson()) << "it can be recorded";
    return changed->scale();
  };
  EXPECT_EQ(with({.initial_scale = 256, .window = 7}), 32);
  EXPECT_EQ(with({.initial_scale = 256, .window = 7, .min_scale = 64}), 64);
  EXPECT_EQ(with({.initial_scale = 1024, .window = 7}), 1024);
  EXPECT_EQ(with({.initial_scale = 8, .window = 1}), 8) << "not dynamic any more";
  EXPECT_FALSE(scaler.With({.dynamic = true, .initial_scale = 2, .min_scale = 4}).ok());
}

TEST(LossScaler, RefusesWhatCannotWork) {
  for (const LossScaleOptions& options :
       {LossScaleOptions{.initial_scale = 0}, LossScaleOptions{.initial_scale = -1},
        LossScaleOptions{.initial_scale = std::nan("")}, LossScaleOptions{.initial_scale = 0x1p128},
        LossScaleOptions{.dynamic = true, .factor = 1}, LossScaleOptions{.dynamic = true, .window = 0},
        LossScaleOptions{.dynamic = true, .hysteresis = 0}, LossScaleOptions{.dynamic = true, .min_scale = 0},
        LossScaleOptions{.dynamic = true, .initial_scale = 2, .min_scale = 4}}) {
    EXPECT_EQ(LossScaler::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(LossScaler, StateSurvivesJsonAtEveryPoint) {
  std::mt19937 random(3);
  LossScaler scaler = Dynamic({.initial_scale = 65536, .window = 3, .hysteresis = 2});
  for (int i = 0; i < 500; ++i) {
    auto copy = LossScaler::FromJson(nlohmann::json::parse(scaler.ToJson().dump()));
    ASSERT_TRUE(copy.ok()) << copy.status();
    ASSERT_EQ(*copy, scaler);
    const bool overflow = random() % 5 == 0;
    ASSERT_EQ(copy->Update(overflow).ok(), scaler.Update(overflow).ok());
    ASSERT_EQ(copy->scale(), scaler.scale());
    scaler = *copy;
  }
}

TEST(LossScaler, DamagedStateIsRefused) {
  const nlohmann::json good = Dynamic({.initial_scale = 65536}).ToJson();
  for (const auto& [key, value] : good.items()) {
    nlohmann::json missing = good;
    missing.erase(key);
    EXPECT_FALSE(LossScaler::FromJson(missing).ok()) << key;
    nlohmann::json wrong = good;
    wrong[key] = "x";
    EXPECT_FALSE(LossScaler::FromJson(wrong).ok()) << key;
  }
  nlohmann::json impossible = good;
  impossible["hysteresis_left"] = 9;
  EXPECT_FALSE(LossScaler::FromJson(impossible).ok());
  EXPECT_FALSE(LossScaler::FromJson(nlohmann::json::array()).ok());
}

}  // namespace
}  // namespace penstock::zero::loss_scale_test
