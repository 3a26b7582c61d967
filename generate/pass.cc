#include "generate/pass.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/decode.h"

namespace penstock::generate {
namespace {

using kernels::DType;

bool IsMatrix(const models::ParameterDescription& parameter) { return parameter.columns > 0; }
bool IsAdapter(const models::ParameterDescription& parameter) {
  return parameter.name.starts_with(models::kAdapterPrefix);
}

// A parameter of an expert of layer `layer`.
void AddExpert(const models::Decoder& decoder, size_t layer, const models::ParameterDescription& parameter,
               int number, std::vector<ExpertMatrices>* experts) {
  const models::DecoderShape& shape = decoder.shape;
  const models::MixtureFunction& mixture = decoder.function.mixture;
  experts->resize(static_cast<size_t>(shape.layers * shape.mixture.experts));
  const auto each = static_cast<size_t>(shape.mixture.experts);
  ExpertMatrices& of = (*experts)[layer * each + static_cast<size_t>(parameter.expert)];
  const auto is = [&](const std::string& name, const char* kind) {
    return parameter.name == mixture.ExpertParameter(parameter.expert, name, kind);
  };
  if (!mixture.gate.empty() && is(mixture.gate, "weight")) of.gate = number;
  if (is(mixture.up, "weight")) of.up = number;
  if (is(mixture.down, "weight")) of.down = number;
  if (is(mixture.up, "bias")) of.up_bias = number;
  if (is(mixture.down, "bias")) of.down_bias = number;
}

}  // namespace

MatrixOrder OrderOf(const models::Decoder& decoder, const models::ModelLayout& layout) {
  const models::DecoderShape& shape = decoder.shape;
  MatrixOrder order;
  int number = 0, head = -1;
  size_t block_number = 0;
  for (const models::BlockDescription& block : decoder.blocks) {
    const bool layer = block_number >= 1 && block_number <= static_cast<size_t>(shape.layers);
    const size_t first = order.all.size();
    for (const models::ParameterDescription& parameter : block.parameters) {
      const bool stays = decoder.function.mixture.IsRouter(parameter.name) || IsAdapter(parameter);
      if (IsAdapter(parameter)) order.adapters.push_back(number);
      if (layer && IsMatrix(parameter) && !stays && parameter.expert < 0) order.all.push_back(number);
      if (parameter.expert >= 0) AddExpert(decoder, block_number - 1, parameter, number, &order.experts);
      if (block_number == static_cast<size_t>(shape.head_block) && parameter.name == shape.head)
        head = number;
      ++number;
    }
    if (layer) order.before_attention.push_back(first + static_cast<size_t>(shape.matrices_before_attention));
    ++block_number;
  }
  PENSTOCK_CHECK(head >= 0 && static_cast<size_t>(number) == layout.tensors.size(),
                 "a decoder's description is its layout's");
  order.all.push_back(head);
  return order;
}

StoredMatrix StoredAs(const WeightSource& source, const models::ModelLayout& layout, int tensor) {
  const models::PublishedTensor& matrix = layout.tensors[static_cast<size_t>(tensor)];
  return {.rows = matrix.rows,
          .columns = matrix.columns,
          .type = source.type(tensor),
          .code = source.code(tensor),
          .scaled = source.scaled(tensor),
          .turned = source.turned(tensor)};
}

DType ComputeType(const WeightSource& source, const MatrixOrder& order) {
  const auto are_narrow = [&](const std::vector<int>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](int tensor) { return source.type(tensor) == DType::kBf16; });
  };
  return are_narrow(order.all) && are_narrow(order.adapters) ? DType::kBf16 : DType::kFp32;
}

// ---- What is kept.

namespace {

// Vectors, routers, adapters, and tables of block 0 that are small; not the other matrices that are only
// multiplied with.
bool IsKept(const models::Decoder& decoder, size_t block, const models::ParameterDescription& parameter,
            uint64_t width, uint64_t table_bytes) {
  const models::DecoderShape& shape = decoder.shape;
  if (!IsMatrix(parameter) || IsAdapter(parameter)) return true;
  if (decoder.function.mixture.IsRouter(parameter.name)) return true;
  const bool table =
      block == 0 && (parameter.name == shape.token_table || parameter.name == shape.position_table);
  return table && static_cast<uint64_t>(parameter.elements()) * width <= table_bytes;
}

template <typename Visit>
void ForKept(const models::Decoder& decoder, DType type, uint64_t table_bytes, Visit visit) {
  int number = 0;
  size_t block_number = 0;
  for (const models::BlockDescription& block : decoder.blocks) {
    for (const models::ParameterDescription& parameter : block.parameters) {
      const DType own = decoder.function.mixture.IsWide(parameter.name) ? DType::kFp32 : type;
      visit(static_cast<int>(block_number), parameter, number++,
            IsKept(decoder, block_number, parameter, kernels::BytesPerElement(own), table_bytes), own);
    }
    ++block_number;
  }
}

}  // namespace

KeptTensors::Sizes KeptTensors::SizesOf(const models::Decoder& decoder, const WeightSource& source,
                                        DType type, uint64_t table_bytes) {
  Sizes sizes;
  ForKept(decoder, type, table_bytes,
          [&](int, const models::ParameterDescription& parameter, int number, bool kept, DType own) {
            if (!kept) return;
            // An allocation is rounded to whole cache lines.
            const auto elements = static_cast<uint64_t>(parameter.elements());
            sizes.kept_bytes += (elements * kernels::BytesPerElement(own) + 127) / 64 * 64;
            uint64_t raw =
                source.type(number) == own ? 0 : elements * kernels::BytesPerElement(source.type(number));
            if (const auto& code = source.code(number); code.has_value())
              raw = static_cast<uint64_t>(parameter.rows) *
                    code->row_bytes(static_cast<size_t>(parameter.columns));
            if (const auto& scaled = source.scaled(number); scaled != nullptr)
              raw = static_cast<uint64_t>(parameter.rows) * scaled->row_bytes();
            sizes.loading_bytes = std::max(sizes.loading_bytes, raw);
          });
  return sizes;
}

absl::StatusOr<std::unique_ptr<KeptTensors>> KeptTensors::Load(const models::Decoder& decoder,
                                                               const models::ModelLayout& layout,
                                                               WeightSource* source, DType type,
                                                               uint64_t table_bytes,
                                                               std::span<std::byte> scratch) {
  auto result = std::make_unique<KeptTensors>();
  result->layout_ = &layout;
  result->source_ = source;
  result->type_ = type;
  result->scratch_ = scratch;
  absl::Status status;
  ForKept(decoder, type, table_bytes,
          [&](int block, const models::ParameterDescription& parameter, int number, bool kept, DType own) {
            result->numbers_.emplace(std::pair(block, parameter.name), number);
            if (!kept || !status.ok()) return;
            std::vector<int64_t> rows(IsMatrix(parameter) ? static_cast<size_t>(parameter.rows) : 1);
            std::iota(rows.begin(), rows.end(), int64_t{0});
            absl::StatusOr<HostRows> read =
                result->Read(number, rows, IsMatrix(parameter) ? parameter.columns : parameter.rows, own);
            status = read.status();
            if (status.ok()) result->kept_.emplace(number, *std::move(read));
          });
  RETURN_IF_ERROR(status);
  return result;
}

int KeptTensors::tensor(int block, std::string_view name) const {
  const auto found = numbers_.find(std::pair(block, std::string(name)));
  return found == numbers_.end() ? -1 : found->second;
}

int KeptTensors::matrix(int block, std::string_view name) const {
  int number = tensor(block, absl::StrCat(std::string(name), ".weight"));
  if (number < 0) number = tensor(block, name);
  PENSTOCK_CHECK(number >= 0, "a block has the matrices of its function");
  return number;
}

absl::StatusOr<HostRows> KeptTensors::Read(int tensor, std::span<const int64_t> rows, int64_t columns,
                                           DType type) {
  const DType stored = source_->type(tensor);
  const auto count = static_cast<int64_t>(rows.size());
  ASSIGN_OR_RETURN(HostRows result, HostRows::Of(type, count, columns));
  const std::optional<kernels::WeightCode>& code = source_->code(tensor);
  const models::ScaledMatrix* const scaled = source_->scaled(tensor).get();
  if (!code.has_value() && scaled == nullptr && stored == type) {
    RETURN_IF_ERROR(source_->ReadRows(tensor, rows, scratch_, result.data()));
    return result;
  }
  const auto width = static_cast<size_t>(columns);
  const size_t row_bytes = code.has_value()    ? code->row_bytes(width)
                           : scaled != nullptr ? scaled->row_bytes()
                                               : width * kernels::BytesPerElement(stored);
  ASSIGN_OR_RETURN(const zero::HostBuffer raw, zero::HostBuffer::Of(count * static_cast<int64_t>(row_bytes),
                                                                    "generate: rows of a table"));
  RETURN_IF_ERROR(source_->ReadRows(tensor, rows, scratch_, raw.data()));
  if (code.has_value()) {
    DecodeRows(*code, raw.data(), count, columns, type, result.data());
  } else if (scaled != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      scaled->Decode(rows[static_cast<size_t>(i)], raw.data() + static_cast<size_t>(i) * row_bytes, type,
                     result.row(i));
    }
  } else {
    kernels::Convert(stored, raw.data(), type, result.data(), result.elements());
  }
  return result;
}

absl::StatusOr<HostRows> KeptTensors::Rows(int table, std::span<const int64_t> rows) {
  const int64_t columns = layout_->tensors[static_cast<size_t>(table)].columns;
  ASSIGN_OR_RETURN(HostRows result, HostRows::Of(type_, static_cast<int64_t>(rows.size()), columns));
  const auto kept = kept_.find(table);
  HostRows read;
  std::vector<int64_t> at(rows.begin(), rows.end());
  if (kept == kept_.end()) {
    std::vector<int64_t> unique = at;
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    ASSIGN_OR_RETURN(read, Read(table, unique, columns, type_));
    for (int64_t& row : at) row = std::lower_bound(unique.begin(), unique.end(), row) - unique.begin();
  }
  const HostRows& from = kept == kept_.end() ? read : kept->second;
  for (size_t i = 0; i < at.size(); ++i)
    std::memcpy(result.row(static_cast<int64_t>(i)), from.row(at[i]), from.row_bytes());
  return result;
}

// ---- What the stream brings.

// Units that hold a part of one of the first `matrix` matrices.
size_t PassRunner::UnitsBefore(size_t matrix) const {
  const int last = parts_.order->all[matrix - 1];
  size_t units = parts_.source->units().size();
  const auto holds = [&](const WeightUnit& unit) {
    return std::any_of(unit.parts.begin(), unit.parts.end(),
                       [last](const WeightPart& part) { return part.tensor == last; });
  };
  while (units > 0 && !holds(parts_.source->units()[units - 1])) --units;
  return units;
}

void PassRunner::AppendStart() {
  parts_.stream->AppendUnits(0, parts_.cache->on_drive() ? UnitsBefore(parts_.order->before_attention.front())
                                                         : parts_.source->units().size());
}

void PassRunner::AppendRest(const std::vector<Share>& shares) {
  if (!parts_.cache->on_drive()) return;
  size_t from = UnitsBefore(parts_.order->before_attention.front());
  for (int64_t layer = 0; layer < parts_.decoder->shape.layers; ++layer) {
    for (const Share& share : shares) {
      parts_.stream->AppendCache(
          parts_.cache->ReadOf(share.slot, layer, share.past, static_cast<int64_t>(share.tokens.size())));
    }
    const auto next = static_cast<size_t>(layer) + 1;
    const size_t end = next < parts_.order->before_attention.size()
                           ? UnitsBefore(parts_.order->before_attention[next])
                           : parts_.source->units().size();
    parts_.stream->AppendUnits(from, end);
    from = end;
  }
}

absl::Status PassRunner::ForParts(
    int tensor, const StoredMatrix& matrix,
    absl::FunctionRef<absl::Status(const std::byte* memory, int64_t first, int64_t elements)> add) {
  for (int64_t done = 0; done < matrix.rows * matrix.columns;) {
    if (!held_) {
      ASSIGN_OR_RETURN(unit_, parts_.stream->Next());
      PENSTOCK_CHECK(!unit_.is_cache, "weights come in the order of their use");
      held_ = true;
      part_ = 0;
    }
    const std::vector<WeightPart>& parts = parts_.source->units()[unit_.unit].parts;
    const WeightPart& part = parts[part_];
    PENSTOCK_CHECK(part.tensor == tensor && part.first == done, "matrices come in the order of their use");
    RETURN_IF_ERROR(add(unit_.memory + part.at, part.first, part.elements));
    done += part.elements;
    if (++part_ < parts.size()) continue;
    held_ = false;
    RETURN_IF_ERROR(parts_.stream->Release(unit_));
  }
  return absl::OkStatus();
}

absl::StatusOr<PassRunner::Records> PassRunner::TakeRecords(const Share& share, int64_t layer) {
  if (!parts_.cache->on_drive()) {
    const CacheRecords records =
        parts_.cache->Records(share.slot, layer, share.past, static_cast<int64_t>(share.tokens.size()));
    return Records{.memory = records.memory, .first = records.first, .item = {}};
  }
  ASSIGN_OR_RETURN(const StreamItem item, parts_.stream->Next());
  PENSTOCK_CHECK(item.is_cache && item.cache.slot == share.slot && item.cache.layer == layer,
                 "records come in the order of their use");
  return Records{.memory = item.memory, .first = item.cache.first, .item = item};
}

absl::Status PassRunner::KeepRecords(const Records& records) {
  if (!parts_.cache->on_drive()) return absl::OkStatus();
  RETURN_IF_ERROR(parts_.cache->Keep(records.item.cache, records.memory));
  return parts_.stream->Release(records.item);
}

std::vector<int64_t> PassRunner::WantedRows(const std::vector<Share>& shares,
                                            const std::vector<int64_t>& first) {
  std::vector<int64_t> wanted;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (!shares[i].wants_logits) continue;
    const auto count = static_cast<int64_t>(shares[i].tokens.size());
    for (int64_t t = shares[i].decodes ? 0 : count - 1; t < count; ++t) wanted.push_back(first[i] + t);
  }
  return wanted;
}

}  // namespace penstock::generate
