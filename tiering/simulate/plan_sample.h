// A share of a plan's tiles, as a plan: from it the step of a very large model is predicted.
//
// A block of a large model is many tiles that take their turns one like the other. With fewer of them, in
// blocks that are as much smaller and compute as much less, a step goes through the same motions in less
// time: slots, rings and what stays in memory are those of the whole plan.
#ifndef PENSTOCK_TIERING_SIMULATE_PLAN_SAMPLE_H_
#define PENSTOCK_TIERING_SIMULATE_PLAN_SAMPLE_H_

#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"

namespace penstock::tiering {

struct PlanSample {
  ModelGraph graph;
  Plan plan;  // for programs and simulation alone: neither its bytes nor its places are those of its tiles
};

// About `share` of each block's tiles, at least one of those that train and one of the others, each kind of
// them (updated in backward, previewed, with state that stays) in the plan's proportion over all blocks.
PlanSample SampleOf(const ModelGraph& graph, const Plan& plan, double share);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_PLAN_SAMPLE_H_
