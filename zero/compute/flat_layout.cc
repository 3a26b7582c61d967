#include "zero/compute/flat_layout.h"

#include <algorithm>

#include "tiering/plan/plan.h"

namespace penstock::zero {

FlatLayout FlatLayout::Of(std::span<const ParameterSpec> parameters) {
  FlatLayout layout;
  int64_t offset = 0;
  auto add_trained = [&](int64_t from, int64_t to, int group) {
    TrainedRange* const last = layout.trained.empty() ? nullptr : &layout.trained.back();
    if (last != nullptr && last->to == from && last->group == group) {
      last->to = to;
    } else {
      layout.trained.push_back({from, to, group});
    }
  };
  for (const ParameterSpec& spec : parameters) {
    const Parameter* const before = layout.parameters.empty() ? nullptr : &layout.parameters.back();
    const bool flips = before != nullptr && (before->trains != spec.trains || before->group != spec.group);
    // Those that train and those that do not, and those of different groups, share no block of 8-bit states.
    if (flips) offset = tiering::AlignUp(offset, tiering::kScaleBlock);
    Parameter& parameter = layout.parameters.emplace_back();
    parameter.name = spec.name;
    parameter.sizes = spec.sizes;
    parameter.offset = offset;
    parameter.elements = 1;
    for (const int64_t size : spec.sizes) parameter.elements *= size;
    parameter.trains = spec.trains;
    parameter.group = spec.group;
    layout.parameter_elements += parameter.elements;
    const int64_t end = tiering::AlignUp(offset + parameter.elements, kParameterAlignment);
    if (parameter.trains) add_trained(offset, end, parameter.group);
    offset = end;
  }
  layout.elements = tiering::AlignUp(std::max<int64_t>(offset, 1), tiering::kElementAlignment);
  if (!layout.parameters.empty() && !layout.parameters.back().trains) {
    offset = tiering::AlignUp(offset, tiering::kScaleBlock);
  }
  if (layout.elements > offset)
    add_trained(offset, layout.elements, parameters.empty() ? 0 : parameters.back().group);
  return layout;
}

bool FlatLayout::Trains() const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const Parameter& parameter) { return parameter.trains; });
}

int FlatLayout::groups() const {
  int most = 0;
  for (const Parameter& parameter : parameters) most = std::max(most, parameter.group);
  return most + 1;
}

bool FlatLayout::SameShapes(const FlatLayout& other) const {
  if (parameters.size() != other.parameters.size()) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sizes != other.parameters[i].sizes ||
        parameters[i].trains != other.parameters[i].trains ||
        parameters[i].group != other.parameters[i].group) {
      return false;
    }
  }
  return true;
}

}  // namespace penstock::zero
