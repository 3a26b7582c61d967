// Products of a few rows with a matrix, in which a row's bits depend on that row and the matrix alone: not on
// how many rows there are, where the row stands among them, how the outputs are cut, or the SIMD level.
// Libraries for large products (GotoBLAS and its heirs) cut their tiles by the number of rows, and so round
// one row in several ways. Made for rows that come one for each text: weights are read once for all of them.
//
//   y[r][n] = sum over k of x[r][k] * w[n][k],    r < rows, n < outputs, k < columns
//
// Definition. The weights are widened to fp32, exactly; x and y are fp32. There is at least one column; row
// by row the columns are filled up with zeros to a multiple of 16. Every term is one fused multiply-add.
//   row by row        lane j of 16 begins with +0 and takes the terms of k = j, j + 16, ... in that order;
//                     then s[j] += s[j + 8] for j < 8, s[j] += s[j + 4] for j < 4, s[j] += s[j + 2] for
//                     j < 2, and s[0] + s[1] (as kernels/reduce.h)
//   column by column  begins with +0 and takes the terms in the order of k
//   packed bf16       rows and weights are bf16, filled up with zeros to a multiple of 32. What is smaller
//                     than 2^-126 counts as zero, scales of coded weights too. There are two orders of sums:
//     pairs           lane j of 16 begins with +0 and takes for i = 0, 32, ... the term of k = i + 2 j + 1
//                     and then that of i + 2 j; then as row by row. AVX-512's VDPBF16PS does so.
//     tiles           of each 32 columns the even ones begin with +0 and take their terms in the order of k,
//                     the odd ones likewise; even + odd is added to the sum before, which begins with +0.
//                     AMX's TDPBF16PS does so, with sixteen rows at a time.
//                     An instruction is used where a sample of it has these bits.
//
// On the calling thread; a caller with several threads gives each some of the outputs. Nothing is allocated
// (40 KiB of stack). Any alignment of weights; thread-safe. No overlap of y with the rest.
#ifndef PENSTOCK_KERNELS_PRODUCT_H_
#define PENSTOCK_KERNELS_PRODUCT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"
#include "kernels/weight_code.h"

namespace penstock::kernels {

struct KernelTable;
struct ProductArguments;

// Outputs that a thread takes at least: cuts at multiples of it leave no short tiles.
inline constexpr size_t kProductOutputs = 64;

// Rows as they lie in memory, `stride` elements from one to the next.
struct ProductInput {
  const float* data;
  size_t rows, columns, stride;
};
struct ProductOutput {
  float* data;
  size_t outputs, stride;
};

// Weights row by row: n's elements follow each other, and then those of n + 1.
void MultiplyRows(const ProductInput& x, DType type, const void* weights, const ProductOutput& y);
// Rows coded by kernels/weight_code.h.
void MultiplyRows(const ProductInput& x, const WeightCode& code, const void* weights, const ProductOutput& y);
// Column by column: w[n][k] is element k * `weights_stride` + n.
void MultiplyRowsTurned(const ProductInput& x, DType type, const void* weights, size_t weights_stride,
                        const ProductOutput& y);

enum class PackedOrder { kPairs, kTiles };
// The one that this processor is fast with: tiles where it has AMX and the system lets the process use it,
// which the first call asks for (arch_prctl, Linux 5.16; it is refused where a thread has a signal stack that
// is too small for tiles). The same for every SIMD level and for as long as the process lives.
PackedOrder FastPackedOrder();
// Whether this processor has an instruction for products in that order, which is then faster with any number
// of rows than products in fp32. The same for every SIMD level.
bool HasPackedProduct();

// Rows in bf16 with weights in bf16, row by row. The rows are packed first, once for all weights that they
// are multiplied with.
class PackedRows {
 public:
  // Of memory that packed rows take.
  static size_t Bytes(size_t rows, size_t columns, PackedOrder order = FastPackedOrder());
  // `stride` elements from one row to the next. `memory`: outlives this; aligned to 64 bytes it is read
  // faster.
  PackedRows(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* memory,
             PackedOrder order = FastPackedOrder());
  void Multiply(const void* weights, const ProductOutput& y) const;
  // Rows coded by kernels/weight_code.h, decoded to bf16. Only where the rows are in the order of tiles.
  void Multiply(const WeightCode& code, const void* weights, const ProductOutput& y) const;

 private:
  ProductArguments Arguments(const void* weights, size_t weights_stride, const ProductOutput& y) const;

  size_t rows_, columns_;
  PackedOrder order_;
  const KernelTable& kernels_;  // that have packed them
  bool native_;                 // with the processor's own instruction for the order
  const void* packed_;
};

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_PRODUCT_H_
