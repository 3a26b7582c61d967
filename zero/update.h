// The optimizer step of one tile, in place: AdamW over the ranges that train, in the plan's precision.
//
// Bits do not depend on how a block is cut into tiles, nor on which thread runs which tile (kernels/adam.h).
#ifndef PENSTOCK_ZERO_UPDATE_H_
#define PENSTOCK_ZERO_UPDATE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/adam.h"
#include "tiering/plan.h"
#include "zero/block.h"
#include "zero/residency.h"

namespace penstock::zero {

// What the global norm decided for a step's update.
struct UpdateDecision {
  int64_t step = 0;
  bool skip = false;  // a gradient was not finite: everything stays as it was
  bool redo = false;  // what was updated in backward is not what this says: made again, or undone
  kernels::AdamStep adam{};
};

void UpdateTile(const tiering::Precision& precision, const kernels::AdamStep& adam, const RunLayout& layout,
                const tiering::Tile& tile, const TileMemory& memory);

// Initial values into a tile: fp32 masters split or copied, moments zero.
void FillTile(const tiering::Precision& precision, const float* masters, const TileMemory& memory);
// The fp32 masters of a tile.
void ReadMasters(const tiering::Precision& precision, const TileMemory& memory, float* masters);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_UPDATE_H_
