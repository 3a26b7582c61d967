// State that lives on a device with its own memory (tiering::DevicePlan): where it is there, and the copies
// of its tiles between there and host memory.
//
// A block's state on the device is that of one tile as large as the block; the store and readers in
// host memory have it tile by tile, so a tile's copy is one for each segment.
//
// Threads: block(), partial_sums() and the copies from any. Nothing may change what a copy reads nor use what
// it fills: the program's edges see to that, or everything is at rest.
#ifndef PENSTOCK_ZERO_COMPUTE_DEVICE_STATE_H_
#define PENSTOCK_ZERO_COMPUTE_DEVICE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "base/index.h"
#include "tiering/plan/plan.h"
#include "zero/compute/device.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

class DeviceState {
 public:
  // `arena`: the device's. `rank`: whose part of every run is this process's. `staging`: host memory for one
  // tile (Plan::checkpoint_bytes), empty where state has its home on a drive. Everything outlives this.
  DeviceState(const tiering::Plan& plan, Device& device, std::byte* arena, int rank,
              std::span<std::byte> staging)
      : plan_(plan), device_(device), arena_(arena), rank_(rank), staging_(staging) {}

  bool has(tiering::BlockIndex block) const { return plan_.on_device(block); }
  // All of a block, over several ranks of this one's part, as one tile on the device: weights, state,
  // gradient.
  TileMemory block(tiering::BlockIndex block) const;
  // The partial sums of its gradient's squares there, one for each tiering::kPartAlignment elements.
  double* partial_sums(tiering::BlockIndex block) const;

  // State alone, from a tile in host memory to the device; weights and state the other way.
  void CopyStateIn(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& from,
                   Device::Done done) const;
  void CopyOut(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& to,
               Device::Done done) const;

  // Weights and state of a tile, to and from host memory; they wait for the copy.
  absl::Status Read(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& to) const;
  absl::Status Write(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& from) const;
  // `count` of its gradient's elements from `first` (of the block) on, as they wait for the update.
  absl::Status ReadGradient(tiering::BlockIndex block, int64_t first, int64_t count, void* to) const;
  // A tile's places in the staging memory, for its present user: the engine before the first step,
  // then the checkpoint that is being copied.
  TileMemory staged(tiering::BlockIndex block, tiering::TileIndex tile) const;

 private:
  struct Piece {
    std::byte* there;
    std::byte* here;
    int64_t bytes;
  };
  std::vector<Piece> Pieces(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& here,
                            bool with_weights) const;
  void Copy(bool in, const std::vector<Piece>& pieces, Device::Done done) const;
  absl::Status CopyNow(bool in, const std::vector<Piece>& pieces) const;
  template <class I>
  std::byte* Place(const IndexedVector<I, tiering::Slot>& slots, I slot) const {
    return arena_ + slots[slot].offset;
  }
  const tiering::DevicePlan::Block& Places(tiering::BlockIndex block) const {
    return plan_.device.blocks[block];
  }

  const tiering::Plan& plan_;
  Device& device_;
  std::byte* const arena_;
  const int rank_;
  const std::span<std::byte> staging_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_DEVICE_STATE_H_
