#include "generate/host_latent.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "generate/decode.h"
#include "kernels/product.h"

namespace penstock::generate {
namespace {

using kernels::DType;

// Terms of a head's product for which another thread is worth waking.
constexpr int64_t kLeastTerms = 32 << 10;

size_t Heads(int64_t terms) { return static_cast<size_t>(std::max<int64_t>(1, kLeastTerms / terms)); }

}  // namespace

HostLatent::HostLatent(const models::Decoder& decoder, ProductScratch* scratch)
    : shape_(decoder.shape.latent),
      neighbours_(decoder.function.latent.turns_neighbours),
      heads_(decoder.shape.heads),
      scratch_(*scratch) {}

absl::Status HostLatent::Begin(DType type) {
  up_ = {};  // before there is another
  ASSIGN_OR_RETURN(up_, HostRows::Of(type, heads_ * head_rows(), shape_.rank));
  return absl::OkStatus();
}

void HostLatent::Add(const StoredMatrix& matrix, const std::byte* memory, int64_t first, int64_t elements) {
  const int64_t columns = up_.columns(), row = first / columns, rows = elements / columns;
  if (matrix.code.has_value())
    return DecodeRows(*matrix.code, memory, rows, columns, up_.type(), up_.row(row), &scratch_.pool);
  if (matrix.scaled == nullptr) {
    const size_t width = kernels::BytesPerElement(up_.type());
    return kernels::Convert(matrix.type, memory, up_.type(), up_.data() + static_cast<size_t>(first) * width,
                            static_cast<size_t>(elements));
  }
  scratch_.ForRows(rows, columns, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const int64_t at = row + static_cast<int64_t>(i);
      matrix.scaled->Decode(at, memory + i * matrix.scaled->row_bytes(), up_.type(), up_.row(at));
    }
  });
}

void HostLatent::PlaceTurned(DType type, const std::byte* from, std::byte* to) const {
  const size_t width = kernels::BytesPerElement(type), count = static_cast<size_t>(shape_.turned);
  if (!neighbours_) {
    std::memcpy(to, from, count * width);
    return;
  }
  for (size_t i = 0; i < count; ++i)
    std::memcpy(to + (i % 2 * (count / 2) + i / 2) * width, from + i * width, width);
}

absl::StatusOr<HostRows> HostLatent::LatentsOf(const HostRows& down) const {
  ASSIGN_OR_RETURN(HostRows latents, HostRows::Of(down.type(), down.rows(), shape_.rank));
  for (int64_t row = 0; row < down.rows(); ++row)
    std::memcpy(latents.row(row), down.row(row), latents.row_bytes());
  return latents;
}

absl::StatusOr<HostRows> HostLatent::Records(const HostRows& down, const HostRows& latents) const {
  const size_t width = kernels::BytesPerElement(down.type()), turned = static_cast<size_t>(shape_.turned);
  ASSIGN_OR_RETURN(HostRows records, HostRows::Of(down.type(), down.rows(), shape_.turned + shape_.rank));
  for (int64_t row = 0; row < down.rows(); ++row) {
    PlaceTurned(down.type(), down.row(row) + latents.row_bytes(), records.row(row));
    std::memcpy(records.row(row) + turned * width, latents.row(row), latents.row_bytes());
  }
  return records;
}

absl::StatusOr<HostRows> HostLatent::Queries(const HostRows& q) {
  const int64_t depth = shape_.query_depth(), record = shape_.turned + shape_.rank;
  HostRows widened;
  if (q.type() != DType::kFp32) {
    ASSIGN_OR_RETURN(widened, scratch_.Converted(q, DType::kFp32));
  }
  const HostRows& wide = q.type() == DType::kFp32 ? q : widened;
  ASSIGN_OR_RETURN(HostRows queries, HostRows::Of(DType::kFp32, q.rows(), heads_ * record));
  const auto rows = static_cast<size_t>(q.rows());
  scratch_.pool.ParallelFor(
      static_cast<size_t>(heads_), Heads(q.rows() * shape_.plain * shape_.rank),
      [&](size_t begin, size_t end) {
        for (auto head = static_cast<int64_t>(begin); head < static_cast<int64_t>(end); ++head) {
          const float* const from = wide.floats() + head * depth;
          float* const to = queries.floats() + head * record;
          kernels::MultiplyRowsTurned(
              {from, rows, static_cast<size_t>(shape_.plain), static_cast<size_t>(wide.columns())},
              up_.type(), up_.row(head * head_rows()), static_cast<size_t>(shape_.rank),
              {to + shape_.turned, static_cast<size_t>(shape_.rank), static_cast<size_t>(queries.columns())});
          for (int64_t row = 0; row < q.rows(); ++row) {
            PlaceTurned(DType::kFp32,
                        reinterpret_cast<const std::byte*>(from + row * wide.columns() + shape_.plain),
                        reinterpret_cast<std::byte*>(to + row * queries.columns()));
          }
        }
      });
  widened = {};
  return q.type() == DType::kFp32 ? std::move(queries) : scratch_.Converted(queries, q.type());
}

absl::StatusOr<HostRows> HostLatent::Values(const HostRows& mixed) {
  ASSIGN_OR_RETURN(HostRows values, HostRows::Of(DType::kFp32, mixed.rows(), heads_ * shape_.value));
  scratch_.pool.ParallelFor(
      static_cast<size_t>(heads_), Heads(mixed.rows() * shape_.value * shape_.rank),
      [&](size_t begin, size_t end) {
        for (auto head = static_cast<int64_t>(begin); head < static_cast<int64_t>(end); ++head) {
          kernels::MultiplyRows({mixed.floats() + head * shape_.rank, static_cast<size_t>(mixed.rows()),
                                 static_cast<size_t>(shape_.rank), static_cast<size_t>(mixed.columns())},
                                up_.type(), up_.row(head * head_rows() + shape_.plain),
                                {values.floats() + head * shape_.value, static_cast<size_t>(shape_.value),
                                 static_cast<size_t>(values.columns())});
        }
      });
  return up_.type() == DType::kFp32 ? std::move(values) : scratch_.Converted(values, up_.type());
}

}  // namespace penstock::generate
