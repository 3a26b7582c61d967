#include "zero/update.h"

#include <algorithm>
#include <cstring>

#include "kernels/split_master.h"

namespace penstock::zero {
namespace {

bool IsSplit(const tiering::Precision& precision) { return precision.weight_bytes() == 2; }

}  // namespace

void UpdateTile(const tiering::Precision& precision, const kernels::AdamStep& adam, const RunLayout& layout,
                const tiering::Tile& tile, const TileMemory& memory) {
  for (const auto& [from, to] : layout.trained) {
    const int64_t begin = std::max(from, tile.offset) - tile.offset;
    const int64_t end = std::min(to, tile.offset + tile.elements) - tile.offset;
    if (begin >= end) continue;
    const auto n = static_cast<size_t>(end - begin);
    if (IsSplit(precision)) {
      kernels::AdamWSplit(adam, static_cast<uint16_t*>(memory.weights) + begin,
                          static_cast<int16_t*>(memory.state[0]) + begin,
                          static_cast<float*>(memory.state[1]) + begin,
                          static_cast<float*>(memory.state[2]) + begin,
                          static_cast<const uint16_t*>(memory.gradient) + begin, n);
    } else {
      kernels::AdamWFp32(adam, static_cast<float*>(memory.weights) + begin,
                         static_cast<float*>(memory.state[0]) + begin,
                         static_cast<float*>(memory.state[1]) + begin,
                         static_cast<const float*>(memory.gradient) + begin, n);
    }
  }
}

void FillTile(const tiering::Precision& precision, const float* masters, const TileMemory& memory) {
  const auto n = static_cast<size_t>(memory.elements);
  size_t moments = 0;
  if (IsSplit(precision)) {
    kernels::SplitMaster(masters, static_cast<uint16_t*>(memory.weights),
                         static_cast<int16_t*>(memory.state[0]), n);
    moments = 1;
  } else {
    std::memcpy(memory.weights, masters, n * sizeof(float));
  }
  for (size_t s = moments; s < memory.state.size(); ++s) {
    std::memset(memory.state[s], 0, n * static_cast<size_t>(precision.segment_bytes[s + 1]));
  }
}

void ReadMasters(const tiering::Precision& precision, const TileMemory& memory, float* masters) {
  const auto n = static_cast<size_t>(memory.elements);
  if (IsSplit(precision)) {
    kernels::JoinMaster(static_cast<const uint16_t*>(memory.weights),
                        static_cast<const int16_t*>(memory.state[0]), masters, n);
  } else {
    std::memcpy(masters, memory.weights, n * sizeof(float));
  }
}

}  // namespace penstock::zero
