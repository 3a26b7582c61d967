// Stages that compute with several blocks, as the engine's stages, each of which uses one.
//
// A stage with the blocks a, b, c becomes five that follow each other: c before, b before, the stage itself
// with a, b after, c after. In forward "before" copies the block's weights, and the stage computes with the
// copies. In backward the stages come the other way round: "after" copies the weights, the stage leaves the
// gradients of b and c, and "before" hands them to the engine. What the stage is given passes through, and so
// does what it returns.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_LOWERED_MODEL_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_LOWERED_MODEL_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

struct StageRole {
  enum Part { kComputes, kBefore, kAfter };
  Part part = kComputes;
  int of = 0;        // the stage that computes, by its number in the lowered model
  size_t which = 0;  // of its further blocks
};

struct LoweredModel {
  Model model;
  std::vector<StageRole> roles;  // [stage]

  // The blocks that the stage computes with, its own first; none of a part before or after.
  std::vector<int> BlocksOf(size_t stage) const;
};

// Stages with one block stay as they are.
LoweredModel Lower(Model model);

// kInvalidArgument: a stage uses a block that is not there, or one twice.
absl::Status CheckBlocks(const LoweredModel& lowered);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_LOWERED_MODEL_H_
