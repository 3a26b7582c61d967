// The optimizer of `penstock train`: flags over config file over defaults; on resume, the run's own.
#ifndef PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "run/config.h"
#include "tools/penstock/recorded_options.h"
#include "zero/compute/optimizer.h"

namespace penstock::tools {

// Flags; empty: not given. `states` is the flag, or else the config's word.
struct OptimizerFlags {
  std::optional<double> lr, weight_decay;
  std::optional<std::string> states;
};

// What the config says of the optimizer, before anything fills its open places.
void NoteOptimizer(const run::OptimizerConfig& config, const RecordedOptions& recorded);

// What is not given has the defaults of DeepSpeed and LibTorch, but AdamW's rate is 3e-4 and its decay 0.01.
// `record` takes everything that a resumed run must find again.
absl::StatusOr<zero::OptimizerOptions> ResolveOptimizerOptions(const OptimizerFlags& flags,
                                                               const run::OptimizerConfig& config,
                                                               const RecordedOptions& recorded,
                                                               nlohmann::json* record);
absl::StatusOr<kernels::StateType> ResolveOptimizerStates(const OptimizerFlags& flags,
                                                          const RecordedOptions& recorded,
                                                          nlohmann::json* record);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_
