// A plan told by kind of data: how many bytes of each lie in which tier, and how many of each a step moves.
#ifndef PENSTOCK_TIERING_TIERS_H_
#define PENSTOCK_TIERING_TIERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tiering/plan.h"

namespace penstock::tiering {

struct TierLine {
  std::string what;
  int64_t in_flight_bytes = 0;  // in host memory, for whatever passes through
  int64_t resident_bytes = 0;   // in host memory, for good
  int64_t nvme_bytes =
      0;  // its home on the drives: both versions of state, room for all inputs that go there
  int64_t read_bytes = 0;  // from the drives, per step in the steady state
  int64_t written_bytes = 0;
};

// Weights, state, gradients, kept inputs, tensors while computing, the rest. Host bytes add up to
// plan.host_bytes(); reads and writes to plan.nvme_read_bytes and nvme_write_bytes; what the store needs
// beside the tiles (records, tables) is not in the NVMe column.
std::vector<TierLine> TiersOf(const ModelGraph& graph, const Plan& plan);

// What writing does to the drives.
struct Wear {
  double bytes_per_day = 0;
  double days_to_rating = 0;  // infinite where nothing is written
};
Wear WearOf(int64_t written_bytes_per_step, double step_seconds, double rated_bytes);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_TIERS_H_
