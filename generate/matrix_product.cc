#include "generate/matrix_product.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "generate/clock.h"
#include "generate/decode.h"
#include "kernels/cache.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::generate {
namespace {

using kernels::DType;
using torch::Tensor;

size_t RowBytes(const StoredMatrix& matrix) {
  const auto columns = static_cast<size_t>(matrix.columns);
  return matrix.code.has_value() ? matrix.code->row_bytes(columns)
                                 : columns * kernels::BytesPerElement(matrix.type);
}

// Whose rows in bf16 are packed.
bool TakesPackedRows(const StoredMatrix& matrix) {
  if (matrix.turned) return false;
  if (matrix.code.has_value()) return kernels::FastPackedOrder() == kernels::PackedOrder::kTiles;
  return matrix.type == DType::kBf16;
}

// Of outputs [0, rows) of a stored matrix; `y`: [rows of x, outputs of the whole], from `first_row` on.
void MultiplySingle(const SingleRows& x, const StoredMatrix& matrix, const std::byte* memory, int64_t rows,
                    int64_t first_row, const Tensor& y, kernels::ThreadPool* pool) {
  const auto columns = static_cast<size_t>(matrix.columns);
  float* const out = y.data_ptr<float>() + first_row;
  const auto stride = static_cast<size_t>(y.size(1));
  constexpr size_t kLeastTerms = 32 << 10;  // for which another thread is worth waking
  constexpr size_t kCut = kernels::kProductOutputs;
  const auto outputs = static_cast<size_t>(rows);
  const size_t tiles = (outputs + kCut - 1) / kCut;
  pool->ParallelFor(tiles, std::max<size_t>(1, kLeastTerms / (kCut * columns)), [&](size_t from, size_t to) {
    const size_t begin = from * kCut, end = std::min(outputs, to * kCut);
    const kernels::ProductOutput part = {out + begin, end - begin, stride};
    const std::byte* weights =
        memory + begin * (matrix.turned ? kernels::BytesPerElement(matrix.type) : RowBytes(matrix));
    if (x.packed.has_value()) {
      return matrix.code.has_value() ? x.packed->Multiply(*matrix.code, weights, part)
                                     : x.packed->Multiply(weights, part);
    }
    const kernels::ProductInput in = {x.wide.data_ptr<float>(), static_cast<size_t>(x.wide.size(0)), columns,
                                      columns};
    if (matrix.turned) {
      kernels::MultiplyRowsTurned(in, matrix.type, weights, outputs, part);
    } else if (matrix.code.has_value()) {
      kernels::MultiplyRows(in, *matrix.code, weights, part);
    } else {
      kernels::MultiplyRows(in, matrix.type, weights, part);
    }
  });
}

}  // namespace

DType TypeOf(const Tensor& x) { return x.scalar_type() == torch::kBFloat16 ? DType::kBf16 : DType::kFp32; }

SingleRows::SingleRows(const Tensor& x, const StoredMatrix& matrix) {
  if (TypeOf(x) != DType::kBf16 || !TakesPackedRows(matrix)) {
    wide = x.to(torch::kFloat32).contiguous();
    return;
  }
  const Tensor contiguous = x.contiguous();
  const auto rows = static_cast<size_t>(x.size(0)), columns = static_cast<size_t>(x.size(1));
  memory = torch::empty({static_cast<int64_t>(kernels::PackedRows::Bytes(rows, columns))}, torch::kUInt8);
  packed.emplace(static_cast<const uint16_t*>(contiguous.data_ptr()), rows, columns, columns,
                 memory.data_ptr());
}

bool MultipliesInTiles(DType x, const StoredMatrix& matrix) {
  return x == DType::kBf16 && TakesPackedRows(matrix) &&
         kernels::FastPackedOrder() == kernels::PackedOrder::kTiles;
}

MatrixProduct::MatrixProduct(Tensor x, const ProductRows& rows, const StoredMatrix& matrix,
                             ProductScratch* scratch)
    : x_(std::move(x)),
      // A row that is multiplied with tiles has its bits beside any others: a prompt's need no cut of their
      // own.
      rows_(MultipliesInTiles(TypeOf(x_), matrix) ? ProductRows{.single = x_.size(0), .chunks = {}} : rows),
      matrix_(matrix),
      scratch_(*scratch) {
  if (rows_.single > 0) single_x_.emplace(x_.narrow(0, 0, rows_.single), matrix_);
  y_ = torch::empty({x_.size(0), matrix_.rows}, x_.options());
}

Tensor MatrixProduct::Result() {
  PENSTOCK_CHECK(carried_.empty(), "a matrix ends with the last of its rows");
  return y_;
}

void MatrixProduct::Add(const std::byte* memory, int64_t first, int64_t elements) {
  if (matrix_.turned) {
    PENSTOCK_CHECK(elements == matrix_.rows * matrix_.columns, "a turned matrix comes whole");
    return AddWholeRows(memory, 0, matrix_.rows);
  }
  const int64_t columns = matrix_.columns;
  if (matrix_.code.has_value()) {
    PENSTOCK_CHECK(first % columns == 0 && elements % columns == 0, "coded parts are whole rows");
    return AddCodedRows(memory, first / columns, elements / columns);
  }
  const size_t width = kernels::BytesPerElement(matrix_.type);
  if (!carried_.empty()) {  // the rest of a row that the part before began
    const int64_t rest = std::min(columns - first % columns, elements);
    carried_.insert(carried_.end(), memory, memory + static_cast<size_t>(rest) * width);
    memory += static_cast<size_t>(rest) * width;
    first += rest;
    elements -= rest;
    if (carried_.size() < RowBytes(matrix_)) return;
    AddWholeRows(carried_.data(), first / columns - 1, 1);
    carried_.clear();
  }
  const int64_t whole = elements / columns;
  if (whole > 0) AddWholeRows(memory, first / columns, whole);
  const std::byte* const end = memory + static_cast<size_t>(elements) * width;
  carried_.assign(memory + static_cast<size_t>(whole * columns) * width, end);
}

// Rows are decoded as many as caches hold, and multiplied at once.
void MatrixProduct::AddCodedRows(const std::byte* memory, int64_t first_row, int64_t rows) {
  AddToSingle(memory, first_row, rows);
  if (rows_.chunks.empty()) return;
  const int64_t columns = matrix_.columns, at_once = DecodedRows(columns);
  Tensor& decoded = scratch_.decoded;
  if (!decoded.defined() || decoded.numel() < at_once * columns) {
    decoded = Tensor();  // before the next is there
    decoded = torch::empty({at_once * columns}, x_.options());
  }
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    DecodeRows(*matrix_.code, memory + static_cast<size_t>(row) * RowBytes(matrix_), count, columns,
               TypeOf(x_), decoded.data_ptr(), &scratch_.pool);
    AddToChunks(decoded.narrow(0, 0, count * columns).view({count, columns}), first_row + row);
  }
}

// Rows of the matrix as they are stored, or a turned one whole.
void MatrixProduct::AddWholeRows(const std::byte* memory, int64_t first_row, int64_t rows) {
  AddToSingle(memory, first_row, rows);
  if (rows_.chunks.empty()) return;
  std::vector<int64_t> sizes = {rows, matrix_.columns};
  if (matrix_.turned) std::swap(sizes[0], sizes[1]);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): from_blob takes no const memory
  const Tensor stored =
      torch::from_blob(const_cast<std::byte*>(memory), sizes, zero::TorchDtype(matrix_.type));
  // In place where it is stored in the type of x.
  const Tensor weights = stored.to(x_.scalar_type());
  AddToChunks(matrix_.turned ? weights.t() : weights, first_row);
}

void MatrixProduct::AddToSingle(const std::byte* memory, int64_t first_row, int64_t rows) {
  if (rows_.single == 0) return;
  const Tensor y = y_.narrow(0, 0, rows_.single);
  if (TypeOf(y) == DType::kFp32)
    return MultiplySingle(*single_x_, matrix_, memory, rows, first_row, y, &scratch_.pool);
  const Tensor part = torch::empty({rows_.single, rows}, torch::kFloat32);
  MultiplySingle(*single_x_, matrix_, memory, rows, 0, part, &scratch_.pool);
  y.narrow(1, first_row, rows).copy_(part);
}

void MatrixProduct::AddToChunks(const Tensor& weights, int64_t first_row) {
  for (const auto& [first, rows] : rows_.chunks) {
    y_.narrow(0, first, rows)
        .narrow(1, first_row, weights.size(0))
        .copy_(torch::mm(x_.narrow(0, first, rows), weights.t()));
  }
}

double MeasureProduct(const StoredMatrix& matrix, int64_t rows, ProductScratch* scratch) {
  constexpr int kTurns = 3;
  // Not LibTorch's memory, which belongs to what is planned.
  std::vector<std::byte> weights(static_cast<size_t>(matrix.rows) * RowBytes(matrix));
  // Of coded weights the type is what they are decoded to.
  const DType type = matrix.type == DType::kBf16 && TakesPackedRows(matrix) ? DType::kBf16 : DType::kFp32;
  std::vector<std::byte> in(static_cast<size_t>(rows * matrix.columns) * kernels::BytesPerElement(type));
  std::vector<float> out(static_cast<size_t>(rows * matrix.rows));
  const SingleRows x(torch::from_blob(in.data(), {rows, matrix.columns}, zero::TorchDtype(type)), matrix);
  const Tensor y = torch::from_blob(out.data(), {rows, matrix.rows});
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    kernels::EvictFromCaches(weights.data(), weights.size());
    const double from = Now();
    MultiplySingle(x, matrix, weights.data(), matrix.rows, 0, y, &scratch->pool);
    best = std::min(best, Now() - from);
  }
  return best;
}

}  // namespace penstock::generate
