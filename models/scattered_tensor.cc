#include "models/scattered_tensor.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "models/stored_type.h"

namespace penstock::models {
absl::Status ScatteredTensor::Add(const TorchFile& file, const TorchTensor& tensor, int64_t first,
                                  int64_t elements) {
  if (!IsFloat(tensor.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": a tensor of type ",
                                                   std::string(swap::DtypeName(tensor.dtype)),
                                                   ": F32, BF16 or F16 can be taken"));
  }
  if (first < 0 || elements < 0 || first > tensor.elements || elements > tensor.elements - first) {
    return absl::InvalidArgumentError(absl::StrCat(
        file.path(), ": elements ", first, " to ", first + elements, " are asked of a tensor of ",
        tensor.elements, ": it is not what the list of parameters says"));
  }
  if (elements == 0) return absl::OkStatus();
  pieces_.push_back({&file, tensor, first, elements_, elements});
  elements_ += elements;
  return absl::OkStatus();
}

absl::Status ScatteredTensor::Read(int64_t from, int64_t n, float* to, ReadBuffer* buffer) const {
  if (from < 0 || n < 0 || from > elements_ || n > elements_ - from)
    return absl::InvalidArgumentError(
        absl::StrCat("elements ", from, " to ", from + n, " of a tensor of ", elements_));
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), from, [](int64_t at, const Piece& each) {
    return at < each.start + each.elements;
  });
  while (n > 0) {
    const int64_t within = from - piece->start;
    const int64_t count = std::min({n, piece->elements - within, kBufferElements});
    const uint64_t width = swap::DtypeBytes(piece->tensor.dtype);
    const auto values = static_cast<size_t>(count);
    buffer->raw.resize(std::max<size_t>(buffer->raw.size(), values * width));
    RETURN_IF_ERROR(piece->file->Read(piece->tensor, static_cast<uint64_t>(piece->first + within) * width,
                                      {buffer->raw.data(), values * width}));
    kernels::Convert(StoredType(piece->tensor.dtype), buffer->raw.data(), kernels::DType::kFp32, to, values);
    from += count;
    to += count;
    n -= count;
    if (within + count == piece->elements) ++piece;
  }
  return absl::OkStatus();
}

// As it is stored here, row by row: [rows, columns]. In the file a column is a row, so that a run of rows is
// a piece of every line there.
absl::Status ScatteredTensor::ReadParameter(const PublishedTensor& parameter, int64_t from, int64_t to,
                                            float* out, ReadBuffer* buffer) const {
  if (!parameter.transposed) return Read(from, to - from, out, buffer);
  const int64_t columns = parameter.columns, end_row = (to + columns - 1) / columns;
  for (int64_t row = from / columns; row < end_row; row += kBufferElements) {
    const int64_t rows = std::min(kBufferElements, end_row - row);
    buffer->values.resize(std::max(buffer->values.size(), static_cast<size_t>(rows)));
    for (int64_t column = 0; column < columns; ++column) {
      RETURN_IF_ERROR(Read(column * parameter.rows + row, rows, buffer->values.data(), buffer));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * columns + column;
        if (at >= from && at < to) out[at - from] = buffer->values[static_cast<size_t>(r)];
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace penstock::models
