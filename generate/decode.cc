#include "generate/decode.h"

#include <ATen/Parallel.h>

namespace penstock::generate {

void DecodeRows(const kernels::WeightCode& code, const std::byte* from, int64_t rows, int64_t columns,
                kernels::DType to, void* out) {
  constexpr int64_t kLeastElements = 32 << 10;  // for which another thread is worth waking
  const auto row = static_cast<size_t>(columns);
  const size_t coded = code.row_bytes(row), decoded = row * kernels::BytesPerElement(to);
  at::parallel_for(0, rows, std::max<int64_t>(kLeastElements / columns, 1), [&](int64_t begin, int64_t end) {
    for (auto r = static_cast<size_t>(begin); r < static_cast<size_t>(end); ++r) {
      kernels::DecodeWeights(code, reinterpret_cast<const uint8_t*>(from + r * coded), row, to,
                             static_cast<std::byte*>(out) + r * decoded);
    }
  });
}

}  // namespace penstock::generate
