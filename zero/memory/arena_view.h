// Where things are in memory: the plan's slots as pointers into the arena.
#ifndef PENSTOCK_ZERO_MEMORY_ARENA_VIEW_H_
#define PENSTOCK_ZERO_MEMORY_ARENA_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "aio/arena.h"
#include "base/check.h"
#include "base/index.h"
#include "tiering/plan/plan.h"

namespace penstock::zero {

// A tile in memory: its weights within the block's run, its state segments and, if spilled, its gradient in a
// tile slot.
struct TileMemory {
  void* weights = nullptr;
  std::vector<void*> state;  // segment 1.. of the precision; none: frozen, its weights are all that is kept
  void* gradient = nullptr;
  int64_t elements = 0;
};

class ArenaView {
 public:
  // `region` has plan.slot_bytes; zeroed here, so that padding and unread pages are defined. `rank`: whose
  // part of every block is this process's.
  ArenaView(const tiering::Plan& plan, aio::Region region, int rank = 0)
      : plan_(plan), region_(std::move(region)), rank_(rank) {
    std::memset(region_.data(), 0, region_.bytes());
    for (const tiering::BlockPlan& block : plan.blocks) at_second_.emplace_back(block.tiles.size(), 0);
  }

  void* weights(tiering::WeightSlot slot) const { return Place(plan_.weight_slots, slot); }
  void* gradient(tiering::GradientSlot slot) const { return Place(plan_.gradient_slots, slot); }
  void* input(tiering::InputSlot slot) const { return Place(plan_.input_slots, slot); }
  float* accumulator(tiering::AccumulatorSlot slot) const {
    return static_cast<float*>(Place(plan_.accumulator_slots, slot));
  }

  // Tile `tile` of `block` with the block's weights in `weight_slot` and its state in `tile_slot` (or none).
  // The gradient is where the block's gradient waits, or beside the state where it was spilled. A tile that
  // has two places (BlockPlan::second_slot) is found at that where its version in force is.
  TileMemory tile(tiering::BlockIndex block, tiering::TileIndex tile, tiering::WeightSlot weight_slot,
                  tiering::TileSlot tile_slot) const {
    return Find(block, tile, weight_slot, tile_slot, at_second_[block][tile] != 0);
  }
  // The other place of a tile that has two: nothing in force is there.
  TileMemory other_place(tiering::BlockIndex block, tiering::TileIndex tile) const {
    const tiering::BlockPlan& of = plan_.blocks[block];
    return Find(block, tile, of.private_weight_slot, of.private_tile_slot[tile],
                at_second_[block][tile] == 0);
  }
  // What is in force of a tile that has two places is at the other one from here on. Nobody else may look for
  // the tile meanwhile.
  void Exchange(tiering::BlockIndex block, tiering::TileIndex tile) {
    PENSTOCK_CHECK(plan_.blocks[block].second_slot[tile].valid(), "a second version of a tile without one");
    at_second_[block][tile] ^= 1;
  }
  // A tile's part of its block's gradient, which is in `slot`.
  std::byte* GradientOf(tiering::BlockIndex block, tiering::TileIndex tile,
                        tiering::GradientSlot slot) const {
    const tiering::BlockPlan& of = plan_.blocks[block];
    const int64_t first = of.tiles[tile].offset - of.trained_from;
    return static_cast<std::byte*>(gradient(slot)) + first * plan_.precision.gradient_bytes;
  }

  int rank() const { return rank_; }
  // Where a tile of this rank's part of a block lies in the whole block.
  tiering::Tile InWholeBlock(tiering::BlockIndex block, const tiering::Tile& tile) const {
    return {rank_ * plan_.blocks[block].elements + tile.offset, tile.elements};
  }

 private:
  TileMemory Find(tiering::BlockIndex block, tiering::TileIndex tile, tiering::WeightSlot weight_slot,
                  tiering::TileSlot tile_slot, bool second) const {
    const tiering::BlockPlan& bp = plan_.blocks[block];
    const tiering::Tile& cut = bp.tiles[tile];
    TileMemory memory;
    memory.elements = cut.elements;
    if (second && weight_slot.valid()) {
      PENSTOCK_CHECK(weight_slot == bp.private_weight_slot, "a tile of two places in a slot that others use");
      memory.weights = Place(plan_.tile_slots, bp.second_slot[tile]);
    } else if (weight_slot.valid()) {
      // A slot has the parts of all ranks, or this one's alone.
      const int64_t offset = plan_.shards_in_memory() == 1 ? cut.offset : InWholeBlock(block, cut).offset;
      memory.weights =
          static_cast<std::byte*>(weights(weight_slot)) + offset * plan_.precision.weight_bytes();
    }
    if (tile_slot.valid()) {
      auto* base =
          second ? SecondState(block, tile) : static_cast<std::byte*>(Place(plan_.tile_slots, tile_slot));
      for (size_t s = 1; s < plan_.precision.segment_bytes.size(); ++s) {
        memory.state.push_back(base + plan_.state_segment_offset(static_cast<int>(s), cut.elements));
      }
      memory.gradient = base + plan_.tile_gradient_offset;
    }
    if (bp.gradient_slot.valid() && !bp.weights_alone(tile)) {
      memory.gradient = GradientOf(block, tile, bp.gradient_slot);
    }
    return memory;
  }
  // Behind the weights.
  std::byte* SecondState(tiering::BlockIndex block, tiering::TileIndex tile) const {
    const tiering::BlockPlan& of = plan_.blocks[block];
    const int64_t weights = of.tiles[tile].elements * plan_.precision.weight_bytes();
    return static_cast<std::byte*>(Place(plan_.tile_slots, of.second_slot[tile])) +
           tiering::AlignUp(weights, tiering::kPage);
  }
  template <class I>
  void* Place(const IndexedVector<I, tiering::Slot>& slots, I slot) const {
    const tiering::Slot& place = slots[slot];
    PENSTOCK_CHECK(place.offset + place.bytes <= static_cast<int64_t>(region_.bytes()),
                   "a slot beyond the arena");
    return region_.data() + place.offset;
  }

  const tiering::Plan& plan_;
  const aio::Region region_;
  const int rank_;
  tiering::PerBlock<tiering::PerTile<char>> at_second_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_ARENA_VIEW_H_
