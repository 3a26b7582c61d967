#include "kernels/product.h"

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
      in_bf16_(kernels_.bf16_product != nullptr && GetCpuFeatures().avx512_bf16),
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
