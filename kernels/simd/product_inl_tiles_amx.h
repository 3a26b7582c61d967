// Products of packed bf16 rows in the order of tiles (kernels/product.h) with AMX's TDPBF16PS, which a
// processor may lack that has all else of this level. Included by exactly one source file, after
// product_inl_tiles.h.
//
// A tile of weights is sixteen outputs by 32 columns as they are stored; one of rows is what PackTiles makes.
// Their product is [outputs, rows]: it is turned on its way to y.
#ifndef PENSTOCK_KERNELS_SIMD_PRODUCT_INL_TILES_AMX_H_
#define PENSTOCK_KERNELS_SIMD_PRODUCT_INL_TILES_AMX_H_

namespace penstock::kernels::avx512 {

inline constexpr size_t kAmxStripColumns = 512;  // of weights that are copied or decoded
inline constexpr size_t kAmxRows = 64;           // whose sums are kept in memory
inline constexpr size_t kAmxOutputs = 2 * kTile;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
inline constexpr TileShapes kWholeTiles;

// Weights of some outputs and columns, in memory.
struct WeightTiles {
  const unsigned char* data;  // the first output's
  size_t stride, blocks;      // bytes from one output to the next; tiles side by side
};

// Adds a strip's terms to `sums`: [of 16 or 32 rows][of 16 or 32 outputs][output][row]. `rows`: of the strip;
// those of the next sixteen rows are `next_rows` bytes further. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and
// 7 rows.
template <bool kTwoOutputs, bool kTwoRows>
[[gnu::target("amx-tile,amx-bf16")]] inline void AmxStrip(const WeightTiles& weights,
                                                          const unsigned char* rows, size_t next_rows,
                                                          float (*sums)[2][kTile][kTile]) {
  _tile_loadd(0, sums[0][0], 64);
  if constexpr (kTwoOutputs) _tile_loadd(1, sums[0][1], 64);
  if constexpr (kTwoRows) _tile_loadd(2, sums[1][0], 64);
  if constexpr (kTwoOutputs && kTwoRows) _tile_loadd(3, sums[1][1], 64);
  for (size_t block = 0; block < weights.blocks; ++block) {
    const unsigned char* w = weights.data + block * kTileColumns * sizeof(uint16_t);
    const unsigned char* x = rows + block * kTileBytes;
    _tile_loadd(4, w, weights.stride);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoOutputs) {
      _tile_loadd(5, w + kTile * weights.stride, weights.stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(7, x + next_rows, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kTwoOutputs && kTwoRows) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0][0], 64);
  if constexpr (kTwoOutputs) _tile_stored(1, sums[0][1], 64);
  if constexpr (kTwoRows) _tile_stored(2, sums[1][0], 64);
  if constexpr (kTwoOutputs && kTwoRows) _tile_stored(3, sums[1][1], 64);
}

// CodedStrip, faster: whole blocks of 32 columns, of which each lies in one group, rounded by an instruction
// that makes numbers zero that count as zero here.
template <int kBits>
struct AmxCodedStrip {
  static constexpr bool kInPlace = false;
  // `column`: a multiple of 32. Up to a multiple of 32 columns are written.
  [[gnu::target("avx512bf16")]] static void Copy(const ProductArguments& a, size_t output, size_t column,
                                                 size_t count, uint16_t* strip) {
    const auto* row = static_cast<const uint8_t*>(a.weights) + output * a.weights_stride;
    const uint8_t* codes = row + (a.columns + a.group - 1) / a.group * 2 + column * kBits / 8;
    size_t group = column / a.group, left = a.group - column % a.group;  // columns of it
    for (size_t k = 0; k < count; k += kTileColumns, codes += kTileColumns * kBits / 8) {
      // Of the next strip: the strips of all outputs are more streams than the processor sees by itself.
      _mm_prefetch(reinterpret_cast<const char*>(codes) + kAmxStripColumns * kBits / 8, _MM_HINT_T0);
      uint16_t half;
      __builtin_memcpy(&half, row + group * 2, 2);
      const F scale = FromBits(SetI(static_cast<uint32_t>(half) << 16));
      I first, second;
      if constexpr (kBits == 8) {
        first = LoadU8<false>(codes, 16);
        second = LoadU8<false>(codes + 16, 16);
      } else {
        const I both = LoadU8<false>(codes, 16);
        first = And(both, SetI(15));
        second = Shr<4>(both);
      }
      const I zero = SetI(kBits == 8 ? 128 : 8);
      const F low = Mul(ToFloat(SubI(first, zero)), scale), high = Mul(ToFloat(SubI(second, zero)), scale);
      _mm512_storeu_si512(strip + k, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
      left -= kTileColumns;
      if (left == 0) {
        ++group;
        left = a.group;
      }
    }
  }
};

template <class Strip>
[[gnu::target("amx-tile,amx-bf16")]] void AmxProduct(const ProductArguments& a) {
  alignas(64) uint16_t strip[kAmxOutputs][kAmxStripColumns];
  alignas(64) float sums[kAmxRows / kTile][2][kTile][kTile];
  const size_t next_rows = (a.columns + kTileColumns - 1) / kTileColumns * kTileBytes;
  const size_t whole = a.columns / kTileColumns * kTileColumns;
  _tile_loadconfig(&kWholeTiles);
  for (size_t row = 0; row < a.rows; row += kAmxRows) {
    const size_t rows = a.rows - row < kAmxRows ? a.rows - row : kAmxRows;
    const size_t row_tiles = (rows + kTile - 1) / kTile;
    const auto* x = reinterpret_cast<const unsigned char*>(a.x) + row / kTile * next_rows;
    for (size_t n = 0; n < a.outputs; n += kAmxOutputs) {
      const size_t outputs = a.outputs - n < kAmxOutputs ? a.outputs - n : kAmxOutputs;
      __builtin_memset(sums, 0, row_tiles * sizeof(sums[0]));
      for (size_t k = 0, count = 0; k < a.columns; k += count) {
        WeightTiles weights = {};
        if constexpr (Strip::kInPlace) {
          if (k < whole && outputs % kTile == 0) {
            count = whole;
            weights = {reinterpret_cast<const unsigned char*>(Strip::At(a, n, k)), a.weights_stride,
                       count / kTileColumns};
          }
        }
        if (weights.data == nullptr) {
          count = a.columns - k < kAmxStripColumns ? a.columns - k : kAmxStripColumns;
          const size_t filled = (count + kTileColumns - 1) / kTileColumns * kTileColumns;
          for (size_t o = 0; o < (outputs + kTile - 1) / kTile * kTile; ++o) {
            const size_t copied = o < outputs ? count : 0;
            if (copied > 0) Strip::Copy(a, n + o, k, copied, strip[o]);
            __builtin_memset(strip[o] + copied, 0, (filled - copied) * sizeof(uint16_t));
          }
          weights = {reinterpret_cast<const unsigned char*>(strip), sizeof(strip[0]), filled / kTileColumns};
        }
        asm volatile("" ::: "memory");  // compilers do not know that tiles read it
        const unsigned char* from = x + k / kTileColumns * kTileBytes;
        for (size_t tile = 0; tile < row_tiles; tile += 2, from += 2 * next_rows) {
          const bool two_rows = tile + 1 < row_tiles, two_outputs = outputs > kTile;
          const auto add = two_outputs ? two_rows ? AmxStrip<true, true> : AmxStrip<true, false>
                           : two_rows ? AmxStrip<false, true>
                                       : AmxStrip<false, false>;
          add(weights, from, next_rows, sums + tile);
        }
        asm volatile("" ::: "memory");
      }
      for (size_t r = 0; r < rows; ++r) {
        float* const y = a.y + (row + r) * a.y_stride + n;
        for (size_t o = 0; o < outputs; ++o) y[o] = sums[r / kTile][o / kTile][o % kTile][r % kTile];
      }
    }
  }
  _tile_release();
}

template <class Strip>
inline constexpr auto kAmxProduct = &AmxProduct<Strip>;
template <>
inline constexpr auto kAmxProduct<CodedStrip<8>> = &AmxProduct<AmxCodedStrip<8>>;
template <>
inline constexpr auto kAmxProduct<CodedStrip<4>> = &AmxProduct<AmxCodedStrip<4>>;

}  // namespace penstock::kernels::avx512

#endif  // PENSTOCK_KERNELS_SIMD_PRODUCT_INL_TILES_AMX_H_
