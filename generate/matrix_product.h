// The product of a pass's rows with one matrix, whose parts come one after the other as they are stored.
//
//   MatrixProduct product(x, rows, matrix, &scratch);
//   for each part, in order: product.Add(memory, first, elements);
//   y = product.Result();
//
// On the processor (MatrixProduct) rows that decode are multiplied by kernels/product.h: a row's bits depend
// on nothing else in the pass. Pieces of prompts are many rows, multiplied by LibTorch: their cut is the same
// in every pass. Where the processor multiplies tiles, kernels/product.h is as fast with many rows: then it
// has them all, where a pass in bf16 multiplies a matrix that is stored row by row in bf16 or coded. On a
// device (TensorProduct) LibTorch multiplies all: rows that decode in blocks of kDeviceRows
// (generate/memory_plan.h), since its libraries choose how they sum by the shape.
//
// Threads: one calls; those of the scratch's pool and LibTorch's own compute. LibTorch's errors are thrown.
#ifndef PENSTOCK_GENERATE_MATRIX_PRODUCT_H_
#define PENSTOCK_GENERATE_MATRIX_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/float16.h"
#include "kernels/product.h"
#include "kernels/thread_pool.h"
#include "kernels/weight_code.h"
#include "zero/compute/device.h"

namespace penstock::generate {

// Which rows of x are multiplied how.
struct ProductRows {
  int64_t single = 0;                               // the first so many, each by itself
  std::vector<std::pair<int64_t, int64_t>> chunks;  // first row and rows, multiplied together
};

// A matrix [rows, columns] as it is stored.
struct StoredMatrix {
  int64_t rows = 0, columns = 0;
  kernels::DType type = kernels::DType::kBf16;  // where it is not coded
  std::optional<kernels::WeightCode> code = std::nullopt;
  bool turned = false;  // stored as [columns, rows]; it comes whole then
};

// Of a pass's rows: kFp32 or kBf16.
kernels::DType TypeOf(const at::Tensor& x);

// Whether rows of this type, all of a pass, are multiplied with such a matrix by kernels/product.h, prompts'
// too.
bool MultipliesInTiles(kernels::DType x, const StoredMatrix& matrix);

// What products use again.
struct ProductScratch {
  // `threads`: that share a product.
  explicit ProductScratch(int threads) : pool(threads) {}
  kernels::ThreadPool pool;
  at::Tensor decoded;  // of coded weights
};

// Rows that are multiplied each by itself, in the form that their matrix takes.
struct SingleRows {
  // `x`: fp32 or bf16. Packed where it is bf16 and so is the matrix, row by row; with a coded one where the
  // processor multiplies tiles. Else in fp32.
  SingleRows(const at::Tensor& x, const StoredMatrix& matrix);
  at::Tensor wide;
  at::Tensor memory;  // of packed rows
  std::optional<kernels::PackedRows> packed;
};

class Product {
 public:
  virtual ~Product() = default;
  // Elements [first, first + elements) of the matrix, row by row as stored, in order. Coded and turned ones:
  // whole rows.
  virtual void Add(const std::byte* memory, int64_t first, int64_t elements) = 0;
  virtual at::Tensor Result() = 0;  // [rows of x, rows of the matrix]
};

// In host memory.
class MatrixProduct : public Product {
 public:
  // `x`: [rows, columns], fp32 or bf16, the type of the result. `matrix` and `scratch` outlive it.
  MatrixProduct(at::Tensor x, const ProductRows& rows, const StoredMatrix& matrix, ProductScratch* scratch);

  void Add(const std::byte* memory, int64_t first, int64_t elements) override;
  at::Tensor Result() override;

 private:
  void AddWholeRows(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddCodedRows(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddToSingle(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddToChunks(const at::Tensor& weights, int64_t first_row);

  const at::Tensor x_;
  const ProductRows rows_;
  const StoredMatrix& matrix_;
  ProductScratch& scratch_;
  std::optional<SingleRows> single_x_;
  at::Tensor y_;
  std::vector<std::byte> carried_;  // the beginning of a row that the next part goes on with
};

// Wherever x is; the parts lie in the same memory.
class TensorProduct : public Product {
 public:
  // As MatrixProduct. rows.single: a multiple of kDeviceRows. `device`: whose memory x is in; outlives it.
  TensorProduct(at::Tensor x, const ProductRows& rows, const StoredMatrix& matrix, zero::Device* device);

  void Add(const std::byte* memory, int64_t first, int64_t elements) override;
  at::Tensor Result() override;

 private:
  void AddCodedRows(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddRows(const at::Tensor& weights, int64_t first_row);

  const at::Tensor x_;
  const ProductRows& rows_;
  const StoredMatrix& matrix_;
  zero::Device& device_;
  at::Tensor y_;
  at::Tensor carried_;  // the beginning of a row that the next part goes on with; undefined: none
};

// How long the products of `rows` rows with such a matrix take here, in seconds: the best of some turns, the
// weights from memory rather than from a cache.
double MeasureProduct(const StoredMatrix& matrix, int64_t rows, ProductScratch* scratch);
// The same of a TensorProduct on a device, where `rows` is a multiple of kDeviceRows.
double MeasureProduct(const StoredMatrix& matrix, int64_t rows, zero::Device* device);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_MATRIX_PRODUCT_H_
