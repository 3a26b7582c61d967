#include "zero/engine/new_state.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "base/check.h"
#include "base/io_error.h"
#include "base/read_ahead.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "swap/replace_parts.h"
#include "tiering/plan/plan_layout.h"
#include "zero/engine/store_layout.h"
#include "zero/engine/tile_ring.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {
namespace {

constexpr int64_t kTileBytes = int64_t{4} << 20;
constexpr size_t kTilesAtOnce = 3;  // on their way to the drive, but for the one that is filled
constexpr size_t kTilesRead = 3;    // ahead, but for the one that is written

constexpr std::array kKinds = {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment};
using Values = std::vector<float>;  // of a tile, of one kind

struct Place {
  int block = 0;
  int64_t first = 0, elements = 0;
};

// Elements of a tile that takes no more than `bytes`.
int64_t TileElements(const tiering::Precision& precision, int64_t bytes) {
  int64_t elements = bytes / precision.UnpaddedBytes(tiering::kElementAlignment) * tiering::kElementAlignment;
  while (elements > tiering::kElementAlignment && precision.TotalBytes(elements) > bytes)
    elements -= tiering::kElementAlignment;
  return std::max(elements, tiering::kElementAlignment);
}

class Writer {
 public:
  Writer(const NewState& state, const ReadState& read) : state_(state), read_(read) {
    const tiering::Precision precision = state.format.precision();
    const int64_t most =
        TileElements(precision, state.tile_bytes > 0 ? std::min(state.tile_bytes, kTileBytes) : kTileBytes);
    for (size_t block = 0; block < state.block_elements.size(); ++block) {
      for (const tiering::Tile& tile : tiering::CutTiles(state.block_elements[block], most)) {
        places_.push_back({static_cast<int>(block), tile.offset, tile.elements});
        layout_.tiles.push_back(TileLayoutOf(precision, tile.elements));
      }
    }
  }

  const swap::Layout& layout() const { return layout_; }

  absl::Status ReadOnly() const {
    std::array<std::unique_ptr<ReadAhead<Values>>, kKinds.size()> ahead = ReadKinds();
    for (size_t t = 0; t < places_.size(); ++t) {
      for (const auto& each : ahead) {
        if (each != nullptr) RETURN_IF_ERROR(each->Next().status());
      }
    }
    return state_.check ? state_.check() : absl::OkStatus();
  }

  absl::Status Run(const std::function<void(uint64_t, uint64_t)>& progress) {
    ASSIGN_OR_RETURN(swap::StoreOptions options, Checked());
    aio::EngineOptions io_options;
    io_options.log = [](std::string_view) {};
    ASSIGN_OR_RETURN(std::unique_ptr<aio::Engine> io, aio::Engine::Create(std::move(io_options)));
    ASSIGN_OR_RETURN(store_, swap::Store::Create(*io, options, layout_, state_.identity));
    aio::ArenaOptions arena_options;
    arena_options.lock = false;
    arena_options.bytes = kTilesAtOnce * store_->geometry().largest_slot_bytes();
    ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> arena, aio::Arena::Create(arena_options));
    TileRing ring(*store_, kTilesAtOnce, state_.step);
    uint64_t done = 0;
    absl::Status status;
    const std::array<std::unique_ptr<ReadAhead<Values>>, kKinds.size()> ahead = ReadKinds();
    for (uint32_t t = 0; t < places_.size() && status.ok(); ++t) {
      std::array<const Values*, kKinds.size()> values{};
      for (size_t k = 0; k < kKinds.size() && status.ok(); ++k) {
        if (ahead[k] == nullptr) continue;
        const absl::StatusOr<Values*> of_tile = ahead[k]->Next();
        PENSTOCK_CHECK(!of_tile.ok() || *of_tile != nullptr, "fewer tiles were read than there are");
        status = of_tile.status();
        if (status.ok()) values[k] = *of_tile;
      }
      if (status.ok()) status = WriteTile(t, values, arena->data(), &ring);
      done += store_->geometry().slot_bytes(t);
      if (status.ok()) progress(done, total_);
    }
    const absl::Status settled = ring.SettleAll();  // also after an error: the memory is still written from
    if (status.ok()) status = settled;
    if (status.ok() && state_.check) status = state_.check();
    if (status.ok()) {
      status = store_->CommitGiven({.step = static_cast<uint64_t>(state_.step),
                                    .updates = static_cast<uint64_t>(state_.updates),
                                    .payload = state_.payload});
    }
    if (!status.ok()) swap::Store::Discard(std::move(store_));  // of no use to anybody
    store_.reset();
    return status;
  }

 private:
  // That there is room, before anything is made.
  absl::StatusOr<swap::StoreOptions> Checked() {
    RETURN_IF_ERROR(swap::CheckSpace(state_.store, layout_, state_.identity));
    for (const swap::TileLayout& tile : layout_.tiles) {
      for (const uint64_t bytes : tile.segment_bytes) total_ += swap::PaddedBytes(bytes);
    }
    return state_.store;
  }

  // By kind; null: it is none that the state keeps.
  std::array<std::unique_ptr<ReadAhead<Values>>, kKinds.size()> ReadKinds() const {
    std::array<std::unique_ptr<ReadAhead<Values>>, kKinds.size()> ahead;
    for (size_t k = 0; k < kKinds.size(); ++k) {
      if (Keeps(state_.format, kKinds[k])) ahead[k] = ReadTiles(kKinds[k]);
    }
    return ahead;
  }

  // Tile after tile, on a thread of its own.
  std::unique_ptr<ReadAhead<Values>> ReadTiles(StateKind kind) const {
    return std::make_unique<ReadAhead<Values>>(
        kTilesRead, [this, kind, next = size_t{0}](Values* to) mutable -> absl::StatusOr<bool> {
          if (next == places_.size()) return false;
          const Place& place = places_[next++];
          to->resize(std::max(to->size(), static_cast<size_t>(place.elements)));
          RETURN_IF_ERROR(read_(kind, place.block, place.first, place.elements, to->data()));
          return true;
        });
  }

  // Values of one tile, as the run keeps them; null: it has none of the kind.
  absl::Status WriteTile(uint32_t tile, std::span<const Values* const> values, std::byte* memory,
                         TileRing* ring) const {
    ASSIGN_OR_RETURN(const size_t slot, ring->Next());
    memory += slot * store_->geometry().largest_slot_bytes();
    std::memset(memory, 0, store_->geometry().slot_bytes(tile));
    std::array<void*, swap::kMaxSegments> segments{};
    const auto there = store_->geometry().SegmentPlaces(tile, memory, &segments);
    TileMemory of_tile;
    of_tile.weights = there[0];
    of_tile.state.assign(there.begin() + 1, there.end());
    of_tile.elements = places_[tile].elements;
    for (size_t k = 0; k < kKinds.size(); ++k) {
      if (values[k] == nullptr) continue;
      if (kKinds[k] == StateKind::kParameter) {
        FillTile(state_.format, values[k]->data(), of_tile);
      } else {
        WriteValues(state_.format, of_tile, kKinds[k], 0, of_tile.elements, values[k]->data());
      }
    }
    return ring->Write(std::vector<const void*>(there.begin(), there.end()));
  }

  const NewState& state_;
  const ReadState& read_;
  std::vector<Place> places_;
  swap::Layout layout_;
  uint64_t total_ = 0;
  std::unique_ptr<swap::Store> store_;
};

}  // namespace

absl::Status ReadWhole(const NewState& state, const ReadState& read) {
  return Writer(state, read).ReadOnly();
}

absl::Status WriteNewState(const NewState& state, const ReadState& read,
                           const std::function<void(uint64_t done, uint64_t total)>& progress) {
  const std::vector<std::string>& directories = state.store.directories;
  const bool one_of_several = state.store.uuid.has_value();  // the others' parts are not in this one's hands
  if (!state.store.overwrite || one_of_several || swap::SeeCommits(directories).empty())
    return Writer(state, read).Run(progress);
  const swap::Finding found = swap::Probe(directories, state.store.lock_patience_ms);
  if (found.holding == swap::Holding::kInUse) return absl::FailedPreconditionError(found.text);
  ASSIGN_OR_RETURN(std::unique_ptr<swap::PartsReplacement> replacement,
                   swap::PartsReplacement::Begin(directories));
  NewState next = state;
  next.store.directories = swap::NextDirectories(directories);
  next.store.overwrite = false;
  next.store.overwrites_only.reset();
  const Writer writer(next, read);
  const absl::Status fits = swap::CheckSpace(next.store, writer.layout(), next.identity);
  if (absl::IsResourceExhausted(fits)) {
    replacement.reset();
    return Writer(state, read).Run(progress);
  }
  RETURN_IF_ERROR(fits);
  if (state.store.overwrites_only.has_value())
    RETURN_IF_ERROR(swap::CheckSeen(directories, *state.store.overwrites_only));
  const absl::Status written = Writer(next, read).Run(progress);
  if (ErrnoOf(written) == EDQUOT) {  // of a quota CheckSpace knows nothing
    replacement.reset();
    return Writer(state, read).Run(progress);
  }
  RETURN_IF_ERROR(written);
  return replacement->Commit();
}

}  // namespace penstock::zero
