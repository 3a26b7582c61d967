#include "models/weights/weight_export.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "kernels/split_master.h"
#include "models/weights/tile_places.h"
#include "tiering/plan/byte_size.h"

namespace penstock::models {
namespace {

constexpr uint64_t kMostSlots = 4;
constexpr uint64_t kLeastStripBytes = uint64_t{64} << 10;
constexpr int64_t kGroupRows = 16;  // turned together: sixteen fp32 values of a column fill a cache line
constexpr int64_t kGroupColumns = 256;
constexpr int64_t kElsewhereElements = 256 << 10;
constexpr int64_t kMergedElements = 4096;  // of a matrix, whose adapter is added at once

using kernels::DType;

// The segments of a tile that are read.
struct Segments {
  uint32_t first = 0;
  uint32_t count = 1;
};

Segments SegmentsRead(swap::Dtype dtype, DType weights) {
  if (weights == DType::kFp16) return {1, 1};                                // the fp32 master
  if (weights == DType::kBf16 && dtype == swap::Dtype::kF32) return {0, 2};  // high, low
  return {0, 1};
}

// What is frozen beside others that train has its weights and no master.
bool WeightsAlone(const swap::Geometry& geometry, uint32_t tile, DType weights) {
  return geometry.segments(tile) == 1 && weights != DType::kFp32;
}

Segments SegmentsOf(const swap::Geometry& geometry, uint32_t tile, const Segments& wanted, DType weights) {
  return WeightsAlone(geometry, tile, weights) ? Segments{0, 1} : wanted;
}

// Most that a tile's segments take in memory, each padded.
uint64_t SlotBytes(std::span<const swap::Geometry> parts, const Segments& wanted, DType weights) {
  uint64_t most = swap::kSectorBytes;
  for (const swap::Geometry& geometry : parts) {
    for (uint32_t t = 0; t < geometry.tiles(); ++t) {
      const Segments segments = SegmentsOf(geometry, t, wanted, weights);
      const uint32_t first = std::min(segments.first, geometry.segments(t));
      const uint32_t end = std::min(first + segments.count, geometry.segments(t));
      most = std::max(most, geometry.segment_start(t, end) - geometry.segment_start(t, first));
    }
  }
  return most;
}

// Of what adapters add, the high and the low part of a master count.
Segments SegmentsFor(const ExportOptions& options, DType weights) {
  return SegmentsRead(options.adapters.empty() ? options.dtype : swap::Dtype::kF32, weights);
}

// The weights of places in ascending order, read ahead and verified.
class TileWeights {
 public:
  TileWeights(std::span<swap::Store* const> parts, const std::vector<TilePlace>& places,
              const Segments& segments, DType weights, std::byte* memory, uint64_t slots, uint64_t slot_bytes)
      : parts_(parts), places_(places), segments_(segments), weights_(weights), slots_(slots) {
    for (uint64_t i = 0; i < slots; ++i) slots_[i].memory = memory + i * slot_bytes;
  }
  ~TileWeights() {
    for (Slot& slot : slots_) Settle(&slot);
  }
  TileWeights(const TileWeights&) = delete;
  TileWeights& operator=(const TileWeights&) = delete;

  // The segments of a place, valid until the next call.
  struct Tile {
    std::array<const std::byte*, 2> segments{};  // the second: where it is read
    bool weights_alone = false;                  // the first is the weights, and there is no other
  };
  // Reads on to `last` may run ahead.
  absl::StatusOr<Tile> Get(uint32_t place, uint32_t last) {
    for (uint32_t p = place; p <= last && p < place + slots_.size(); ++p) {
      RETURN_IF_ERROR(Ask(p));
    }
    Slot& slot = slots_[place % slots_.size()];
    if (slot.pending) {
      slot.pending = false;
      swap::Store& store = StoreOf(place);
      absl::Status status = store.Wait(&slot.io);
      if (status.ok()) status = store.VerifyRead(slot.io);
      if (!status.ok()) {
        slot.place = kNone;
        return status;
      }
    }
    const Segments read = Of(place);
    return Tile{{slot.memory, read.count > 1 ? slot.memory + Offset(place, 1) : nullptr},
                WeightsAlone(StoreOf(place).geometry(), places_[place].tile, weights_)};
  }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Slot {
    swap::TileIo io;
    std::byte* memory = nullptr;
    uint32_t place = kNone;
    bool pending = false;  // read and not yet verified
  };

  void Settle(Slot* slot) {
    // A read that nobody wants any more: how it ended is of no matter.
    if (slot->pending) StoreOf(slot->place).Wait(&slot->io).IgnoreError();
    slot->pending = false;
    slot->place = kNone;
  }

  swap::Store& StoreOf(uint32_t place) const { return *parts_[places_[place].part]; }

  Segments Of(uint32_t place) const {
    return SegmentsOf(StoreOf(place).geometry(), places_[place].tile, segments_, weights_);
  }

  // Of the i-th segment that is read, from where the first one is.
  uint64_t Offset(uint32_t place, uint32_t i) const {
    const swap::Geometry& geometry = StoreOf(place).geometry();
    const uint32_t tile = places_[place].tile, first = Of(place).first;
    return geometry.segment_start(tile, first + i) - geometry.segment_start(tile, first);
  }

  absl::Status Ask(uint32_t place) {
    Slot& slot = slots_[place % slots_.size()];
    if (slot.place == place) return absl::OkStatus();
    Settle(&slot);
    const Segments read = Of(place);
    std::array<void*, 2> to{};
    for (uint32_t s = 0; s < read.count; ++s) to[s] = slot.memory + Offset(place, s);
    RETURN_IF_ERROR(StoreOf(place).ReadSegments(&slot.io, places_[place].tile, read.first, read.count,
                                                std::span<void* const>(to.data(), read.count),
                                                aio::Priority::kPrefetch, swap::VersionChoice::kCommitted));
    slot.place = place;
    slot.pending = true;
    return absl::OkStatus();
  }

  const std::span<swap::Store* const> parts_;
  const std::vector<TilePlace>& places_;
  const Segments segments_;
  const DType weights_;
  std::vector<Slot> slots_;
};

// Writes tensors as elements of T: float, or uint16_t for bf16.
template <typename T>
class Exporter {
 public:
  Exporter(TileWeights* weights, const std::vector<TilePlace>& places, const ExportOptions& options,
           DType type, std::span<std::byte> strip, std::function<void(uint64_t bytes)> appended)
      : weights_(*weights),
        places_(places),
        options_(options),
        type_(type),
        strip_(strip),
        appended_(std::move(appended)) {}

  // `adapter`: what is added to it; null: nothing.
  absl::Status Write(const PublishedTensor& tensor, const MatrixAdapter* adapter,
                     swap::SafetensorsWriter* writer) {
    writer_ = writer;
    RETURN_IF_ERROR(TakeAdapter(adapter));
    if (options_.elsewhere && !InState(tensor)) return WriteFromElsewhere(tensor);
    const int64_t room = static_cast<int64_t>(strip_.size() / sizeof(T));
    if (!tensor.transposed) {
      int64_t filled = 0;
      absl::Status status = ForTiles(tensor, [&](const Piece& piece) -> absl::Status {
        for (int64_t from = piece.from; from < piece.to;) {
          const int64_t n = std::min(piece.to - from, room - filled);
          Convert(piece, from, n, strip() + filled);
          from += n;
          filled += n;
          if (filled < room) continue;
          RETURN_IF_ERROR(Append(filled));
          filled = 0;
        }
        return absl::OkStatus();
      });
      if (status.ok() && filled > 0) status = Append(filled);
      return status;
    }
    const int64_t at_once = std::min(tensor.columns, room / tensor.rows);
    for (int64_t c = 0; c < tensor.columns; c += at_once) {
      const int64_t columns = std::min(at_once, tensor.columns - c);
      absl::Status status = ForTiles(tensor, [&](const Piece& piece) {
        Turn(tensor, piece, c, columns);
        return absl::OkStatus();
      });
      if (status.ok()) status = Append(columns * tensor.rows);
      RETURN_IF_ERROR(status);
    }
    return absl::OkStatus();
  }

 private:
  // Elements [from, to) of a tensor, which one tile holds.
  struct Piece {
    int64_t from = 0, to = 0;
    int64_t shift = 0;  // element e of the tensor is element e + shift of the tile
    TileWeights::Tile data;
  };

  T* strip() const { return reinterpret_cast<T*>(strip_.data()); }

  template <typename Use>
  absl::Status ForTiles(const PublishedTensor& tensor, Use&& use) {
    const auto overlaps = [&](const TilePlace& place) {
      return PieceOf(tensor, place.block, place.first, place.elements).has_value();
    };
    const auto begin = std::find_if(places_.begin(), places_.end(), overlaps);
    const auto end = std::find_if_not(begin, places_.end(), overlaps);
    const auto last = static_cast<uint32_t>(end - places_.begin() - 1);
    for (auto it = begin; it != end; ++it) {
      ASSIGN_OR_RETURN(auto data, weights_.Get(static_cast<uint32_t>(it - places_.begin()), last));
      const TensorPiece held = *PieceOf(tensor, it->block, it->first, it->elements);
      RETURN_IF_ERROR(use(Piece{held.from, held.to, held.at - held.from, data}));
    }
    return absl::OkStatus();
  }

  bool InState(const PublishedTensor& tensor) const {
    return std::any_of(places_.begin(), places_.end(), [&](const TilePlace& place) {
      return PieceOf(tensor, place.block, place.first, place.elements).has_value();
    });
  }

  absl::Status ReadElsewhere(const PublishedTensor& tensor, int64_t from, int64_t n) {
    for (int64_t at = 0; at < n;) {
      const TensorPlace place = PlaceOf(tensor, from + at);
      const int64_t count = std::min(n - at, place.elements);
      RETURN_IF_ERROR(options_.elsewhere(place.block, place.first, count, elsewhere_.data() + at));
      at += count;
    }
    return absl::OkStatus();
  }

  absl::Status WriteFromElsewhere(const PublishedTensor& tensor) {
    const int64_t all = tensor.elements(), room = static_cast<int64_t>(strip_.size() / sizeof(T));
    const int64_t at_once = tensor.transposed ? all : std::min(all, kElsewhereElements);
    elsewhere_.resize(static_cast<size_t>(at_once));
    for (int64_t from = 0; from < all; from += at_once) {
      const int64_t n = std::min(at_once, all - from);
      RETURN_IF_ERROR(ReadElsewhere(tensor, from, n));
      if (adapter_ != nullptr) AddAdapter(from, n, elsewhere_.data());
      for (int64_t at = 0; at < n; at += room) {
        const int64_t count = std::min(room, n - at);
        if (tensor.transposed) {
          for (int64_t i = 0; i < count; ++i) {
            const int64_t e = at + i;  // as it is published
            const float value =
                elsewhere_[static_cast<size_t>(e % tensor.rows * tensor.columns + e / tensor.rows)];
            kernels::Convert(DType::kFp32, &value, kTo, strip() + i, 1);
          }
        } else {
          kernels::Convert(DType::kFp32, elsewhere_.data() + at, kTo, strip(), static_cast<size_t>(count));
        }
        RETURN_IF_ERROR(Append(count));
      }
    }
    return absl::OkStatus();
  }

  static constexpr DType kTo = sizeof(T) == 4 ? DType::kFp32 : DType::kBf16;

  void Convert(const Piece& piece, int64_t from, int64_t elements, T* to) const {
    if (adapter_ == nullptr) return ConvertAlone(piece, from, elements, kTo, to);
    for (int64_t done = 0; done < elements; done += kMergedElements) {
      const int64_t n = std::min(kMergedElements, elements - done);
      std::array<float, kMergedElements> values;
      ConvertAlone(piece, from + done, n, DType::kFp32, values.data());
      AddAdapter(from + done, n, values.data());
      kernels::Convert(DType::kFp32, values.data(), kTo, to + done, static_cast<size_t>(n));
    }
  }

  void ConvertAlone(const Piece& piece, int64_t from, int64_t elements, DType type, void* to) const {
    const auto [segments, weights_alone] = piece.data;
    const int64_t at = from + piece.shift;
    const auto n = static_cast<size_t>(elements);
    // The weights are halves of a master, or its rounding.
    const DType stored = weights_alone || type_ == DType::kBf16 ? type_ : DType::kFp32;
    const auto width = static_cast<int64_t>(kernels::BytesPerElement(stored));
    if (segments[1] != nullptr && type == DType::kFp32) {
      kernels::JoinMaster(reinterpret_cast<const uint16_t*>(segments[0]) + at,
                          reinterpret_cast<const int16_t*>(segments[1]) + at, static_cast<float*>(to), n);
    } else {
      kernels::Convert(stored, segments[0] + at * width, type, to, n);
    }
  }

  // Elements [from, from + n) of the matrix that is written.
  void AddAdapter(int64_t from, int64_t n, float* to) const {
    const int64_t columns = adapter_->down->columns, rank = adapter_->down->rows;
    for (int64_t e = from; e < from + n;) {
      const int64_t row = e / columns, column = e % columns, end = std::min(from + n, (row + 1) * columns);
      sums_.assign(static_cast<size_t>(end - e), 0);
      for (int64_t k = 0; k < rank; ++k) {
        const float up = up_[static_cast<size_t>(row * rank + k)];
        const float* const down = down_.data() + k * columns + column;
        for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += up * down[i];
      }
      for (size_t i = 0; i < sums_.size(); ++i)
        to[e - from + static_cast<int64_t>(i)] += sums_[i] * static_cast<float>(adapter_->scaling);
      e = end;
    }
  }

  absl::Status TakeAdapter(const MatrixAdapter* adapter) {
    adapter_ = nullptr;  // of no effect on its own tensors
    if (adapter == nullptr) return absl::OkStatus();
    for (const auto& [tensor, to] : {std::pair{adapter->down, &down_}, {adapter->up, &up_}}) {
      to->resize(static_cast<size_t>(tensor->elements()));
      RETURN_IF_ERROR(ForTiles(*tensor, [&, values = to->data()](const Piece& piece) {
        ConvertAlone(piece, piece.from, piece.to - piece.from, DType::kFp32, values + piece.from);
        return absl::OkStatus();
      }));
    }
    adapter_ = adapter;
    return absl::OkStatus();
  }

  // Puts what the piece has of columns [first, first + columns) into the strip, turned.
  void Turn(const PublishedTensor& tensor, const Piece& piece, int64_t first, int64_t columns) const {
    const int64_t width = tensor.columns, height = tensor.rows;
    const int64_t end_row = (piece.to + width - 1) / width;
    std::array<T, kGroupRows * kGroupColumns> group;
    std::array<int64_t, kGroupRows> from, to;  // columns that the piece has of each row
    for (int64_t row = piece.from / width; row < end_row; row += kGroupRows) {
      const int64_t rows = std::min(kGroupRows, end_row - row);
      for (int64_t c = first; c < first + columns; c += kGroupColumns) {
        const int64_t end = std::min(c + kGroupColumns, first + columns);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t start = (row + r) * width;
          const auto i = static_cast<size_t>(r);
          from[i] = std::clamp(piece.from - start, c, end);
          to[i] = std::max(from[i], std::min(end, piece.to - start));
          Convert(piece, start + from[i], to[i] - from[i], group.data() + r * kGroupColumns + (from[i] - c));
        }
        for (int64_t column = c; column < end; ++column) {
          T* out = strip() + (column - first) * height + row;
          for (int64_t r = 0; r < rows; ++r) {
            const auto i = static_cast<size_t>(r);
            if (column < from[i] || column >= to[i]) continue;
            out[r] = group[static_cast<size_t>(r * kGroupColumns + column - c)];
          }
        }
      }
    }
  }

  absl::Status Append(int64_t elements) {
    const uint64_t bytes = static_cast<uint64_t>(elements) * sizeof(T);
    RETURN_IF_ERROR(writer_->Append(strip_.first(bytes)));
    appended_(bytes);
    return absl::OkStatus();
  }

  swap::SafetensorsWriter* writer_ = nullptr;
  TileWeights& weights_;
  const std::vector<TilePlace>& places_;
  const ExportOptions& options_;
  const DType type_;  // of the run's weights
  std::vector<float> elsewhere_;
  const MatrixAdapter* adapter_ = nullptr;
  std::vector<float> down_, up_;     // its matrices, whole
  mutable std::vector<float> sums_;  // of a row
  const std::span<std::byte> strip_;
  const std::function<void(uint64_t bytes)> appended_;
};

// A file of the export: some of the layout's tensors, in its order.
struct Shard {
  std::string path;
  std::vector<const PublishedTensor*> tensors;
  uint64_t bytes = 0;
};

constexpr const char* kEnding = ".safetensors";

std::string StemOf(const std::string& path) { return std::string(absl::StripSuffix(path, kEnding)); }

std::vector<Shard> CutIntoShards(const ModelLayout& layout, const ExportOptions& options) {
  std::vector<Shard> shards(1);
  for (const PublishedTensor& tensor : layout.tensors) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.elements()) * swap::DtypeBytes(options.dtype);
    const bool full = options.max_shard_bytes > 0 && shards.back().bytes + bytes > options.max_shard_bytes;
    if (full && !shards.back().tensors.empty()) shards.emplace_back();
    shards.back().tensors.push_back(&tensor);
    shards.back().bytes += bytes;
  }
  if (shards.size() == 1) {
    shards[0].path = options.path;
    return shards;
  }
  const std::string stem = StemOf(options.path);
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].path = absl::StrFormat("%s-%05d-of-%05d%s", stem, i + 1, shards.size(), kEnding);
  }
  return shards;
}

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string IndexOf(const std::vector<Shard>& shards) {
  uint64_t bytes = 0;
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const Shard& shard : shards) {
    bytes += shard.bytes;
    for (const PublishedTensor* tensor : shard.tensors) map[tensor->name] = NameOf(shard.path);
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                        {"weight_map", std::move(map)}};
  return index.dump(2) + "\n";
}

// The shards that the index of an older export names; none where there is no index, or none that can be read.
std::set<std::string> ShardsOf(const std::string& index, const std::string& path) {
  std::set<std::string> shards;
  const absl::StatusOr<nlohmann::json> json = penstock::ReadJsonObject(index);
  if (!json.ok()) return shards;
  const auto map = json->find("weight_map");
  if (map == json->end() || !map->is_object()) return shards;
  const std::string stem = StemOf(path), directory = path.substr(0, path.size() - NameOf(path).size());
  for (const nlohmann::json& value : *map) {
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    // As CutIntoShards names them, and nothing else that somebody may have put into an index.
    if (NameOf(name) == name && absl::StartsWith(directory + name, stem + "-") &&
        absl::EndsWith(name, kEnding))
      shards.insert(directory + name);
  }
  return shards;
}

absl::Status AddText(const std::string& path, const std::string& text, bool overwrite,
                     std::vector<AtomicFile>* files) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, {.replace = overwrite}));
  RETURN_IF_ERROR(file.Write(text));
  files->push_back(std::move(file));
  return absl::OkStatus();
}

// With all its space reserved.
absl::StatusOr<std::vector<std::unique_ptr<swap::SafetensorsWriter>>> CreateShards(
    const std::vector<Shard>& shards, const ExportOptions& options) {
  std::vector<std::unique_ptr<swap::SafetensorsWriter>> writers;
  for (const Shard& shard : shards) {
    std::vector<swap::TensorInfo> tensors;
    tensors.reserve(shard.tensors.size());
    for (const PublishedTensor* tensor : shard.tensors)
      tensors.push_back({tensor->name, options.dtype, tensor->published_shape(), 0});
    ASSIGN_OR_RETURN(
        writers.emplace_back(),
        swap::SafetensorsWriter::Create(shard.path, std::move(tensors), options.metadata, options.overwrite));
  }
  return writers;
}

}  // namespace

ExportMemory MemoryForExport(std::span<const swap::Geometry> parts, const ModelLayout& layout,
                             const ExportOptions& options, DType weights) {
  const uint64_t slot = SlotBytes(parts, SegmentsFor(options, weights), weights);
  const uint64_t width = swap::DtypeBytes(options.dtype);
  uint64_t column = kLeastStripBytes, matrix = kLeastStripBytes;
  for (const PublishedTensor& tensor : layout.tensors) {
    if (!tensor.transposed) continue;
    column = std::max(column, static_cast<uint64_t>(tensor.rows) * width);
    matrix = std::max(matrix, static_cast<uint64_t>(tensor.elements()) * width);
  }
  ExportMemory memory{slot + column, kMostSlots * slot + matrix};
  for (const auto& [name, adapter] : options.adapters) {
    memory.beside_bytes = std::max(
        memory.beside_bytes,
        static_cast<uint64_t>(adapter.down->elements() + adapter.up->elements() + adapter.down->columns) *
            sizeof(float));
  }
  if (options.elsewhere) {
    int64_t most = kElsewhereElements;
    for (const PublishedTensor& tensor : layout.tensors)
      most = std::max(most, tensor.transposed ? tensor.elements() : 0);
    memory.beside_bytes += static_cast<uint64_t>(most) * sizeof(float);
  }
  return memory;
}

absl::StatusOr<int> ExportWeights(std::span<swap::Store* const> parts, const ModelLayout& layout,
                                  DType weight_type, std::span<std::byte> memory,
                                  const ExportOptions& options) {
  std::vector<swap::Geometry> geometries;
  for (const swap::Store* part : parts) geometries.push_back(part->geometry());
  ASSIGN_OR_RETURN(const std::vector<TilePlace> places, PlaceTiles(parts, layout, weight_type));
  const Segments segments = SegmentsFor(options, weight_type);
  const ExportMemory needs = MemoryForExport(geometries, layout, options, weight_type);
  const uint64_t slot_bytes = SlotBytes(geometries, segments, weight_type);
  if (memory.size() < needs.least_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "exporting needs at least ", tiering::FormatBytes(static_cast<int64_t>(needs.least_bytes)), " (",
        needs.least_bytes, " bytes) of memory, not ", memory.size()));
  }
  // Half of what a strip does not have to have goes to tiles in flight.
  const uint64_t spare = memory.size() - needs.least_bytes;
  const uint64_t slots = std::min(kMostSlots, 1 + spare / 2 / slot_bytes);
  TileWeights weights(parts, places, segments, weight_type, memory.data(), slots, slot_bytes);

  const std::vector<Shard> shards = CutIntoShards(layout, options);
  const std::string index = options.path + ".index.json";
  const bool sharded = shards.size() > 1;
  for (const std::string& key : {index, options.path}) {
    ASSIGN_OR_RETURN(const bool there, PathExists(key));
    if (there && !options.overwrite)
      return absl::AlreadyExistsError(absl::StrCat(key, " is there already (`overwrite` replaces it)"));
  }
  ASSIGN_OR_RETURN(std::vector<std::unique_ptr<swap::SafetensorsWriter>> writers,
                   CreateShards(shards, options));
  uint64_t total = 0, done = 0;
  for (const Shard& shard : shards) total += shard.bytes;
  const auto appended = [&](uint64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(done, total);
  };
  std::vector<AtomicFile> files;
  if (!options.config_path.empty())
    RETURN_IF_ERROR(AddText(options.config_path, options.config, options.overwrite, &files));
  const auto write_all = [&](auto exporter) -> absl::Status {
    for (size_t i = 0; i < shards.size(); ++i) {
      for (const PublishedTensor* tensor : shards[i].tensors) {
        const auto adapter = options.adapters.find(tensor->name);
        RETURN_IF_ERROR(exporter.Write(
            *tensor, adapter == options.adapters.end() ? nullptr : &adapter->second, writers[i].get()));
      }
      ASSIGN_OR_RETURN(AtomicFile file, writers[i]->Take());
      files.push_back(std::move(file));
    }
    return absl::OkStatus();
  };
  const std::span<std::byte> strip = memory.subspan(slots * slot_bytes);
  RETURN_IF_ERROR(
      options.dtype == swap::Dtype::kF32
          ? write_all(Exporter<float>(&weights, places, options, weight_type, strip, appended))
          : write_all(Exporter<uint16_t>(&weights, places, options, weight_type, strip, appended)));
  if (sharded) RETURN_IF_ERROR(AddText(index, IndexOf(shards), options.overwrite, &files));
  const auto superseded = [&] {
    std::set<std::string> old = options.overwrite ? ShardsOf(index, options.path) : std::set<std::string>();
    if (sharded) {
      for (const Shard& shard : shards) old.erase(shard.path);
    }
    return std::vector<std::string>(old.begin(), old.end());
  };
  RETURN_IF_ERROR(AtomicFile::CommitTogether(std::move(files), {options.path, index}, superseded));
  return static_cast<int>(shards.size());
}

}  // namespace penstock::models
