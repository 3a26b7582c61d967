// The operations of one training step, for callers that count what it moves.
//
// Tiles of a block that are alike move the same bytes in the same way. One of them stands for all of them, so
// that the step of a model of a million tiles is counted as fast as that of a small one, and to the same
// byte.
#ifndef PENSTOCK_TIERING_PROGRAM_STEP_OPS_H_
#define PENSTOCK_TIERING_PROGRAM_STEP_OPS_H_

#include <cstdint>
#include <functional>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

// A plan with one tile for all of a block that are alike: as large, with the same of it in memory, updated in
// the same order. All else is the plan's, so that its blocks are larger than their tiles together.
class CondensedPlan {
 public:
  explicit CondensedPlan(const Plan& plan);

  const Plan& plan() const { return plan_; }
  // How many operations of the whole plan's step this one stands for.
  int64_t times(const Op& op) const { return op.tile.valid() ? times_[op.block][op.tile] : 1; }

 private:
  Plan plan_;
  PerBlock<PerTile<int64_t>> times_;
};

// Calls visit(op) for each operation of a training step in its steady state, in the program's order, without
// those that only a wrong assumption makes happen. `speculative_update` false: of a step that, like the one
// before it, updates nothing in backward.
void ForStepOps(const ModelGraph& graph, const Plan& plan, bool speculative_update,
                const std::function<void(const Op&)>& visit);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_STEP_OPS_H_
