#include "zero/compute/device_state.h"

#include <future>
#include <memory>
#include <mutex>
#include <utility>

#include "kernels/reduce.h"

namespace penstock::zero {

static_assert(tiering::kPartAlignment == static_cast<int64_t>(kernels::kReduceBlock));

TileMemory DeviceState::block(tiering::BlockIndex block) const {
  const tiering::DevicePlan::Block& places = Places(block);
  TileMemory memory;
  memory.elements = plan_.blocks[block].elements;
  memory.weights = Place(plan_.device.weight_slots, places.weight_slot) +
                   rank_ * memory.elements * plan_.precision.weight_bytes();
  memory.gradient = Place(plan_.device.gradient_slots, places.gradient_slot);
  std::byte* const state = Place(plan_.device.state_slots, places.state_slot);
  for (size_t s = 1; s < plan_.precision.segment_bytes.size(); ++s)
    memory.state.push_back(state + plan_.state_segment_offset(static_cast<int>(s), memory.elements));
  return memory;
}

double* DeviceState::partial_sums(tiering::BlockIndex block) const {
  std::byte* const state = Place(plan_.device.state_slots, Places(block).state_slot);
  return reinterpret_cast<double*>(state + plan_.precision.StateBytes(plan_.blocks[block].elements));
}

std::vector<DeviceState::Piece> DeviceState::Pieces(tiering::BlockIndex block, tiering::TileIndex tile,
                                                    const TileMemory& here, bool with_weights) const {
  const tiering::BlockPlan& of = plan_.blocks[block];
  const tiering::Tile& cut = of.tiles[tile];
  const TileMemory there = this->block(block);
  std::vector<Piece> pieces;
  auto add = [&](void* far, void* near, int64_t at, int64_t bytes) {
    pieces.push_back({static_cast<std::byte*>(far) + at, static_cast<std::byte*>(near), bytes});
  };
  const std::vector<int>& widths = plan_.precision.segment_bytes;
  if (with_weights)
    add(there.weights, here.weights, cut.offset * widths.front(), cut.elements * widths.front());
  for (size_t s = 1; s < widths.size(); ++s) {
    void* const far = there.state[s - 1];
    void* const near = here.state[s - 1];
    add(far, near, cut.offset * widths[s], cut.elements * widths[s]);
    if (widths[s] > 1) continue;
    // Codes of 8 bit have their scales behind them: here behind the tile's, there behind the block's.
    constexpr int64_t kScales = tiering::kScaleBlock / 4;
    add(far, static_cast<std::byte*>(near) + cut.elements, of.elements + cut.offset / kScales,
        cut.elements / kScales);
  }
  return pieces;
}

void DeviceState::Copy(bool in, const std::vector<Piece>& pieces, Device::Done done) const {
  // Told once, when the last of them is over, of the first that failed.
  struct Joined {
    std::mutex mutex;
    size_t left;
    absl::Status status;
    Device::Done done;
  };
  auto joined = std::make_shared<Joined>();
  joined->left = pieces.size();
  joined->done = std::move(done);
  for (const Piece& piece : pieces) {
    auto one = [joined](absl::Status status) {
      {
        std::lock_guard lock(joined->mutex);
        joined->status.Update(std::move(status));
        if (--joined->left > 0) return;
      }
      joined->done(std::move(joined->status));
    };
    if (in) {
      device_.CopyIn(piece.there, piece.here, piece.bytes, /*after_compute=*/false, std::move(one));
    } else {
      device_.CopyOut(piece.here, piece.there, piece.bytes, std::move(one));
    }
  }
}

absl::Status DeviceState::CopyNow(bool in, const std::vector<Piece>& pieces) const {
  std::promise<absl::Status> over;
  Copy(in, pieces, [&over](absl::Status status) { over.set_value(std::move(status)); });
  return over.get_future().get();
}

void DeviceState::CopyStateIn(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& from,
                              Device::Done done) const {
  Copy(/*in=*/true, Pieces(block, tile, from, /*with_weights=*/false), std::move(done));
}

void DeviceState::CopyOut(tiering::BlockIndex block, tiering::TileIndex tile, const TileMemory& to,
                          Device::Done done) const {
  Copy(/*in=*/false, Pieces(block, tile, to, /*with_weights=*/true), std::move(done));
}

absl::Status DeviceState::Read(tiering::BlockIndex block, tiering::TileIndex tile,
                               const TileMemory& to) const {
  return CopyNow(/*in=*/false, Pieces(block, tile, to, /*with_weights=*/true));
}

absl::Status DeviceState::Write(tiering::BlockIndex block, tiering::TileIndex tile,
                                const TileMemory& from) const {
  return CopyNow(/*in=*/true, Pieces(block, tile, from, /*with_weights=*/true));
}

absl::Status DeviceState::ReadGradient(tiering::BlockIndex block, int64_t first, int64_t count,
                                       void* to) const {
  const int64_t width = plan_.precision.gradient_bytes;
  std::byte* const gradient = static_cast<std::byte*>(this->block(block).gradient);
  return CopyNow(/*in=*/false, {{gradient + first * width, static_cast<std::byte*>(to), count * width}});
}

TileMemory DeviceState::staged(tiering::BlockIndex block, tiering::TileIndex tile) const {
  TileMemory memory;
  memory.elements = plan_.blocks[block].tiles[tile].elements;
  std::byte* place = staging_.data();
  memory.weights = place;
  for (size_t s = 0; s + 1 < plan_.precision.segment_bytes.size(); ++s) {
    place += tiering::AlignUp(plan_.precision.SegmentBytes(s, memory.elements), tiering::kPage);
    memory.state.push_back(place);
  }
  return memory;
}

}  // namespace penstock::zero
