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

swap::TileLayout WeightsAloneLayoutOf(const tiering::Precision& precision, int64_t elements) {
  swap::TileLayout layout;
  layout.segment_bytes = {static_cast<uint64_t>(precision.SegmentBytes(0, elements))};
  return layout;
}

swap::Layout LayoutOf(const tiering::Plan& plan) {
  swap::Layout layout;
  for (const tiering::BlockPlan& block : plan.blocks) {
    for (const tiering::TileIndex t : block.tiles.indices()) {
      if (!block.in_store(t)) continue;
      const int64_t elements = block.tiles[t].elements;
      layout.tiles.push_back(block.weights_alone(t) ? WeightsAloneLayoutOf(plan.precision, elements)
                                                    : TileLayoutOf(plan.precision, elements));
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

namespace {

// Elements of a tile that is all there, or has its weights alone; 0: of neither kind.
struct FoundTile {
  int64_t elements = 0;
  bool weights_alone = false;
};
FoundTile Find(const swap::TileLayout& tile, const tiering::Precision& precision) {
  return {.elements = precision.ElementsOf(tile.segment_bytes),
          .weights_alone = tile.segment_bytes.size() == 1 && precision.segment_bytes.size() > 1};
}

// Whether what is frozen of a block lies in tiles of its own.
bool CutWhereItTrains(const std::vector<int64_t>& tiles, int64_t trained_from) {
  int64_t at = 0;
  for (size_t t = 0; t < tiles.size() && at < trained_from; ++t) at += tiles[t];
  return at == trained_from;
}

}  // namespace

swap::Layout LayoutWithScratch(const swap::StoreShape& shape, const tiering::Precision& precision) {
  swap::Layout layout;
  for (const swap::TilePlacement& tile : shape.tiles) {
    const FoundTile found = Find(tile.layout, precision);
    const bool trains = found.elements > 0 && !found.weights_alone;
    layout.tiles.push_back(trains ? TileLayoutOf(precision, found.elements) : tile.layout);
  }
  return layout;
}

absl::StatusOr<StoreTiles> TilesOf(const swap::StoreShape& shape, const tiering::ModelGraph& graph, int world,
                                   const tiering::Precision& precision, bool frozen_elsewhere) {
  StoreTiles tiles;
  size_t next = 0;
  int64_t apart = 0,
          in_part = 0;  // elements of blocks that have state which are without, and those that may be
  bool cut = true;
  const auto not_its_models = [&next] {
    return absl::DataLossError(absl::StrCat("tile ", next - 1, " of the store is not one of its model's"));
  };
  for (const tiering::BlockShape& block : graph.blocks) {
    std::vector<int64_t>& of_block = tiles.elements.emplace_back();
    char& block_alone = tiles.blocks_alone.emplace_back(0);
    const int64_t frozen = block.trains ? block.trained_from : 0;
    const int64_t elsewhere = !frozen_elsewhere ? 0 : block.trains ? frozen : block.elements;
    int64_t alone = 0, alone_to = 0;
    const int64_t part = tiering::ShardElements(block.elements, world);
    for (int64_t elements = elsewhere; elements < part;) {
      if (next == shape.tiles.size())
        return absl::DataLossError("the store has fewer tiles than its model needs");
      const FoundTile tile = Find(shape.tiles[next++].layout, precision);
      if (tile.elements == 0) return not_its_models();
      of_block.push_back(tile.elements);
      elements += tile.elements;
      if (!tile.weights_alone) continue;
      alone += tile.elements;
      alone_to = elements;
    }
    if (alone > 0 && elsewhere > 0) return not_its_models();
    block_alone = alone == part ? 1 : 0;
    if (elsewhere > 0 || block_alone != 0) continue;
    if (alone > 0 && world > 1) return not_its_models();
    if (alone_to > frozen) return not_its_models();
    apart += alone;
    in_part += frozen;
    cut &= CutWhereItTrains(of_block, frozen);
  }
  if (next != shape.tiles.size()) return absl::DataLossError("the store has more tiles than its model needs");
  if (apart != 0 && apart != in_part) {
    return absl::DataLossError("some tiles of the store have state for what is frozen, and some have none");
  }
  // Without any state the two kinds are one.
  tiles.frozen_apart = apart > 0 || frozen_elsewhere || (precision.segment_bytes.size() == 1 && cut);
  return tiles;
}

namespace {

// Slots of a new store.
uint32_t VersionsHere(const EngineOptions& options, swap::StoreOptions store, const swap::Layout& layout,
                      const std::string& identity, std::span<const uint64_t> besides) {
  if (options.storage.versions > 0) return static_cast<uint32_t>(options.storage.versions);
  if (options.new_weights) return 1;  // no step writes over them
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
