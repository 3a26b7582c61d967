// What a configuration says of updates, memory and transfers, as the engine's options.
#ifndef PENSTOCK_RUN_CONFIG_OPTIONS_H_
#define PENSTOCK_RUN_CONFIG_OPTIONS_H_

#include "run/config.h"
#include "run/settings.h"
#include "zero/engine/engine_options.h"

namespace penstock::run {

// Sets what the rows of the table say (SetOptions), and what is made of several settings: the planner's
// bounds, the tile's bytes, where saved activations wait, the requests in flight, and when a stuck operation
// is reported and ends the run. `options` has the type of weights, the algorithm and the ranks.
void ApplyConfig(const Config& config, Door door, zero::EngineOptions* options);

// Whether a run is planned once more where its first steps differ much from their prediction
// (zero/engine/prediction_check.h).
bool PlansAgain(const PenstockConfig& config, int world, OffloadDevice offload);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_CONFIG_OPTIONS_H_
