// Parameters that are updated at other rates than the rest, by their names: no weight decay on biases and
// norms, a smaller learning rate for what was trained before.
//
//   options.optimizer.groups = {{.names = {"*.bias", "*norm*"}, .weight_decay = 0.0},
//                               {.names = {"wte.*"}, .lr_factor = 0.1}};
//
// Group 0 is all that no group names. Where parameters lie does not depend on it: a run may have groups from
// any step on.
#ifndef PENSTOCK_ZERO_COMPUTE_PARAMETER_GROUPS_H_
#define PENSTOCK_ZERO_COMPUTE_PARAMETER_GROUPS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/optimizer.h"

namespace penstock::zero {

struct ParameterGroup {
  // Of its parameters: block, a dot, the name within the block; a star stands for any characters, or none. A
  // parameter is of the first group that has its name.
  std::vector<std::string> names;
  // Times the learning rate of the schedule, or of the algorithm. Default 1.
  double lr_factor = 1;
  // Default: the algorithm's.
  std::optional<double> weight_decay = std::nullopt;

  bool operator==(const ParameterGroup&) const = default;
};

// Whether a name with stars in it stands for this one.
bool NameMatches(std::string_view pattern, std::string_view name);

// The layouts of the blocks of `graph` with each parameter in its group. kInvalidArgument: a name that stands
// for no parameter that trains, a factor or decay that no optimizer has, parameters that their Compute has
// put into groups already, or, with states of 8 bit, two groups that share a scale.
absl::StatusOr<GradientSums::Layouts> LayoutsWithGroups(const tiering::ModelGraph& graph,
                                                        const GradientSums::Layouts& layouts,
                                                        const std::vector<ParameterGroup>& groups,
                                                        kernels::StateType states);

// What all groups go by where `rest` is what group 0 does, one after the other.
std::vector<GroupRates> RatesOfGroups(const GroupRates& rest, const std::vector<ParameterGroup>& groups);

// As a run records them.
nlohmann::json ToJson(const std::vector<ParameterGroup>& groups);
absl::StatusOr<std::vector<ParameterGroup>> GroupsFromJson(const nlohmann::json& json);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_PARAMETER_GROUPS_H_
