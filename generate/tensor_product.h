// The product of a pass's rows with one matrix on a device, whose parts come one after the other as they are
// stored (generate/matrix_product.h has the host's). LibTorch multiplies: rows that decode in blocks of
// kDeviceRows (generate/memory_plan.h), since its libraries choose how they sum by the shape, and pieces of
// prompts that are cut alike in every pass.
//
// Threads: one. LibTorch's errors are thrown.
#ifndef PENSTOCK_GENERATE_TENSOR_PRODUCT_H_
#define PENSTOCK_GENERATE_TENSOR_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "generate/stored_matrix.h"
#include "zero/compute/device.h"

namespace penstock::generate {

// Which rows of x are multiplied how.
struct ProductRows {
  int64_t single = 0;                               // rows at the front: a multiple of kDeviceRows
  std::vector<std::pair<int64_t, int64_t>> chunks;  // first row and rows, multiplied together
};

class TensorProduct {
 public:
  // `x`: [rows, columns], fp32 or bf16, the type of the result, in the memory of `device`; the parts lie
  // there too. `rows`, `matrix` and `device` outlive it.
  TensorProduct(at::Tensor x, const ProductRows& rows, const StoredMatrix& matrix, zero::Device* device);

  // Elements [first, first + elements) of the matrix, row by row as stored, in order. Coded and turned ones:
  // whole rows.
  void Add(const std::byte* memory, int64_t first, int64_t elements);
  at::Tensor Result();  // [rows of x, rows of the matrix]

 private:
  void AddCodedRows(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddScaledRows(const std::byte* memory, int64_t first_row, int64_t rows);
  void AddRows(const at::Tensor& weights, int64_t first_row);

  const at::Tensor x_;
  const ProductRows& rows_;
  const StoredMatrix& matrix_;
  zero::Device& device_;
  at::Tensor y_;
  at::Tensor numbers_, scales_;  // there, of a matrix with scales of its own
  at::Tensor carried_;           // the beginning of a row that the next part goes on with; undefined: none
};

// How long the products of `rows` rows, a multiple of kDeviceRows, with such a matrix take there, in seconds.
double MeasureTensorProduct(const StoredMatrix& matrix, int64_t rows, zero::Device* device);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_TENSOR_PRODUCT_H_
