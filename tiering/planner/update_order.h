// Which tiles are updated in backward (tiering/program/program.h has the two orders), and which are previewed
// while none is.
#ifndef PENSTOCK_TIERING_PLANNER_UPDATE_ORDER_H_
#define PENSTOCK_TIERING_PLANNER_UPDATE_ORDER_H_

#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"

namespace penstock::tiering {

// A program of very many tiles takes longer to simulate than what is chosen by it is worth.
bool TooManyTilesToSimulate(const Plan& plan);
// Bytes of host memory that second versions of tiles (BlockPlan::second_slot) may take beside the plan.
int64_t RoomForSecondVersions(const PlanOptions& options, const Plan& plan);
// Tiles of plans under these options may be previewed.
bool MayPreview(const PlanOptions& options);
// Of few tiles, many plans and steps are simulated in no time.
bool FewTilesToSimulate(const Plan& plan);

// A step's seconds in virtual time, 0 where nothing was simulated or the plan does not train.
struct OrderedStep {
  double seconds = 0;
  double clipped_seconds = 0;  // while every step is clipped, and nothing is updated in backward
};

// Marks the tiles of `plan` that are updated in backward, evenly over every block, with the share that makes
// the step shortest on the options' machine, and from which rate of replayed steps on that no longer pays.
// `thorough` tries more shares. With too many tiles the share is computed, not tried.
//
// Without a drive the version before an update in backward stands in host memory: tiles are marked where a
// device with its own memory computes, as many as there is room for, and its caller gives them second slots.
//
// Where time is preferred, tiles are marked too that are previewed in steps which update nothing in backward:
// as many as make a clipped step shortest.
OrderedStep ChooseUpdateOrder(const ModelGraph& graph, const PlanOptions& options, bool thorough, Plan* plan);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLANNER_UPDATE_ORDER_H_
