// The optimizer step of one tile, in place, over the ranges that train, in the types of the run.
//
// Bits do not depend on how a block is cut into tiles, nor on which thread runs which tile
// (kernels/optimizer.h): tiles start at multiples of tiering::kElementAlignment, ranges that train where
// zero/compute/flat_layout.h puts them.
#ifndef PENSTOCK_ZERO_COMPUTE_UPDATE_H_
#define PENSTOCK_ZERO_COMPUTE_UPDATE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "kernels/thread_pool.h"
#include "tiering/plan/plan.h"
#include "zero/compute/flat_layout.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/tile_format.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

// What the global norm decided for a step's update.
struct UpdateDecision {
  int64_t step = 0;
  bool skip = false;    // a gradient was not finite: everything stays as it was
  bool replay = false;  // what was updated in backward is not what this says: made again, or undone
  int64_t update = 0;   // its number, 1 for the first
  std::vector<OptimizerStep> groups = {OptimizerStep{}};  // one for all, or one for each group

  const OptimizerStep& of(int group) const {
    return groups.size() == 1 ? groups.front() : groups[static_cast<size_t>(group)];
  }
};

// The arrays of the tile's ranges of that group that train. `seed` is what compact states are rounded with:
// another one for every block and update. `memory` may be a device's.
std::vector<kernels::UpdateArrays> UpdatesOf(const TileFormat& format, uint64_t seed,
                                             const FlatLayout& layout, int group, const tiering::Tile& tile,
                                             const TileMemory& memory);
// Updates those of all groups, by the processor in host memory. `trusts`: with LAMB, of each parameter of
// the layout (TrustOf); empty: 1 for all.
void UpdateTile(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                const FlatLayout& layout, const tiering::Tile& tile, const TileMemory& memory,
                std::span<const double> trusts = {});

// With LAMB: adds the squares of what the tile has of each parameter of the layout, and of its update by this
// decision, to that parameter's norms. Nothing in `memory` is changed: UpdateTile makes the same moments
// again. The sums over all tiles of a block, in any order and however it is cut, are the same to the bit.
// Moments are fp32 or bf16.
void AddTensorNorms(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                    const FlatLayout& layout, const tiering::Tile& tile, const TileMemory& memory,
                    std::span<kernels::LambNorms> norms);
// The trust ratio of a parameter of that group, from its norms over all of it.
double TrustOf(const UpdateDecision& decision, int group, const kernels::LambNorms& norms);

// What is left to do for a block's gradient once its last addend is there: rounds the fp32 `sums` of n
// elements into `gradient` (null: it holds the gradient already), and squares the result; in one pass
// over memory, which `pool` shares. The sum is exact: its bits do not depend on who adds what when.
kernels::SumOfSquares FinishGradient(kernels::DType type, const float* sums, void* gradient, size_t n,
                                     kernels::ThreadPool* pool = nullptr);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_UPDATE_H_
