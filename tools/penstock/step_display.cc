#include "tools/penstock/step_display.h"

#include <algorithm>
#include <limits>
#include <string>

namespace penstock::tools {

void StepDisplay::NoteMoved(const zero::Engine& engine, double at, double step_seconds) {
  constexpr double kOften = 0.1;
  if (moved_.empty() || at - moved_.back().at > kOften) {
    const aio::EngineStats io = engine.io_stats();
    moved_.push_back({at, io.DeviceReadBytes(), io.DeviceWriteBytes()});
  }
  // Over the last step at least: within one, forward and backward move different things.
  while (moved_.size() > 2 && at - moved_[1].at >= std::max(0.5, step_seconds)) moved_.pop_front();
}

void StepDisplay::Show(const zero::Engine& engine, const zero::StepResult& newest, double seconds,
                       tiering::Stall waiting) {
  NoteMoved(engine, seconds, newest.seconds);
  const Moved &before = moved_.front(), &last = moved_.back();
  const double passed = last.at - before.at;
  ProgressSample sample;
  sample.step = engine.step();
  sample.steps = steps_;
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  sample.loss = sample.tokens_per_second = sample.seconds_left = kUnknown;
  sample.read_bytes_per_second = sample.write_bytes_per_second = kUnknown;
  if (newest.step > 0) {
    const int64_t from = engine.resumed_from().value_or(0);
    const double per_step = seconds / static_cast<double>(std::max<int64_t>(1, newest.step - from));
    sample.loss = newest.loss;
    sample.tokens_per_second = static_cast<double>(tokens_per_step_) / newest.seconds;
    sample.seconds_left = per_step * static_cast<double>(steps_ - newest.step);
  }
  if (passed > 0) {
    sample.read_bytes_per_second = static_cast<double>(last.read_bytes - before.read_bytes) / passed;
    sample.write_bytes_per_second = static_cast<double>(last.write_bytes - before.write_bytes) / passed;
  }
  sample.waits_for = std::string(tiering::StallName(waiting));
  progress_.Update(sample);
}

}  // namespace penstock::tools
