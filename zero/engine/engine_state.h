// What stands before the first step: measuring and planning, the store's layout, initial values.
#ifndef PENSTOCK_ZERO_ENGINE_ENGINE_STATE_H_
#define PENSTOCK_ZERO_ENGINE_ENGINE_STATE_H_

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"
#include "zero/compute/block.h"
#include "zero/compute/device_state.h"
#include "zero/engine/direct_storage.h"
#include "zero/engine/engine.h"
#include "zero/engine/rank_agreement.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

struct PreparedModel {
  EnginePlan plan;
  std::vector<std::shared_ptr<BlockModule>> modules;
  nlohmann::json identity;  // what a store is made with, and what it must have to be resumed
  DeviceExchange devices;   // of several ranks
  DirectStorage storage;    // of a device apart, with a drive
};

// Measures the model and plans it under the options. With options.resume (or without options.trains) the
// state directories (without a drive of its own: the checkpoint's) must hold a run of this very model, type
// and seed (kFailedPrecondition names what differs), whose tiles the plan takes over; without, the
// directories must be free or options.overwrite set.
absl::StatusOr<PreparedModel> PrepareModel(const Model& model, const EngineOptions& options);

// The types that the options ask for; kInvalidArgument for a type that is not served.
absl::StatusOr<TileFormat> FormatOf(const EngineOptions& options);

// Tiles in the order of blocks, segments as in Precision, scratch for a spilled gradient.
swap::Layout LayoutOf(const tiering::Plan& plan);

// What the ranks of this host take together, for asking whether there is room.
swap::Layout OfAllHere(const swap::Layout& layout, const EngineOptions& options);

// Builds one block after the other, seeded by its number, and puts its values where the plan wants them: into
// the store as version 1 of every tile (not committed), or into their resident places, in host memory or on
// `device` (null: none is apart). Holds one tile of a block that says what it begins with
// (BlockSpec::initial), and the whole of one that does not.
absl::Status InitializeState(const Model& model, const EngineOptions& options, const EnginePlan& plan,
                             const ArenaView& residency, const DeviceState* device,
                             const std::vector<BlockModule*>& modules, swap::Store* store,
                             const std::function<void(const std::string&)>& log);

// Makes a run in options.state_dirs (which hold none, or one of no use) of the checkpoint `path`: what
// --resume then goes on with. As many versions as a new run would have. The checkpoint may be of another
// number of ranks: each of options.comm cuts its part out of it, in tiles of the size that it has. Memory:
// two tiles.
absl::Status RestoreRun(const std::string& path, const EngineOptions& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_ENGINE_STATE_H_
