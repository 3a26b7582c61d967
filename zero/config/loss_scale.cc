#include "zero/config/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace penstock::zero {
namespace {

bool PositiveFinite(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

absl::StatusOr<LossScaler> LossScaler::Create(const LossScaleOptions& options) {
  if (!PositiveFinite(options.initial_scale) || options.initial_scale > kMaxScale) {
    return absl::InvalidArgumentError(
        absl::StrFormat("loss scale %g: must be above 0 and at most 2^127", options.initial_scale));
  }
  LossScaler scaler;
  scaler.options_ = options;
  scaler.scale_ = options.initial_scale;
  scaler.hysteresis_left_ = options.hysteresis;
  if (!options.dynamic) return scaler;
  if (!std::isfinite(options.factor) || options.factor <= 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("loss scale factor %g: must be above 1", options.factor));
  }
  if (options.window < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("loss scale window ", options.window, ": must be 1 or more"));
  }
  if (options.hysteresis < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("loss scale hysteresis ", options.hysteresis, ": must be 1 or more"));
  }
  if (!PositiveFinite(options.min_scale) || options.min_scale > options.initial_scale) {
    return absl::InvalidArgumentError(
        absl::StrFormat("smallest loss scale %g: must be above 0 and at most the initial scale %g",
                        options.min_scale, options.initial_scale));
  }
  return scaler;
}

absl::Status LossScaler::Update(bool overflow) {
  if (!options_.dynamic) return absl::OkStatus();
  const int64_t iteration = iteration_++;
  if (!overflow) {
    if (options_.consecutive_hysteresis) hysteresis_left_ = options_.hysteresis;
    const int64_t clean = iteration - last_overflow_ - 1;
    if (clean > 0 && clean % options_.window == 0) {
      hysteresis_left_ = options_.hysteresis;
      scale_ = std::min(scale_ * options_.factor, kMaxScale);
    }
    return absl::OkStatus();
  }
  if (hysteresis_left_ > 1) {
    --hysteresis_left_;
  } else if (scale_ <= options_.min_scale) {
    return absl::OutOfRangeError(
        absl::StrFormat("the gradients overflow at the smallest loss scale %g (fp16.min_loss_scale): "
                        "training has diverged, or needs a "
                        "lower learning rate or bf16",
                        options_.min_scale));
  } else {
    scale_ = std::max(scale_ / options_.factor, options_.min_scale);
  }
  last_overflow_ = iteration;
  return absl::OkStatus();
}

absl::StatusOr<LossScaler> LossScaler::With(const LossScaleOptions& options) const {
  absl::StatusOr<LossScaler> scaler = Create(options);
  if (!scaler.ok()) return scaler;
  scaler->iteration_ = iteration_;
  scaler->last_overflow_ = last_overflow_;
  const bool goes_on = options_.dynamic && options.dynamic && options_.initial_scale == options.initial_scale;
  if (goes_on) scaler->scale_ = std::max(scale_, options.min_scale);
  return scaler;
}

nlohmann::json LossScaleOptions::ToJson() const {
  return {{"dynamic", dynamic},
          {"initial_scale", initial_scale},
          {"factor", factor},
          {"window", window},
          {"min_scale", min_scale},
          {"hysteresis", hysteresis},
          {"consecutive_hysteresis", consecutive_hysteresis}};
}

nlohmann::json LossScaler::ToJson() const {
  nlohmann::json json = options_.ToJson();
  json.update({{"scale", scale_},
               {"iteration", iteration_},
               {"last_overflow", last_overflow_},
               {"hysteresis_left", hysteresis_left_}});
  return json;
}

absl::StatusOr<LossScaler> LossScaler::FromJson(const nlohmann::json& json) {
  try {
    LossScaleOptions options;
    json.at("dynamic").get_to(options.dynamic);
    json.at("initial_scale").get_to(options.initial_scale);
    json.at("factor").get_to(options.factor);
    json.at("window").get_to(options.window);
    json.at("min_scale").get_to(options.min_scale);
    json.at("hysteresis").get_to(options.hysteresis);
    json.at("consecutive_hysteresis").get_to(options.consecutive_hysteresis);
    absl::StatusOr<LossScaler> scaler = Create(options);
    if (!scaler.ok()) return scaler;
    json.at("scale").get_to(scaler->scale_);
    json.at("iteration").get_to(scaler->iteration_);
    json.at("last_overflow").get_to(scaler->last_overflow_);
    json.at("hysteresis_left").get_to(scaler->hysteresis_left_);
    const bool valid =
        PositiveFinite(scaler->scale_) && scaler->scale_ <= kMaxScale && scaler->iteration_ >= 0 &&
        scaler->last_overflow_ >= -1 && scaler->last_overflow_ < std::max<int64_t>(scaler->iteration_, 1) &&
        (!options.dynamic || (scaler->scale_ >= options.min_scale && scaler->hysteresis_left_ >= 1 &&
                              scaler->hysteresis_left_ <= options.hysteresis));
    if (!valid) return absl::InvalidArgumentError("loss scaler state: values that no run can reach");
    return scaler;
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("loss scaler state: ", error.what()));
  }
}

}  // namespace penstock::zero
