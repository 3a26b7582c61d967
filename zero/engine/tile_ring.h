// Writes the tiles of a new run to its store, one after the other: some are on their way to the drive while
// the next one is filled.
#ifndef PENSTOCK_ZERO_ENGINE_TILE_RING_H_
#define PENSTOCK_ZERO_ENGINE_TILE_RING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"

namespace penstock::zero {

// The memory of a slot is the caller's; it stays until the slot is settled. One thread.
class TileRing {
 public:
  // Tiles get the version of `step`; nothing is committed. The store outlives it.
  TileRing(swap::Store& store, size_t slots, int64_t step);

  // The slot that the next tile goes by way of; what was in it is written.
  absl::StatusOr<size_t> Next();
  // That tile begins to be written, from these segments in the slot's memory.
  absl::Status Write(std::span<const void* const> segments);
  // Waits for all, also after an error; returns the first.
  absl::Status SettleAll();

 private:
  struct Slot {
    swap::TileIo io;
    std::vector<uint64_t> checksums;
    bool busy = false;
  };
  absl::Status Settle(Slot& slot);

  swap::Store& store_;
  const uint64_t version_;
  std::vector<Slot> slots_;
  uint32_t tile_ = 0;  // number of the next one in the store
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_TILE_RING_H_
