// Products of packed bf16 rows (kernels/product.h) with AVX-512's VDPBF16PS, which a processor may lack that
// has all else of this level. Included by exactly one source file, after product_inl.h.
#ifndef PENSTOCK_KERNELS_SIMD_PRODUCT_INL_BF16_H_
#define PENSTOCK_KERNELS_SIMD_PRODUCT_INL_BF16_H_

namespace penstock::kernels::avx512 {

inline constexpr size_t kBf16TileOutputs = 4;

// Rows of the next tile: its sums and weights fit into the registers.
inline size_t Bf16TileRows(size_t left) { return left >= 6 ? 6 : left >= 2 ? 2 : 1; }

// The rows of a tile lie side by side, 32 columns of each and then the next 32: read in one stream, where
// rows that lie a multiple of 4 KiB apart would share the sets of a cache.
inline void PackBf16(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed) {
  const size_t blocks = (columns + 31) / 32;
  auto* to = static_cast<unsigned char*>(packed);
  for (size_t row = 0; row < rows;) {
    const size_t tile = Bf16TileRows(rows - row);
    for (size_t k = 0; k < columns; k += 32) {
      const size_t left = columns - k < 32 ? columns - k : 32;
      for (size_t r = 0; r < tile; ++r) {
        unsigned char* const at = to + (k / 32 * tile + r) * 64;
        if (left < 32) __builtin_memset(at, 0, 64);
        __builtin_memcpy(at, x + (row + r) * stride + k, left * sizeof(uint16_t));
      }
    }
    to += tile * blocks * 64;
    row += tile;
  }
}

// Outputs first ... first + kOutputs - 1 of rows row ... row + kRows - 1.
template <size_t kRows, size_t kOutputs>
[[gnu::target("avx512bf16")]] inline void Bf16Tile(const ProductArguments& a, size_t row, size_t first) {
  const auto* x = reinterpret_cast<const unsigned char*>(a.x) + row * ((a.columns + 31) / 32 * 64);
  const auto* const weights = static_cast<const unsigned char*>(a.weights) + first * a.weights_stride;
  __m512 sums[kRows][kOutputs];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOutputs; ++n) sums[r][n] = _mm512_setzero_ps();
  }
  for (size_t k = 0; k < a.columns; k += 32) {
    const size_t left = a.columns - k;
    const __mmask32 mask = left < 32 ? (1U << left) - 1U : ~0U;
    __m512bh w[kOutputs];
    for (size_t n = 0; n < kOutputs; ++n) {
      w[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, weights + n * a.weights_stride + k * sizeof(uint16_t));
    }
    for (size_t r = 0; r < kRows; ++r, x += 64) {
      const auto values = (__m512bh)_mm512_loadu_si512(x);
      for (size_t n = 0; n < kOutputs; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], values, w[n]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOutputs; ++n) a.y[(row + r) * a.y_stride + first + n] = SumOfLanes(F{sums[r][n]});
  }
}

template <size_t kOutputs>
inline void Bf16Rows(const ProductArguments& a, size_t first) {
  for (size_t row = 0; row < a.rows;) {
    const size_t tile = Bf16TileRows(a.rows - row);
    if (tile == 6) Bf16Tile<6, kOutputs>(a, row, first);
    if (tile == 2) Bf16Tile<2, kOutputs>(a, row, first);
    if (tile == 1) Bf16Tile<1, kOutputs>(a, row, first);
    row += tile;
  }
}

inline void Bf16Product(const ProductArguments& a) {
  size_t n = 0;
  for (; n + kBf16TileOutputs <= a.outputs; n += kBf16TileOutputs) Bf16Rows<kBf16TileOutputs>(a, n);
  for (; n < a.outputs; ++n) Bf16Rows<1>(a, n);
}

inline constexpr auto kPackBf16 = &PackBf16;
inline constexpr auto kBf16Product = &Bf16Product;

}  // namespace penstock::kernels::avx512

#endif  // PENSTOCK_KERNELS_SIMD_PRODUCT_INL_BF16_H_
