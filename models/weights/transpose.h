// Matrices turned, in blocks whose lines are read and written whole.
#ifndef PENSTOCK_MODELS_WEIGHTS_TRANSPOSE_H_
#define PENSTOCK_MODELS_WEIGHTS_TRANSPOSE_H_

#include <algorithm>
#include <cstdint>

namespace penstock::models {

// to[c * to_stride + r] = from[r * from_stride + c], of `rows` times `columns`. Element by element each line
// of a side with a stride of some KiB would be fetched as often as it has elements: such lines share their
// place in the cache.
inline void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
  constexpr int64_t kBlock = 16;  // a line of 64 bytes
  // Along the lines that are written: each is some pages from the next.
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t wide = std::min(kBlock, columns - column);
    for (int64_t row = 0; row < rows; row += kBlock) {
      const int64_t high = std::min(kBlock, rows - row);
      float block[kBlock][kBlock];
      for (int64_t r = 0; r < high; ++r) std::copy_n(from + (row + r) * from_stride + column, wide, block[r]);
      for (int64_t c = 0; c < wide; ++c) {
        float* const line = to + (column + c) * to_stride + row;
        for (int64_t r = 0; r < high; ++r) line[r] = block[r][c];
      }
    }
  }
}

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_TRANSPOSE_H_
