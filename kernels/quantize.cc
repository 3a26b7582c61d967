#include "kernels/quantize.h"

#include <algorithm>

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {

void Quantize8(Code8 code, const float* in, uint8_t* codes, float* scales, size_t n, const Rounding& rounding,
               ThreadPool* pool) {
  const auto encode = Kernels().encode8[static_cast<size_t>(code)];
  ForPieces(n, pool, [=](size_t begin, size_t end) {
    Rounding block = rounding;
    for (size_t i = begin; i < end; i += kStateBlock) {
      block.first_element = rounding.first_element + i;
      scales[i / kStateBlock] = encode(in + i, codes + i, std::min(kStateBlock, end - i), block);
    }
  });
}

void Dequantize8(Code8 code, const uint8_t* codes, const float* scales, float* out, size_t n,
                 ThreadPool* pool) {
  const auto decode = Kernels().decode8[static_cast<size_t>(code)];
  ForPieces(n, pool, [=](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += kStateBlock) {
      decode(codes + i, scales[i / kStateBlock], out + i, std::min(kStateBlock, end - i));
    }
  });
}

}  // namespace penstock::kernels
