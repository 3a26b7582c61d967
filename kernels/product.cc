#include "kernels/product.h"

#include <cstring>
#include <vector>

#include "kernels/cpu_features.h"
#include "kernels/simd/table.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace penstock::kernels {
namespace {

// On this thread, numbers below 2^-126 count as zero, as they always do in bf16 products.
class FlushesToZero {
 public:
#if defined(__x86_64__)
  FlushesToZero() { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushesToZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 1U << 15, kDenormalsAreZero = 1U << 6;
  const unsigned before_ = _mm_getcsr();
#endif
};

// Of packed rows.
size_t Filled(size_t columns) { return (columns + 31) / 32 * 32; }

// Whether this processor's bf16 products have the bits of the definition, which the makers' manuals do not
// promise: a few hundred of them, of every size down to what counts as zero, beside multiply-adds.
bool Bf16ProductIsExact(const KernelTable& kernels) {
  constexpr size_t kRows = 7, kColumns = 70, kOutputs = 40;
  std::vector<uint16_t> values((kRows + kOutputs) * kColumns);
  uint32_t random = 1;
  for (uint16_t& value : values) {
    random = random * 1664525 + 1013904223;
    const uint32_t exponent = (random >> 24) % 3 == 0 ? 30 + (random >> 8) % 60 : 112 + (random >> 8) % 24;
    value = static_cast<uint16_t>((random >> 31) << 15 | exponent << 7 | (random >> 16 & 0x7F));
  }
  const FlushesToZero flushes;
  const size_t filled = Filled(kColumns);
  std::vector<float> packed(kRows * filled), fast(kRows * kOutputs), exact(kRows * kOutputs);
  ProductArguments arguments = {.x = packed.data(),
                                .rows = kRows,
                                .columns = kColumns,
                                .x_stride = filled,
                                .weights = values.data() + kRows * kColumns,
                                .weights_stride = kColumns * sizeof(uint16_t),
                                .group = 0,
                                .y = fast.data(),
                                .outputs = kOutputs,
                                .y_stride = kOutputs};
  kernels.pack_bf16(values.data(), kRows, kColumns, kColumns, packed.data());
  kernels.bf16_product(arguments);
  kernels.pack_pairs(values.data(), kRows, kColumns, kColumns, packed.data());
  arguments.columns = filled;
  arguments.y = exact.data();
  kernels.pair_product(arguments);
  return std::memcmp(fast.data(), exact.data(), fast.size() * sizeof(float)) == 0;
}

bool UsesBf16Product(const KernelTable& kernels) {
  if (kernels.bf16_product == nullptr || !GetCpuFeatures().avx512_bf16) return false;
  static const bool exact = Bf16ProductIsExact(kernels);  // one level has them
  return exact;
}

ProductArguments ArgumentsOf(const ProductInput& x, const void* weights, const ProductOutput& y) {
  return {.x = x.data,
          .rows = x.rows,
          .columns = x.columns,
          .x_stride = x.stride,
          .weights = weights,
          .weights_stride = 0,
          .group = 0,
          .y = y.data,
          .outputs = y.outputs,
          .y_stride = y.stride};
}

}  // namespace

void MultiplyRows(const ProductInput& x, DType type, const void* weights, const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = x.columns * BytesPerElement(type);
  Kernels().product[static_cast<size_t>(type)](arguments);
}

void MultiplyRows(const ProductInput& x, const WeightCode& code, const void* weights,
                  const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = code.row_bytes(x.columns);
  arguments.group = code.group;
  Kernels().coded_product[code.bits == 8 ? 0 : 1](arguments);
}

void MultiplyRowsTurned(const ProductInput& x, DType type, const void* weights, size_t weights_stride,
                        const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = weights_stride * BytesPerElement(type);
  Kernels().turned_product[static_cast<size_t>(type)](arguments);
}

PackedRows::PackedRows(const uint16_t* x, size_t rows, size_t columns, size_t stride)
    : rows_(rows),
      columns_(columns),
      kernels_(Kernels()),
      in_bf16_(UsesBf16Product(kernels_)),
      memory_(rows * Filled(columns) * (in_bf16_ ? sizeof(uint16_t) : sizeof(float))) {
  (in_bf16_ ? kernels_.pack_bf16 : kernels_.pack_pairs)(x, rows, columns, stride, memory_.data());
}

void PackedRows::Multiply(const void* weights, const ProductOutput& y) const {
  const FlushesToZero flushes;
  const size_t filled = Filled(columns_);
  (in_bf16_ ? kernels_.bf16_product
            : kernels_.pair_product)({.x = reinterpret_cast<const float*>(memory_.data()),
                                      .rows = rows_,
                                      .columns = in_bf16_ ? columns_ : filled,
                                      .x_stride = filled,
                                      .weights = weights,
                                      .weights_stride = columns_ * sizeof(uint16_t),
                                      .group = 0,
                                      .y = y.data,
                                      .outputs = y.outputs,
                                      .y_stride = y.stride});
}

}  // namespace penstock::kernels
