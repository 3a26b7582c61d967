// A configuration's bounds on memory and transfers, as the engine's options.
#ifndef PENSTOCK_RUN_CONFIG_OPTIONS_H_
#define PENSTOCK_RUN_CONFIG_OPTIONS_H_

#include "run/config.h"
#include "zero/engine/engine_options.h"

namespace penstock::run {

// Sets the order of updates, the tile's bytes, the planner's bounds and the requests in flight. What a tile
// holds must be known: `options` has its types, its algorithm and its ranks.
void ApplyConfig(const Config& config, zero::EngineOptions* options);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_CONFIG_OPTIONS_H_
