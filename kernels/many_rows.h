// The product of many rows with a matrix, as the prompts of texts are: a row's bits depend on that row and
// the matrix alone, as in kernels/product.h.
//
//   y[r][n] = sum over k of x[r][k] * w[n][k],    r < rows, n < outputs, k < columns
//
// Definition. All is widened to fp32, exactly; a sum begins with +0 and takes the terms in the order of k,
// each one a fused multiply-add; it is rounded once to the type of y.
//
// Rows are turned, so that a vector has an element of sixteen of them, and weights are read once for
// kManyRowsAtOnce rows: row by row as they are stored, widened a strip at a time (after Goto and van de Geijn
// 2008, "Anatomy of high-performance matrix multiplication").
#ifndef PENSTOCK_KERNELS_MANY_ROWS_H_
#define PENSTOCK_KERNELS_MANY_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/float16.h"
#include "kernels/weight_code.h"

namespace penstock::kernels {

class ThreadPool;

inline constexpr size_t kManyRowsAtOnce = 256;

// `stride`: elements from one row to the next.
struct ManyRows {
  DType type;
  const void* data;
  size_t rows, columns, stride;
};
struct ManyWeights {
  DType type;                      // where they are not coded
  std::optional<WeightCode> code;  // of whole rows (kernels/weight_code.h)
  const void* data;
  size_t outputs;
  // Above 0: column by column, w[n][k] is element k * turned_stride + n; else row by row without gaps.
  size_t turned_stride = 0;
};
struct ManyOutputs {
  DType type;
  void* data;
  size_t stride;
};

// Of `scratch`, which is best aligned to 64 bytes.
size_t ManyRowsScratch(size_t rows, size_t outputs);
// Null `pool`: on the calling thread.
void MultiplyManyRows(const ManyRows& x, const ManyWeights& weights, const ManyOutputs& y, void* scratch,
                      ThreadPool* pool);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_MANY_ROWS_H_
