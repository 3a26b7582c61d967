#include "zero/compute/update.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "kernels/quantize.h"
#include "kernels/stream_copy.h"

namespace penstock::zero {

BlockSteps::BlockSteps(const UpdateDecision& decision, const FlatLayout& layout, tiering::BlockIndex block)
    : decision_(decision),
      layout_(layout),
      own_(decision.own != nullptr && block.valid() ? &decision.own->of[block] : nullptr) {}

const OptimizerStep* BlockSteps::of(size_t parameter) const {
  if (own_ == nullptr) {
    const Parameter& of = layout_.parameters[parameter];
    return of.trains ? &decision_.of(of.group) : nullptr;
  }
  const int number = (*own_)[parameter];
  return number == ParameterSteps::kNone ? nullptr : &decision_.own->steps[static_cast<size_t>(number)];
}

std::vector<StepRange> BlockSteps::Ranges() const {
  std::vector<StepRange> ranges;
  if (own_ == nullptr) {
    for (const auto& [from, to, group] : layout_.trained) ranges.push_back({&decision_.of(group), from, to});
    return ranges;
  }
  // Those that train lie one behind the other, behind what is frozen.
  int64_t end = 0;
  const OptimizerStep* step = nullptr;
  const auto add = [&](int64_t to) {
    if (step == nullptr || end == to) return;
    StepRange* const last = ranges.empty() ? nullptr : &ranges.back();
    if (last != nullptr && last->step == step && last->to == end) {
      last->to = to;
    } else {
      ranges.push_back({step, end, to});
    }
  };
  for (size_t p = 0; p < layout_.parameters.size(); ++p) {
    if (!layout_.parameters[p].trains) continue;
    add(layout_.parameters[p].offset);
    end = layout_.parameters[p].offset;
    step = of(p);
  }
  add(layout_.elements);
  return ranges;
}

namespace {

// The part of a range that a tile has, in the tile's elements; empty: none.
StepRange InTile(const StepRange& range, const tiering::Tile& tile) {
  return {range.step, std::max(range.from, tile.offset) - tile.offset,
          std::min(range.to, tile.offset + tile.elements) - tile.offset};
}

kernels::UpdateArrays ArraysAt(const TileFormat& format, uint64_t seed, const tiering::Tile& tile,
                               const TileMemory& memory, int64_t from, int64_t to) {
  kernels::UpdateArrays arrays = ArraysOf(format, memory, from, to - from);
  arrays.first_element = static_cast<uint64_t>(tile.offset + from);
  arrays.seed = seed;
  return arrays;
}

void Apply(const OptimizerStep& step, const kernels::UpdateArrays& arrays) {
  std::visit(
      [&](const auto& of) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(of)>, kernels::LambStep>)
          kernels::ApplyUpdate(of, arrays);
      },
      step);
}

// One moment of some elements that share a scale, as fp32.
class Decoded {
 public:
  Decoded(kernels::Code8 code, void* codes, float* scale, size_t n, const kernels::Rounding& rounding)
      : code_(code), codes_(static_cast<uint8_t*>(codes)), scale_(scale), n_(n), rounding_(rounding) {
    if (codes_ != nullptr) kernels::Dequantize8(code_, codes_, scale_, values_.data(), n_);
  }
  void* at(size_t element) { return codes_ == nullptr ? nullptr : values_.data() + element; }
  void Encode() {
    if (codes_ != nullptr) kernels::Quantize8(code_, values_.data(), codes_, scale_, n_, rounding_);
  }

 private:
  const kernels::Code8 code_;
  uint8_t* const codes_;
  float* const scale_;
  const size_t n_;
  const kernels::Rounding rounding_;
  alignas(64) std::array<float, kernels::kStateBlock> values_;
};

// Elements [from, to) of a tile whose states have 8 bit, of which others share the scale.
void ApplyWithinScale(const TileFormat& format, const StepRange& range, uint64_t seed,
                      const tiering::Tile& tile, const TileMemory& memory) {
  const int64_t begin = range.from / tiering::kScaleBlock * tiering::kScaleBlock;
  const int64_t end = std::min(begin + tiering::kScaleBlock, memory.elements);
  const kernels::UpdateArrays all = ArraysAt(format, seed, tile, memory, begin, end);
  const kernels::Rounding rounding = {.stochastic = true, .seed = seed, .first_element = all.first_element};
  Decoded m(kernels::Code8::kSigned, all.m, all.m_scales, all.n, rounding);
  Decoded v(kernels::Code8::kUnsigned, all.v, all.v_scales, all.n, rounding);
  TileFormat wide = format;
  wide.states = kernels::StateType::kFp32;
  kernels::UpdateArrays arrays = ArraysAt(wide, seed, tile, memory, range.from, range.to);
  arrays.m = m.at(static_cast<size_t>(range.from - begin));
  arrays.v = v.at(static_cast<size_t>(range.from - begin));
  Apply(*range.step, arrays);
  m.Encode();
  v.Encode();
}

// Norms are summed over pieces that end at multiples of this in the run, at which tiles and shards may be
// cut.
constexpr int64_t kNormPiece = tiering::kElementAlignment;
static_assert(kNormPiece <= static_cast<int64_t>(kernels::kReduceBlock));

// Calls visit(number of the parameter, its step, arrays) for the pieces of the tile that are updated,
// parameter by parameter.
template <typename Visit>
void ForNormPieces(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                   const tiering::Tile& tile, const TileMemory& memory, const Visit& visit) {
  const std::vector<Parameter>& parameters = steps.layout().parameters;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const OptimizerStep* const step = steps.of(p);
    if (step == nullptr) continue;
    const Parameter& parameter = parameters[p];
    const int64_t end = std::min(parameter.offset + parameter.elements, tile.offset + tile.elements);
    int64_t begin = std::max(parameter.offset, tile.offset);
    while (begin < end) {
      const int64_t next = std::min(end, (begin / kNormPiece + 1) * kNormPiece);
      visit(p, std::get<kernels::LambStep>(*step),
            ArraysAt(format, seed, tile, memory, begin - tile.offset, next - tile.offset));
      begin = next;
    }
  }
}

// Calls whole(range) and shared(range) in the order of elements for all that is updated of a tile; `shared`
// is what shares a scale of 8-bit states with another range or with what is not updated.
template <typename Whole, typename Shared>
void ForUpdates(const TileFormat& format, const BlockSteps& steps, const tiering::Tile& tile,
                const Whole& whole, const Shared& shared) {
  const int64_t unit = format.states == kernels::StateType::k8Bit ? tiering::kScaleBlock : 1;
  for (const StepRange& range : steps.Ranges()) {
    auto [step, from, to] = InTile(range, tile);
    if (from < to && from % unit != 0) {
      const int64_t next = std::min(to, tiering::AlignUp(from, unit));
      shared(StepRange{step, from, next});
      from = next;
    }
    const int64_t end = to == tile.elements ? to : to / unit * unit;
    if (from < end) whole(StepRange{step, from, end});
    from = std::max(from, end);
    if (from < to) shared(StepRange{step, from, to});
  }
}

// Copies elements [begin, end) of a tile with their states around the caches; with states of 8 bit `begin` is
// at a scale's first element, and `end` too or the tile's end.
void CopyElements(const TileFormat& format, const TileMemory& from, const TileMemory& to, int64_t begin,
                  int64_t end) {
  const tiering::Precision precision = format.precision();
  for (size_t s = 0; s < precision.segment_bytes.size(); ++s) {
    const auto* const source = static_cast<const std::byte*>(s == 0 ? from.weights : from.state[s - 1]);
    auto* const target = static_cast<std::byte*>(s == 0 ? to.weights : to.state[s - 1]);
    const int64_t width = precision.segment_bytes[s];
    kernels::StreamCopy(source + begin * width, target + begin * width,
                        static_cast<size_t>((end - begin) * width));
    // The scales behind the codes.
    const int64_t scales = precision.SegmentBytes(s, end - begin) - (end - begin) * width;
    const int64_t first = from.elements * width + begin / tiering::kScaleBlock * 4;
    if (scales > 0) kernels::StreamCopy(source + first, target + first, static_cast<size_t>(scales));
  }
}

}  // namespace

std::vector<StepArrays> UpdatesOf(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                                  const tiering::Tile& tile, const TileMemory& memory) {
  std::vector<StepArrays> updates;
  for (const StepRange& each : steps.Ranges()) {
    const auto [step, from, to] = InTile(each, tile);
    if (from >= to) continue;
    const auto same = std::find_if(updates.begin(), updates.end(),
                                   [of = step](const StepArrays& known) { return known.step == of; });
    StepArrays& of_step = same != updates.end() ? *same : updates.emplace_back(StepArrays{step, {}});
    of_step.arrays.push_back(ArraysAt(format, seed, tile, memory, from, to));
  }
  return updates;
}

void UpdateTile(const TileFormat& format, const BlockSteps& steps, uint64_t seed, const tiering::Tile& tile,
                const TileMemory& memory, std::span<const double> trusts) {
  if (steps.uses_lamb()) {
    ForNormPieces(format, steps, seed, tile, memory,
                  [&](size_t p, const kernels::LambStep& step, const kernels::UpdateArrays& arrays) {
                    kernels::LambNorms known;
                    kernels::LambMoments(step, arrays, &known);
                    kernels::LambApply(step, trusts.empty() ? 1.0 : trusts[p], arrays);
                  });
    return;
  }
  ForUpdates(
      format, steps, tile,
      [&](const StepRange& range) {
        Apply(*range.step, ArraysAt(format, seed, tile, memory, range.from, range.to));
      },
      [&](const StepRange& range) { ApplyWithinScale(format, range, seed, tile, memory); });
}

void UpdateTileInto(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                    const tiering::Tile& tile, const TileMemory& from, const TileMemory& to) {
  PENSTOCK_CHECK(!steps.uses_lamb(), "an update by LAMB from one place to another");
  TileMemory there = to;
  there.gradient = from.gradient;
  // Elements before this one have their values in `to`.
  int64_t done = 0;
  const auto copy_to = [&](int64_t end) {
    if (done < end) CopyElements(format, from, to, done, end);
    done = std::max(done, end);
  };
  ForUpdates(
      format, steps, tile,
      [&](const StepRange& range) {
        copy_to(range.from);
        kernels::UpdateArrays arrays = ArraysAt(format, seed, tile, there, range.from, range.to);
        const kernels::UpdateArrays source = ArraysAt(format, seed, tile, from, range.from, range.to);
        arrays.from = {source.param, source.master_low, source.m, source.v, source.m_scales, source.v_scales};
        Apply(*range.step, arrays);
        done = range.to;
      },
      [&](const StepRange& range) {
        copy_to(std::min(tiering::AlignUp(range.to, tiering::kScaleBlock), tile.elements));
        kernels::StreamCopyFence();
        ApplyWithinScale(format, range, seed, tile, there);
      });
  copy_to(tile.elements);
  kernels::StreamCopyFence();
}

void AddTensorNorms(const TileFormat& format, const BlockSteps& steps, uint64_t seed,
                    const tiering::Tile& tile, const TileMemory& memory,
                    std::span<kernels::LambNorms> norms) {
  PENSTOCK_CHECK(format.states != kernels::StateType::k8Bit, "norms of LAMB with moments of 8 bit");
  const size_t width = kernels::StateBytes(format.states, 1);
  ForNormPieces(format, steps, seed, tile, memory,
                [&](size_t p, const kernels::LambStep& step, kernels::UpdateArrays arrays) {
                  alignas(64) std::array<std::byte, kNormPiece * sizeof(float)> m, v;
                  std::memcpy(m.data(), arrays.m, arrays.n * width);
                  std::memcpy(v.data(), arrays.v, arrays.n * width);
                  arrays.m = m.data();
                  arrays.v = v.data();
                  kernels::LambMoments(step, arrays, &norms[p]);
                });
}

double TrustOf(const OptimizerStep& step, const kernels::LambNorms& norms) {
  return kernels::LambTrust(std::get<kernels::LambStep>(step), norms);
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
