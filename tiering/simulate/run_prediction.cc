#include "tiering/simulate/run_prediction.h"

#include <utility>

namespace penstock::tiering {

void RunPrediction::Observe(const Op& op, double start_seconds, double end_seconds) {
  if (window_.has_value()) window_->Observe(op, start_seconds, end_seconds);
}

bool RunPrediction::Stepped() {
  ++steps_;
  if (steps_ > 1 && steps_ < 2 * begun_after_ + 1 && !window_->full()) return false;
  return EndWindow();
}

bool RunPrediction::Finish() { return steps_ > begun_after_ && EndWindow(); }

bool RunPrediction::EndWindow() {
  const int64_t steps = steps_ - begun_after_;
  std::optional<Calibration> ended = std::exchange(window_, std::nullopt);
  begun_after_ = steps_;
  if (!ended.has_value()) {  // the first step fills the pipeline
    window_.emplace(graph_, plan_, machine_, busy_bytes_);
    return false;
  }
  const Calibration::Result result = ended->Calibrated();
  machine_ = result.machine;
  window_.emplace(graph_, plan_, machine_, busy_bytes_);
  absl::StatusOr<Prediction> newest = Predict(result.graph, plan_, result.machine);
  if (!newest.ok()) return false;
  const auto before = static_cast<double>(predicted_steps_), now = static_cast<double>(steps);
  for (double Prediction::*mean :
       {&Prediction::step_seconds, &Prediction::clipped_step_seconds, &Prediction::lower_bound_seconds,
        &Prediction::clipped_lower_bound_seconds}) {
    (*newest).*mean = (prediction_.*mean * before + (*newest).*mean * now) / (before + now);
  }
  prediction_ = *std::move(newest);
  drive_seen_ = result.drive_seen;
  predicted_steps_ += steps;
  ++windows_;
  return true;
}

}  // namespace penstock::tiering
