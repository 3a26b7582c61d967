#include "zero/compute/flat_layout.h"

#include <algorithm>
#include <numeric>

#include "tiering/plan/plan.h"

namespace penstock::zero {
namespace {

// Lays parameters one behind the other.
class Cursor {
 public:
  explicit Cursor(FlatLayout* layout) : layout_(*layout) {}

  void Place(Parameter* parameter) {
    // Those that train and those that do not, and those of different groups, share no block of 8-bit states.
    const bool flips =
        last_ != nullptr && (last_->trains != parameter->trains || last_->group != parameter->group);
    if (flips) offset_ = tiering::AlignUp(offset_, tiering::kScaleBlock);
    parameter->offset = offset_;
    offset_ = tiering::AlignUp(offset_ + parameter->elements, kParameterAlignment);
    if (parameter->trains) AddTrained(parameter->offset, offset_, parameter->group);
    last_ = parameter;
  }

  // What comes next begins a part of its own.
  void StartTrained() {
    offset_ = tiering::AlignUp(offset_, tiering::kPartAlignment);
    layout_.trained_from = offset_;
  }

  void End() {
    // Also of parameters without elements there is something.
    const int64_t least = layout_.trained_from + 1;
    layout_.elements = tiering::AlignUp(std::max(offset_, least), tiering::kElementAlignment);
    if (last_ != nullptr && !last_->trains) offset_ = tiering::AlignUp(offset_, tiering::kScaleBlock);
    if (layout_.elements > offset_)
      AddTrained(offset_, layout_.elements, last_ == nullptr ? 0 : last_->group);
  }

 private:
  void AddTrained(int64_t from, int64_t to, int group) {
    TrainedRange* const last = layout_.trained.empty() ? nullptr : &layout_.trained.back();
    if (last != nullptr && last->to == from && last->group == group) {
      last->to = to;
    } else {
      layout_.trained.push_back({from, to, group});
    }
  }

  FlatLayout& layout_;
  const Parameter* last_ = nullptr;
  int64_t offset_ = 0;
};

}  // namespace

FlatLayout FlatLayout::Of(std::span<const ParameterSpec> parameters) {
  FlatLayout layout;
  bool any_trains = false, any_frozen = false;
  for (const ParameterSpec& spec : parameters) {
    Parameter& parameter = layout.parameters.emplace_back();
    parameter.name = spec.name;
    parameter.sizes = spec.sizes;
    parameter.elements = 1;
    for (const int64_t size : spec.sizes) parameter.elements *= size;
    parameter.trains = spec.trains;
    parameter.group = spec.group;
    layout.parameter_elements += parameter.elements;
    (spec.trains ? any_trains : any_frozen) = true;
  }
  Cursor cursor(&layout);
  for (const bool trains : {false, true}) {
    if (trains && any_trains && any_frozen) cursor.StartTrained();
    for (Parameter& parameter : layout.parameters) {
      if (parameter.trains == trains) cursor.Place(&parameter);
    }
  }
  cursor.End();
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

std::vector<size_t> FlatLayout::InOrder() const {
  std::vector<size_t> numbers(parameters.size());
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  std::stable_sort(numbers.begin(), numbers.end(),
                   [this](size_t x, size_t y) { return parameters[x].offset < parameters[y].offset; });
  return numbers;
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
