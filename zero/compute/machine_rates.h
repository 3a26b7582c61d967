// What the parts of this machine reach, as plans need it (tiering::MachineModel): copies to a device with its
// own memory, updates, a sample of compute. Drives are measured by aio/profile.h.
#ifndef PENSTOCK_ZERO_COMPUTE_MACHINE_RATES_H_
#define PENSTOCK_ZERO_COMPUTE_MACHINE_RATES_H_

#include <functional>

#include "absl/status/statusor.h"
#include "zero/compute/device.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/tile_format.h"

namespace penstock::zero {

// What copies between registered host memory and a device with its own memory reach, in some of its memory:
// before its arena is made.
struct CopyRates {
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
};
absl::StatusOr<CopyRates> MeasureCopyRates(Device& device);

// Parameters per second that a device updates in its own memory, before its arena is made.
absl::StatusOr<double> MeasureUpdateRateThere(Device& device, const TileFormat& format,
                                              const OptimizerOptions& optimizer);

// Parameters per second that one update worker gets through, checksums included, from memory: of a tile's
// size, or of half of `memory_bytes` where that is less (0: no bound). Beside it `compute_threads` compute.
absl::StatusOr<double> MeasureUpdateRate(const TileFormat& format, const OptimizerOptions& optimizer,
                                         int64_t memory_bytes = 0, int compute_threads = 1);

// Seconds of a call of `compute`, over a quarter of a second or one call, everything in them that passed. So
// many `threads` share it. *disturbed (where it is given): other work had the processors meanwhile.
double SecondsOfCompute(const std::function<void()>& compute, int threads, bool* disturbed = nullptr);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_MACHINE_RATES_H_
