#include "zero/compute/update.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace penstock::zero {

std::vector<kernels::UpdateArrays> UpdatesOf(const TileFormat& format, uint64_t seed,
                                             const FlatLayout& layout, int group, const tiering::Tile& tile,
                                             const TileMemory& memory) {
  std::vector<kernels::UpdateArrays> updates;
  for (const auto& [from, to, of_group] : layout.trained) {
    if (of_group != group) continue;
    const int64_t begin = std::max(from, tile.offset) - tile.offset;
    const int64_t end = std::min(to, tile.offset + tile.elements) - tile.offset;
    if (begin >= end) continue;
    kernels::UpdateArrays& arrays = updates.emplace_back(ArraysOf(format, memory, begin, end - begin));
    arrays.first_element = static_cast<uint64_t>(tile.offset + begin);
    arrays.seed = seed;
  }
  return updates;
}

void UpdateTile(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                const FlatLayout& layout, const tiering::Tile& tile, const TileMemory& memory) {
  for (int group = 0; group < layout.groups(); ++group) {
    for (const kernels::UpdateArrays& arrays : UpdatesOf(format, seed, layout, group, tile, memory))
      std::visit([&](const auto& step) { kernels::ApplyUpdate(step, arrays); }, decision.of(group));
  }
}

kernels::SumOfSquares FinishGradient(kernels::DType type, const float* sums, void* gradient, size_t n,
                                     kernels::ThreadPool* pool) {
  // So much stays in the cache between rounding and squaring; at multiples of it sums do not depend on cuts.
  constexpr size_t kPiece = 8 * kernels::kReduceBlock;
  kernels::SumOfSquares squares;
  std::mutex mutex;  // of it
  const auto finish = [&](size_t from, size_t to) {
    kernels::SumOfSquares some;
    for (size_t begin = from; begin < to; begin += kPiece) {
      const size_t count = std::min(kPiece, to - begin);
      std::byte* piece = static_cast<std::byte*>(gradient) + begin * kernels::BytesPerElement(type);
      if (sums != nullptr) kernels::Convert(kernels::DType::kFp32, sums + begin, type, piece, count);
      kernels::AddSquares(type, piece, count, &some);
    }
    const std::lock_guard lock(mutex);
    squares.Merge(some);
  };
  if (pool == nullptr || n <= kPiece) {
    finish(0, n);
  } else {
    pool->ParallelFor(n, kPiece, finish);
  }
  return squares;
}

}  // namespace penstock::zero
