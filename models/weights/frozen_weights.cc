#include "models/weights/frozen_weights.h"

#include <limits.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/split_master.h"
#include "models/weights/stored_type.h"

namespace penstock::models {
namespace {

using kernels::DType;

constexpr size_t kAtOnce = 1024;  // elements that are made wider by way of a buffer

int64_t WidthOf(DType type) { return static_cast<int64_t>(kernels::BytesPerElement(type)); }

// Hugging Face's cache links to its files, and aio::File follows no links: this one is the user's.
absl::StatusOr<std::unique_ptr<aio::File>> OpenFile(const std::string& path) {
  aio::FileOptions options;
  options.path = path;
  options.read_only = true;
  options.allow_unaligned_file_system = true;
  absl::StatusOr<std::unique_ptr<aio::File>> file = aio::File::Open(options);
  if (!absl::IsFailedPrecondition(file.status())) return file;
  std::array<char, PATH_MAX> real{};
  if (::realpath(path.c_str(), real.data()) == nullptr) return file;
  options.path = real.data();
  return aio::File::Open(options);
}

}  // namespace

// Elements of one tensor, on their way to `to`.
struct FrozenWeights::Part {
  size_t tensor = 0;
  int64_t from = 0, elements = 0;  // of the tensor
  std::byte* to = nullptr;
  uint64_t offset = 0;          // in the file, of what is read:
  uint64_t bytes = 0;           // all of it but
  uint64_t tail_bytes = 0;      // a last row of codes, or all of what is wider than its place
  std::byte* raw = nullptr;     // where the former goes; the latter has a buffer,
  std::vector<std::byte> tail;  // this one
  int64_t whole_rows = 0;       // of codes, that are read to `raw`
};

class FrozenWeights::TileRead : public zero::FrozenSource::Read {
 public:
  std::vector<Part> parts;
  std::vector<std::unique_ptr<aio::Request>> requests;
  size_t used = 0;  // of them
  std::byte* to = nullptr;
  int64_t bytes = 0;  // of the tile, in memory
  std::atomic<int> outstanding{0};
  Done done = nullptr;
  void* context = nullptr;

  void Ended() {
    if (outstanding.fetch_sub(1) == 1) done(context);
  }
  static void OnDone(aio::Request&, void* read) { static_cast<TileRead*>(read)->Ended(); }

  void Add(aio::File& file, uint64_t offset, std::byte* memory, uint64_t n) {
    if (n == 0) return;
    if (used == requests.size()) requests.push_back(std::make_unique<aio::Request>());
    aio::Request& request = *requests[used++];
    request.PrepareRead(file, offset, memory, n);
    request.set_priority(aio::Priority::kDemand);
    request.set_on_complete(&TileRead::OnDone, this);
  }
};

absl::StatusOr<std::unique_ptr<FrozenWeights>> FrozenWeights::Open(const std::string& path,
                                                                   ModelLayout layout, DType type,
                                                                   const std::string& label) {
  ASSIGN_OR_RETURN(const std::unique_ptr<WeightImport> import,
                   WeightImport::OpenAnyCode(path, layout, label));
  std::unique_ptr<FrozenWeights> weights(new FrozenWeights(std::move(layout), type));
  for (size_t i = 0; i < weights->layout_.tensors.size(); ++i) RETURN_IF_ERROR(weights->Take(*import, i));
  return weights;
}

absl::Status FrozenWeights::Take(const WeightImport& import, size_t i) {
  const PublishedTensor& tensor = layout_.tensors[i];
  const WeightImport::Place place = import.PlaceOf(i);
  if (place.scaled != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        place.path, ": ", tensor.name, " is in ", ScaledCodeName(place.scaled->code()),
        ", which `penstock generate` reads and no training: give whole weights, or packed ones"));
  }
  const DType stored = StoredType(place.dtype);
  const bool matrix = tensor.columns > 0;
  if (place.code.has_value()) {
    bits_ = import.packed()->bits;
  } else if (matrix && tensor.transposed) {
    return absl::UnimplementedError(absl::StrCat(tensor.name, " is published turned"));
  } else if (matrix && WidthOf(stored) > WidthOf(type_)) {
    return absl::UnimplementedError(
        absl::StrCat(tensor.name, " is published in fp32, and the run computes in 16 bit"));
  }
  auto& file = files_[place.path];
  if (file == nullptr) {
    ASSIGN_OR_RETURN(file, OpenFile(place.path));
  }
  tensors_.push_back({file.get(), place.offset, stored, place.code});
  return absl::OkStatus();
}

std::vector<std::string> FrozenWeights::Paths() const {
  std::vector<std::string> paths;
  for (const auto& [path, file] : files_) paths.push_back(path);
  return paths;
}

FrozenWeights::Part FrozenWeights::PartOf(size_t i, const TensorPiece& piece) const {
  const Tensor& tensor = tensors_[i];
  Part part;
  part.tensor = i;
  part.from = piece.from;
  part.elements = piece.to - piece.from;
  const auto room = static_cast<uint64_t>(part.elements * WidthOf(type_));
  if (!tensor.code.has_value()) {
    const auto width = static_cast<uint64_t>(WidthOf(tensor.type));
    const uint64_t bytes = static_cast<uint64_t>(part.elements) * width;
    part.offset = tensor.offset + static_cast<uint64_t>(part.from) * width;
    (bytes <= room ? part.bytes : part.tail_bytes) = bytes;
  } else {
    const auto columns = static_cast<uint64_t>(layout_.tensors[i].columns);
    const uint64_t row = tensor.code->row_bytes(columns);
    const auto from = static_cast<uint64_t>(piece.from), end = static_cast<uint64_t>(piece.to);
    const uint64_t first = from / columns, last = (end + columns - 1) / columns;
    part.offset = tensor.offset + first * row;
    // What is decoded must never overtake what is not yet: so no row that the part has the beginning of, and
    // no more than there is room for.
    uint64_t whole = last - first - (end % columns != 0 ? 1 : 0);
    if (row > columns * static_cast<uint64_t>(WidthOf(type_))) whole = 0;
    while (whole * row > room) --whole;
    part.whole_rows = static_cast<int64_t>(whole);
    part.bytes = whole * row;
    part.tail_bytes = (last - first - whole) * row;
  }
  return part;
}

int64_t FrozenWeights::BytesOf(tiering::BlockIndex block, int64_t elements) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < layout_.tensors.size(); ++i) {
    const std::optional<TensorPiece> piece = PieceOf(layout_.tensors[i], block.value(), 0, elements);
    if (!piece.has_value()) continue;
    const Part part = PartOf(i, *piece);
    bytes += static_cast<int64_t>(part.bytes + part.tail_bytes);
  }
  return bytes;
}

std::string FrozenWeights::PlaceOf(tiering::BlockIndex block) const {
  for (size_t i = 0; i < layout_.tensors.size(); ++i) {
    const int64_t all = layout_.block_elements[static_cast<size_t>(block.value())];
    if (PieceOf(layout_.tensors[i], block.value(), 0, all).has_value()) return tensors_[i].file->path();
  }
  return "no file";
}

std::unique_ptr<zero::FrozenSource::Read> FrozenWeights::MakeRead() const {
  return std::make_unique<TileRead>();
}

absl::Status FrozenWeights::Start(aio::Engine& io, Read* into, tiering::BlockIndex block, int64_t first,
                                  int64_t elements, std::byte* to, Done done, void* context) {
  TileRead& read = static_cast<TileRead&>(*into);
  read.parts.clear();
  read.used = 0;
  read.to = to;
  read.bytes = elements * WidthOf(type_);
  read.done = done;
  read.context = context;
  for (size_t i = 0; i < layout_.tensors.size(); ++i) {
    const std::optional<TensorPiece> piece = PieceOf(layout_.tensors[i], block.value(), first, elements);
    if (!piece.has_value()) continue;
    Part& part = read.parts.emplace_back(PartOf(i, *piece));
    part.to = to + piece->at * WidthOf(type_);
    part.raw = part.to + part.elements * WidthOf(type_) - static_cast<int64_t>(part.bytes);
    part.tail.resize(part.tail_bytes);
    aio::File& file = *tensors_[i].file;
    read.Add(file, part.offset, part.raw, part.bytes);
    read.Add(file, part.offset + part.bytes, part.tail.data(), part.tail_bytes);
  }
  // One more than the requests: who submits is the last to leave where all are over at once.
  read.outstanding.store(static_cast<int>(read.used) + 1);
  std::vector<aio::Request*> all;
  for (size_t i = 0; i < read.used; ++i) all.push_back(read.requests[i].get());
  if (!all.empty()) RETURN_IF_ERROR(io.Submit(all));
  read.Ended();
  return absl::OkStatus();
}

absl::Status FrozenWeights::Finish(Read* of) {
  TileRead& read = static_cast<TileRead&>(*of);
  for (size_t i = 0; i < read.used; ++i) RETURN_IF_ERROR(read.requests[i]->status());
  std::byte* end = read.to;
  for (Part& part : read.parts) {
    std::memset(end, 0, static_cast<size_t>(part.to - end));
    tensors_[part.tensor].code.has_value() ? Decode(part) : Widen(part);
    part.tail = std::vector<std::byte>();
    end = part.to + part.elements * WidthOf(type_);
  }
  std::memset(end, 0, static_cast<size_t>(read.to + read.bytes - end));
  return absl::OkStatus();
}

// Rounded as masters are, so that the bits are those of weights that were copied.
void FrozenWeights::Round(const float* values, size_t n, std::byte* to) const {
  if (type_ != DType::kBf16) return kernels::Convert(DType::kFp32, values, type_, to, n);
  std::array<int16_t, kAtOnce> low;
  for (size_t at = 0; at < n; at += kAtOnce) {
    kernels::SplitMaster(values + at, reinterpret_cast<uint16_t*>(to) + at, low.data(),
                         std::min(kAtOnce, n - at));
  }
}

void FrozenWeights::Widen(const Part& part) const {
  const DType stored = tensors_[part.tensor].type;
  if (stored == type_) return;  // it is in its place
  const std::byte* const from = part.tail_bytes > 0 ? part.tail.data() : part.raw;
  const auto n = static_cast<size_t>(part.elements);
  const auto width = static_cast<size_t>(WidthOf(stored)), to_width = static_cast<size_t>(WidthOf(type_));
  std::array<float, kAtOnce> some, values;
  for (size_t at = 0; at < n; at += kAtOnce) {
    const size_t count = std::min(kAtOnce, n - at);
    std::memcpy(some.data(), from + at * width, count * width);
    kernels::Convert(stored, some.data(), DType::kFp32, values.data(), count);
    Round(values.data(), count, part.to + at * to_width);
  }
}

void FrozenWeights::Decode(const Part& part) const {
  const kernels::WeightCode& code = *tensors_[part.tensor].code;
  const int64_t columns = layout_.tensors[part.tensor].columns, width = WidthOf(type_);
  const size_t row_bytes = code.row_bytes(static_cast<size_t>(columns));
  std::vector<uint8_t> row(row_bytes);
  std::vector<float> values(static_cast<size_t>(columns));
  const int64_t first = part.from / columns, end = part.from + part.elements;
  for (int64_t r = first; r * columns < end; ++r) {
    const int64_t number = r - first;
    const bool in_place = number < part.whole_rows;
    const std::byte* const from = in_place ? part.raw : part.tail.data();
    const int64_t at = in_place ? number : number - part.whole_rows;
    std::memcpy(row.data(), from + at * static_cast<int64_t>(row_bytes), row_bytes);
    kernels::DecodeWeights(code, row.data(), static_cast<size_t>(columns), DType::kFp32, values.data());
    const int64_t begin = std::max(part.from, r * columns), stop = std::min(end, (r + 1) * columns);
    Round(values.data() + (begin - r * columns), static_cast<size_t>(stop - begin),
          part.to + (begin - part.from) * width);
  }
}

}  // namespace penstock::models
