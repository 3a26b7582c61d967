// Weights of a training state: the first segment of its tiles, each checked against its checksum.
//
// A tile is a run of a block's elements, cut where the plan of the training wanted; a matrix may begin and
// end anywhere in one, and two matrices may share one.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "generate/weight_source.h"
#include "tiering/plan/model_graph.h"

namespace penstock::generate {
namespace {

using kernels::DType;

class StateSource : public WeightSource {
 public:
  StateSource(aio::Engine* engine, const models::ModelLayout& layout, DType type)
      : WeightSource(engine), layout_(layout), width_(type == DType::kFp32 ? 4 : 2) {
    tensors_.assign(layout_.tensors.size(), Stored{type, false});
  }

  absl::Status Open(const zero::ShardDirectories& parts, uint64_t sequence, std::span<const int> uses) {
    for (const std::vector<std::string>& part : parts) {
      swap::StoreOptions options;
      options.directories = part;
      options.read_only = true;
      if (parts.size() > 1) options.sequence = sequence;
      options.allow_unaligned_file_system = true;
      ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> store, swap::Store::Open(engine_, options));
      if (store->committed_sequence() != sequence) {
        return absl::FailedPreconditionError(
            absl::StrCat(part.front(), " changed while it was being opened: is a run writing there?"));
      }
      stores_.push_back(std::move(store));
    }
    RETURN_IF_ERROR(PlaceTiles());
    for (const int tensor : uses) {
      for (size_t t = 0; t < tiles_.size(); ++t) {
        const std::optional<WeightPart> part = PartOf(tensor, tiles_[t]);
        if (!part.has_value()) continue;
        if (unit_tiles_.empty() || unit_tiles_.back() != t) {
          unit_tiles_.push_back(t);
          units_.push_back({BytesOf(tiles_[t]), {}});
        }
        units_.back().parts.push_back(*part);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Start(size_t unit, std::byte* memory, UnitRead* read) override {
    RETURN_IF_ERROR(Ask(tiles_[unit_tiles_[unit]], memory, aio::Priority::kPrefetch, read));
    return absl::OkStatus();
  }

  uint64_t scratch_bytes() const override {
    uint64_t most = swap::kSectorBytes;
    for (const Tile& tile : tiles_) most = std::max(most, BytesOf(tile));
    return 2 * most;
  }

  absl::Status ReadRows(int tensor, std::span<const int64_t> rows, std::span<std::byte> memory,
                        std::byte* to) override {
    const models::PublishedTensor& t = layout_.tensors[static_cast<size_t>(tensor)];
    const int64_t row = t.columns == 0 ? t.rows : t.columns;
    std::vector<const Tile*> wanted;
    for (const Tile& tile : tiles_) {
      const std::optional<WeightPart> part = PartOf(tensor, tile);
      if (!part.has_value()) continue;
      if (std::any_of(rows.begin(), rows.end(), [&](int64_t r) {
            return r * row < part->first + part->elements && (r + 1) * row > part->first;
          }))
        wanted.push_back(&tile);
    }
    const size_t half = memory.size() / 2;
    absl::Status status;
    for (size_t i = 0; i < wanted.size() && status.ok(); ++i) {
      if (i == 0) status = Ask(*wanted[0], memory.data(), aio::Priority::kDemand, &reads_[0]);
      // The next one is on its way while this one is checked.
      if (status.ok() && i + 1 < wanted.size()) {
        status = Ask(*wanted[i + 1], memory.data() + (i + 1) % 2 * half, aio::Priority::kDemand,
                     &reads_[(i + 1) % 2]);
      }
      if (reads_[i % 2].pending) status.Update(Finish(&reads_[i % 2]));
      if (!status.ok()) break;
      const WeightPart part = *PartOf(tensor, *wanted[i]);
      rows_bytes_ += BytesOf(*wanted[i]);
      CopyRows(part, rows, row, memory.data() + i % 2 * half, to);
    }
    for (UnitRead& read : reads_) {
      if (read.pending) Finish(&read).IgnoreError();  // the error before it is the one to tell
    }
    return status;
  }

 private:
  struct Tile {
    int block = 0;
    int64_t first = 0, elements = 0;
    size_t store = 0;
    uint32_t number = 0;  // in its store
  };

  uint64_t BytesOf(const Tile& tile) const {
    return swap::PaddedBytes(stores_[tile.store]->geometry().segment_bytes(tile.number, 0));
  }

  // What a tile has of a tensor.
  std::optional<WeightPart> PartOf(int tensor, const Tile& tile) const {
    const models::PublishedTensor& t = layout_.tensors[static_cast<size_t>(tensor)];
    const int64_t from = std::max(t.offset, tile.first);
    const int64_t to = std::min(t.offset + t.elements(), tile.first + tile.elements);
    if (t.block != tile.block || from >= to) return std::nullopt;
    return WeightPart{tensor, from - t.offset, to - from, static_cast<uint64_t>(from - tile.first) * width_};
  }

  void CopyRows(const WeightPart& part, std::span<const int64_t> rows, int64_t row, const std::byte* memory,
                std::byte* to) const {
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t from = std::max(rows[i] * row, part.first);
      const int64_t end = std::min((rows[i] + 1) * row, part.first + part.elements);
      if (from >= end) continue;
      const int64_t into = static_cast<int64_t>(i) * row + (from - rows[i] * row);
      std::memcpy(to + static_cast<uint64_t>(into) * width_,
                  memory + part.at + static_cast<uint64_t>(from - part.first) * width_,
                  static_cast<uint64_t>(end - from) * width_);
    }
  }

  absl::Status Ask(const Tile& tile, std::byte* memory, aio::Priority priority, UnitRead* read) {
    read->store = stores_[tile.store].get();
    void* const place = memory;
    RETURN_IF_ERROR(read->store->ReadSegments(&read->tile, tile.number, 0, 1,
                                              std::span<void* const>(&place, 1), priority,
                                              swap::Which::kCommitted));
    read->pending = true;
    return absl::OkStatus();
  }

  // In the order of blocks, elements ascending; what is not a tile of this model is damage.
  absl::Status PlaceTiles() {
    std::vector<uint32_t> next(stores_.size(), 0);
    const auto world = static_cast<int>(stores_.size());
    for (size_t block = 0; block < layout_.block_elements.size(); ++block) {
      const int64_t run = layout_.block_elements[block];
      const int64_t share = tiering::ShardElements(run, world);
      for (size_t s = 0; s < stores_.size(); ++s) {
        const swap::Geometry& geometry = stores_[s]->geometry();
        for (int64_t at = 0; at < share;) {
          const uint32_t number = next[s]++;
          const auto elements = number < geometry.tiles()
                                    ? static_cast<int64_t>(geometry.segment_bytes(number, 0) / width_)
                                    : int64_t{0};
          if (elements <= 0 || at + elements > share) {
            return absl::DataLossError(absl::StrCat("tile ", number, " of ", stores_[s]->path(0),
                                                    " is missing, or is not one of its model's"));
          }
          const int64_t first = static_cast<int64_t>(s) * share + at;
          if (first < run) tiles_.push_back({static_cast<int>(block), first, elements, s, number});
          at += elements;
        }
      }
    }
    for (size_t s = 0; s < stores_.size(); ++s) {
      if (next[s] != stores_[s]->geometry().tiles())
        return absl::DataLossError(absl::StrCat(stores_[s]->path(0), " has more tiles than its model needs"));
    }
    return absl::OkStatus();
  }

  const models::ModelLayout layout_;
  const uint64_t width_;                              // bytes of an element
  std::vector<std::unique_ptr<swap::Store>> stores_;  // by rank
  std::vector<Tile> tiles_;
  std::vector<size_t> unit_tiles_;  // parallel to units_
  std::array<UnitRead, 2> reads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> OpenState(aio::Engine* engine,
                                                        const zero::ShardDirectories& parts,
                                                        uint64_t sequence, DType type,
                                                        const models::ModelLayout& layout,
                                                        std::span<const int> uses) {
  auto source = std::make_unique<StateSource>(engine, layout, type);
  RETURN_IF_ERROR(source->Open(parts, sequence, uses));
  return source;
}

}  // namespace penstock::generate
