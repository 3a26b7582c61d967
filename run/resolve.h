// What a script trains with: a DeepSpeed configuration, and values by keyword, which win over it.
#ifndef PENSTOCK_RUN_RESOLVE_H_
#define PENSTOCK_RUN_RESOLVE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "run/config.h"
#include "run/given_values.h"
#include "run/state_directories.h"
#include "zero/config/lr_schedule.h"
#include "zero/config/modes.h"

namespace penstock::run {

using Keywords = GivenValues;  // of penstock.initialize

struct Resolved {
  Config config;                   // with keywords, and DeepSpeed's values where neither says anything
  std::vector<std::string> notes;  // lines for people: keys without effect, and what was filled
  kernels::DType dtype = kernels::DType::kFp32;
  OffloadDevice offload = OffloadDevice::kNvme;
  StateDirectories directories;              // none unless `offload` is nvme
  int64_t micro_batches = 1;                 // of a step, for each rank
  int64_t forwards = 1;                      // that a step's losses may use; micro_batches at least
  std::optional<int64_t> micro_batch_size;   // samples; empty: nothing says it
  std::optional<zero::LrSchedule> schedule;  // empty: a constant rate, or the script's own
};

// config: null where there is none; then nothing is filled and gradients are not clipped. world: ranks.
// needs_place: false: state on a drive may be without a directory, as for a plan.
//
// kInvalidArgument, one line that names a setting as its caller spelt it: a wrong configuration, a keyword
// that there is not, a value of a wrong type or out of bounds, no directory for state on a drive, batch sizes
// that contradict each other.
absl::StatusOr<Resolved> Resolve(const nlohmann::ordered_json* config, const Keywords& keywords, int world,
                                 bool needs_place);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_RESOLVE_H_
