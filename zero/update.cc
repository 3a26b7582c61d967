#include "zero/update.h"

#include <algorithm>
#include <utility>

namespace penstock::zero {

void UpdateTile(const TileFormat& format, const OptimizerStep& optimizer, uint64_t seed,
                const RunLayout& layout, const tiering::Tile& tile, const TileMemory& memory) {
  for (const auto& [from, to] : layout.trained) {
    const int64_t begin = std::max(from, tile.offset) - tile.offset;
    const int64_t end = std::min(to, tile.offset + tile.elements) - tile.offset;
    if (begin >= end) continue;
    kernels::UpdateArrays arrays = ArraysOf(format, memory, begin, end - begin);
    arrays.first_element = static_cast<uint64_t>(tile.offset + begin);
    arrays.seed = seed;
    std::visit([&](const auto& step) { kernels::ApplyUpdate(step, arrays); }, optimizer);
  }
}

}  // namespace penstock::zero
