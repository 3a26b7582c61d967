// Products of a few rows with a matrix, written once over the 16-lane vectors; kernels/product.h says what
// each must be. Included after elementwise_inl.h.
//
// Weights go through a strip on the stack, widened to fp32 once for all rows; sums are kept in registers for
// a tile of rows and outputs, and in memory from one strip of columns to the next.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

// A tile of sums and what is multiplied into it fit into the registers (kVectors of 16 lanes).
inline constexpr size_t kTileRows = kVectors >= 32 ? 4 : kVectors >= 8 ? 2 : 1;
inline constexpr size_t kTileOutputs = kTileRows;
inline constexpr size_t kStripColumns = 1024;  // a multiple of every vector's and every code block's
inline constexpr size_t kRowsAtOnce = 64;      // sums that are kept in memory
static_assert(kStripColumns % 32 == 0);

template <int kType>
struct PlainWeights {
  static const float* Widened(const ProductArguments& a, size_t output, size_t column, size_t count,
                              float* strip) {
    const auto* row = static_cast<const unsigned char*>(a.weights) + output * a.weights_stride;
    if constexpr (kType == 0) return reinterpret_cast<const float*>(row) + column;
    ToFp32<kType == 0 ? 1 : kType>(reinterpret_cast<const uint16_t*>(row) + column, strip, count);
    return strip;
  }
};
// Columns [column, column + count) of a coded output, as fp32 or bf16.
template <int kBits, int kType, class T>
inline void DecodeStrip(const ProductArguments& a, size_t output, size_t column, size_t count, T* strip) {
  const auto* row = static_cast<const uint8_t*>(a.weights) + output * a.weights_stride;
  const uint8_t* codes = row + (a.columns + a.group - 1) / a.group * 2;
  // What is left of a group that another strip began, then whole groups.
  size_t done = column % a.group == 0 ? 0 : a.group - column % a.group;
  done = done < count ? done : count;
  const auto decode = [&](size_t at, size_t part) {
    DecodeWeightRow<kBits, kType>(row + (column + at) / a.group * 2, codes + (column + at) * kBits / 8,
                                  a.group, strip + at, part);
  };
  if (done > 0) decode(0, done);
  if (done < count) decode(done, count - done);
}
template <int kBits>
struct CodedWeights {
  static const float* Widened(const ProductArguments& a, size_t output, size_t column, size_t count,
                              float* strip) {
    DecodeStrip<kBits, 0>(a, output, column, count, strip);
    return strip;
  }
};

// bf16 in the order of packed terms: of each 32 elements the odd ones, then the even ones; zeros to the end.
inline void WidenPairs(const uint16_t* in, float* out, size_t n) {
  const auto widen = [](const void* from, float* to) {
    const I pairs = LoadPairs(from);
    StoreF<false>(to, FromBits(And(pairs, SetI(0xFFFF0000u))), 16);
    StoreF<false>(to + 16, FromBits(Shl<16>(pairs)), 16);
  };
  size_t i = 0;
  for (; i + 32 <= n; i += 32) widen(in + i, out + i);
  if (i == n) return;
  alignas(64) uint16_t rest[32] = {};
  __builtin_memcpy(rest, in + i, (n - i) * sizeof(uint16_t));
  widen(rest, out + i);
}
inline void PackPairs(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed) {
  const size_t filled = (columns + 31) / 32 * 32;
  for (size_t r = 0; r < rows; ++r)
    WidenPairs(x + r * stride, static_cast<float*>(packed) + r * filled, columns);
}
struct PairWeights {
  static const float* Widened(const ProductArguments& a, size_t output, size_t column, size_t count,
                              float* strip) {
    const auto* row = static_cast<const unsigned char*>(a.weights) + output * a.weights_stride;
    const size_t columns = a.weights_stride / sizeof(uint16_t);  // a.columns is filled up
    WidenPairs(reinterpret_cast<const uint16_t*>(row) + column, strip,
               columns - column < count ? columns - column : count);
    return strip;
  }
};

// Adds the terms of `count` columns to the sums [kRows][kOutputs][16] that begin at `sums`, a row's
// kTileOutputs vectors from the next.
template <size_t kRows, size_t kOutputs>
inline void AddToTile(const float* x, size_t x_stride, const float* const* weights, size_t count,
                      float* sums) {
  F tile[kRows][kOutputs];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOutputs; ++n) tile[r][n] = LoadF<false>(sums + (r * kTileOutputs + n) * 16, 16);
  }
  ForVectors(count, [&]<bool kTail>(size_t k, size_t lanes) {
    F w[kOutputs];
    for (size_t n = 0; n < kOutputs; ++n) w[n] = LoadF<kTail>(weights[n] + k, lanes);
    for (size_t r = 0; r < kRows; ++r) {
      const F values = LoadF<kTail>(x + r * x_stride + k, lanes);
      for (size_t n = 0; n < kOutputs; ++n) tile[r][n] = Fma(values, w[n], tile[r][n]);
    }
  });
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOutputs; ++n) StoreF<false>(sums + (r * kTileOutputs + n) * 16, tile[r][n], 16);
  }
}

template <size_t kOutputs>
inline void AddToTileOf(size_t rows, const float* x, size_t x_stride, const float* const* weights,
                        size_t count, float* sums) {
  if constexpr (kTileRows >= 4) {
    if (rows == 4) return AddToTile<4, kOutputs>(x, x_stride, weights, count, sums);
    if (rows == 3) return AddToTile<3, kOutputs>(x, x_stride, weights, count, sums);
  }
  if constexpr (kTileRows >= 2) {
    if (rows == 2) return AddToTile<2, kOutputs>(x, x_stride, weights, count, sums);
  }
  AddToTile<1, kOutputs>(x, x_stride, weights, count, sums);
}

// Outputs first ... first + kOutputs - 1 of rows row ... row + rows - 1.
template <class Weights, size_t kOutputs>
inline void ProductOfTile(const ProductArguments& a, size_t row, size_t rows, size_t first) {
  alignas(64) float strip[kOutputs][kStripColumns];
  alignas(64) float sums[kRowsAtOnce][kTileOutputs][16];
  __builtin_memset(sums, 0, rows * sizeof(sums[0]));
  const float* weights[kOutputs];
  for (size_t k = 0; k < a.columns; k += kStripColumns) {
    const size_t count = a.columns - k < kStripColumns ? a.columns - k : kStripColumns;
    for (size_t n = 0; n < kOutputs; ++n) weights[n] = Weights::Widened(a, first + n, k, count, strip[n]);
    for (size_t r = 0; r < rows; r += kTileRows) {
      AddToTileOf<kOutputs>(rows - r < kTileRows ? rows - r : kTileRows, a.x + (row + r) * a.x_stride + k,
                            a.x_stride, weights, count, sums[r][0]);
    }
  }
  for (size_t r = 0; r < rows; ++r) {
    for (size_t n = 0; n < kOutputs; ++n)
      a.y[(row + r) * a.y_stride + first + n] = SumOfLanes(LoadF<false>(sums[r][n], 16));
  }
}

template <class Weights>
void Product(const ProductArguments& a) {
  for (size_t row = 0; row < a.rows; row += kRowsAtOnce) {
    const size_t rows = a.rows - row < kRowsAtOnce ? a.rows - row : kRowsAtOnce;
    size_t n = 0;
    for (; n + kTileOutputs <= a.outputs; n += kTileOutputs)
      ProductOfTile<Weights, kTileOutputs>(a, row, rows, n);
    for (; n < a.outputs; ++n) ProductOfTile<Weights, 1>(a, row, rows, n);
  }
}

// ---- Column by column: lanes are outputs, sums lie in y from one strip of columns to the next.

inline constexpr size_t kTurnedColumns = 32;

// Columns k ... k + count - 1 of kOutputs vectors of outputs (the last one of `lanes`), from output n on.
template <int kType, size_t kRows, size_t kOutputs, bool kTail>
inline void AddTurned(const ProductArguments& a, size_t row, size_t n, size_t lanes, size_t k, size_t count) {
  F tile[kRows][kOutputs];
  float* const y = a.y + row * a.y_stride + n;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kOutputs; ++v)
      tile[r][v] = k == 0 ? Set(0) : LoadF<kTail>(y + r * a.y_stride + v * 16, lanes);
  }
  for (size_t i = k; i < k + count; ++i) {
    const auto* weights = static_cast<const unsigned char*>(a.weights) + i * a.weights_stride;
    F w[kOutputs];
    for (size_t v = 0; v < kOutputs; ++v)
      w[v] = Element<kType>::template Load<kTail>(weights, n + v * 16, lanes);
    for (size_t r = 0; r < kRows; ++r) {
      const F value = Set(a.x[(row + r) * a.x_stride + i]);
      for (size_t v = 0; v < kOutputs; ++v) tile[r][v] = Fma(value, w[v], tile[r][v]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kOutputs; ++v) StoreF<kTail>(y + r * a.y_stride + v * 16, tile[r][v], lanes);
  }
}

template <int kType, size_t kRows>
inline void AddTurnedOutputs(const ProductArguments& a, size_t row, size_t k, size_t count) {
  size_t n = 0;
  for (; n + kTileOutputs * 16 <= a.outputs; n += kTileOutputs * 16)
    AddTurned<kType, kRows, kTileOutputs, false>(a, row, n, 16, k, count);
  for (; n + 16 <= a.outputs; n += 16) AddTurned<kType, kRows, 1, false>(a, row, n, 16, k, count);
  if (n < a.outputs) AddTurned<kType, kRows, 1, true>(a, row, n, a.outputs - n, k, count);
}

template <int kType>
void TurnedProduct(const ProductArguments& a) {
  for (size_t k = 0; k < a.columns; k += kTurnedColumns) {
    const size_t count = a.columns - k < kTurnedColumns ? a.columns - k : kTurnedColumns;
    size_t row = 0;
    for (; row + kTileRows <= a.rows; row += kTileRows) AddTurnedOutputs<kType, kTileRows>(a, row, k, count);
    for (; row < a.rows; ++row) AddTurnedOutputs<kType, 1>(a, row, k, count);
  }
}

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
