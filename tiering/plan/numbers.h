// What blocks, tiles, stages and their uses are counted by, a type for each (base/index.h).
#ifndef PENSTOCK_TIERING_PLAN_NUMBERS_H_
#define PENSTOCK_TIERING_PLAN_NUMBERS_H_

#include "base/index.h"

namespace penstock::tiering {

using BlockIndex = Index<struct BlockTag>;   // of the model, or of a plan for it
using TileIndex = Index<struct TileTag>;     // within its block
using StageIndex = Index<struct StageTag>;   // of the model: the order of its description
using Position = Index<struct PositionTag>;  // of a stage in the order in which a pass runs them
// Of a block's weights in a pass: each stage of forward uses one, and then each of backward, whose last stage
// first. A pass of S stages that trains has 2 S - 1 of them, less those before the first that trains.
using UseIndex = Index<struct UseTag>;

template <class T>
using PerBlock = IndexedVector<BlockIndex, T>;
template <class T>
using PerTile = IndexedVector<TileIndex, T>;
template <class T>
using PerStage = IndexedVector<StageIndex, T>;
template <class T>
using PerPosition = IndexedVector<Position, T>;

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_NUMBERS_H_
