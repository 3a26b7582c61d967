// Weights read where they lie in safetensors: past the page cache, at whatever offset they begin.
//
// A file's data begins behind a header of any length, so a unit's bytes begin anywhere. The whole sectors
// around them are read, and the part says where in them the elements are.
#include <limits.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/bytes.h"
#include "base/status_macros.h"
#include "generate/weight_source.h"
#include "models/weights/stored_type.h"
#include "models/weights/weight_import.h"

namespace penstock::generate {
namespace {

using kernels::DType;

constexpr uint64_t kRowReads = 64;  // in flight at once
constexpr uint64_t kLeastScratch = uint64_t{1} << 20;

uint64_t WidthOf(DType type) { return type == DType::kFp32 ? 4 : 2; }

// The whole sectors around [from, to), within a file of `size` bytes.
struct Sectors {
  uint64_t begin = 0, end = 0;
  Sectors(uint64_t from, uint64_t to, uint64_t size)
      : begin(aio::AlignDown(from, aio::kSectorBytes)),
        end(std::min(aio::AlignUp(to, aio::kSectorBytes), size)) {}
  uint64_t padded() const { return aio::AlignUp(end - begin, aio::kSectorBytes); }
};

class SafetensorsSource : public WeightSource {
 public:
  SafetensorsSource(aio::Engine* engine, const models::ModelLayout& layout)
      : WeightSource(engine), layout_(layout) {}

  absl::Status Open(const std::string& path, const WeightUses& uses, const std::string& label) {
    ASSIGN_OR_RETURN(const std::unique_ptr<models::WeightImport> import,
                     models::WeightImport::OpenAnyCode(path, layout_, label));
    for (size_t i = 0; i < layout_.tensors.size(); ++i) {
      const models::WeightImport::Place place = import->PlaceOf(i);
      // What has scales of its own is computed as the table of tokens is stored.
      const DType type = place.code.has_value()                           ? import->packed()->compute
                         : place.scaled == nullptr                        ? models::StoredType(place.dtype)
                         : i > 0 && tensors_.front().type != DType::kBf16 ? DType::kFp32
                                                                          : DType::kBf16;
      tensors_.push_back({type, place.turned, place.code, place.scaled});
      ASSIGN_OR_RETURN(const size_t file, FileOf(place.path));
      places_.push_back({file, place.offset});
      scales_.push_back({{}, place.scales_bytes});
      if (place.scales_bytes > 0) {
        ASSIGN_OR_RETURN(scales_.back().place.file, FileOf(place.scales_path));
        scales_.back().place.offset = place.scales_offset;
      }
      largest_row_ = std::max(largest_row_, RowBytes(i));
    }
    for (const int tensor : uses.in_order) Cut(tensor);
    for (const ExpertMatrices& expert : uses.experts) AddExpert(expert);
    return absl::OkStatus();
  }

  absl::Status Start(size_t unit, std::byte* memory, UnitRead* read) override {
    const Extent& extent = extents_[unit];
    read->store = nullptr;
    read->request.PrepareRead(*files_[extent.file], extent.offset, memory, extent.bytes);
    read->request.set_priority(aio::Priority::kPrefetch);
    RETURN_IF_ERROR(engine_.Submit(&read->request));
    read->pending = true;
    return absl::OkStatus();
  }

  absl::Status StartExpert(size_t expert, std::byte* memory, aio::Priority priority,
                           ExpertRead* read) override {
    read->started = 0;
    absl::Status status;
    for (const Extent& extent : expert_extents_[expert]) {
      aio::Request& request = read->requests[read->started];
      request.PrepareRead(*files_[extent.file], extent.offset, memory, extent.bytes);
      request.set_priority(priority);
      status = engine_.Submit(&request);
      if (!status.ok()) break;
      ++read->started;
      memory += aio::AlignUp(extent.bytes, aio::kSectorBytes);
    }
    // What was started before one that cannot be is waited for: it writes to memory of the caller's.
    if (!status.ok()) FinishExpert(read).IgnoreError();
    return status;
  }

  uint64_t scratch_bytes() const override {
    const uint64_t row = aio::AlignDown(largest_row_ + 2 * aio::kSectorBytes, aio::kSectorBytes);
    return std::max(kLeastScratch / row, uint64_t{1}) * row;
  }

  absl::Status ReadRows(int tensor, std::span<const int64_t> rows, std::span<std::byte> memory,
                        std::byte* to) override {
    const auto index = static_cast<size_t>(tensor);
    const uint64_t row_bytes = RowBytes(index);
    const uint64_t slot = aio::AlignDown(row_bytes + 2 * aio::kSectorBytes, aio::kSectorBytes);
    const size_t at_once = std::min<size_t>(kRowReads, memory.size() / slot);
    if (at_once == 0) return absl::InvalidArgumentError("weights: less scratch than scratch_bytes()");
    for (size_t from = 0; from < rows.size(); from += at_once) {
      const size_t n = std::min(at_once, rows.size() - from);
      RETURN_IF_ERROR(
          ReadSome(index, rows.subspan(from, n), row_bytes, slot, memory.data(), to + from * row_bytes));
    }
    return absl::OkStatus();
  }

 private:
  struct Place {
    size_t file = 0;
    uint64_t offset = 0;
  };
  struct Scales {
    Place place;
    uint64_t bytes = 0;  // 0: a matrix has none, or they are in memory
  };
  struct Extent {
    size_t file = 0;
    uint64_t offset = 0, bytes = 0;
  };

  // A row as it is stored; a vector is one row.
  int64_t RowElements(size_t i) const {
    const models::PublishedTensor& t = layout_.tensors[i];
    return t.columns == 0 || tensors_[i].turned ? t.rows : t.columns;
  }

  uint64_t RowBytes(size_t i) const {
    const Stored& stored = tensors_[i];
    const auto elements = static_cast<uint64_t>(RowElements(i));
    if (stored.scaled != nullptr) return stored.scaled->row_bytes();
    return stored.code.has_value() ? stored.code->row_bytes(elements) : WidthOf(stored.type) * elements;
  }

  absl::StatusOr<size_t> FileOf(const std::string& path) {
    const auto [at, added] = by_path_.emplace(path, files_.size());
    if (!added) return at->second;
    aio::FileOptions options;
    options.path = path;
    options.read_only = true;
    options.allow_unaligned_file_system = true;  // read-only weights may lie anywhere
    absl::StatusOr<std::unique_ptr<aio::File>> file = aio::File::Open(options);
    // Hugging Face's cache links to its files, and aio::File follows no links: this one is the user's.
    if (absl::IsFailedPrecondition(file.status())) {
      std::array<char, PATH_MAX> real{};
      if (::realpath(path.c_str(), real.data()) != nullptr) {
        options.path = real.data();
        file = aio::File::Open(options);
      }
    }
    RETURN_IF_ERROR(file.status());
    ASSIGN_OR_RETURN(const uint64_t size, (*file)->Size());
    sizes_.push_back(size);
    files_.push_back(*std::move(file));
    return at->second;
  }

  void Add(int tensor, int64_t first, int64_t elements) {
    const Place& place = places_[static_cast<size_t>(tensor)];
    const auto index = static_cast<size_t>(tensor);
    const auto bytes = [&](int64_t n) {  // of whole rows
      return RowBytes(index) * static_cast<uint64_t>(n / RowElements(index));
    };
    const uint64_t from = place.offset + bytes(first);
    const Sectors sectors(from, from + bytes(elements), sizes_[place.file]);
    extents_.push_back({place.file, sectors.begin, sectors.end - sectors.begin});
    units_.push_back({sectors.padded(), {{tensor, first, elements, from - sectors.begin}}});
  }

  // Whole rows; a turned matrix stays whole, since its product is a sum over its rows.
  void Cut(int tensor) {
    const models::PublishedTensor& t = layout_.tensors[static_cast<size_t>(tensor)];
    if (turned(tensor)) return Add(tensor, 0, t.elements());
    const uint64_t row = RowBytes(static_cast<size_t>(tensor));
    const auto rows = static_cast<int64_t>(std::max(kUnitBytes / row, uint64_t{1}));
    for (int64_t at = 0; at < t.rows; at += rows)
      Add(tensor, at * t.columns, std::min(rows, t.rows - at) * t.columns);
  }

  uint64_t TensorBytes(int tensor) const {
    const models::PublishedTensor& t = layout_.tensors[static_cast<size_t>(tensor)];
    const auto index = static_cast<size_t>(tensor);
    return RowBytes(index) * static_cast<uint64_t>(t.elements() / RowElements(index));
  }

  // One unit of all of an expert's matrices. What lies side by side in a file is one extent.
  void AddExpert(const ExpertMatrices& expert) {
    struct Piece {
      size_t file = 0;
      uint64_t from = 0, bytes = 0;
      size_t part = 0;
      bool is_scales = false;
      bool operator<(const Piece& other) const {
        return std::pair(file, from) < std::pair(other.file, other.from);
      }
    };
    WeightUnit unit;
    std::vector<Piece> pieces;
    for (const int tensor : {expert.gate, expert.up, expert.down}) {
      if (tensor < 0) continue;
      const auto index = static_cast<size_t>(tensor);
      const Place &place = places_[index], &scales = scales_[index].place;
      pieces.push_back({place.file, place.offset, TensorBytes(tensor), unit.parts.size()});
      if (scales_[index].bytes > 0)
        pieces.push_back({scales.file, scales.offset, scales_[index].bytes, unit.parts.size(), true});
      unit.parts.push_back({tensor, 0, layout_.tensors[index].elements(), 0, 0, scales_[index].bytes});
    }
    std::sort(pieces.begin(), pieces.end());
    std::vector<Extent> extents;
    for (size_t i = 0; i < pieces.size();) {
      const size_t file = pieces[i].file;
      const uint64_t begin = pieces[i].from;
      size_t next = i;
      uint64_t end = begin;
      while (next < pieces.size() && pieces[next].file == file && pieces[next].from == end)
        end += pieces[next++].bytes;
      const Sectors sectors(begin, end, sizes_[file]);
      for (; i < next; ++i) {
        WeightPart& part = unit.parts[pieces[i].part];
        (pieces[i].is_scales ? part.scales_at : part.at) = unit.bytes + pieces[i].from - sectors.begin;
      }
      extents.push_back({file, sectors.begin, sectors.end - sectors.begin});
      unit.bytes += sectors.padded();
    }
    experts_.push_back(std::move(unit));
    expert_extents_.push_back(std::move(extents));
  }

  absl::Status ReadSome(size_t tensor, std::span<const int64_t> rows, uint64_t row_bytes, uint64_t slot,
                        std::byte* memory, std::byte* to) {
    const Place& place = places_[tensor];
    std::array<aio::Request*, kRowReads> submitted{};
    const auto sectors = [&](size_t i) {
      const uint64_t from = place.offset + row_bytes * static_cast<uint64_t>(rows[i]);
      return Sectors(from, from + row_bytes, sizes_[place.file]);
    };
    for (size_t i = 0; i < rows.size(); ++i) {
      const Sectors around = sectors(i);
      requests_[i].PrepareRead(*files_[place.file], around.begin, memory + i * slot,
                               around.end - around.begin);
      requests_[i].set_priority(aio::Priority::kDemand);
      submitted[i] = &requests_[i];
      rows_bytes_ += around.padded();
    }
    const std::span<aio::Request* const> all(submitted.data(), rows.size());
    RETURN_IF_ERROR(engine_.Submit(all));
    RETURN_IF_ERROR(engine_.WaitAll(all));
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint64_t from = place.offset + row_bytes * static_cast<uint64_t>(rows[i]);
      std::memcpy(to + i * row_bytes, memory + i * slot + (from - sectors(i).begin), row_bytes);
    }
    return absl::OkStatus();
  }

  const models::ModelLayout layout_;
  std::map<std::string, size_t> by_path_;
  std::vector<std::unique_ptr<aio::File>> files_;
  std::vector<uint64_t> sizes_;                      // parallel to files_
  std::vector<Place> places_;                        // parallel to layout_.tensors
  std::vector<Scales> scales_;                       // likewise
  std::vector<Extent> extents_;                      // parallel to units_
  std::vector<std::vector<Extent>> expert_extents_;  // parallel to experts_
  std::array<aio::Request, kRowReads> requests_;
  uint64_t largest_row_ = aio::kSectorBytes;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> OpenSafetensors(aio::Engine* engine, const std::string& path,
                                                              const models::ModelLayout& layout,
                                                              const WeightUses& uses,
                                                              const std::string& label) {
  auto source = std::make_unique<SafetensorsSource>(engine, layout);
  RETURN_IF_ERROR(source->Open(path, uses, label));
  return source;
}

}  // namespace penstock::generate
