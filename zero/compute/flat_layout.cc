#include "zero/compute/flat_layout.h"

#include <algorithm>

#include "tiering/plan/plan.h"

namespace penstock::zero {

FlatLayout FlatLayout::Of(std::span<const ParameterSpec> parameters) {
  FlatLayout layout;
  int64_t offset = 0;
  auto add_trained = [&](int64_t from, int64_t to) {
    if (!layout.trained.empty() && layout.trained.back().second == from) {
      layout.trained.back().second = to;
    } else {
      layout.trained.emplace_back(from, to);
    }
  };
  for (const ParameterSpec& spec : parameters) {
    const bool flips = !layout.parameters.empty() && layout.parameters.back().trains != spec.trains;
    // Those that train and those that do not share no block of 8-bit states.
    if (flips) offset = tiering::AlignUp(offset, tiering::kScaleBlock);
    Parameter& parameter = layout.parameters.emplace_back();
    parameter.name = spec.name;
    parameter.sizes = spec.sizes;
    parameter.offset = offset;
    parameter.elements = 1;
    for (const int64_t size : spec.sizes) parameter.elements *= size;
    parameter.trains = spec.trains;
    layout.parameter_elements += parameter.elements;
    const int64_t end = tiering::AlignUp(offset + parameter.elements, kParameterAlignment);
    if (parameter.trains) add_trained(offset, end);
    offset = end;
  }
  layout.elements = tiering::AlignUp(std::max<int64_t>(offset, 1), tiering::kElementAlignment);
  if (!layout.parameters.empty() && !layout.parameters.back().trains) {
    offset = tiering::AlignUp(offset, tiering::kScaleBlock);
  }
  if (layout.elements > offset) add_trained(offset, layout.elements);
  return layout;
}

bool FlatLayout::Trains() const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const Parameter& parameter) { return parameter.trains; });
}

bool FlatLayout::SameShapes(const FlatLayout& other) const {
  if (parameters.size() != other.parameters.size()) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sizes != other.parameters[i].sizes ||
        parameters[i].trains != other.parameters[i].trains) {
      return false;
    }
  }
  return true;
}

}  // namespace penstock::zero
