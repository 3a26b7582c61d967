// Initial values: what a new run's state begins with.
#ifndef PENSTOCK_ZERO_ENGINE_INITIALIZE_H_
#define PENSTOCK_ZERO_ENGINE_INITIALIZE_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "swap/store.h"
#include "zero/compute/compute.h"
#include "zero/compute/device_state.h"
#include "zero/compute/gradient_sums.h"
#include "zero/engine/engine.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

// Asks for the values of one block after the other, seeded by its number, and puts them where the plan wants
// them: into the store as version 1 of every tile (not committed), or into their resident places, in host
// memory or on `device` (null: none is apart). Holds one tile, beside what the Compute holds of a block.
absl::Status InitializeState(Compute& compute, const EngineOptions& options, const EnginePlan& plan,
                             const ArenaView& arena_view, const DeviceState* device,
                             const GradientSums::Layouts& layouts, swap::Store* store,
                             const std::function<void(const std::string&)>& log);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_INITIALIZE_H_
