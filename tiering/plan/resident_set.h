// What stays in host memory from step to step, beside the working set.
#ifndef PENSTOCK_TIERING_PLAN_RESIDENT_SET_H_
#define PENSTOCK_TIERING_PLAN_RESIDENT_SET_H_

#include <cstdint>
#include <vector>

#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"

namespace penstock::tiering {

class ResidentSet {
 public:
  // Both outlive it.
  ResidentSet(const ModelGraph& graph, const PlanOptions& options);

  // Blocks whose weights stay, within `free` bytes and the user's bounds: those whose reads they save are
  // worth most for their memory. Small ones that the user wants to persist come first.
  PerBlock<char> ChooseWeights(const Plan& plan, int64_t free) const;  // [block]
  // That the weights of those blocks take.
  static int64_t BytesOf(const Plan& plan, const PerBlock<char>& stays);

  // Blocks that stay with all their state, first come, first served: each saves as much for a byte as any
  // other. Adds them to those whose weights stay; returns the bytes that this takes.
  int64_t KeepBlocks(const Plan& plan, int64_t free, PerBlock<char>* weights, PerBlock<char>* whole) const;

 private:
  // Most elements that are used between two uses of the block that follow each other, from step to step.
  int64_t LongestGap(BlockIndex block) const;

  const ModelGraph& graph_;
  const PlanOptions& options_;
  std::vector<BlockIndex> walk_;  // blocks in the order of their uses in a step
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_RESIDENT_SET_H_
