#include "generate/matrix_product.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/functional/function_ref.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/clock.h"
#include "generate/decode.h"
#include "kernels/cache.h"
#include "kernels/layer.h"
#include "kernels/many_rows.h"

namespace penstock::generate {
namespace {

using kernels::DType;

// Elements of a row-wise function for which another thread is worth waking.
constexpr int64_t kLeastElementsOfRows = 16 << 10;

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

// Of outputs [0, rows) of a stored matrix, in fp32; `y`: [rows of x, stride].
void MultiplySingle(const SingleRows& x, const StoredMatrix& matrix, const std::byte* memory, int64_t rows,
                    float* y, size_t stride, kernels::ThreadPool* pool) {
  const auto columns = static_cast<size_t>(matrix.columns);
  constexpr size_t kLeastTerms = 32 << 10;  // for which another thread is worth waking
  constexpr size_t kCut = kernels::kProductOutputs;
  const auto outputs = static_cast<size_t>(rows);
  const size_t tiles = (outputs + kCut - 1) / kCut;
  pool->ParallelFor(tiles, std::max<size_t>(1, kLeastTerms / (kCut * columns)), [&](size_t from, size_t to) {
    const size_t begin = from * kCut, end = std::min(outputs, to * kCut);
    const kernels::ProductOutput part = {y + begin, end - begin, stride};
    const std::byte* weights =
        memory + begin * (matrix.turned ? kernels::BytesPerElement(matrix.type) : RowBytes(matrix));
    if (x.packed.has_value()) {
      return matrix.code.has_value() ? x.packed->Multiply(*matrix.code, weights, part)
                                     : x.packed->Multiply(weights, part);
    }
    const kernels::ProductInput in = {x.wide, static_cast<size_t>(x.rows), columns, columns};
    if (matrix.turned) {
      kernels::MultiplyRowsTurned(in, matrix.type, weights, outputs, part);
    } else if (matrix.code.has_value()) {
      kernels::MultiplyRows(in, *matrix.code, weights, part);
    } else {
      kernels::MultiplyRows(in, matrix.type, weights, part);
    }
  });
}

// Rows of a matrix with scales of its own, decoded a strip at a time, which caches hold until it is
// multiplied: `multiply` is given memory, first row and rows.
absl::Status ForDecodedRows(const StoredMatrix& matrix, const std::byte* memory, int64_t first_row,
                            int64_t rows, ProductScratch* scratch,
                            absl::FunctionRef<absl::Status(const std::byte*, int64_t, int64_t)> multiply) {
  constexpr int64_t kLeastElements = 32 << 10;  // for which another thread is worth waking
  const models::ScaledMatrix& scaled = *matrix.scaled;
  const size_t width = static_cast<size_t>(matrix.columns) * kernels::BytesPerElement(matrix.type);
  const int64_t at_once = DecodedRows(matrix.columns);
  if (const int64_t bytes = std::min(rows, at_once) * static_cast<int64_t>(width);
      scratch->decoded.bytes() < bytes) {
    scratch->decoded = {};  // before the next is there
    ASSIGN_OR_RETURN(scratch->decoded, zero::HostBuffer::Of(bytes, "generate: decoded weights"));
  }
  std::byte* const decoded = scratch->decoded.data();
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    scratch->pool.ParallelFor(static_cast<size_t>(count),
                              static_cast<size_t>(std::max<int64_t>(kLeastElements / matrix.columns, 1)),
                              [&](size_t begin, size_t end) {
                                for (size_t i = begin; i < end; ++i) {
                                  const int64_t at = row + static_cast<int64_t>(i);
                                  scaled.Decode(first_row + at,
                                                memory + static_cast<size_t>(at) * scaled.row_bytes(),
                                                matrix.type, decoded + i * width);
                                }
                              });
    RETURN_IF_ERROR(multiply(decoded, first_row + row, count));
  }
  return absl::OkStatus();
}

}  // namespace

void ProductScratch::ForRows(int64_t rows, int64_t columns, absl::FunctionRef<void(size_t, size_t)> work) {
  const auto grain = static_cast<size_t>(std::max<int64_t>(1, kLeastElementsOfRows / columns));
  pool.ParallelFor(static_cast<size_t>(rows), grain, work);
}

void ProductScratch::AddToRows(const HostRows& vector, HostRows* y) {
  ForRows(y->rows(), y->columns(), [&](size_t begin, size_t end) {
    for (auto row = static_cast<int64_t>(begin); row < static_cast<int64_t>(end); ++row) {
      kernels::AddElements(y->type(), y->row(row), vector.data(), static_cast<size_t>(y->columns()),
                           y->row(row));
    }
  });
}

absl::StatusOr<HostRows> ProductScratch::Converted(const HostRows& x, DType type) {
  ASSIGN_OR_RETURN(HostRows converted, HostRows::Of(type, x.rows(), x.columns()));
  ForRows(x.rows(), x.columns(), [&](size_t begin, size_t end) {
    const auto first = static_cast<int64_t>(begin);
    kernels::Convert(x.type(), x.row(first), type, converted.row(first),
                     (end - begin) * static_cast<size_t>(x.columns()));
  });
  return converted;
}

bool MultipliesAllPacked(DType x, const StoredMatrix& matrix) {
  return x == DType::kBf16 && TakesPackedRows(matrix) && kernels::HasPackedProduct();
}

absl::StatusOr<SingleRows> SingleRows::Of(const HostRows& x, int64_t rows, const StoredMatrix& matrix) {
  SingleRows made;
  made.rows = rows;
  if (rows == 0) return made;
  const auto count = static_cast<size_t>(rows), columns = static_cast<size_t>(x.columns());
  if (x.type() == DType::kBf16 && TakesPackedRows(matrix)) {
    const size_t bytes = kernels::PackedRows::Bytes(count, columns);
    ASSIGN_OR_RETURN(made.memory, zero::HostBuffer::Of(static_cast<int64_t>(bytes), "generate: packed rows"));
    made.packed.emplace(reinterpret_cast<const uint16_t*>(x.data()), count, columns, columns,
                        made.memory.data());
  } else if (x.type() == DType::kFp32) {
    made.wide = x.floats();
  } else {
    ASSIGN_OR_RETURN(made.widened, HostRows::Of(DType::kFp32, rows, x.columns()));
    kernels::Convert(x.type(), x.data(), DType::kFp32, made.widened.data(), count * columns);
    made.wide = made.widened.floats();
  }
  return made;
}

absl::StatusOr<MatrixProduct> MatrixProduct::Begin(const HostRows& x, int64_t single,
                                                   const StoredMatrix& matrix, ProductScratch* scratch) {
  // A row that is multiplied packed has its bits beside any others.
  MatrixProduct product(x, MultipliesAllPacked(x.type(), matrix) ? x.rows() : single, matrix, scratch);
  ASSIGN_OR_RETURN(SingleRows single_x, SingleRows::Of(x, product.single_, matrix));
  product.single_x_.emplace(std::move(single_x));
  ASSIGN_OR_RETURN(product.y_, HostRows::Of(x.type(), x.rows(), matrix.rows));
  return product;
}

absl::StatusOr<HostRows> ProductWith(const HostRows& matrix, const HostRows& x, int64_t single,
                                     ProductScratch* scratch) {
  const StoredMatrix stored = {.rows = matrix.rows(), .columns = matrix.columns(), .type = matrix.type()};
  ASSIGN_OR_RETURN(MatrixProduct product, MatrixProduct::Begin(x, single, stored, scratch));
  RETURN_IF_ERROR(product.Add(matrix.data(), 0, static_cast<int64_t>(matrix.elements())));
  return product.Result();
}

HostRows MatrixProduct::Result() {
  PENSTOCK_CHECK(carried_.empty(), "a matrix ends with the last of its rows");
  return std::move(y_);
}

absl::Status MatrixProduct::Add(const std::byte* memory, int64_t first, int64_t elements) {
  if (matrix_.turned) {
    PENSTOCK_CHECK(elements == matrix_.rows * matrix_.columns, "a turned matrix comes whole");
    return AddWholeRows(memory, 0, matrix_.rows);
  }
  const int64_t columns = matrix_.columns;
  if (matrix_.code.has_value()) {
    PENSTOCK_CHECK(first % columns == 0 && elements % columns == 0, "coded parts are whole rows");
    return AddWholeRows(memory, first / columns, elements / columns);
  }
  if (matrix_.scaled != nullptr) {
    PENSTOCK_CHECK(first % columns == 0 && elements % columns == 0, "coded parts are whole rows");
    return ForDecodedRows(matrix_, memory, first / columns, elements / columns, &scratch_,
                          [this](const std::byte* decoded, int64_t first_row, int64_t rows) {
                            return AddWholeRows(decoded, first_row, rows);
                          });
  }
  const size_t width = kernels::BytesPerElement(matrix_.type);
  if (!carried_.empty()) {  // the rest of a row that the part before began
    const int64_t rest = std::min(columns - first % columns, elements);
    carried_.insert(carried_.end(), memory, memory + static_cast<size_t>(rest) * width);
    memory += static_cast<size_t>(rest) * width;
    first += rest;
    elements -= rest;
    if (carried_.size() < RowBytes(matrix_)) return absl::OkStatus();
    RETURN_IF_ERROR(AddWholeRows(carried_.data(), first / columns - 1, 1));
    carried_.clear();
  }
  const int64_t whole = elements / columns;
  if (whole > 0) RETURN_IF_ERROR(AddWholeRows(memory, first / columns, whole));
  const std::byte* const end = memory + static_cast<size_t>(elements) * width;
  carried_.assign(memory + static_cast<size_t>(whole * columns) * width, end);
  return absl::OkStatus();
}

// Rows of the matrix as they are stored, or decoded, or a turned one whole.
absl::Status MatrixProduct::AddWholeRows(const std::byte* memory, int64_t first_row, int64_t rows) {
  if (single_ > 0) RETURN_IF_ERROR(AddToSingle(memory, first_row, rows));
  return single_ < x_.rows() ? AddToMany(memory, first_row, rows) : absl::OkStatus();
}

absl::Status MatrixProduct::AddToSingle(const std::byte* memory, int64_t first_row, int64_t rows) {
  if (y_.type() == DType::kFp32) {
    MultiplySingle(*single_x_, matrix_, memory, rows, y_.floats() + first_row,
                   static_cast<size_t>(y_.columns()), &scratch_.pool);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const HostRows part, HostRows::Of(DType::kFp32, single_, rows));
  MultiplySingle(*single_x_, matrix_, memory, rows, part.floats(), static_cast<size_t>(rows), &scratch_.pool);
  for (int64_t row = 0; row < single_; ++row) {
    kernels::Fp32ToBf16(part.floats() + row * rows, reinterpret_cast<uint16_t*>(y_.row(row)) + first_row,
                        static_cast<size_t>(rows));
  }
  return absl::OkStatus();
}

absl::Status MatrixProduct::AddToMany(const std::byte* memory, int64_t first_row, int64_t rows) {
  const auto many = static_cast<size_t>(x_.rows() - single_), outputs = static_cast<size_t>(rows);
  const auto scratch = static_cast<int64_t>(kernels::ManyRowsScratch(many, outputs));
  if (scratch_.many.bytes() < scratch) {
    scratch_.many = {};  // before the next is there
    ASSIGN_OR_RETURN(scratch_.many, zero::HostBuffer::Of(scratch, "generate: a prompt's product"));
  }
  kernels::MultiplyManyRows(
      {x_.type(), x_.row(single_), many, static_cast<size_t>(x_.columns()),
       static_cast<size_t>(x_.columns())},
      {matrix_.type, matrix_.code, memory, outputs, matrix_.turned ? static_cast<size_t>(matrix_.rows) : 0},
      {y_.type(), y_.row(single_) + static_cast<size_t>(first_row) * kernels::BytesPerElement(y_.type()),
       static_cast<size_t>(y_.columns())},
      scratch_.many.data(), &scratch_.pool);
  return absl::OkStatus();
}

absl::StatusOr<double> MeasureProduct(const StoredMatrix& matrix, int64_t rows, ProductScratch* scratch) {
  constexpr int kTurns = 3;
  const size_t row_bytes = matrix.scaled != nullptr ? matrix.scaled->row_bytes() : RowBytes(matrix);
  std::vector<std::byte> weights(static_cast<size_t>(matrix.rows) * row_bytes);
  // Of coded weights the type is what they are decoded to.
  const DType type = matrix.type == DType::kBf16 && TakesPackedRows(matrix) ? DType::kBf16 : DType::kFp32;
  ASSIGN_OR_RETURN(const HostRows in, HostRows::Of(type, rows, matrix.columns));
  std::memset(in.data(), 0, static_cast<size_t>(rows) * in.row_bytes());
  std::vector<float> out(static_cast<size_t>(rows * matrix.rows));
  ASSIGN_OR_RETURN(const SingleRows x, SingleRows::Of(in, rows, matrix));
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    kernels::EvictFromCaches(weights.data(), weights.size());
    const double from = Now();
    const auto multiply = [&](const std::byte* memory, int64_t first_row, int64_t count) {
      MultiplySingle(x, matrix, memory, count, out.data() + first_row, static_cast<size_t>(matrix.rows),
                     &scratch->pool);
      return absl::OkStatus();
    };
    if (matrix.scaled != nullptr) {
      RETURN_IF_ERROR(ForDecodedRows(matrix, weights.data(), 0, matrix.rows, scratch, multiply));
    } else {
      RETURN_IF_ERROR(multiply(weights.data(), 0, matrix.rows));
    }
    best = std::min(best, Now() - from);
  }
  return best;
}

}  // namespace penstock::generate
