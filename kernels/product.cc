#include "kernels/product.h"

#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

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

}  // namespace penstock::kernels
