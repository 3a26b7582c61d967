#include "kernels/weight_code.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

// Not negative, and finite unless x is near the largest fp32: then infinity, which the caller avoids.
uint16_t RoundUpToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

}  // namespace

bool EncodeWeights(const WeightCode& code, const float* row, size_t columns, uint8_t* out) {
  const int most = code.bits == 8 ? 127 : 7, zero = most + 1;
  const size_t groups = (columns + code.group - 1) / code.group;
  uint8_t* const codes = out + groups * 2;
  // Padding is q = 0.
  std::memset(codes, code.bits == 8 ? zero : zero | zero << 4, code.row_bytes(columns) - groups * 2);
  for (size_t g = 0; g < groups; ++g) {
    const size_t begin = g * code.group, end = std::min(columns, begin + code.group);
    float largest = 0;
    bool finite = true;
    for (size_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(row[i]);
      largest = std::max(largest, std::fabs(row[i]));
    }
    if (!finite) return false;
    const uint16_t rounded = RoundUpToBf16(largest / static_cast<float>(most));
    std::memcpy(out + 2 * g, &rounded, 2);
    const float scale = Bf16ToFloat(rounded);
    for (size_t i = begin; i < end; ++i) {
      const float exact = scale == 0 ? 0.0f : std::nearbyint(row[i] / scale);
      const int q = std::clamp(static_cast<int>(exact), -most, most) + zero;
      if (code.bits == 8) {
        codes[i] = static_cast<uint8_t>(q);
      } else {
        uint8_t& byte = codes[i / kCodeBlock * 16 + i % 16];
        byte = static_cast<uint8_t>(i % kCodeBlock < 16 ? (byte & 0xF0) | q : (byte & 0x0F) | q << 4);
      }
    }
  }
  return true;
}

void DecodeWeights(const WeightCode& code, const uint8_t* row, size_t columns, DType to, void* out) {
  const size_t groups = (columns + code.group - 1) / code.group;
  Kernels().decode_weights[code.bits == 8 ? 0 : 1][static_cast<size_t>(to)](row, row + groups * 2, code.group,
                                                                            out, columns);
}

}  // namespace penstock::kernels
