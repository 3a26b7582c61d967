// A plan told by kind of data: how many bytes of each lie in which tier, and how many of each a step moves.
#ifndef PENSTOCK_TIERING_ADVICE_TIER_TABLE_H_
#define PENSTOCK_TIERING_ADVICE_TIER_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tiering/plan/plan.h"

namespace penstock::tiering {

struct TierLine {
  std::string what;
  int64_t in_flight_bytes = 0;  // in host memory, for whatever passes through
  int64_t resident_bytes = 0;   // in host memory, for good
  int64_t nvme_bytes =
      0;  // its home on the drives: every version of state, room for all inputs that go there
  int64_t read_bytes = 0;  // from the drives, per step in the steady state
  int64_t written_bytes = 0;
};

// What the plan's files on the drives come to, which a plan does not know.
struct OnDrives {
  int versions = 2;   // of every tile
  int64_t bytes = 0;  // of all files; 0: not known
};

// Weights, state, gradients, saved activations, tensors while computing, the rest. Host bytes add up to
// plan.host_bytes(); reads and writes to plan.nvme_read_bytes and nvme_write_bytes; the NVMe column to
// drives.bytes, where that is known: what is not tiles, gradients or inputs (records, tables, rounding) is
// the rest. Of one rank.
std::vector<TierLine> TiersOf(const ModelGraph& graph, const Plan& plan, const OnDrives& drives = {});

// What writing does to the drives.
struct Wear {
  double bytes_per_day = 0;
  double days_to_rating = 0;  // infinite where nothing is written
};
Wear WearOf(int64_t written_bytes_per_step, double step_seconds, double rated_bytes);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_ADVICE_TIER_TABLE_H_
