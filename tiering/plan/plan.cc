#include "tiering/plan/plan.h"

namespace penstock::tiering {

int64_t Plan::state_segment_offset(int segment, int64_t elements) const {
  int64_t offset = 0;
  for (int s = 1; s < segment; ++s)
    offset += AlignUp(precision.SegmentBytes(static_cast<size_t>(s), elements), kPage);
  return offset;
}

int64_t Plan::tile_count() const {
  int64_t tiles = 0;
  for (const BlockPlan& block : blocks) tiles += static_cast<int64_t>(block.tiles.size());
  return tiles;
}

int64_t Plan::trained_tiles() const {
  int64_t tiles = 0;
  for (const BlockPlan& block : blocks) {
    for (const TileIndex t : block.tiles.indices()) tiles += block.updates(t) ? 1 : 0;
  }
  return tiles;
}

std::string_view Plan::order_of_update() const {
  if (!speculates) return "next_forward";
  return speculative_share() == 1.0 ? "in_backward" : "mixed";
}

double Plan::speculative_share() const {
  double early = 0;
  for (const BlockPlan& block : blocks) {
    for (const char tile : block.speculative_update) early += tile;
  }
  return early == 0 ? 0 : early / static_cast<double>(trained_tiles());
}

double Plan::previewed_share() const {
  double previewed = 0;
  for (const BlockPlan& block : blocks) {
    for (const char tile : block.previews) previewed += tile;
  }
  return previewed == 0 ? 0 : previewed / static_cast<double>(trained_tiles());
}

int64_t Plan::second_version_bytes() const {
  int64_t bytes = 0;
  for (int i = 1; i <= second_versions; ++i)
    bytes += AlignUp(tile_slots[tile_slots.end_index() - i].bytes, kPage);
  return bytes;
}

double Plan::on_device_share() const {
  int64_t elements = 0;
  for (const BlockPlan& block : blocks) elements += block.elements;
  return elements == 0 ? 0 : static_cast<double>(device.resident_elements) / static_cast<double>(elements);
}

Ledger Plan::ledger() const {
  Ledger ledger;
  auto sum = [](const auto& slots, size_t from, size_t to) {
    int64_t bytes = 0;
    for (size_t i = from; i < to; ++i)
      bytes += AlignUp(slots.begin()[static_cast<ptrdiff_t>(i)].bytes, kPage);
    return bytes;
  };
  size_t shared_weight_slots = 0, ring_gradients = 0;
  for (const WeightClass& cls : weight_classes) shared_weight_slots += static_cast<size_t>(cls.slots);
  for (const GradientRing& ring : gradient_rings) ring_gradients += static_cast<size_t>(ring.slots);
  const size_t kept_gradients = gradient_slots.size() - ring_gradients;
  auto add = [&](const char* what, const auto& slots, size_t from, size_t to) {
    ledger.Add(what, sum(slots, from, to), static_cast<int64_t>(to - from));
  };
  add("weights in flight", weight_slots, 0, shared_weight_slots);
  add("weights resident", weight_slots, shared_weight_slots, weight_slots.size());
  add("state in flight", tile_slots, 0, static_cast<size_t>(tile_ring));
  const size_t kept_tiles = tile_slots.size() - static_cast<size_t>(second_versions);
  add("state resident", tile_slots, static_cast<size_t>(tile_ring), kept_tiles);
  add("second versions of tiles", tile_slots, kept_tiles, tile_slots.size());
  add("gradients resident", gradient_slots, 0, kept_gradients);
  add("gradients in flight", gradient_slots, kept_gradients, gradient_slots.size());
  add("fp32 gradient sums", accumulator_slots, 0, accumulator_slots.size());
  add("inputs off the device", input_slots, 0, input_slots.size());
  ledger.Add(on_nvme ? "checkpoint in flight" : "state on its way from the device", checkpoint_bytes);
  const int64_t coded_weights = codes.weights ? GatherBytes(shards_in_memory(), kNetworkPiece) : 0;
  ledger.Add("gradients of other ranks", network_bytes - coded_weights);
  ledger.Add("coded weights of other ranks", coded_weights);
  ledger.Add("huge page rounding", arena_bytes - slot_bytes - checkpoint_bytes - network_bytes);
  ledger.Add("tensors", tensor_bytes);
  return ledger;
}

std::string_view PlacementName(Placement placement) {
  switch (placement) {
    case Placement::kAuto:
      return "auto";
    case Placement::kCpu:
      return "cpu";
    case Placement::kCuda:
      return "cuda";
    case Placement::kConst:
      return "const";
  }
  return "unknown";
}

}  // namespace penstock::tiering
