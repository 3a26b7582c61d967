#include "kernels/many_rows.h"

#include <algorithm>

#include "kernels/simd/table.h"
#include "kernels/thread_pool.h"

namespace penstock::kernels {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kOutputsAtOnce = 48;  // that a thread takes: a multiple of every level's tile

size_t Vectors(size_t rows) { return (rows + kLanes - 1) / kLanes; }

template <class Work>
void Share(ThreadPool* pool, size_t n, size_t grain, const Work& work) {
  if (pool == nullptr) return work(size_t{0}, n);
  pool->ParallelFor(n, grain, work);
}

}  // namespace

size_t ManyRowsScratch(size_t rows, size_t outputs) {
  return Vectors(std::min(rows, kManyRowsAtOnce)) * kLanes * (kManyRowsStrip + outputs) * sizeof(float);
}

void MultiplyManyRows(const ManyRows& x, const ManyWeights& weights, const ManyOutputs& y, void* scratch,
                      ThreadPool* pool) {
  const KernelTable& kernels = Kernels();
  const size_t x_width = BytesPerElement(x.type);
  const auto type = static_cast<size_t>(weights.type);
  const bool turned = weights.turned_stride > 0;
  const auto product = weights.code.has_value() ? kernels.coded_many_product[weights.code->bits == 8 ? 0 : 1]
                       : turned                 ? kernels.turned_many_product[type]
                                                : kernels.many_product[type];
  const size_t weights_stride =
      weights.code.has_value() ? weights.code->row_bytes(x.columns)
                               : (turned ? weights.turned_stride : x.columns) * BytesPerElement(weights.type);
  for (size_t row = 0; row < x.rows; row += kManyRowsAtOnce) {
    const size_t rows = std::min(x.rows - row, kManyRowsAtOnce), vectors = Vectors(rows);
    auto* const packed = static_cast<float*>(scratch);
    float* const sums = packed + vectors * kLanes * kManyRowsStrip;
    for (size_t k = 0; k < x.columns; k += kManyRowsStrip) {
      const size_t count = std::min(x.columns - k, kManyRowsStrip);
      Share(pool, vectors, 4, [&](size_t begin, size_t end) {
        for (size_t v = begin; v < end; ++v) {
          const size_t first = row + v * kLanes;
          kernels.turn_rows[static_cast<size_t>(x.type)](
              static_cast<const unsigned char*>(x.data) + (first * x.stride + k) * x_width,
              std::min(row + rows - first, kLanes), x.stride, count, packed + v * kLanes * count);
        }
      });
      Share(pool, weights.outputs, kOutputsAtOnce, [&](size_t begin, size_t end) {
        product({.packed = packed,
                 .vectors = vectors,
                 .columns = x.columns,
                 .first_column = k,
                 .count = count,
                 .weights = weights.data,
                 .weights_stride = weights_stride,
                 .group = weights.code.has_value() ? weights.code->group : 0,
                 .first = begin,
                 .end = end,
                 .sums = sums,
                 .sums_stride = vectors * kLanes});
      });
    }
    Share(pool, rows, 16, [&](size_t begin, size_t end) {
      kernels.take_turned[static_cast<size_t>(y.type)](
          sums + begin, vectors * kLanes, end - begin, weights.outputs,
          static_cast<unsigned char*>(y.data) + (row + begin) * y.stride * BytesPerElement(y.type), y.stride);
    });
  }
}

}  // namespace penstock::kernels
