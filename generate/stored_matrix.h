// A matrix as it is stored, for kernels that multiply with it.
#ifndef PENSTOCK_GENERATE_STORED_MATRIX_H_
#define PENSTOCK_GENERATE_STORED_MATRIX_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "kernels/float16.h"
#include "kernels/weight_code.h"
#include "models/weights/scaled_weights.h"

namespace penstock::generate {

// [rows, columns].
struct StoredMatrix {
  int64_t rows = 0, columns = 0;
  kernels::DType type = kernels::DType::kBf16;  // where it is not coded
  std::optional<kernels::WeightCode> code = std::nullopt;
  // Of a matrix with scales of its own, as which it is stored; `type` is what it is decoded to.
  std::shared_ptr<const models::ScaledMatrix> scaled = nullptr;
  bool turned = false;  // stored as [columns, rows]; it comes whole then
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_STORED_MATRIX_H_
