#include "zero/compute/parameter_groups.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tiering/plan/plan.h"
#include "zero/config/json_field.h"

namespace penstock::zero {
namespace {

absl::Status CheckRates(const std::vector<ParameterGroup>& groups) {
  for (const ParameterGroup& group : groups) {
    const double decay = group.weight_decay.value_or(0);
    if (std::isfinite(group.lr_factor) && group.lr_factor >= 0 && std::isfinite(decay) && decay >= 0)
      continue;
    return absl::InvalidArgumentError(absl::StrCat("a group of parameters with a factor of ", group.lr_factor,
                                                   " and a weight decay of ", decay,
                                                   ": both must be numbers of 0 or more"));
  }
  return absl::OkStatus();
}

// Which groups' names have stood for something, name by name.
using Found = std::vector<std::vector<bool>>;

int GroupOf(const std::string& name, const std::vector<ParameterGroup>& groups, Found* found) {
  int of = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t n = 0; n < groups[g].names.size(); ++n) {
      if (!NameMatches(groups[g].names[n], name)) continue;
      (*found)[g][n] = true;
      if (of == 0) of = static_cast<int>(g) + 1;
    }
  }
  return of;
}

// What trains, again, by the groups that the parameters have now. Padding goes with what it follows.
absl::Status Regroup(FlatLayout* layout, const std::string& block, kernels::StateType states) {
  std::vector<TrainedRange> before = std::exchange(layout->trained, {});
  const std::vector<size_t> order = layout->InOrder();
  for (const TrainedRange& range : before) {
    int64_t from = range.from;
    const auto add = [&](int64_t to, int group) {
      if (to <= from) return;
      std::vector<TrainedRange>& all = layout->trained;
      if (!all.empty() && all.back().to == from && all.back().group == group) {
        all.back().to = to;
      } else {
        all.push_back({from, to, group});
      }
      from = to;
    };
    int group = 0;
    for (const size_t p : order) {
      const Parameter& parameter = layout->parameters[p];
      if (parameter.offset < range.from || parameter.offset >= range.to || !parameter.trains) continue;
      if (parameter.group != group) {
        if (states == kernels::StateType::k8Bit && parameter.offset > range.from &&
            parameter.offset % tiering::kScaleBlock != 0) {
          return absl::InvalidArgumentError(absl::StrCat(
              "with optimizer states of 8 bit, ", block, ".", parameter.name,
              " shares a scale with the parameter before it, which is of another group: states of 32 or 16 "
              "bit, or a ParameterSpec::group from its Compute"));
        }
        add(parameter.offset, group);
        group = parameter.group;
      }
    }
    add(range.to, group);
  }
  return absl::OkStatus();
}

}  // namespace

bool NameMatches(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  pattern.remove_prefix(star + 1);
  // What is before the next star may begin anywhere; the earliest place leaves most of the rest.
  for (;;) {
    const size_t next = pattern.find('*');
    if (next == std::string_view::npos) return name.ends_with(pattern);
    const size_t at = name.find(pattern.substr(0, next));
    if (at == std::string_view::npos) return false;
    name.remove_prefix(at + next);
    pattern.remove_prefix(next + 1);
  }
}

absl::StatusOr<GradientSums::Layouts> LayoutsWithGroups(const tiering::ModelGraph& graph,
                                                        const GradientSums::Layouts& layouts,
                                                        const std::vector<ParameterGroup>& groups,
                                                        kernels::StateType states) {
  RETURN_IF_ERROR(CheckRates(groups));
  Found found;
  for (const ParameterGroup& group : groups) found.emplace_back(group.names.size(), false);
  GradientSums::Layouts made;
  // Blocks of one layout whose parameters are in the same groups share one again.
  std::map<std::pair<const FlatLayout*, std::vector<int>>, std::shared_ptr<const FlatLayout>> known;
  for (const tiering::BlockIndex b : layouts.indices()) {
    const FlatLayout& layout = *layouts[b];
    const std::string& block = graph.blocks[b].name;
    if (layout.groups() > 1) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block,
                                                     " has groups of parameters from its Compute already "
                                                     "(ParameterSpec::group): groups by name go without"));
    }
    std::vector<int> numbers;
    for (const Parameter& parameter : layout.parameters) {
      numbers.push_back(parameter.trains ? GroupOf(absl::StrCat(block, ".", parameter.name), groups, &found)
                                         : 0);
    }
    std::shared_ptr<const FlatLayout>& shared = known[{&layout, numbers}];
    if (shared == nullptr) {
      auto own = std::make_shared<FlatLayout>(layout);
      for (size_t p = 0; p < numbers.size(); ++p) own->parameters[p].group = numbers[p];
      RETURN_IF_ERROR(Regroup(own.get(), block, states));
      shared = std::move(own);
    }
    made.push_back(shared);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto none = std::find(found[g].begin(), found[g].end(), false);
    if (none == found[g].end() && !groups[g].names.empty()) continue;
    return absl::InvalidArgumentError(
        groups[g].names.empty()
            ? absl::StrCat("group ", g + 1, " of the parameters names none")
            : absl::StrCat("\"", groups[g].names[static_cast<size_t>(none - found[g].begin())],
                           "\" stands for no parameter that trains: names are block, a dot, parameter"));
  }
  return made;
}

std::vector<GroupRates> RatesOfGroups(const GroupRates& rest, const std::vector<ParameterGroup>& groups) {
  std::vector<GroupRates> all = {rest};
  for (const ParameterGroup& group : groups) {
    GroupRates& rates = all.emplace_back(rest);
    rates.rates.lr *= group.lr_factor;
    if (group.weight_decay.has_value()) rates.weight_decay = group.weight_decay;
  }
  return all;
}

nlohmann::json ToJson(const std::vector<ParameterGroup>& groups) {
  nlohmann::json all = nlohmann::json::array();
  for (const ParameterGroup& group : groups) {
    nlohmann::json one = {{"names", group.names}, {"lr_factor", group.lr_factor}};
    if (group.weight_decay.has_value()) one["weight_decay"] = *group.weight_decay;
    all.push_back(std::move(one));
  }
  return all;
}

absl::StatusOr<std::vector<ParameterGroup>> GroupsFromJson(const nlohmann::json& json) {
  absl::Status wrong = absl::DataLossError("groups of parameters");
  if (!json.is_array()) return wrong;
  std::vector<ParameterGroup> groups;
  for (const nlohmann::json& one : json) {
    const auto names = JsonField<std::vector<std::string>>(one, "names");
    const auto factor = JsonField<double>(one, "lr_factor");
    if (!names.has_value() || !factor.has_value()) return wrong;
    groups.push_back({*names, *factor, JsonField<double>(one, "weight_decay")});
    if (one.contains("weight_decay") && !groups.back().weight_decay.has_value()) return wrong;
  }
  if (!CheckRates(groups).ok()) return wrong;
  return groups;
}

}  // namespace penstock::zero
