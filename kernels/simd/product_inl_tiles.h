// Products of packed bf16 rows in the order of tiles (kernels/product.h), written over the 16-lane vectors.
// Lanes are rows. Included after product_inl.h.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

inline constexpr size_t kTile = 16;         // rows or outputs of a tile
inline constexpr size_t kTileColumns = 32;  // in as many pairs as a tile has rows
inline constexpr size_t kTileBytes = 1024;

// Sixteen rows after the other, filled up with zeros; of each 32 columns a tile: pair by pair, the two
// columns of each of the sixteen rows.
inline void PackTiles(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed) {
  const size_t blocks = (columns + kTileColumns - 1) / kTileColumns;
  __builtin_memset(packed, 0, (rows + kTile - 1) / kTile * blocks * kTileBytes);
  for (size_t row = 0; row < rows; ++row) {
    auto* to = static_cast<uint16_t*>(packed) + row / kTile * blocks * kTileBytes / 2 + row % kTile * 2;
    const uint16_t* from = x + row * stride;
    for (size_t k = 0; k + 2 <= columns; k += 2, to += kTile * 2) __builtin_memcpy(to, from + k, 4);
    if (columns % 2 != 0) *to = from[columns - 1];
  }
}

// Columns of an output as bf16: where they are stored so, in place.
struct PlainStrip {
  static constexpr bool kInPlace = true;
  static const uint16_t* At(const ProductArguments& a, size_t output, size_t column) {
    const auto* row = static_cast<const unsigned char*>(a.weights) + output * a.weights_stride;
    return reinterpret_cast<const uint16_t*>(row) + column;
  }
  static void Copy(const ProductArguments& a, size_t output, size_t column, size_t count, uint16_t* strip) {
    __builtin_memcpy(strip, At(a, output, column), count * sizeof(uint16_t));
  }
};
template <int kBits>
struct CodedStrip {
  static constexpr bool kInPlace = false;
  static void Copy(const ProductArguments& a, size_t output, size_t column, size_t count, uint16_t* strip) {
    DecodeStrip<kBits, 1>(a, output, column, count, strip);
  }
};

// Adds the terms of 32 columns of sixteen rows.
inline F AddTile(const unsigned char* rows, const uint16_t* weights, F sum) {
  F even = Set(0), odd = Set(0);
  for (size_t p = 0; p < kTile; ++p) {
    const I pairs = LoadPairs(rows + p * kTile * 4);
    const auto weight = [&](size_t k) { return FromBits(SetI(static_cast<uint32_t>(weights[k]) << 16)); };
    even = Fma(FromBits(Shl<16>(pairs)), weight(2 * p), even);
    odd = Fma(FromBits(And(pairs, SetI(0xFFFF0000u))), weight(2 * p + 1), odd);
  }
  return Add(sum, Add(even, odd));
}

template <class Strip>
void TileProduct(const ProductArguments& a) {
  const size_t blocks = (a.columns + kTileColumns - 1) / kTileColumns;
  alignas(64) uint16_t strip[kStripColumns];
  for (size_t row = 0; row < a.rows; row += kTile) {
    const auto* rows = reinterpret_cast<const unsigned char*>(a.x) + row / kTile * blocks * kTileBytes;
    for (size_t n = 0; n < a.outputs; ++n) {
      F sum = Set(0);
      for (size_t k = 0; k < a.columns; k += kStripColumns) {
        const size_t count = a.columns - k < kStripColumns ? a.columns - k : kStripColumns;
        Strip::Copy(a, n, k, count, strip);
        size_t i = 0;
        for (; i + kTileColumns <= count; i += kTileColumns)
          sum = AddTile(rows + (k + i) / kTileColumns * kTileBytes, strip + i, sum);
        if (i == count) continue;
        __builtin_memset(strip + count, 0, (i + kTileColumns - count) * sizeof(uint16_t));
        sum = AddTile(rows + (k + i) / kTileColumns * kTileBytes, strip + i, sum);
      }
      alignas(64) float lanes[kTile];
      StoreF<false>(lanes, sum, kTile);
      for (size_t r = 0; r < kTile && row + r < a.rows; ++r) a.y[(row + r) * a.y_stride + n] = lanes[r];
    }
  }
}

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
