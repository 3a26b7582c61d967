// The product of a pass's rows with one matrix in host memory, whose parts come one after the other as they
// are stored.
//
//   ASSIGN_OR_RETURN(MatrixProduct product, MatrixProduct::Begin(x, single, matrix, &scratch));
//   for each part, in order: RETURN_IF_ERROR(product.Add(memory, first, elements));
//   y = product.Result();
//
// Rows that decode are multiplied by kernels/product.h, those of prompts by kernels/many_rows.h: a row's bits
// depend on nothing else in the pass. Where the processor has an instruction for products of bf16,
// kernels/product.h is as fast with many rows: then it has them all, where a pass in bf16 multiplies a matrix
// that is stored row by row in bf16, or coded and multiplied in tiles.
//
// Threads: one calls; those of the scratch's pool compute. Errors: kResourceExhausted: memory is at its
// limit.
#ifndef PENSTOCK_GENERATE_MATRIX_PRODUCT_H_
#define PENSTOCK_GENERATE_MATRIX_PRODUCT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/host_rows.h"
#include "generate/stored_matrix.h"
#include "kernels/product.h"
#include "kernels/thread_pool.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::generate {

// Whether rows of this type, all of a pass, are multiplied with such a matrix by kernels/product.h, prompts'
// too.
bool MultipliesAllPacked(kernels::DType x, const StoredMatrix& matrix);

// What products use again.
struct ProductScratch {
  // `threads`: that share a product.
  explicit ProductScratch(int threads) : pool(threads) {}
  // Shares rows of `columns` elements among the threads: work(begin, end) is given some of them at a time.
  void ForRows(int64_t rows, int64_t columns, absl::FunctionRef<void(size_t, size_t)> work);
  // Adds a vector, of y's type and columns, to each row.
  void AddToRows(const HostRows& vector, HostRows* y);
  // The same rows in another type.
  absl::StatusOr<HostRows> Converted(const HostRows& x, kernels::DType type);

  kernels::ThreadPool pool;
  zero::HostBuffer many;     // of kernels/many_rows.h
  zero::HostBuffer decoded;  // of a matrix with scales of its own
};

// Rows that are multiplied each by itself, in the form that their matrix takes.
struct SingleRows {
  // The first `rows` of x: fp32 or bf16. Packed where it is bf16 and so is the matrix, row by row; with a
  // coded one where the processor multiplies tiles. Else in fp32. `x` outlives it.
  static absl::StatusOr<SingleRows> Of(const HostRows& x, int64_t rows, const StoredMatrix& matrix);
  int64_t rows = 0;
  const float* wide = nullptr;
  HostRows widened;         // where x is not fp32 already
  zero::HostBuffer memory;  // of packed rows
  std::optional<kernels::PackedRows> packed;
};

class MatrixProduct {
 public:
  // `x`: [rows, columns], fp32 or bf16, the type of the result; the first `single` of its rows decode. All
  // outlive it.
  static absl::StatusOr<MatrixProduct> Begin(const HostRows& x, int64_t single, const StoredMatrix& matrix,
                                             ProductScratch* scratch);

  // Elements [first, first + elements) of the matrix, row by row as stored, in order. Coded and turned ones:
  // whole rows.
  absl::Status Add(const std::byte* memory, int64_t first, int64_t elements);
  HostRows Result();  // [rows of x, rows of the matrix]

 private:
  MatrixProduct(const HostRows& x, int64_t single, const StoredMatrix& matrix, ProductScratch* scratch)
      : x_(x), single_(single), matrix_(matrix), scratch_(*scratch) {}
  absl::Status AddWholeRows(const std::byte* memory, int64_t first_row, int64_t rows);
  absl::Status AddToSingle(const std::byte* memory, int64_t first_row, int64_t rows);
  absl::Status AddToMany(const std::byte* memory, int64_t first_row, int64_t rows);

  const HostRows& x_;
  const int64_t single_;
  const StoredMatrix& matrix_;
  ProductScratch& scratch_;
  std::optional<SingleRows> single_x_;
  HostRows y_;
  std::vector<std::byte> carried_;  // the beginning of a row that the next part goes on with
};

// The product with a matrix that is in memory whole, as rows.
absl::StatusOr<HostRows> ProductWith(const HostRows& matrix, const HostRows& x, int64_t single,
                                     ProductScratch* scratch);

// How long the products of `rows` rows with such a matrix take here, in seconds: the best of some turns, the
// weights from memory rather than from a cache.
absl::StatusOr<double> MeasureProduct(const StoredMatrix& matrix, int64_t rows, ProductScratch* scratch);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_MATRIX_PRODUCT_H_
