#include "tools/pages/op_places.h"

#include "absl/strings/str_cat.h"

namespace penstock::tools {
namespace {

template <class I>
IndexedVector<I, int64_t> SizesOf(const IndexedVector<I, tiering::Slot>& slots) {
  IndexedVector<I, int64_t> sizes;
  for (const I slot : slots.indices()) sizes.push_back(slots[slot].bytes);
  return sizes;
}

template <class I>
void AddPlace(const char* tier, const char* kind, I slot, const IndexedVector<I, int64_t>& sizes,
              std::string content, std::vector<Place>* places) {
  if (!slot.valid() || static_cast<size_t>(slot.value()) >= sizes.size()) return;
  places->push_back({tier, kind, slot.value(), sizes[slot], std::move(content)});
}

}  // namespace

SlotSizes::SlotSizes(const tiering::Plan& plan)
    : weights_(SizesOf(plan.weight_slots)),
      tiles_(SizesOf(plan.tile_slots)),
      gradients_(SizesOf(plan.gradient_slots)),
      sums_(SizesOf(plan.accumulator_slots)),
      device_weights_(SizesOf(plan.device.weight_slots)),
      device_gradients_(SizesOf(plan.device.gradient_slots)),
      device_sums_(SizesOf(plan.device.accumulator_slots)) {}

std::vector<Place> SlotSizes::PlacesOf(const tiering::Op& op) const {
  std::vector<Place> places;
  // Weights and state stay from step to step; a gradient is of one step.
  const std::string block = absl::StrCat(op.block.value());
  const std::string gradient = absl::StrCat(block, "@", op.step);
  AddPlace("host", "weights", op.weight_slot, weights_, block, &places);
  AddPlace("host", "optimizer state", op.tile_slot, tiles_, absl::StrCat(block, "/", op.tile.value()),
           &places);
  AddPlace("host", "gradients", op.gradient_slot, gradients_, gradient, &places);
  AddPlace("host", "fp32 sums", op.accumulator_slot, sums_, gradient, &places);
  AddPlace("device", "weights", op.device_weight_slot, device_weights_, block, &places);
  AddPlace("device", "gradients", op.device_gradient_slot, device_gradients_, gradient, &places);
  AddPlace("device", "fp32 sums", op.device_accumulator_slot, device_sums_, gradient, &places);
  return places;
}

}  // namespace penstock::tools
