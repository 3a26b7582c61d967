// What another machine, budget or batch would change: each case is planned anew and simulated.
#ifndef PENSTOCK_TIERING_ADVICE_WHAT_IF_H_
#define PENSTOCK_TIERING_ADVICE_WHAT_IF_H_

#include <string>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering {

struct WhatIf {
  std::string change;  // "one more drive"
  std::string error;   // why it cannot be, as where the budget does not hold the larger batch; empty: it can
  Prediction prediction;  // of a step
  int64_t host_bytes = 0;
  int64_t nvme_read_bytes = 0, nvme_write_bytes = 0;  // per step
  // Samples per second against the plan as it is: above 1 is faster.
  double speedup = 0;
  // What changes are clipped steps, and others not: prediction.clipped_step_seconds, and what one reads.
  bool of_clipped_steps = false;
  int64_t clipped_read_bytes = 0;
};

// One more drive like the `drives` that are there; twice the host memory (where there is a budget); a
// micro-batch twice as large, taking twice the time and memory of activations; twice the compute (another
// device that shares the work, or one twice as fast); and the other preference (PlanOptions::prefer), where
// it has a say. `now` is the prediction of the plan under `options`.
std::vector<WhatIf> AskWhatIf(const ModelGraph& graph, const PlanOptions& options, const Prediction& now,
                              int drives);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_ADVICE_WHAT_IF_H_
