#include "generate/tensor_product.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "generate/clock.h"
#include "generate/decode.h"
#include "generate/memory_plan.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::generate {
namespace {

using torch::Tensor;

// Elements where x is; a copy of them where the address is none that kernels read vectors from.
Tensor ElementsAt(const std::byte* memory, int64_t elements, torch::Dtype type, const Tensor& x) {
  constexpr uintptr_t kAligned = 16;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): from_blob takes no const memory
  auto* const at = const_cast<std::byte*>(memory);
  if (reinterpret_cast<uintptr_t>(at) % kAligned == 0)
    return torch::from_blob(at, {elements}, x.options().dtype(type));
  const auto bytes = elements * static_cast<int64_t>(c10::elementSize(type));
  return torch::from_blob(at, {bytes}, x.options().dtype(torch::kUInt8)).clone().view(type);
}

}  // namespace

TensorProduct::TensorProduct(Tensor x, const ProductRows& rows, const StoredMatrix& matrix,
                             zero::Device* device)
    : x_(std::move(x)), rows_(rows), matrix_(matrix), device_(*device) {
  PENSTOCK_CHECK(rows_.single % kDeviceRows == 0, "rows that decode come in blocks on a device");
  // Rows between what is multiplied are numbers too.
  y_ = torch::zeros({x_.size(0), matrix_.rows}, x_.options());
  if (matrix_.scaled == nullptr) return;
  const auto there = [&](std::span<const float> values) {
    Tensor host = torch::empty({static_cast<int64_t>(values.size())}, torch::kFloat32);
    std::copy(values.begin(), values.end(), host.data_ptr<float>());
    return host.to(x_.device());
  };
  numbers_ = there(models::NumbersOf(matrix_.scaled->code()));
  const int64_t blocks =
      (matrix_.columns + matrix_.scaled->block_columns() - 1) / matrix_.scaled->block_columns();
  scales_ = there(matrix_.scaled->Scales()).view({-1, blocks});
}

Tensor TensorProduct::Result() {
  PENSTOCK_CHECK(!carried_.defined(), "a matrix ends with the last of its rows");
  return y_;
}

void TensorProduct::Add(const std::byte* memory, int64_t first, int64_t elements) {
  const int64_t columns = matrix_.columns;
  if (matrix_.code.has_value()) {
    PENSTOCK_CHECK(first % columns == 0 && elements % columns == 0, "coded parts are whole rows");
    return AddCodedRows(memory, first / columns, elements / columns);
  }
  if (matrix_.scaled != nullptr) {
    PENSTOCK_CHECK(first % columns == 0 && elements % columns == 0, "coded parts are whole rows");
    return AddScaledRows(memory, first / columns, elements / columns);
  }
  const torch::Dtype type = zero::TorchDtype(matrix_.type);
  if (matrix_.turned) {
    PENSTOCK_CHECK(elements == matrix_.rows * columns, "a turned matrix comes whole");
    const Tensor weights = ElementsAt(memory, elements, type, x_).view({columns, matrix_.rows});
    return AddRows(weights.to(x_.scalar_type()).t(), 0);
  }
  const Tensor part = ElementsAt(memory, elements, type, x_);
  int64_t done = 0;
  if (carried_.defined()) {  // the rest of a row that the part before began
    done = std::min(columns - first % columns, elements);
    carried_ = torch::cat({carried_, part.narrow(0, 0, done)});
    if (carried_.numel() < columns) return;
    AddRows(carried_.view({1, columns}).to(x_.scalar_type()), first / columns);
    carried_ = Tensor();
  }
  const int64_t whole = (elements - done) / columns * columns;
  if (whole > 0) {
    const Tensor weights = part.narrow(0, done, whole).view({whole / columns, columns});
    AddRows(weights.to(x_.scalar_type()), (first + done) / columns);
  }
  const int64_t rest = elements - done - whole;
  // Its memory goes back to the stream.
  if (rest > 0) carried_ = part.narrow(0, done + whole, rest).clone();
}

void TensorProduct::AddCodedRows(const std::byte* memory, int64_t first_row, int64_t rows) {
  const kernels::WeightCode& code = *matrix_.code;
  const auto row_bytes = static_cast<int64_t>(code.row_bytes(static_cast<size_t>(matrix_.columns)));
  const int64_t at_once = std::max<int64_t>(kDeviceDecodedElements / matrix_.columns, 1);
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    const Tensor weights = torch::empty({count, matrix_.columns}, x_.options());
    device_.DecodeWeights(
        code, memory + row * row_bytes, count, matrix_.columns,
        x_.scalar_type() == torch::kBFloat16 ? kernels::DType::kBf16 : kernels::DType::kFp32,
        weights.data_ptr());
    AddRows(weights, first_row + row);
  }
}

// As models::ScaledMatrix decodes them.
void TensorProduct::AddScaledRows(const std::byte* memory, int64_t first_row, int64_t rows) {
  constexpr int64_t kElements = int64_t{1}
                                << 20;  // at once: they are four times as large while they are decoded
  const models::ScaledMatrix& scaled = *matrix_.scaled;
  const auto row_bytes = static_cast<int64_t>(scaled.row_bytes());
  const int64_t at_once = std::max<int64_t>(kElements / matrix_.columns, 1);
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    Tensor codes = ElementsAt(memory + row * row_bytes, count * row_bytes, torch::kUInt8, x_);
    if (scaled.code() == models::ScaledCode::kMxfp4)
      codes = torch::stack({codes.bitwise_and(15), codes.div(16, "floor")}, 1).flatten();
    const Tensor values = numbers_.index_select(0, codes.to(torch::kInt32)).view({count, matrix_.columns});
    const Tensor at =
        torch::arange(first_row + row, first_row + row + count, x_.options().dtype(torch::kInt64))
            .div(scaled.block_rows(), "floor");
    const Tensor scales = scales_.index_select(0, at).repeat_interleave(scaled.block_columns(), 1);
    AddRows(values.mul_(scales.narrow(1, 0, matrix_.columns)).to(x_.scalar_type()), first_row + row);
  }
}

void TensorProduct::AddRows(const Tensor& weights, int64_t first_row) {
  const auto multiply = [&](int64_t first, int64_t rows) {
    Tensor out = y_.narrow(0, first, rows).narrow(1, first_row, weights.size(0));
    torch::mm_out(out, x_.narrow(0, first, rows), weights.t());
  };
  for (int64_t row = 0; row < rows_.single; row += kDeviceRows) multiply(row, kDeviceRows);
  for (const auto& [first, rows] : rows_.chunks) multiply(first, rows);
}

double MeasureTensorProduct(const StoredMatrix& matrix, int64_t rows, zero::Device* device) {
  constexpr int kTurns = 4;      // the first loads the library
  constexpr int kProducts = 16;  // one after the other, as in a pass: it takes longer to hear of their end
  const torch::TensorOptions there = torch::TensorOptions().device(zero::TorchDeviceOf(*device));
  const Tensor x =
      torch::zeros({rows, matrix.columns},
                   there.dtype(matrix.type == kernels::DType::kBf16 ? torch::kBFloat16 : torch::kFloat32));
  const auto columns = static_cast<size_t>(matrix.columns);
  const size_t row_bytes = matrix.code.has_value()    ? matrix.code->row_bytes(columns)
                           : matrix.scaled != nullptr ? matrix.scaled->row_bytes()
                                                      : columns * kernels::BytesPerElement(matrix.type);
  const Tensor weights =
      torch::zeros({matrix.rows * static_cast<int64_t>(row_bytes)}, there.dtype(torch::kUInt8));
  const ProductRows all = {.single = rows, .chunks = {}};
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const double from = Now();
    for (int i = 0; i < kProducts; ++i) {
      TensorProduct product(x, all, matrix, device);
      product.Add(static_cast<const std::byte*>(weights.data_ptr()), 0, matrix.rows * matrix.columns);
    }
    zero::Finish(*device);
    best = std::min(best, (Now() - from) / kProducts);
  }
  return best;
}

}  // namespace penstock::generate
