// bf16 and fp16 to fp32 and back, and sums of 16-bit values into fp32.
//
// 16-bit values are plain uint16_t bit patterns: bf16 is the upper half of an fp32; fp16 is IEEE binary16.
// To 16 bits, values are rounded to nearest, ties to even, denormals kept, overflow to infinity; a NaN stays
// a NaN (quiet, sign kept, the upper bits of its payload kept). To fp32 is exact; a signalling NaN becomes
// quiet from fp16 and keeps its bits from bf16.
//
// Array functions: any n, any alignment of the elements' own type or worse; `in` and `out` must not overlap.
// Thread-safe; no allocation. `pool` as in kernels/thread_pool.h. Same bits at every SIMD level.
#ifndef PENSTOCK_KERNELS_FLOAT16_H_
#define PENSTOCK_KERNELS_FLOAT16_H_

#include <cstddef>
#include <cstdint>

namespace penstock::kernels {

class ThreadPool;

// The element types of parameters and gradients.
enum class DType : uint8_t { kFp32, kBf16, kFp16 };

constexpr size_t BytesPerElement(DType type) { return type == DType::kFp32 ? 4 : 2; }

// One value; portable, for single elements, tests and tails.
float Bf16ToFloat(uint16_t value);
uint16_t FloatToBf16(float value);
float Fp16ToFloat(uint16_t value);
uint16_t FloatToFp16(float value);

void Bf16ToFp32(const uint16_t* in, float* out, size_t n, ThreadPool* pool = nullptr);
void Fp16ToFp32(const uint16_t* in, float* out, size_t n, ThreadPool* pool = nullptr);
void Fp32ToBf16(const float* in, uint16_t* out, size_t n, ThreadPool* pool = nullptr);
void Fp32ToFp16(const float* in, uint16_t* out, size_t n, ThreadPool* pool = nullptr);

// acc[i] += in[i], one fp32 rounding each: micro-batches summed in the order of the calls.
void AccumulateFp32(const float* in, float* acc, size_t n, ThreadPool* pool = nullptr);
void AccumulateBf16(const uint16_t* in, float* acc, size_t n, ThreadPool* pool = nullptr);
void AccumulateFp16(const uint16_t* in, float* acc, size_t n, ThreadPool* pool = nullptr);

// Any type to any other by the rules above; the same type copies the bits. bf16 <-> fp16 goes through fp32.
void Convert(DType from, const void* in, DType to, void* out, size_t n, ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_FLOAT16_H_
