// The optimizers that the engine serves, as one type each for what a user sets and for what one update needs.
//
// All but LAMB update an element from that element alone (kernels/optimizer.h), so that a tile may be updated
// without the rest of its tensor. LAMB scales the updates of a tensor by the norms of the whole tensor and of
// its whole update: a step reads its state twice, first for the norms (NeedsTensorNorms).
#ifndef PENSTOCK_ZERO_COMPUTE_OPTIMIZER_H_
#define PENSTOCK_ZERO_COMPUTE_OPTIMIZER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "kernels/optimizer.h"
#include "zero/config/lr_schedule.h"

namespace penstock::zero {

using OptimizerOptions = std::variant<kernels::AdamOptions, kernels::AdagradOptions, kernels::LionOptions,
                                      kernels::SgdOptions, kernels::LambOptions>;

// The constants of one update.
using OptimizerStep = std::variant<kernels::AdamStep, kernels::AdagradStep, kernels::LionStep,
                                   kernels::SgdStep, kernels::LambStep>;

// Which states an optimizer keeps for every parameter.
struct Moments {
  bool m = true;
  bool v = true;
};
Moments MomentsOf(const OptimizerOptions& options);

// An update needs the norms of whole parameters and of their updates: LAMB.
bool NeedsTensorNorms(const OptimizerOptions& options);

// What its state is: "adam" (AdamW too), "adagrad", "lion", "sgd", "sgd with momentum" or "lamb". Part of a
// run's identity.
std::string OptimizerName(const OptimizerOptions& options);
// By that name; empty for another.
std::optional<Moments> MomentsByName(std::string_view name);

double LearningRate(const OptimizerOptions& options);

// What a step says of the updates of a group of parameters.
struct GroupRates {
  ScheduledRates rates;
  std::optional<double> weight_decay = std::nullopt;  // default: the algorithm's
};

// Update number `update` (1 for the first) at these rates, with gradients multiplied by `grad_scale`
// (the clip factor over the loss scale). Betas that a schedule cycles are those of Adam, Lion and LAMB.
OptimizerStep MakeOptimizerStep(const OptimizerOptions& options, const GroupRates& group, int64_t update,
                                double grad_scale);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_OPTIMIZER_H_
