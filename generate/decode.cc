#include "generate/decode.h"

namespace penstock::generate {

void DecodeRows(const kernels::WeightCode& code, const std::byte* from, int64_t rows, int64_t columns,
                kernels::DType to, void* out, kernels::ThreadPool* pool) {
  constexpr int64_t kLeastElements = 32 << 10;  // for which another thread is worth waking
  const auto row = static_cast<size_t>(columns);
  const size_t coded = code.row_bytes(row), decoded = row * kernels::BytesPerElement(to);
  const auto decode = [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      kernels::DecodeWeights(code, reinterpret_cast<const uint8_t*>(from + r * coded), row, to,
                             static_cast<std::byte*>(out) + r * decoded);
    }
  };
  if (pool == nullptr) return decode(0, static_cast<size_t>(rows));
  pool->ParallelFor(static_cast<size_t>(rows),
                    static_cast<size_t>(std::max<int64_t>(kLeastElements / columns, 1)), decode);
}

}  // namespace penstock::generate
