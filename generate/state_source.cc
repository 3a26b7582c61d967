// Weights of a training state: the first segment of its tiles, each checked against its checksum.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "generate/weight_source.h"
#include "models/weights/tile_places.h"

namespace penstock::generate {
namespace {

using kernels::DType;

class StateSource : public WeightSource {
 public:
  StateSource(aio::Engine* engine, const models::ModelLayout& layout, DType type)
      : WeightSource(engine), layout_(layout), type_(type), width_(type == DType::kFp32 ? 4 : 2) {
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
    std::vector<swap::Store*> ranks;
    ranks.reserve(stores_.size());
    for (const auto& store : stores_) ranks.push_back(store.get());
    ASSIGN_OR_RETURN(tiles_, models::PlaceTiles(ranks, layout_, type_));
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
  using Tile = models::TilePlace;

  uint64_t BytesOf(const Tile& tile) const {
    return swap::PaddedBytes(stores_[tile.part]->geometry().segment_bytes(tile.tile, 0));
  }

  // What a tile has of a tensor.
  std::optional<WeightPart> PartOf(int tensor, const Tile& tile) const {
    const std::optional<models::TensorPiece> piece =
        models::PieceOf(layout_.tensors[static_cast<size_t>(tensor)], tile.block, tile.first, tile.elements);
    if (!piece.has_value()) return std::nullopt;
    return WeightPart{tensor, piece->from, piece->to - piece->from,
                      static_cast<uint64_t>(piece->at) * width_};
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
    read->store = stores_[tile.part].get();
    void* const place = memory;
    RETURN_IF_ERROR(read->store->ReadSegments(&read->tile, tile.tile, 0, 1, std::span<void* const>(&place, 1),
                                              priority, swap::VersionChoice::kCommitted));
    read->pending = true;
    return absl::OkStatus();
  }

  const models::ModelLayout layout_;
  const DType type_;
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
                                                        const WeightUses& uses) {
  if (!uses.experts.empty())
    return absl::UnimplementedError("weights: a state of a mixture of experts, which nothing trains yet");
  auto source = std::make_unique<StateSource>(engine, layout, type);
  RETURN_IF_ERROR(source->Open(parts, sequence, uses.in_order));
  return source;
}

}  // namespace penstock::generate
