// Where the elements of a model's blocks lie in the tiles of a training state.
//
// A block's elements are cut evenly over the ranks (tiering::ShardElements). A rank's store has its shares in
// the order of blocks, each cut into tiles where the plan of the training wanted: a tensor may begin and end
// anywhere in one, and two tensors may share one.
#ifndef PENSTOCK_MODELS_WEIGHTS_TILE_PLACES_H_
#define PENSTOCK_MODELS_WEIGHTS_TILE_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "models/weights/layout.h"
#include "swap/store.h"

namespace penstock::models {

// Elements [first, first + elements) of a block, and the tile that has them.
struct TilePlace {
  int block = 0;
  int64_t first = 0;
  int64_t elements = 0;  // those beyond the block's end, which a last share may have, included
  size_t part = 0;       // rank
  uint32_t tile = 0;     // of its part
};

// In the order of blocks, elements ascending; tiles wholly beyond a block's end are left out. `parts`: the
// ranks' stores. `weights`: the type of those in the first segment. kDataLoss: the tiles are not those of
// such a model: too few, too many, or with segments of other lengths than its elements have.
absl::StatusOr<std::vector<TilePlace>> PlaceTiles(std::span<swap::Store* const> parts,
                                                  const ModelLayout& layout, kernels::DType weights);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_TILE_PLACES_H_
