#include "zero/config/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace penstock::zero::lr_schedule_test {
namespace {

LrSchedule Make(const LrScheduleSpec& spec) {
  auto schedule = LrSchedule::Create(spec);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *schedule;
}

// One of each type, with every field away from its default.
std::vector<LrScheduleSpec> OneOfEach() {
  WarmupDecayLr decay;
  decay.warmup = {
      .warmup_min_lr = 0.01, .warmup_max_lr = 0.3, .warmup_num_steps = 7, .warmup_type = WarmupType::kLinear};
  decay.total_num_steps = 31;
  return {Constant{.lr = 0.2},
          WarmupThenCosine{.lr = 0.3, .min_lr = 0.07, .warmup = 5, .horizon = 40},
          LrRangeTest{.min_lr = 2e-3, .step_size = 11, .step_rate = 1.5, .staircase = true},
          OneCycle{.cycle_min_lr = 0.1,
                   .cycle_max_lr = 0.7,
                   .decay_lr_rate = 0.3,
                   .first_step_size = 9,
                   .second_step_size = 13,
                   .first_stair_count = 3,
                   .second_stair_count = 2,
                   .decay_step_size = 4,
                   .cycle_momentum = true,
                   .cycle_min_mom = 0.7,
                   .cycle_max_mom = 0.95,
                   .decay_mom_rate = 0.01},
          WarmupLr{.warmup_min_lr = 0.01,
                   .warmup_max_lr = 0.2,
                   .warmup_num_steps = 9,
                   .warmup_type = WarmupType::kLog},
          decay,
          WarmupCosineLr{.lr = 0.4,
                         .total_num_steps = 33,
                         .warmup_min_ratio = 0.1,
                         .warmup_num_steps = 6,
                         .cos_min_ratio = 0.02,
                         .warmup_type = WarmupType::kLinear}};
}

TEST(Constant, IsTheSameAtEveryStep) {
  const LrSchedule s = Make(Constant{.lr = 0.25});
  for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{1'000'000}}) EXPECT_EQ(s.At(step).lr, 0.25);
  EXPECT_FALSE(s.At(1).beta1.has_value());
}

TEST(WarmupThenCosine, GoldenValues) {
  const LrSchedule s = Make(WarmupThenCosine{.lr = 1, .min_lr = 0.1, .warmup = 4, .horizon = 12});
  EXPECT_EQ(s.At(1).lr, 0.25);
  EXPECT_EQ(s.At(3).lr, 0.75);
  EXPECT_EQ(s.At(4).lr, 1.0);
  EXPECT_NEAR(s.At(6).lr, 0.8681980515339464, 1e-15);  // 0.1 + 0.9 * (1 + cos(pi/4)) / 2
  EXPECT_NEAR(s.At(8).lr, 0.55, 1e-15);
  EXPECT_EQ(s.At(12).lr, 0.1);
  EXPECT_EQ(s.At(13).lr, 0.1);
  EXPECT_EQ(s.At(1'000'000'000).lr, 0.1);
  EXPECT_EQ(s.At(0).lr, s.At(1).lr);
  EXPECT_FALSE(s.At(5).beta1.has_value());
}

TEST(WarmupThenCosine, NoWarmupStartsJustBelowThePeak) {
  const LrSchedule s = Make(WarmupThenCosine{.lr = 1, .min_lr = 0, .warmup = 0, .horizon = 4});
  EXPECT_NEAR(s.At(1).lr, (1 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(s.At(2).lr, 0.5, 1e-15);
  EXPECT_EQ(s.At(4).lr, 0.0);
}

TEST(WarmupThenCosine, AWarmupBeyondTheHorizonStopsAtIt) {
  const LrSchedule s = Make(WarmupThenCosine{.lr = 1, .min_lr = 0.1, .warmup = 100, .horizon = 10});
  EXPECT_DOUBLE_EQ(s.At(10).lr, 0.1);  // 10/100 of the warm-up
  EXPECT_EQ(s.At(11).lr, 0.1);         // and then the minimum
  EXPECT_DOUBLE_EQ(s.At(5).lr, 0.05);
}

TEST(LrRangeTest, GoldenValues) {
  const LrSchedule s = Make(LrRangeTest{.min_lr = 1e-3, .step_size = 10, .step_rate = 2});
  EXPECT_DOUBLE_EQ(s.At(1).lr, 1e-3);
  EXPECT_DOUBLE_EQ(s.At(6).lr, 2e-3);
  EXPECT_DOUBLE_EQ(s.At(11).lr, 3e-3);
  const LrSchedule stairs =
      Make(LrRangeTest{.min_lr = 1e-3, .step_size = 10, .step_rate = 2, .staircase = true});
  EXPECT_DOUBLE_EQ(stairs.At(10).lr, 1e-3);
  EXPECT_DOUBLE_EQ(stairs.At(11).lr, 3e-3);
  EXPECT_DOUBLE_EQ(stairs.At(20).lr, 3e-3);
}

TEST(OneCycle, GoldenValues) {
  const LrSchedule s = Make(OneCycle{.cycle_min_lr = 0.1,
                                     .cycle_max_lr = 1.1,
                                     .decay_lr_rate = 0.5,
                                     .first_step_size = 4,
                                     .second_step_size = 8,
                                     .decay_step_size = 2,
                                     .decay_mom_rate = 0.1});
  EXPECT_DOUBLE_EQ(s.At(1).lr, 0.1);
  EXPECT_DOUBLE_EQ(s.At(3).lr, 0.6);
  EXPECT_DOUBLE_EQ(s.At(5).lr, 1.1);
  EXPECT_DOUBLE_EQ(s.At(9).lr, 0.6);
  EXPECT_DOUBLE_EQ(s.At(13).lr, 0.1);
  EXPECT_DOUBLE_EQ(s.At(15).lr, 0.1 / 1.5);
  EXPECT_DOUBLE_EQ(s.At(17).lr, 0.1 / 2.0);

  EXPECT_DOUBLE_EQ(*s.At(1).beta1, 0.8);   // the constructor's value
  EXPECT_DOUBLE_EQ(*s.At(3).beta1, 0.85);  // halfway up, halfway down
  EXPECT_DOUBLE_EQ(*s.At(5).beta1, 0.8);
  EXPECT_DOUBLE_EQ(*s.At(13).beta1, 0.9);
  EXPECT_DOUBLE_EQ(*s.At(15).beta1, 0.99);
  EXPECT_DOUBLE_EQ(*s.At(17).beta1, OneCycle::kLargestBeta1);  // DeepSpeed's would be 1.08
  EXPECT_DOUBLE_EQ(*s.At(5).beta2, 0.99);
}

TEST(OneCycle, Stairs) {
  const LrSchedule s = Make(OneCycle{.cycle_min_lr = 0,
                                     .cycle_max_lr = 1,
                                     .first_step_size = 4,
                                     .second_step_size = 8,
                                     .first_stair_count = 2,
                                     .cycle_momentum = false});
  const std::vector<double> want = {0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0, 0};
  for (size_t k = 0; k < want.size(); ++k) EXPECT_EQ(s.At(static_cast<int64_t>(k) + 1).lr, want[k]) << k;
  EXPECT_FALSE(s.At(3).beta1.has_value());
  EXPECT_FALSE(s.At(3).beta2.has_value());
}

TEST(OneCycle, StairsReachThePeakForAnySizes) {
  for (int64_t first = 1; first < 60; ++first) {
    for (int64_t second = 1; second < 60; second += 7) {
      const LrSchedule s = Make(OneCycle{.cycle_min_lr = 0,
                                         .cycle_max_lr = 1,
                                         .first_step_size = first,
                                         .second_step_size = second,
                                         .first_stair_count = 3,
                                         .cycle_momentum = false});
      ASSERT_EQ(s.At(first + 1).lr, 1.0) << first << " " << second;
    }
  }
}

TEST(OneCycle, WithoutDecayStaysAtTheMinimum) {
  const LrSchedule s =
      Make(OneCycle{.cycle_min_lr = 0.1, .cycle_max_lr = 1, .decay_lr_rate = 3, .first_step_size = 2});
  EXPECT_EQ(s.At(1000).lr, 0.1);
  EXPECT_EQ(*s.At(1000).beta1, 0.9);
}

TEST(WarmupLr, GoldenValues) {
  const LrSchedule linear = Make(WarmupLr{
      .warmup_min_lr = 0, .warmup_max_lr = 1, .warmup_num_steps = 8, .warmup_type = WarmupType::kLinear});
  EXPECT_EQ(linear.At(1).lr, 0);
  EXPECT_EQ(linear.At(2).lr, 0);  // DeepSpeed's first two steps are alike
  EXPECT_EQ(linear.At(6).lr, 0.5);
  EXPECT_EQ(linear.At(10).lr, 1);
  EXPECT_EQ(linear.At(99).lr, 1);
  const LrSchedule log = Make(WarmupLr{.warmup_min_lr = 0, .warmup_max_lr = 1, .warmup_num_steps = 8});
  EXPECT_EQ(log.At(2).lr, 0);
  EXPECT_DOUBLE_EQ(log.At(3).lr, 1.0 / 3);
  EXPECT_DOUBLE_EQ(log.At(5).lr, 2.0 / 3);
  EXPECT_DOUBLE_EQ(log.At(9).lr, 1);
  // A warm-up of 0 or 1 steps is one of 2, as in DeepSpeed.
  EXPECT_EQ(Make(WarmupLr{.warmup_max_lr = 1, .warmup_num_steps = 0}).At(4).lr, 1);
}

TEST(WarmupDecayLr, GoldenValues) {
  WarmupDecayLr spec;
  spec.warmup = {
      .warmup_min_lr = 0.2, .warmup_max_lr = 1.2, .warmup_num_steps = 8, .warmup_type = WarmupType::kLinear};
  spec.total_num_steps = 16;
  const LrSchedule s = Make(spec);
  EXPECT_DOUBLE_EQ(s.At(1).lr, 0.2);
  EXPECT_DOUBLE_EQ(s.At(6).lr, 0.7);
  EXPECT_DOUBLE_EQ(s.At(10).lr, 1.2);
  EXPECT_DOUBLE_EQ(s.At(14).lr, 0.7);
  EXPECT_DOUBLE_EQ(s.At(18).lr, 0.2);
  EXPECT_DOUBLE_EQ(s.At(500).lr, 0.2);
}

TEST(WarmupCosineLr, GoldenValues) {
  const LrSchedule s = Make(WarmupCosineLr{.lr = 2,
                                           .total_num_steps = 12,
                                           .warmup_min_ratio = 0.5,
                                           .warmup_num_steps = 4,
                                           .cos_min_ratio = 0.25,
                                           .warmup_type = WarmupType::kLinear});
  EXPECT_EQ(s.At(1).lr, 0);
  EXPECT_DOUBLE_EQ(s.At(2).lr, 1);
  EXPECT_DOUBLE_EQ(s.At(4).lr, 1.5);
  EXPECT_NEAR(s.At(6).lr, 1.9429096493834626, 1e-14);  // 2 * (0.25 + 0.75 * (1 + cos(pi/8)) / 2)
  EXPECT_DOUBLE_EQ(s.At(9).lr, 1.25);
  EXPECT_DOUBLE_EQ(s.At(13).lr, 0.5);
  EXPECT_DOUBLE_EQ(s.At(1000).lr, 0.5);
}

TEST(LrSchedule, JsonGivesTheSameBitsAtEveryStep) {
  for (const LrScheduleSpec& spec : OneOfEach()) {
    const LrSchedule s = Make(spec);
    auto copy = LrSchedule::FromJson(nlohmann::json::parse(s.ToJson().dump()));
    ASSERT_TRUE(copy.ok()) << s.name() << ": " << copy.status();
    EXPECT_EQ(copy->name(), s.name());
    for (int64_t step = 0; step < 100; ++step) {
      ASSERT_EQ(copy->At(step).lr, s.At(step).lr) << s.name() << " at " << step;
      ASSERT_EQ(copy->At(step).beta1, s.At(step).beta1);
      ASSERT_EQ(copy->At(step).beta2, s.At(step).beta2);
    }
  }
}

TEST(LrSchedule, RatesAreFiniteAndNotNegativeEverywhere) {
  for (const LrScheduleSpec& spec : OneOfEach()) {
    const LrSchedule s = Make(spec);
    for (const int64_t step : {int64_t{-5}, int64_t{1}, int64_t{50}, std::numeric_limits<int64_t>::max()}) {
      const ScheduledRates rates = s.At(step);
      EXPECT_TRUE(std::isfinite(rates.lr) && rates.lr >= 0) << s.name() << " at " << step << ": " << rates.lr;
      if (rates.beta1) {
        EXPECT_LT(*rates.beta1, 1) << s.name();
      }
    }
  }
}

TEST(LrSchedule, DamagedJsonIsRefused) {
  for (const LrScheduleSpec& spec : OneOfEach()) {
    const nlohmann::json good = Make(spec).ToJson();
    for (const auto& [key, value] : good["params"].items()) {
      nlohmann::json missing = good;
      missing["params"].erase(key);
      EXPECT_FALSE(LrSchedule::FromJson(missing).ok()) << good["type"] << " without " << key;
      nlohmann::json wrong = good;
      wrong["params"][key] = "?";
      EXPECT_FALSE(LrSchedule::FromJson(wrong).ok()) << good["type"] << " " << key;
    }
    nlohmann::json more = good;
    more["params"]["extra"] = 1;
    EXPECT_FALSE(LrSchedule::FromJson(more).ok());
    nlohmann::json other = good;
    other["type"] = "Other";
    EXPECT_FALSE(LrSchedule::FromJson(other).ok());
  }
  EXPECT_FALSE(LrSchedule::FromJson(nlohmann::json()).ok());
}

TEST(LrSchedule, RefusesNonsenseByName) {
  const double nan = std::nan("");
  const auto refused = [](const LrScheduleSpec& spec, std::string_view field) {
    const auto schedule = LrSchedule::Create(spec);
    ASSERT_EQ(schedule.status().code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_NE(std::string(schedule.status().message()).find(field), std::string::npos) << schedule.status();
  };
  refused(Constant{.lr = -1}, "lr");
  refused(WarmupThenCosine{.lr = -1}, "lr");
  refused(WarmupThenCosine{.lr = nan}, "lr");
  refused(WarmupThenCosine{.warmup = -1}, "warmup");
  refused(WarmupThenCosine{.horizon = 0}, "horizon");
  refused(LrRangeTest{.step_size = 0}, "step_size");
  refused(OneCycle{.cycle_min_lr = 2, .cycle_max_lr = 1}, "cycle_max_lr");
  refused(OneCycle{.cycle_max_lr = 1, .cycle_max_mom = 1}, "cycle_max_mom");
  refused(OneCycle{.cycle_max_lr = 1, .second_step_size = 0}, "cycle_second_step_size");
  refused(WarmupLr{.warmup_num_steps = -1}, "warmup_num_steps");
  refused(WarmupDecayLr{.warmup = {}, .total_num_steps = 0}, "total_num_steps");
  refused(WarmupCosineLr{.cos_min_ratio = -0.1}, "cos_min_ratio");
}

}  // namespace
}  // namespace penstock::zero::lr_schedule_test
