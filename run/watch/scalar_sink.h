// Where the scalars of a training go, one value a tag and sample.
//
// DeepSpeed counts along the samples that were trained on (global_samples), not along steps. A sink holds
// every pair of tag and sample once: what it has already is passed over, so that a caller that is not sure
// whether a step was written before a kill hands it over again.
#ifndef PENSTOCK_RUN_WATCH_SCALAR_SINK_H_
#define PENSTOCK_RUN_WATCH_SCALAR_SINK_H_

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace penstock::run {

// All that a training tells, by DeepSpeed's names.
inline constexpr std::array<const char*, 4> kScalarTags = {
    "Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale", "Train/Samples/eval_loss"};

struct Scalar {
  std::string tag;  // of kScalarTags
  double value = 0;
};

// Whose scalars a sink may hold.
struct MonitorOwner {
  std::string run_id;
  bool resumes = false;                 // existing scalars may be the run's own
  std::set<std::string> replaces = {};  // ids of runs that go, and their scalars with them
};

class ScalarSink {
 public:
  virtual ~ScalarSink() = default;
  // Once before the first Append, when the run is this process's and makes steps: cuts off what a kill left
  // torn and what lies behind `samples`, which will come again, and all that was of a run that is replaced.
  // What is written from here on is locked. kFailedPrecondition: another process writes it.
  virtual absl::Status Begin(int64_t samples) = 0;
  // kResourceExhausted: the disk is full.
  virtual absl::Status Append(int64_t samples, const std::vector<Scalar>& scalars) = 0;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_SCALAR_SINK_H_
