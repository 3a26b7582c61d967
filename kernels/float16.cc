#include "kernels/float16.h"

#include <bit>
#include <cstring>

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {

float Bf16ToFloat(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float Fp16ToFloat(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t exponent = (value >> 10) & 0x1Fu;
  const uint32_t mantissa = value & 0x3FFu;
  if (exponent == 0x1F) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | quiet | (mantissa << 13));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Zero or denormal: a whole number of 2^-24, which fp32 holds as a normal number.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u)
    return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude >= 0x38800000u) {                  // normal in fp16: 2^-14 and above
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below 2^-25: zero
  const uint32_t exponent = magnitude >> 23;
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = 126u - exponent;  // 14 ... 24: mantissa in units of 2^-24 after it
  const uint32_t whole = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  const uint32_t up = rest > half || (rest == half && (whole & 1u) != 0) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (whole + up));
}

namespace {

void ToFp32(DType type, const uint16_t* in, float* out, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().to_fp32[static_cast<size_t>(type)];
  ForPieces(n, pool, [=](size_t begin, size_t end) { kernel(in + begin, out + begin, end - begin); });
}

void FromFp32(DType type, const float* in, uint16_t* out, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().from_fp32[static_cast<size_t>(type)];
  ForPieces(n, pool, [=](size_t begin, size_t end) { kernel(in + begin, out + begin, end - begin); });
}

void Accumulate(DType type, const void* in, float* acc, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().accumulate[static_cast<size_t>(type)];
  const size_t width = BytesPerElement(type);
  const auto* bytes = static_cast<const unsigned char*>(in);
  ForPieces(n, pool,
            [=](size_t begin, size_t end) { kernel(bytes + begin * width, acc + begin, end - begin); });
}

}  // namespace

void Bf16ToFp32(const uint16_t* in, float* out, size_t n, ThreadPool* pool) {
  ToFp32(DType::kBf16, in, out, n, pool);
}
void Fp16ToFp32(const uint16_t* in, float* out, size_t n, ThreadPool* pool) {
  ToFp32(DType::kFp16, in, out, n, pool);
}
void Fp32ToBf16(const float* in, uint16_t* out, size_t n, ThreadPool* pool) {
  FromFp32(DType::kBf16, in, out, n, pool);
}
void Fp32ToFp16(const float* in, uint16_t* out, size_t n, ThreadPool* pool) {
  FromFp32(DType::kFp16, in, out, n, pool);
}

void AccumulateFp32(const float* in, float* acc, size_t n, ThreadPool* pool) {
  Accumulate(DType::kFp32, in, acc, n, pool);
}
void AccumulateBf16(const uint16_t* in, float* acc, size_t n, ThreadPool* pool) {
  Accumulate(DType::kBf16, in, acc, n, pool);
}
void AccumulateFp16(const uint16_t* in, float* acc, size_t n, ThreadPool* pool) {
  Accumulate(DType::kFp16, in, acc, n, pool);
}

void Convert(DType from, const void* in, DType to, void* out, size_t n, ThreadPool* pool) {
  if (from == to) {
    const size_t width = BytesPerElement(from);
    ForPieces(n, pool, [=](size_t begin, size_t end) {
      std::memcpy(static_cast<unsigned char*>(out) + begin * width,
                  static_cast<const unsigned char*>(in) + begin * width, (end - begin) * width);
    });
  } else if (to == DType::kFp32) {
    ToFp32(from, static_cast<const uint16_t*>(in), static_cast<float*>(out), n, pool);
  } else if (from == DType::kFp32) {
    FromFp32(to, static_cast<const float*>(in), static_cast<uint16_t*>(out), n, pool);
  } else {
    const auto widen = Kernels().to_fp32[static_cast<size_t>(from)];
    const auto narrow = Kernels().from_fp32[static_cast<size_t>(to)];
    ForPieces(n, pool, [=](size_t begin, size_t end) {
      constexpr size_t kBuffer = 512;  // stays in the first-level cache
      alignas(64) float buffer[kBuffer];
      for (size_t i = begin; i < end; i += kBuffer) {
        const size_t count = end - i < kBuffer ? end - i : kBuffer;
        widen(static_cast<const uint16_t*>(in) + i, buffer, count);
        narrow(buffer, static_cast<uint16_t*>(out) + i, count);
      }
    });
  }
}

}  // namespace penstock::kernels
