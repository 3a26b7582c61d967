// Sum of squares and finite check of gradients: reproducible to the bit for every thread count, every SIMD
// level, and every cut of a run into pieces at multiples of kReduceBlock elements, in whatever order the
// pieces come.
//
// Definition. A run is cut into reduction blocks of kReduceBlock elements, counted from its start (the last
// may be shorter). The partial sum of a block, in double: lane j of 16 adds the squares of elements j, j +
// 16, j + 32, ... in that order (the square of an fp32 is exact in double); then s[j] += s[j + 8] for j < 8,
// s[j] += s[j + 4] for j < 4, s[j] += s[j + 2] for j < 2, and s[0] + s[1]. The partial sums are added
// exactly, in fixed point: no rounding, hence no order. The value is that exact sum rounded once to double.
//
// Neither overflow nor underflow can occur: squares of fp32 lie between 2^-298 and 2^256. A partial sum is
// finite if and only if every element of its block is, so the finite check costs nothing beside the norm.
#ifndef PENSTOCK_KERNELS_REDUCE_H_
#define PENSTOCK_KERNELS_REDUCE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

namespace penstock::kernels {

class ThreadPool;

// Elements in a reduction block. Cut gradient runs at multiples of it, and sums do not depend on the cut.
inline constexpr size_t kReduceBlock = 4096;

// An exact sum of non-negative doubles. A value type of 112 bytes (trivially copyable: ranks may exchange its
// bytes and merge them in any order); not for two threads at once.
class SumOfSquares {
 public:
  // Adds one partial sum: >= 0, and zero or between 2^-320 and 2^320; NaN and infinity are counted as not
  // finite.
  void Add(double partial);
  void Merge(const SumOfSquares& other);
  // The sum so far, rounded to nearest even; +infinity if anything added was not finite.
  double Value() const;
  // True while everything added was finite.
  bool Finite() const { return not_finite_blocks_ == 0; }
  uint64_t not_finite_blocks() const { return not_finite_blocks_; }

 private:
  void AddAt(size_t limb, uint64_t low, uint64_t high);

  // Fixed point, least limb first: the value is the sum of limbs_[i] * 2^(64 i - 384).
  std::array<uint64_t, 13> limbs_ = {};
  uint64_t not_finite_blocks_ = 0;
};

// Adds the squares of n elements to `sum`, by the definition above with the run starting at `in`.
void AddSquares(DType type, const void* in, size_t n, SumOfSquares* sum, ThreadPool* pool = nullptr);
void AddSquaresFp32(const float* in, size_t n, SumOfSquares* sum, ThreadPool* pool = nullptr);
void AddSquaresBf16(const uint16_t* in, size_t n, SumOfSquares* sum, ThreadPool* pool = nullptr);
void AddSquaresFp16(const uint16_t* in, size_t n, SumOfSquares* sum, ThreadPool* pool = nullptr);

// True if no element is an infinity or a NaN. True for n = 0. For when no norm is wanted.
bool AllFinite(DType type, const void* in, size_t n, ThreadPool* pool = nullptr);

// x[i] = x[i] * factor, rounded once to x's type (bf16 and fp16: the product in fp32, then rounded).
void Scale(DType type, void* x, float factor, size_t n, ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_REDUCE_H_
