// The learning rate as a pure function of the step.
//
// Three families:
//  * `Constant`: the optimizer's rate, as in DeepSpeed where there is no scheduler.
//  * Penstock's own (`WarmupThenCosine`): linear warm-up, then a cosine down to `min_lr` over a horizon that
//  is fixed
//    when the run is created. The horizon is part of the saved state, so a larger last step on resume never
//    changes a rate that was already used; beyond the horizon the rate stays at `min_lr`.
//  * DeepSpeed's five, by their names in its JSON. Formulas follow deepspeed/runtime/lr_schedules.py (2025);
//  where its
//    order of calls matters it is reproduced: the optimizer steps first and the scheduler after it, so step 1
//    runs at the rate that the scheduler's constructor set and step s >= 2 at the rate of batch index i = s
//    - 2.
//
// `step` is 1-based and counts updates: DeepSpeed does not advance its schedule over a step that was skipped
// for overflow, so a caller that skips passes (updates applied so far) + 1.
//
// Everything here is a value: no I/O, no state, safe from any thread. Rates are doubles computed with
// <cmath>; on one machine the same inputs give the same bits.
#ifndef PENSTOCK_ZERO_CONFIG_LR_SCHEDULE_H_
#define PENSTOCK_ZERO_CONFIG_LR_SCHEDULE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::zero {

struct Constant {
  double lr = 3e-4;
};

// Penstock's default. With w = warmup, h = horizon and step s:
//   s <= min(w, h)  lr * s / w
//   w < s < h       min_lr + (lr - min_lr) * (1 + cos(pi * (s - w) / (h - w))) / 2
//   else            min_lr
struct WarmupThenCosine {
  double lr = 3e-4;
  double min_lr = 3e-5;
  int64_t warmup = 0;   // steps; 0: none
  int64_t horizon = 1;  // steps; fixed when the run is created
};

// min_lr * (1 + step_rate * x), x = (s - 1) / step_size, floored when `staircase`.
struct LrRangeTest {
  double min_lr = 1e-3;
  int64_t step_size = 2000;
  double step_rate = 1.0;
  bool staircase = false;
};

// Up over first_step_size steps, down over second_step_size, then a decay by 1 / (1 + decay_lr_rate * k /
// decay_step_size) of cycle_min_lr, k counting steps after the cycle; decay_step_size 0 stays at
// cycle_min_lr. With a stair count n the rise (or fall) moves in n equal stairs. With `cycle_momentum` Adam's
// beta1 runs the other way, from cycle_max_mom down to cycle_min_mom and back, then grows by (1 +
// decay_mom_rate * k / decay_step_size), and beta2 is 0.99 throughout, as in DeepSpeed; its very first step
// uses cycle_min_mom, as there. DeepSpeed lets beta1 pass 1, where Adam is undefined: here it stops at
// kLargestBeta1.
struct OneCycle {
  static constexpr double kBeta2 = 0.99;
  static constexpr double kLargestBeta1 = 0.9999;
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  int64_t first_step_size = 2000;
  std::optional<int64_t> second_step_size = std::nullopt;  // first_step_size where not given
  int64_t first_stair_count = 0;
  std::optional<int64_t> second_stair_count = std::nullopt;  // first_stair_count where not given
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
};

enum class WarmupType { kLog, kLinear };

// min + (max - min) * g: with i = s - 2 and N = max(2, warmup_num_steps), g = ln(i + 1) / ln(N) (log) or i /
// N (linear) while i < N, then 1. Step 1: warmup_min_lr.
struct WarmupLr {
  double warmup_min_lr = 0;
  double warmup_max_lr = 1e-3;
  int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::kLog;
};

// WarmupLr, then g = max(0, (T - i) / max(1, T - N)) with T = total_num_steps.
struct WarmupDecayLr {
  WarmupLr warmup;
  int64_t total_num_steps = 1;
};

// A ratio of the optimizer's `lr`. Step 1: 0. While i < N: r0 + (1 - r0) * g with r0 = warmup_min_ratio and g
// as in WarmupLr; then c + (1 - c) * (1 + cos(pi * p)) / 2, c = cos_min_ratio, p = min(1, (i - N + 1) /
// max(1, T - N)).
struct WarmupCosineLr {
  double lr = 1e-3;
  int64_t total_num_steps = 1;
  double warmup_min_ratio = 0;
  int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupType warmup_type = WarmupType::kLog;
};

using LrScheduleSpec =
    std::variant<WarmupThenCosine, LrRangeTest, OneCycle, WarmupLr, WarmupDecayLr, WarmupCosineLr, Constant>;

// What an update uses. The betas are set only by schedules that cycle them; else the optimizer's own hold.
struct ScheduledRates {
  double lr = 0;
  std::optional<double> beta1 = std::nullopt;
  std::optional<double> beta2 = std::nullopt;
};

// A validated schedule.
class LrSchedule {
 public:
  // kInvalidArgument, one line that names the field and its value, when a field is out of range: rates
  // negative or not finite, step counts below 1 (warm-ups: below 0), momenta outside [0, 1).
  static absl::StatusOr<LrSchedule> Create(const LrScheduleSpec& spec);

  // The rates of update `step`, 1-based; a step below 1 is taken as 1.
  ScheduledRates At(int64_t step) const;

  // "Constant", "WarmupThenCosine", or DeepSpeed's name of the type.
  std::string_view name() const;
  const LrScheduleSpec& spec() const { return spec_; }

  // {"type": name, "params": {...}}; exact: FromJson(ToJson()) gives the same bits at every step. FromJson
  // refuses what Create refuses, and missing or unknown fields.
  nlohmann::json ToJson() const;
  static absl::StatusOr<LrSchedule> FromJson(const nlohmann::json& json);

 private:
  explicit LrSchedule(const LrScheduleSpec& spec) : spec_(spec) {}
  LrScheduleSpec spec_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_LR_SCHEDULE_H_
