// The optimizers that the engine serves, as one type each for what a user sets and for what one update needs.
//
// Every one of them updates an element from that element alone (kernels/optimizer.h), so that a tile may be
// updated without the rest of its tensor. LAMB is not among them: it scales each update by the norms of the
// whole tensor, which are known only after every element has been updated, so its tensors would have to be
// read twice in a step.
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

using OptimizerOptions =
    std::variant<kernels::AdamOptions, kernels::AdagradOptions, kernels::LionOptions, kernels::SgdOptions>;

// The constants of one update.
using OptimizerStep =
    std::variant<kernels::AdamStep, kernels::AdagradStep, kernels::LionStep, kernels::SgdStep>;

// Which states an optimizer keeps for every parameter.
struct Moments {
  bool m = true;
  bool v = true;
};
Moments MomentsOf(const OptimizerOptions& options);

// What its state is: "adam" (AdamW too), "adagrad", "lion", "sgd" or "sgd with momentum". Part of a run's
// identity.
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
// (the clip factor over the loss scale). Betas that a schedule cycles are those of Adam and Lion.
OptimizerStep MakeOptimizerStep(const OptimizerOptions& options, const GroupRates& group, int64_t update,
                                double grad_scale);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_OPTIMIZER_H_
