#include "run/watch/monitors.h"

#include <limits>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "run/watch/csv_monitor.h"
#include "run/watch/event_file.h"
#include "zero/config/json_field.h"

namespace penstock::run {

std::vector<Scalar> ScalarsOf(const nlohmann::json& entry, bool scales_loss) {
  // What is not finite is null in a line.
  const auto number = [&entry](const char* key) {
    return zero::JsonField<double>(entry, key).value_or(std::numeric_limits<double>::quiet_NaN());
  };
  if (entry.contains("windows")) return {{"Train/Samples/eval_loss", number("loss")}};
  std::vector<Scalar> scalars = {{"Train/Samples/train_loss", number("loss")},
                                 {"Train/Samples/lr", number("lr")}};
  if (scales_loss) scalars.push_back({"Train/Samples/loss_scale", number("loss_scale")});
  return scalars;
}

absl::StatusOr<Monitors> Monitors::Open(const Config& config, const MonitorOwner& owner, bool scales_loss) {
  Monitors monitors;
  monitors.scales_loss_ = scales_loss;
  if (config.csv_monitor.on()) {
    ASSIGN_OR_RETURN(std::unique_ptr<ScalarSink> csv,
                     CsvMonitor::Open(config.csv_monitor.directory(), owner));
    monitors.sinks_.push_back(std::move(csv));
  }
  if (config.tensorboard.on()) {
    ASSIGN_OR_RETURN(std::unique_ptr<ScalarSink> events,
                     EventFile::Open(config.tensorboard.directory(), owner));
    monitors.sinks_.push_back(std::move(events));
  }
  return monitors;
}

absl::Status Monitors::Begin(int64_t samples) {
  for (const auto& sink : sinks_) RETURN_IF_ERROR(sink->Begin(samples));
  return absl::OkStatus();
}

absl::Status Monitors::Append(const nlohmann::json& entry) {
  if (sinks_.empty()) return absl::OkStatus();
  const int64_t samples = zero::JsonField<int64_t>(entry, "samples").value_or(0);
  const std::vector<Scalar> scalars = ScalarsOf(entry, scales_loss_);
  for (const auto& sink : sinks_) RETURN_IF_ERROR(sink->Append(samples, scalars));
  return absl::OkStatus();
}

}  // namespace penstock::run
