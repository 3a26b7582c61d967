#include "models/deepspeed/scattered_tensor.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "models/weights/stored_type.h"
#include "models/weights/transpose.h"

namespace penstock::models {
namespace {

constexpr int64_t kStripElements = int64_t{4} << 20;    // 16 MiB
constexpr int64_t kLinesElements = int64_t{512} << 10;  // 2 MiB, that are turned at once

}  // namespace

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
  pieces_.push_back({&file, &tensor, first, elements_, elements});
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
    const uint64_t width = swap::DtypeBytes(piece->tensor->dtype);
    const auto values = static_cast<size_t>(count);
    buffer->raw.resize(std::max<size_t>(buffer->raw.size(), values * width));
    RETURN_IF_ERROR(piece->file->Read(*piece->tensor, static_cast<uint64_t>(piece->first + within) * width,
                                      {buffer->raw.data(), values * width}));
    kernels::Convert(StoredType(piece->tensor->dtype), buffer->raw.data(), kernels::DType::kFp32, to, values);
    from += count;
    to += count;
    n -= count;
    if (within + count == piece->elements) ++piece;
  }
  return absl::OkStatus();
}

// As it is kept, row by row: [rows, columns]. In the file a column is a row. So many rows are read together
// that the file is read in long runs, and each part of it once.
absl::Status ScatteredTensor::LoadStrip(const PublishedTensor& parameter, int64_t row, ReadBuffer* buffer,
                                        ReadBuffer::Strip* strip) const {
  const int64_t columns = parameter.columns;
  const int64_t most = std::clamp<int64_t>(kStripElements / columns, 1, parameter.rows);
  strip->tensor = nullptr;  // until it is whole
  strip->row = row - row % most;
  strip->rows = std::min(most, parameter.rows - strip->row);
  strip->values.resize(static_cast<size_t>(strip->rows * columns));
  const int64_t rows = strip->rows, together = std::max<int64_t>(1, kLinesElements / rows);
  buffer->values.resize(std::max(buffer->values.size(), static_cast<size_t>(together * rows)));
  for (int64_t column = 0; column < columns; column += together) {
    const int64_t count = std::min(together, columns - column);
    float* const lines = buffer->values.data();
    if (rows == parameter.rows) {
      RETURN_IF_ERROR(Read(column * rows, count * rows, lines, buffer));
    } else {
      for (int64_t c = 0; c < count; ++c)
        RETURN_IF_ERROR(Read((column + c) * parameter.rows + strip->row, rows, lines + c * rows, buffer));
    }
    Transpose(lines, rows, count, rows, strip->values.data() + column, columns);
  }
  strip->tensor = this;
  return absl::OkStatus();
}

absl::Status ScatteredTensor::ReadParameter(const PublishedTensor& parameter, int64_t from, int64_t to,
                                            float* out, ReadBuffer* buffer) const {
  if (!parameter.transposed) return Read(from, to - from, out, buffer);
  const int64_t columns = parameter.columns;
  while (from < to) {
    const int64_t row = from / columns;
    ReadBuffer::Strip* const strip = &buffer->strip;
    if (strip->tensor != this || row < strip->row || row >= strip->row + strip->rows)
      RETURN_IF_ERROR(LoadStrip(parameter, row, buffer, strip));
    const int64_t begin = from - strip->row * columns,
                  end = std::min(to, (strip->row + strip->rows) * columns);
    std::copy_n(strip->values.data() + begin, end - from, out);
    out += end - from;
    from = end;
  }
  return absl::OkStatus();
}

}  // namespace penstock::models
