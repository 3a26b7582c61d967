// What a configuration says of updates, memory and transfers, as the engine's options.
#ifndef PENSTOCK_RUN_CONFIG_OPTIONS_H_
#define PENSTOCK_RUN_CONFIG_OPTIONS_H_

#include <string>
#include <vector>

#include "run/config.h"
#include "zero/engine/engine_options.h"

namespace penstock::run {

// Sets what the rows of the table say (SetOptions), and what is made of several settings: the planner's
// bounds, the tile's bytes, where saved activations wait, and the requests in flight. `options` has the type
// of weights, the algorithm and the ranks.
void ApplyConfig(const Config& config, zero::EngineOptions* options);

// Whether a run is planned once more where its first steps differ much from their prediction
// (zero/engine/prediction_check.h).
bool PlansAgain(const PenstockConfig& config, int world, OffloadDevice offload);
// Adds a line where that was asked for and there is no such plan.
void NotePlansAgain(const PenstockConfig& config, int world, OffloadDevice offload,
                    std::vector<std::string>* notes);

// When a stuck operation is reported, and when it ends the run. unasked: seconds after which it is reported
// where the configuration does not say it; 0: never. What ends the run is reported in half of that time at
// the latest.
zero::WatchOptions WatchOf(const PenstockConfig& config, double unasked);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_CONFIG_OPTIONS_H_
