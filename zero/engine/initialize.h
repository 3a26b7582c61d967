// Initial values: what a new run's state begins with.
#ifndef PENSTOCK_ZERO_ENGINE_INITIALIZE_H_
#define PENSTOCK_ZERO_ENGINE_INITIALIZE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "swap/store.h"
#include "zero/compute/device_state.h"
#include "zero/compute/libtorch/block.h"
#include "zero/engine/engine.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

// Builds one block after the other, seeded by its number, and puts its values where the plan wants them: into
// the store as version 1 of every tile (not committed), or into their resident places, in host memory or on
// `device` (null: none is apart). Holds one tile of a block that says what it begins with
// (BlockSpec::initial), and the whole of one that does not.
absl::Status InitializeState(const Model& model, const EngineOptions& options, const EnginePlan& plan,
                             const ArenaView& residency, const DeviceState* device,
                             const std::vector<BlockModule*>& modules, swap::Store* store,
                             const std::function<void(const std::string&)>& log);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_INITIALIZE_H_
