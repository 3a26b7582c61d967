// A matrix of a pass in host memory that is counted and bounded (zero/memory/tensor_memory.h), row by row, in
// fp32 or bf16.
#ifndef PENSTOCK_GENERATE_HOST_ROWS_H_
#define PENSTOCK_GENERATE_HOST_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::generate {

class HostRows {
 public:
  HostRows() = default;
  // Holding nothing of use. kResourceExhausted: beyond the limit.
  static absl::StatusOr<HostRows> Of(kernels::DType type, int64_t rows, int64_t columns) {
    HostRows made;
    made.type_ = type;
    made.rows_ = rows;
    made.columns_ = columns;
    const auto bytes = rows * columns * static_cast<int64_t>(kernels::BytesPerElement(type));
    if (bytes > 0) {
      ASSIGN_OR_RETURN(made.memory_, zero::HostBuffer::Of(bytes, "generate: a pass"));
    }
    return made;
  }

  kernels::DType type() const { return type_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  size_t elements() const { return static_cast<size_t>(rows_ * columns_); }
  size_t row_bytes() const { return static_cast<size_t>(columns_) * kernels::BytesPerElement(type_); }
  std::byte* row(int64_t i) const { return memory_.data() + static_cast<size_t>(i) * row_bytes(); }
  std::byte* data() const { return memory_.data(); }
  float* floats() const { return reinterpret_cast<float*>(memory_.data()); }  // where the type is kFp32

 private:
  kernels::DType type_ = kernels::DType::kFp32;
  int64_t rows_ = 0, columns_ = 0;
  zero::HostBuffer memory_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_HOST_ROWS_H_
