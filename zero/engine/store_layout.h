// Where a run's state lies in its store: tiles in the order of blocks, in segments as tiering::Precision
// says.
#ifndef PENSTOCK_ZERO_ENGINE_STORE_LAYOUT_H_
#define PENSTOCK_ZERO_ENGINE_STORE_LAYOUT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "swap/store.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"
#include "zero/engine/engine.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

// Of one tile, with scratch for a spilled gradient; frozen beside others that train, its weights alone.
swap::TileLayout TileLayoutOf(const tiering::Precision& precision, int64_t elements);
swap::TileLayout WeightsAloneLayoutOf(const tiering::Precision& precision, int64_t elements);
swap::Layout LayoutOf(const tiering::Plan& plan);
// Of a store or checkpoint, which may have none, as a run that trains needs it.
swap::Layout LayoutWithScratch(const swap::StoreShape& shape, const tiering::Precision& precision);

// What the ranks of this host take together, for asking whether there is room.
swap::Layout LayoutOfThisHost(const swap::Layout& layout, const EngineOptions& options);

// The tiles of a store that is there, as elements by block.
struct StoreTiles {
  tiering::PerBlock<std::vector<int64_t>> elements;
  // What is frozen of a block that trains has its weights alone (PlanOptions::frozen_apart).
  bool frozen_apart = false;
  // Whether a block has: it was frozen whole when the run began (PlanOptions::blocks_alone). Without any
  // state none has.
  tiering::PerBlock<char> blocks_alone;
};
// kDataLoss: they are not those of the model. `frozen_elsewhere`: as PlanOptions has it.
absl::StatusOr<StoreTiles> TilesOf(const swap::StoreShape& shape, const tiering::ModelGraph& graph, int world,
                                   const tiering::Precision& precision, bool frozen_elsewhere = false);

// How many versions of everything a new store holds: what the options say, else three where checkpoints are
// copied at leisure and there is room, else two; the same on all ranks, the least that any has. `besides`:
// bytes by directory that the run takes beside its store.
absl::StatusOr<uint32_t> AgreeOnVersions(const EngineOptions& options, const swap::StoreOptions& store,
                                         const swap::Layout& layout, const std::string& identity,
                                         std::span<const uint64_t> besides = {});

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_STORE_LAYOUT_H_
