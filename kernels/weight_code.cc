#include "kernels/weight_code.h"

#include <algorithm>
#include <cstring>

#include "kernels/simd/table.h"

namespace penstock::kernels {

bool EncodeWeights(const WeightCode& code, DType from, const void* row, size_t columns, uint8_t* out) {
  const auto encode = Kernels().encode_weights[code.bits == 8 ? 0 : 1][static_cast<size_t>(from)];
  const auto* const values = static_cast<const unsigned char*>(row);
  uint8_t* codes = out + (columns + code.group - 1) / code.group * 2;
  bool finite = true;
  for (size_t begin = 0; begin < columns; begin += code.group, out += 2) {
    const size_t n = std::min(code.group, columns - begin);
    const uint16_t scale = encode(values + begin * BytesPerElement(from), n, codes);
    std::memcpy(out, &scale, 2);
    finite = finite && scale < 0x7F80;
    codes += code.group * static_cast<size_t>(code.bits) / 8;
  }
  return finite;
}

void DecodeWeights(const WeightCode& code, const uint8_t* row, size_t columns, DType to, void* out) {
  const size_t groups = (columns + code.group - 1) / code.group;
  Kernels().decode_weights[code.bits == 8 ? 0 : 1][static_cast<size_t>(to)](row, row + groups * 2, code.group,
                                                                            out, columns);
}

}  // namespace penstock::kernels
