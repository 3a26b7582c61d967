#include "tiering/use_trace.h"

#include <algorithm>

namespace penstock::tiering {

bool UseTrace::Use(int item) {
  pass_.push_back(item);
  if (recording()) return false;
  if (position_ < order_.size() && order_[position_] == item) {
    ++position_;
    return true;
  }
  ++deviations_;
  // What was left out is skipped; what was put in leaves the expectation as it is.
  const auto from = order_.begin() + static_cast<std::ptrdiff_t>(position_);
  const auto again = std::find(from, order_.end(), item);
  if (again != order_.end()) position_ = static_cast<size_t>(again - order_.begin()) + 1;
  return false;
}

bool UseTrace::EndPass() {
  const bool changed = pass_ != order_;
  if (changed) {
    // A pass that ended early is a deviation that no use has shown.
    if (!recording() && position_ < order_.size()) ++deviations_;
    order_ = std::move(pass_);
  }
  pass_.clear();
  position_ = 0;
  return changed;
}

size_t UseTrace::DistanceTo(int item) const {
  const size_t length = order_.size();
  for (size_t i = 0; i < 2 * length; ++i) {
    const size_t at = position_ + i;
    if (at < 2 * length && order_[at % length] == item) return i;
  }
  return kNever;
}

}  // namespace penstock::tiering
