// Where the bytes of an operation lie: the slots that it fills, uses or empties.
#ifndef PENSTOCK_TOOLS_PAGES_OP_PLACES_H_
#define PENSTOCK_TOOLS_PAGES_OP_PLACES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tools {

// One slot. What is in it is named by `content`: two operations with one slot and one content use the same
// bytes, and between them these stay.
struct Place {
  std::string tier;  // "host" or "device"
  std::string kind;  // "weights", "optimizer state", "gradients", "fp32 sums"
  int slot = 0;
  int64_t bytes = 0;
  std::string content;
};

// Of a plan, the sizes of its slots; it need not outlive the plan.
class SlotSizes {
 public:
  SlotSizes() = default;  // knows of none: operations have no places
  explicit SlotSizes(const tiering::Plan& plan);
  std::vector<Place> PlacesOf(const tiering::Op& op) const;

 private:
  IndexedVector<tiering::WeightSlot, int64_t> weights_;
  IndexedVector<tiering::TileSlot, int64_t> tiles_;
  IndexedVector<tiering::GradientSlot, int64_t> gradients_;
  IndexedVector<tiering::AccumulatorSlot, int64_t> sums_;
  IndexedVector<tiering::DeviceWeightSlot, int64_t> device_weights_;
  IndexedVector<tiering::DeviceGradientSlot, int64_t> device_gradients_;
  IndexedVector<tiering::DeviceAccumulatorSlot, int64_t> device_sums_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_OP_PLACES_H_
