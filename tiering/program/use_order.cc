#include "tiering/program/use_order.h"

#include <algorithm>
#include <limits>

#include "base/index.h"

namespace penstock::tiering {

void UseOrder::Clear() {
  for (std::vector<size_t>& uses : uses_) uses.clear();
  next_ = 0;
}

void UseOrder::Add(int block) { uses_[At(block)].push_back(next_++); }

UseOrder::GiveUp UseOrder::WorthGivingUp(int block, size_t position) const {
  constexpr size_t kNever = std::numeric_limits<size_t>::max();
  const std::vector<size_t>& uses = uses_[At(block)];
  const bool computes = position > 0 && std::binary_search(uses.begin(), uses.end(), position - 1);
  const auto next = std::upper_bound(uses.begin(), uses.end(), position);
  return {!computes, next != uses.end() ? *next : kNever};
}

}  // namespace penstock::tiering
