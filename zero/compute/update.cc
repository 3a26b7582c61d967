#include "zero/compute/update.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

#include "base/check.h"

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

namespace {

// Norms are summed over pieces that end at multiples of this in the run, at which tiles and shards may be
// cut.
constexpr int64_t kNormPiece = tiering::kElementAlignment;
static_assert(kNormPiece <= static_cast<int64_t>(kernels::kReduceBlock));

// Calls visit(number of the parameter, arrays) for the pieces of the tile, parameter by parameter.
template <typename Visit>
void ForNormPieces(const TileFormat& format, uint64_t seed, const FlatLayout& layout,
                   const tiering::Tile& tile, const TileMemory& memory, const Visit& visit) {
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    const Parameter& parameter = layout.parameters[p];
    if (!parameter.trains) continue;
    const int64_t end = std::min(parameter.offset + parameter.elements, tile.offset + tile.elements);
    int64_t begin = std::max(parameter.offset, tile.offset);
    while (begin < end) {
      const int64_t next = std::min(end, (begin / kNormPiece + 1) * kNormPiece);
      kernels::UpdateArrays arrays = ArraysOf(format, memory, begin - tile.offset, next - begin);
      arrays.first_element = static_cast<uint64_t>(begin);
      arrays.seed = seed;
      visit(p, arrays);
      begin = next;
    }
  }
}

const kernels::LambStep* LambOf(const UpdateDecision& decision, int group) {
  return std::get_if<kernels::LambStep>(&decision.of(group));
}

}  // namespace

void UpdateTile(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                const FlatLayout& layout, const tiering::Tile& tile, const TileMemory& memory,
                std::span<const double> trusts) {
  if (LambOf(decision, 0) != nullptr) {
    ForNormPieces(format, seed, layout, tile, memory, [&](size_t p, const kernels::UpdateArrays& arrays) {
      const kernels::LambStep& step = *LambOf(decision, layout.parameters[p].group);
      kernels::LambNorms known;
      kernels::LambMoments(step, arrays, &known);
      kernels::LambApply(step, trusts.empty() ? 1.0 : trusts[p], arrays);
    });
    return;
  }
  for (int group = 0; group < layout.groups(); ++group) {
    for (const kernels::UpdateArrays& arrays : UpdatesOf(format, seed, layout, group, tile, memory)) {
      std::visit(
          [&](const auto& step) {
            if constexpr (!std::is_same_v<std::decay_t<decltype(step)>, kernels::LambStep>)
              kernels::ApplyUpdate(step, arrays);
          },
          decision.of(group));
    }
  }
}

void AddTensorNorms(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                    const FlatLayout& layout, const tiering::Tile& tile, const TileMemory& memory,
                    std::span<kernels::LambNorms> norms) {
  PENSTOCK_CHECK(format.states != kernels::StateType::k8Bit, "norms of LAMB with moments of 8 bit");
  const size_t width = kernels::StateBytes(format.states, 1);
  ForNormPieces(format, seed, layout, tile, memory, [&](size_t p, kernels::UpdateArrays arrays) {
    alignas(64) std::array<std::byte, kNormPiece * sizeof(float)> m, v;
    std::memcpy(m.data(), arrays.m, arrays.n * width);
    std::memcpy(v.data(), arrays.v, arrays.n * width);
    arrays.m = m.data();
    arrays.v = v.data();
    kernels::LambMoments(*LambOf(decision, layout.parameters[p].group), arrays, &norms[p]);
  });
}

double TrustOf(const UpdateDecision& decision, int group, const kernels::LambNorms& norms) {
  return kernels::LambTrust(*LambOf(decision, group), norms);
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
