// The loss scale of fp16 training: a pure state machine, DeepSpeed's keys and behaviour.
//
// The loss is multiplied by scale() before backward and the gradients divided by it after; when a gradient is
// not finite the step is skipped and the scale falls, and after a quiet stretch it rises. bf16 and fp32 use
// scale 1. Source: deepspeed/runtime/fp16/loss_scaler.py, whose iteration counting is kept: with o the
// iteration of the last overflow (-1 at first) the scale doubles after a clean iteration i when (i - o - 1)
// is a positive multiple of the window, so the first doubling comes one iteration later than "window clean
// iterations" suggests.
#ifndef PENSTOCK_ZERO_CONFIG_LOSS_SCALE_H_
#define PENSTOCK_ZERO_CONFIG_LOSS_SCALE_H_

#include <cstdint>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::zero {

struct LossScaleOptions {
  nlohmann::json ToJson() const;

  bool dynamic = false;                 // false: the scale never changes
  double initial_scale = 1.0;           // fp16.loss_scale, or 2^initial_scale_power when dynamic
  double factor = 2.0;                  // down on overflow, up after a window
  int64_t window = 1000;                // clean iterations before the scale rises
  double min_scale = 1.0;               // it never falls below
  int64_t hysteresis = 2;               // overflows tolerated before it falls: the h-th in a row lowers it
  bool consecutive_hysteresis = false;  // true: a clean iteration restores the hysteresis at once
};

// A value: copy it to keep an old state. Not synchronised.
class LossScaler {
 public:
  // The largest scale: beyond it a power of two would leave float's range, and DeepSpeed's would become
  // infinite.
  static constexpr double kMaxScale = 0x1p+127;

  // kInvalidArgument for scales that are not finite and positive, a factor not above 1, a window or
  // hysteresis below 1, or a minimum above the initial scale.
  static absl::StatusOr<LossScaler> Create(const LossScaleOptions& options);
  // Scale 1 for ever.
  LossScaler() = default;

  double scale() const { return scale_; }
  bool dynamic() const { return options_.dynamic; }
  const LossScaleOptions& options() const { return options_; }

  // Tells the outcome of one iteration. `overflow`: a gradient was not finite, so the update was skipped.
  // Returns kOutOfRange (one line) when the scale would have to fall but is already at its minimum: training
  // cannot go on, and the state is unchanged but for the count of iterations. A static scale never changes
  // and never fails.
  absl::Status Update(bool overflow);

  // Options and state, exact.
  nlohmann::json ToJson() const;
  static absl::StatusOr<LossScaler> FromJson(const nlohmann::json& json);

  // The same training under other options: the scale stays where it was found, within them; another initial
  // scale, or a scale that is no longer dynamic, begins there anew. kInvalidArgument: as Create.
  absl::StatusOr<LossScaler> With(const LossScaleOptions& options) const;

  friend bool operator==(const LossScaler& a, const LossScaler& b) { return a.ToJson() == b.ToJson(); }

 private:
  LossScaleOptions options_;
  double scale_ = 1.0;
  int64_t iteration_ = 0;
  int64_t last_overflow_ = -1;
  int64_t hysteresis_left_ = 2;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_LOSS_SCALE_H_
