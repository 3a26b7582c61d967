#include "tiering/simulate/run_prediction.h"

#include <cmath>
#include <utility>

namespace penstock::tiering {
namespace {

// Of what was predicted: a difference that another plan may be worth.
constexpr double kMuch = 0.5;

}  // namespace

bool RunPrediction::Beside::differs_much() const {
  return predicted_seconds > 0 && std::abs(measured_seconds - predicted_seconds) >= kMuch * predicted_seconds;
}

void RunPrediction::Observe(const Op& op, double start_seconds, double end_seconds) {
  if (window_.has_value()) window_->Observe(op, start_seconds, end_seconds);
}

bool RunPrediction::Stepped(const Step& step) {
  ++steps_;
  sums_.measured_seconds += step.seconds;
  sums_.predicted_seconds += step.deferred ? at_start_.clipped_step_seconds : at_start_.step_seconds;
  sums_.deferred_share += step.deferred ? 1 : 0;
  if (steps_ > 1 && steps_ < 2 * begun_after_ + 1 && !window_->full()) return false;
  return EndWindow();
}

bool RunPrediction::Finish() { return steps_ > begun_after_ && EndWindow(); }

bool RunPrediction::EndWindow() {
  const int64_t steps = steps_ - begun_after_;
  std::optional<Calibration> ended = std::exchange(window_, std::nullopt);
  const Beside sums = std::exchange(sums_, Beside());
  begun_after_ = steps_;
  if (!ended.has_value()) {  // the first step fills the pipeline
    window_.emplace(graph_, plan_, shown_.machine, busy_bytes_);
    return false;
  }
  shown_ = ended->Calibrated();
  window_.emplace(graph_, plan_, shown_.machine, busy_bytes_);
  absl::StatusOr<Prediction> newest = Predict(shown_.graph, plan_, shown_.machine);
  if (!newest.ok()) return false;
  const auto before = static_cast<double>(predicted_steps_), now = static_cast<double>(steps);
  for (double Prediction::*mean :
       {&Prediction::step_seconds, &Prediction::clipped_step_seconds, &Prediction::lower_bound_seconds,
        &Prediction::clipped_lower_bound_seconds}) {
    (*newest).*mean = (prediction_.*mean * before + (*newest).*mean * now) / (before + now);
  }
  prediction_ = *std::move(newest);
  beside_ = {sums.measured_seconds / now, sums.predicted_seconds / now, sums.deferred_share / now};
  predicted_steps_ += steps;
  ++windows_;
  return true;
}

}  // namespace penstock::tiering
