#include "zero/engine/tile_ring.h"

#include "base/status_macros.h"
#include "zero/compute/tile_version.h"

namespace penstock::zero {

TileRing::TileRing(swap::Store& store, size_t slots, int64_t step)
    : store_(store), version_(VersionAfter(step)), slots_(slots) {}

absl::StatusOr<size_t> TileRing::Next() {
  const size_t slot = tile_ % slots_.size();
  RETURN_IF_ERROR(Settle(slots_[slot]));
  return slot;
}

absl::Status TileRing::Write(std::span<const void* const> segments) {
  Slot& slot = slots_[tile_ % slots_.size()];
  slot.checksums.clear();
  for (uint32_t s = 0; s < segments.size(); ++s)
    slot.checksums.push_back(store_.SegmentChecksum(tile_, s, version_, segments[s]));
  RETURN_IF_ERROR(store_.WriteTile(&slot.io, tile_, version_, segments, aio::Priority::kWriteBehind));
  slot.busy = true;
  ++tile_;
  return absl::OkStatus();
}

absl::Status TileRing::SettleAll() {
  absl::Status first;
  for (Slot& slot : slots_) first.Update(Settle(slot));
  return first;
}

absl::Status TileRing::Settle(Slot& slot) {
  if (!slot.busy) return absl::OkStatus();
  slot.busy = false;
  RETURN_IF_ERROR(store_.Wait(&slot.io));
  return store_.NoteWritten(&slot.io, slot.checksums);
}

}  // namespace penstock::zero
