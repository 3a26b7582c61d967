#include "kernels/reduce.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <mutex>

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

// a + b + *carry, with the new carry (0 or 1) left in *carry.
uint64_t AddCarry(uint64_t a, uint64_t b, uint64_t* carry) {
  uint64_t sum;
  const bool first = __builtin_add_overflow(a, b, &sum);
  const bool second = __builtin_add_overflow(sum, *carry, &sum);
  *carry = first || second ? 1 : 0;
  return sum;
}

}  // namespace

void SumOfSquares::AddAt(size_t limb, uint64_t low, uint64_t high) {
  uint64_t carry = 0;
  limbs_[limb] = AddCarry(limbs_[limb], low, &carry);
  for (size_t i = limb + 1; i < limbs_.size() && (high != 0 || carry != 0); ++i) {
    limbs_[i] = AddCarry(limbs_[i], high, &carry);
    high = 0;
  }
}

void SumOfSquares::Add(double partial) {
  const uint64_t bits = std::bit_cast<uint64_t>(partial);
  const uint64_t exponent = (bits >> 52) & 0x7FFu;
  if (exponent == 0x7FF) {
    ++not_finite_blocks_;
    return;
  }
  if (exponent < 1075 - 384) return;  // zero, or smaller than the contract allows
  const uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52);
  // The mantissa counts units of 2^(exponent - 1075); limb 0 starts at 2^-384.
  const size_t position = exponent - 1075 + 384;
  const size_t limb = position / 64;
  const size_t shift = position % 64;
  if (limb + 2 > limbs_.size()) {  // larger than the contract allows
    ++not_finite_blocks_;
    return;
  }
  AddAt(limb, mantissa << shift, shift == 0 ? 0 : mantissa >> (64 - shift));
}

void SumOfSquares::Merge(const SumOfSquares& other) {
  uint64_t carry = 0;
  for (size_t i = 0; i < limbs_.size(); ++i) limbs_[i] = AddCarry(limbs_[i], other.limbs_[i], &carry);
  not_finite_blocks_ += other.not_finite_blocks_;
}

double SumOfSquares::Value() const {
  if (!Finite()) return HUGE_VAL;
  size_t top = limbs_.size();
  while (top > 0 && limbs_[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  // The 64 leading bits, and whether anything stands below them: the conversion to double then rounds
  // correctly.
  const int leading_zeros = std::countl_zero(limbs_[top - 1]);
  uint64_t lead = limbs_[top - 1] << leading_zeros;
  uint64_t below = 0;
  if (top >= 2) {
    if (leading_zeros > 0) lead |= limbs_[top - 2] >> (64 - leading_zeros);
    below = limbs_[top - 2] << leading_zeros;
    for (size_t i = 0; i + 2 < top; ++i) below |= limbs_[i];
  }
  if (below != 0) lead |= 1;
  return std::ldexp(static_cast<double>(lead), static_cast<int>(top - 1) * 64 - leading_zeros - 384);
}

void AddSquares(DType type, const void* in, size_t n, SumOfSquares* sum, ThreadPool* pool) {
  const auto kernel = Kernels().block_squares[static_cast<size_t>(type)];
  const size_t width = BytesPerElement(type);
  const auto* bytes = static_cast<const unsigned char*>(in);
  std::mutex mutex;
  ForPieces(n, pool, [&, kernel](size_t begin, size_t end) {
    SumOfSquares piece;
    for (size_t i = begin; i < end; i += kReduceBlock) {
      piece.Add(kernel(bytes + i * width, std::min(kReduceBlock, end - i)));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    sum->Merge(piece);
  });
}

void AddSquaresFp32(const float* in, size_t n, SumOfSquares* sum, ThreadPool* pool) {
  AddSquares(DType::kFp32, in, n, sum, pool);
}
void AddSquaresBf16(const uint16_t* in, size_t n, SumOfSquares* sum, ThreadPool* pool) {
  AddSquares(DType::kBf16, in, n, sum, pool);
}
void AddSquaresFp16(const uint16_t* in, size_t n, SumOfSquares* sum, ThreadPool* pool) {
  AddSquares(DType::kFp16, in, n, sum, pool);
}

bool AllFinite(DType type, const void* in, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().all_finite[static_cast<size_t>(type)];
  const size_t width = BytesPerElement(type);
  const auto* bytes = static_cast<const unsigned char*>(in);
  std::atomic<bool> finite = true;
  ForPieces(n, pool, [&, kernel](size_t begin, size_t end) {
    for (size_t i = begin; i < end && finite.load(std::memory_order_relaxed); i += kReduceBlock) {
      if (!kernel(bytes + i * width, std::min(kReduceBlock, end - i)))
        finite.store(false, std::memory_order_relaxed);
    }
  });
  return finite.load();
}

void Scale(DType type, void* x, float factor, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().scale[static_cast<size_t>(type)];
  const size_t width = BytesPerElement(type);
  auto* bytes = static_cast<unsigned char*>(x);
  ForPieces(n, pool, [=](size_t begin, size_t end) { kernel(bytes + begin * width, factor, end - begin); });
}

}  // namespace penstock::kernels
