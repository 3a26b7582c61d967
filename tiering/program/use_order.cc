#include "tiering/program/use_order.h"

#include <algorithm>
#include <limits>

#include "base/index.h"

namespace penstock::tiering {

void UseOrder::Clear() {
  for (std::vector<UseIndex>& uses : uses_) uses.clear();
  next_ = UseIndex(0);
}

void UseOrder::Add(BlockIndex block) {
  uses_[block].push_back(next_);
  ++next_;
}

UseOrder::GiveUp UseOrder::WorthGivingUp(BlockIndex block, UseIndex use) const {
  constexpr UseIndex kNever(std::numeric_limits<int>::max());
  const std::vector<UseIndex>& uses = uses_[block];
  const bool computes = std::binary_search(uses.begin(), uses.end(), use - 1);
  const auto next = std::upper_bound(uses.begin(), uses.end(), use);
  return {!computes, next != uses.end() ? *next : kNever};
}

}  // namespace penstock::tiering
