// The optimizer of `penstock train`: flags over config file over defaults; on resume, the run's own.
#ifndef PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "run/config.h"
#include "run/record/recorded_options.h"
#include "zero/compute/optimizer.h"

namespace penstock::tools {

// `config` has the flags. What it leaves open has the defaults of DeepSpeed and LibTorch, but AdamW's rate is
// 3e-4 and its decay 0.01. `record` takes everything that a resumed run must find again.
absl::StatusOr<zero::OptimizerOptions> ResolveOptimizerOptions(const run::OptimizerConfig& config,
                                                               const run::RecordedOptions& recorded,
                                                               nlohmann::json* record);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_OPTIMIZER_FLAGS_H_
