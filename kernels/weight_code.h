// Weights in 8 or 4 bit: whole numbers with one bf16 scale for every group of a row.
//
//   value = scale * q,   scale = (largest magnitude of the group) / m, rounded up to bf16,   -m <= q <= m
//
// m is 127 for 8 bit and 7 for 4 bit, and q is value / scale rounded to nearest, ties to even: round to
// nearest in groups, symmetric ("absmax": Dettmers et al. 2022; groups: Yao et al., ZeroQuant, 2022). The
// scale is rounded up, so that no q is cut off: the error of a value is at most scale / 2. scale * q is exact
// in fp32; decoded to 16 bits it is rounded once more, to nearest even. A group of zeros has the scale 0, and
// one that holds an infinity or a NaN has a NaN for its scale: it decodes to NaN wholly.
//
// A coded row is its scales, then its codes, without gaps:
//   scales   ceil(columns / group) bf16, little-endian
//   codes    for each 32 values (the last of a row padded with q = 0): 8 bit: 32 bytes, q + 128;
//            4 bit: 16 bytes, byte j holds q + 8 of value j in its low and of value j + 16 in its high half
//
// Codes are valid(). Any alignment; no overlap; thread-safe; no allocation. Same bits at every SIMD level.
#ifndef PENSTOCK_KERNELS_WEIGHT_CODE_H_
#define PENSTOCK_KERNELS_WEIGHT_CODE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

namespace penstock::kernels {

inline constexpr size_t kCodeBlock = 32;  // values that are padded to
inline constexpr size_t kMostCodeGroup = 4096;

struct WeightCode {
  int bits = 8;       // 8 or 4
  size_t group = 64;  // values that share a scale: a multiple of kCodeBlock, at most kMostCodeGroup
  bool valid() const {
    return (bits == 8 || bits == 4) && group > 0 && group % kCodeBlock == 0 && group <= kMostCodeGroup;
  }
  constexpr size_t row_bytes(size_t columns) const {
    const size_t padded = (columns + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
    return (columns + group - 1) / group * 2 + padded * static_cast<size_t>(bits) / 8;
  }
};

// Codes a row of elements of type `from`. False: it holds a value that is not finite.
bool EncodeWeights(const WeightCode& code, DType from, const void* row, size_t columns, uint8_t* out);
inline bool EncodeWeights(const WeightCode& code, const float* row, size_t columns, uint8_t* out) {
  return EncodeWeights(code, DType::kFp32, row, columns, out);
}

// Decodes a row.
void DecodeWeights(const WeightCode& code, const uint8_t* row, size_t columns, DType to, void* out);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_WEIGHT_CODE_H_
