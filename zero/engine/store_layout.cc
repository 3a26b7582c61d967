#include "zero/engine/store_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/ranks/agree.h"

namespace penstock::zero {

swap::TileLayout TileLayoutOf(const tiering::Precision& precision, int64_t elements) {
  swap::TileLayout layout;
  for (size_t s = 0; s < precision.segment_bytes.size(); ++s)
    layout.segment_bytes.push_back(static_cast<uint64_t>(precision.SegmentBytes(s, elements)));
  layout.scratch_bytes = static_cast<uint64_t>(elements * precision.gradient_bytes);
  return layout;
}

swap::Layout LayoutOf(const tiering::Plan& plan) {
  swap::Layout layout;
  for (const tiering::BlockPlan& block : plan.blocks) {
    for (const tiering::Tile& tile : block.tiles) {
      layout.tiles.push_back(TileLayoutOf(plan.precision, tile.elements));
    }
  }
  return layout;
}

swap::Layout LayoutOfThisHost(const swap::Layout& layout, const EngineOptions& options) {
  const int here = options.comm != nullptr ? options.comm->environment().local_world : 1;
  swap::Layout all;
  for (int k = 0; k < here; ++k) all.tiles.insert(all.tiles.end(), layout.tiles.begin(), layout.tiles.end());
  return all;
}

absl::StatusOr<tiering::PerBlock<std::vector<int64_t>>> TilesOf(const swap::StoreShape& shape,
                                                                const tiering::ModelGraph& graph, int world,
                                                                const tiering::Precision& precision) {
  tiering::PerBlock<std::vector<int64_t>> tiles;
  size_t next = 0;
  for (const tiering::BlockShape& block : graph.blocks) {
    std::vector<int64_t>& of_block = tiles.emplace_back();
    for (int64_t elements = 0; elements < tiering::ShardElements(block.elements, world);) {
      if (next == shape.tiles.size())
        return absl::DataLossError("the store has fewer tiles than its model needs");
      const swap::TileLayout& tile = shape.tiles[next++].layout;
      const auto of_tile = tile.segment_bytes.empty()
                               ? 0
                               : static_cast<int64_t>(tile.segment_bytes[0]) / precision.weight_bytes();
      bool fits = of_tile > 0 && tile.segment_bytes.size() == precision.segment_bytes.size();
      for (size_t s = 0; fits && s < tile.segment_bytes.size(); ++s) {
        fits = static_cast<int64_t>(tile.segment_bytes[s]) == precision.SegmentBytes(s, of_tile);
      }
      if (!fits)
        return absl::DataLossError(
            absl::StrCat("tile ", next - 1, " of the store is not one of its model's"));
      of_block.push_back(of_tile);
      elements += of_tile;
    }
  }
  if (next != shape.tiles.size()) return absl::DataLossError("the store has more tiles than its model needs");
  return tiles;
}

namespace {

// Slots of a new store.
uint32_t VersionsHere(const EngineOptions& options, swap::StoreOptions store, const swap::Layout& layout,
                      const std::string& identity, std::span<const uint64_t> besides) {
  if (options.storage.versions > 0) return static_cast<uint32_t>(options.storage.versions);
  // With a third version a checkpoint is copied at leisure; it is worth its space where there is any. Where
  // only checkpoints are commits, the second one is free meanwhile.
  if (!options.trains || options.storage.checkpoints.every == 0) return 2;
  if (options.storage.durability == Durability::kCheckpoint) return 2;
  store.slots = 3;
  return swap::CheckSpace(store, LayoutOfThisHost(layout, options), identity, besides).ok() ? 3 : 2;
}

}  // namespace

absl::StatusOr<uint32_t> AgreeOnVersions(const EngineOptions& options, const swap::StoreOptions& store,
                                         const swap::Layout& layout, const std::string& identity,
                                         std::span<const uint64_t> besides) {
  const uint32_t mine = VersionsHere(options, store, layout, identity, besides);
  if (options.comm == nullptr) return mine;
  ASSIGN_OR_RETURN(std::vector<int64_t> all, AllNumbers(*options.comm, "the versions", mine));
  return static_cast<uint32_t>(*std::min_element(all.begin(), all.end()));
}

}  // namespace penstock::zero
