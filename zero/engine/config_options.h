// A configuration's bounds on memory and transfers, as the engine's options.
#ifndef PENSTOCK_ZERO_ENGINE_CONFIG_OPTIONS_H_
#define PENSTOCK_ZERO_ENGINE_CONFIG_OPTIONS_H_

#include "zero/config/config.h"
#include "zero/engine/engine_options.h"

namespace penstock::zero {

// Sets the order of updates, the tile's bytes, the planner's bounds and the requests in flight. What a tile
// holds must be known: `options` has its types, its algorithm and its ranks.
void ApplyConfig(const Config& config, EngineOptions* options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_CONFIG_OPTIONS_H_
