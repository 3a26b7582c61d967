#include "models/weights/tile_places.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tiering/plan/model_graph.h"
#include "zero/engine/state_identity.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::models {

absl::StatusOr<std::vector<TilePlace>> PlaceTiles(std::span<swap::Store* const> parts,
                                                  const ModelLayout& layout, kernels::DType weights) {
  const std::string& path = parts.front()->path(0);
  ASSIGN_OR_RETURN(const tiering::Precision precision,
                   zero::PrecisionOf(zero::WholeIdentity(parts.front()->identity()), path));
  if (precision.weight_bytes() != static_cast<int>(kernels::BytesPerElement(weights)))
    return absl::DataLossError(absl::StrCat(path, " holds weights of another type than its model"));
  std::vector<TilePlace> places;
  std::vector<uint32_t> next(parts.size(), 0);
  for (size_t block = 0; block < layout.block_elements.size(); ++block) {
    const int64_t run = layout.block_elements[block];
    const int64_t from = layout.state_from.empty() ? 0 : layout.state_from[block];
    const int64_t share = tiering::ShardElements(run, static_cast<int>(parts.size()));
    for (size_t p = 0; p < parts.size(); ++p) {
      const swap::Geometry& geometry = parts[p]->geometry();
      for (int64_t at = from; at < share;) {
        const uint32_t t = next[p]++;
        if (t >= geometry.tiles()) {
          return absl::DataLossError(
              absl::StrCat(parts[p]->path(0), " has fewer tiles than its model needs"));
        }
        // All segments are looked at: what is read of one reaches as far as the weights do.
        const int64_t elements = precision.ElementsOf(parts[p]->shape().tiles[t].layout.segment_bytes);
        if (elements <= 0 || elements > share - at) {
          return absl::DataLossError(
              absl::StrCat("tile ", t, " of ", parts[p]->path(0), " is not one of its model's"));
        }
        // The last shares may go beyond the run's end.
        const int64_t first = static_cast<int64_t>(p) * share + at;
        if (first < run) places.push_back({static_cast<int>(block), first, elements, p, t});
        at += elements;
      }
    }
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    if (next[p] != parts[p]->geometry().tiles())
      return absl::DataLossError(absl::StrCat(parts[p]->path(0), " has more tiles than its model needs"));
  }
  return places;
}

}  // namespace penstock::models
