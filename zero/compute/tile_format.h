// What the segments of a tile hold: the types of a run's weights, masters and optimizer states.
//
//   fp32   p (fp32, weights and master in one), then the states
//   bf16   high (bf16, the weights), low (16 bits; with high the fp32 master: kernels/split_master.h), states
//   fp16   weights (fp16), p (fp32 master), states
//
// The states are m and v, those of them that the optimizer has, in fp32, bf16 or block-wise 8 bit (codes of
// all elements, then their scales: kernels/quantize.h). A gradient waits in the type of the weights.
#ifndef PENSTOCK_ZERO_COMPUTE_TILE_FORMAT_H_
#define PENSTOCK_ZERO_COMPUTE_TILE_FORMAT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/optimizer.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/optimizer.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

struct TileFormat {
  kernels::DType weights = kernels::DType::kBf16;
  kernels::StateType states = kernels::StateType::kFp32;
  Moments moments;

  // Byte counts of the same.
  tiering::Precision precision() const;
};

std::string_view DTypeName(kernels::DType type);          // "fp32", "bf16", "fp16"
std::string_view StateTypeName(kernels::StateType type);  // "fp32", "bf16", "8bit"
std::optional<kernels::DType> ParseDType(std::string_view name);
std::optional<kernels::StateType> ParseStateType(std::string_view name);

// Of a tile that is frozen, its weights may be all that there is (TileMemory::state is empty): they stand for
// the masters then, and its moments are zero.

// A tile's arrays, as the kernels take them, from element `begin` on: a multiple of kernels::kStateBlock
// where states are 8 bit. The gradient is the tile's.
kernels::UpdateArrays ArraysOf(const TileFormat& format, const TileMemory& memory, int64_t begin, int64_t n);

// What a parameter's state is made of, in full precision.
enum class StateKind : uint8_t {
  kParameter,     // the fp32 master
  kFirstMoment,   // m; momentum
  kSecondMoment,  // v; sum of squares
  kGradient,      // of the last step, as summed and rounded, not clipped
};
std::string_view StateKindName(StateKind kind);

// Whether tiles have it: not a gradient, nor a moment that the optimizer does without.
bool Keeps(const TileFormat& format, StateKind kind);
// `n` values from element `begin` of a tile's masters or moments on, as fp32; of a kind that it keeps.
void ReadValues(const TileFormat& format, const TileMemory& memory, StateKind kind, int64_t begin, int64_t n,
                float* values);
// The other way. Values that share a scale with written ones (8 bit) may be rounded anew. Where weights are
// all that there is, only they are written.
void WriteValues(const TileFormat& format, const TileMemory& memory, StateKind kind, int64_t begin, int64_t n,
                 const float* values);

// Initial values into a tile: fp32 masters split, copied or rounded; states zero.
void FillTile(const TileFormat& format, const float* masters, const TileMemory& memory);
// The fp32 masters of a tile.
void ReadMasters(const TileFormat& format, const TileMemory& memory, float* masters);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_TILE_FORMAT_H_
