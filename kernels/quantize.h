// Block-wise 8-bit values: small floats with one fp32 scale for every kStateBlock elements, for optimizer
// states.
//
//   value = scale * f(code),   scale = (largest magnitude of the block) / 1.875
//
// f(code) is a binary float with 3 bits of mantissa and gradual underflow whose largest value is 1.875:
//   signed (first moments)      1 sign, 4 exponent bits: 2^-17 ... 2^-14 (denormal steps), 2^-14 ... 1.875
//   unsigned (second moments)   5 exponent bits: 2^-33 ... 2^-30, 2^-30 ... 1.875
// so that the relative error is at most 2^-4 (nearest) over 4 and 9 decimal orders below the block's largest.
// An unsigned value that is not zero never becomes zero: a vanished second moment would blow up the step.
//
// Rounding is to nearest (ties away from zero), or stochastic: up with the probability of the fraction, drawn
// from a hash of (seed, element's position, which moment), so that the expected value is exact (but where
// clamped at the block's largest or at the least unsigned) and the result depends on no cut and no thread. A
// block that holds an infinity or a NaN has a NaN for a scale and zeros for codes: it decodes to NaN wholly.
// All-zero codes and scales decode to zero.
//
// Any n, any alignment; a run starts at a block's start; no overlap; thread-safe; no allocation.
#ifndef PENSTOCK_KERNELS_QUANTIZE_H_
#define PENSTOCK_KERNELS_QUANTIZE_H_

#include <cstddef>
#include <cstdint>

namespace penstock::kernels {

class ThreadPool;

// Elements that share a scale.
inline constexpr size_t kStateBlock = 256;

enum class Code8 : uint8_t { kSigned, kUnsigned };

struct Rounding {
  bool stochastic = false;
  uint64_t seed = 0;
  uint64_t first_element = 0;  // the run's position, a multiple of kStateBlock
};

// `scales` holds ceil(n / kStateBlock) elements. Unsigned codes take the magnitude.
void Quantize8(Code8 code, const float* in, uint8_t* codes, float* scales, size_t n,
               const Rounding& rounding = {}, ThreadPool* pool = nullptr);
void Dequantize8(Code8 code, const uint8_t* codes, const float* scales, float* out, size_t n,
                 ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_QUANTIZE_H_
