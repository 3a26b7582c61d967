// The monitors of a training: what a step is to DeepSpeed's, and the sinks that the config asks for.
#ifndef PENSTOCK_RUN_WATCH_MONITORS_H_
#define PENSTOCK_RUN_WATCH_MONITORS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/config.h"
#include "run/watch/scalar_sink.h"

namespace penstock::run {

class Monitors {
 public:
  // Those that are switched on; none may be. `scales_loss`: of fp16, whose loss scale is one scalar more.
  static absl::StatusOr<Monitors> Open(const Config& config, const MonitorOwner& owner, bool scales_loss);

  bool any() const { return !sinks_.empty(); }
  // ScalarSink::Begin and Append of all.
  absl::Status Begin(int64_t samples);
  // Of a step's or an evaluation's line of the log, with "samples": those that were trained on until then.
  absl::Status Append(const nlohmann::json& entry);

 private:
  std::vector<std::unique_ptr<ScalarSink>> sinks_;
  bool scales_loss_ = false;
};

// A line of the log as DeepSpeed names its scalars.
std::vector<Scalar> ScalarsOf(const nlohmann::json& entry, bool scales_loss);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_MONITORS_H_
