// The optimizer step of one tile, in place, over the ranges that train, in the types of the run. A parameter
// to which no gradient came may stay as it is, and one that has missed updates have a step of its own.
//
// Bits do not depend on how a block is cut into tiles, nor on which thread runs which tile
// (kernels/optimizer.h): tiles start at multiples of tiering::kElementAlignment, ranges that train where
// zero/compute/flat_layout.h puts them.
#ifndef PENSTOCK_ZERO_COMPUTE_UPDATE_H_
#define PENSTOCK_ZERO_COMPUTE_UPDATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "kernels/thread_pool.h"
#include "tiering/plan/numbers.h"
#include "tiering/plan/plan.h"
#include "zero/compute/flat_layout.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/tile_format.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

// Steps of parameters of which some have missed updates (zero/compute/missed_updates.h), so that they do not
// all go by the step of their group.
struct ParameterSteps {
  std::vector<OptimizerStep> steps;
  // The number of each parameter's among them; kNone: no gradient came to it, and it stays as it is. Frozen
  // parameters have kNone.
  tiering::PerBlock<std::vector<int>> of;
  static constexpr int kNone = -1;
};

// What the global norm decided for a step's update.
struct UpdateDecision {
  int64_t step = 0;
  bool skip = false;    // a gradient was not finite: everything stays as it was
  bool replay = false;  // what was updated in backward is not what this says: made again, or undone
  int64_t update = 0;   // its number, 1 for the first
  std::vector<OptimizerStep> groups = {OptimizerStep{}};  // one for all, or one for each group
  // Null: every parameter goes by its group's.
  std::shared_ptr<const ParameterSteps> own = nullptr;

  const OptimizerStep& of(int group) const {
    return groups.size() == 1 ? groups.front() : groups[static_cast<size_t>(group)];
  }
};

// Elements [from, to) of a block's run, and the step that they are updated by.
struct StepRange {
  const OptimizerStep* step = nullptr;
  int64_t from = 0, to = 0;
};

// The steps of one block's parameters. The decision and the layout outlive it.
class BlockSteps {
 public:
  // Without a block every parameter goes by its group's step.
  BlockSteps(const UpdateDecision& decision, const FlatLayout& layout,  // NOLINT(google-explicit-constructor)
             tiering::BlockIndex block = {});

  // Of a parameter, by its number in the layout; null: it stays as it is.
  const OptimizerStep* of(size_t parameter) const;
  // All ranges that are updated, each as long as one step goes. Padding belongs to the parameter before it.
  std::vector<StepRange> Ranges() const;
  const FlatLayout& layout() const { return layout_; }
  bool uses_lamb() const { return std::holds_alternative<kernels::LambStep>(decision_.groups.front()); }

 private:
  const UpdateDecision& decision_;
  const FlatLayout& layout_;
  const std::vector<int>* const own_;  // null: those of the groups
};

// The arrays of a tile that one step updates.
struct StepArrays {
  const OptimizerStep* step = nullptr;
  std::vector<kernels::UpdateArrays> arrays;
};

// The arrays of all that is updated of a tile. `seed` is what compact states are rounded with: another one
// for every block and update. `memory` may be a device's. With states of 8 bit, ranges of different steps
// must not share a scale.
std::vector<StepArrays> UpdatesOf(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                                  const tiering::Tile& tile, const TileMemory& memory);
// Updates them, by the processor in host memory. What no gradient came to keeps its bits; with states of 8
// bit its moments may be rounded anew where they share a scale with what is updated. `trusts`: with LAMB, of
// each parameter of the layout (TrustOf); empty: 1 for all.
void UpdateTile(const TileFormat& format, const BlockSteps& steps, uint64_t seed, const tiering::Tile& tile,
                const TileMemory& memory, std::span<const double> trusts = {});

// The same from one place to another, with any optimizer but LAMB: `from` keeps its bits, with its gradient,
// and `to` has the result, around the caches.
void UpdateTileInto(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                    const tiering::Tile& tile, const TileMemory& from, const TileMemory& to);

// With LAMB: adds the squares of what the tile has of each parameter of the layout that is updated, and of
// its update, to that parameter's norms. Nothing in `memory` is changed: UpdateTile makes the same moments
// again. The sums over all tiles of a block, in any order and however it is cut, are the same to the bit.
// Moments are fp32 or bf16.
void AddTensorNorms(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                    const tiering::Tile& tile, const TileMemory& memory, std::span<kernels::LambNorms> norms);
// The trust ratio of a parameter that is updated by this step of LAMB, from its norms over all of it.
double TrustOf(const OptimizerStep& step, const kernels::LambNorms& norms);

// What is left to do for a block's gradient once its last addend is there: rounds the fp32 `sums` of n
// elements into `gradient` (null: it holds the gradient already), and squares the result; in one pass
// over memory, which `pool` shares. The sum is exact: its bits do not depend on who adds what when.
kernels::SumOfSquares FinishGradient(kernels::DType type, const float* sums, void* gradient, size_t n,
                                     kernels::ThreadPool* pool = nullptr);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_UPDATE_H_
