// A model without arithmetic: the bytes of every segment follow from (seed, tile, segment, number of
// updates), and an update computes the next bytes from the present ones, so that an update on wrong bytes
// shows for ever after. The same functions are the oracle.
#ifndef PENSTOCK_TESTS_SWAP_FAKE_MODEL_H_
#define PENSTOCK_TESTS_SWAP_FAKE_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "swap/aligned_buffer.h"
#include "swap/store.h"

namespace penstock::swap {

class FakeModel {
 public:
  // `adjacent`: the segments of a tile one after the other in memory, as a training has them; else each
  // apart.
  FakeModel(const Layout& layout, uint64_t seed, bool adjacent = true) : layout_(layout), seed_(seed) {
    for (const TileLayout& tile : layout.tiles) {
      uint64_t bytes = 0;
      for (uint64_t length : tile.segment_bytes) bytes += PaddedBytes(length) + (adjacent ? 0 : kSectorBytes);
      memory_.emplace_back(bytes);
      tiles_.emplace_back();
      std::byte* at = memory_.back().data();
      for (uint64_t length : tile.segment_bytes) {
        tiles_.back().push_back(Segment(at));
        at += PaddedBytes(length) + (adjacent ? 0 : kSectorBytes);
      }
    }
  }

  class Segment {
   public:
    explicit Segment(std::byte* data) : data_(data) {}
    std::byte* data() const { return data_; }

   private:
    std::byte* data_;
  };

  // The state at update 0.
  void Initialize() {
    for (size_t t = 0; t < tiles_.size(); ++t) {
      for (size_t s = 0; s < tiles_[t].size(); ++s) {
        Generator random(seed_ * 1000003 + t * 131 + s);
        Words(t, s, [&](uint64_t) { return random(); });
      }
    }
    updates_ = 0;
  }

  // One deterministic update of a tile, from its bytes as they are now.
  void Update(uint32_t tile, uint64_t update) {
    for (size_t s = 0; s < tiles_[tile].size(); ++s) {
      Words(tile, s, [&](uint64_t word) { return (word ^ update) * 0x9e3779b97f4a7c15u + (word >> 29) + s; });
    }
  }
  void UpdateAll(uint64_t update) {
    for (uint32_t t = 0; t < tiles_.size(); ++t) Update(t, update);
    updates_ = update;
  }

  uint64_t updates() const { return updates_; }
  void set_updates(uint64_t updates) { updates_ = updates; }
  const std::vector<Segment>& tile(uint32_t t) const { return tiles_[t]; }
  uint32_t tiles() const { return static_cast<uint32_t>(tiles_.size()); }

  // First difference to another model's bytes; empty if there is none.
  std::string Difference(const FakeModel& other) const {
    for (size_t t = 0; t < tiles_.size(); ++t) {
      for (size_t s = 0; s < tiles_[t].size(); ++s) {
        if (std::memcmp(tiles_[t][s].data(), other.tiles_[t][s].data(), layout_.tiles[t].segment_bytes[s]) !=
            0) {
          return absl::StrCat("tile ", t, " segment ", s, " differs");
        }
      }
    }
    return "";
  }

  // Through a store, blocking. WriteAll has all tiles in flight at once. Every other tile is written in two
  // parts, its first segment last.
  absl::Status WriteTile(Store& store, uint32_t tile, uint64_t version) {
    TileIo io;
    for (int part = 0; part < (InParts(tile, version) ? 2 : 1); ++part) {
      if (absl::Status s = SubmitPart(store, &io, tile, version, part); !s.ok()) return s;
      (void)store.Wait(&io);
      if (absl::Status s = Note(store, &io); !s.ok()) return s;
    }
    return absl::OkStatus();
  }
  absl::Status WriteAll(Store& store, uint64_t version) {
    std::vector<std::unique_ptr<TileIo>> ios;
    for (uint32_t t = 0; t < tiles(); ++t) ios.push_back(std::make_unique<TileIo>());
    absl::Status result;
    for (int part = 0; part < 2 && result.ok(); ++part) {
      for (uint32_t t = 0; t < tiles(); ++t) {
        if (part == 1 && !InParts(t, version)) continue;
        if (absl::Status s = SubmitPart(store, ios[t].get(), t, version, part); !s.ok()) {
          for (auto& io : ios) {
            if (io->pending()) (void)store.Wait(io.get());
          }
          return s;
        }
      }
      for (uint32_t t = 0; t < tiles(); ++t) {
        if (part == 1 && !InParts(t, version)) continue;
        (void)store.Wait(ios[t].get());
        result.Update(Note(store, ios[t].get()));
      }
    }
    return result;
  }
  absl::Status ReadTile(Store& store, uint32_t tile, VersionChoice choice = VersionChoice::kNewest) {
    std::vector<void*> places;
    for (const Segment& segment : tiles_[tile]) places.push_back(segment.data());
    TileIo io;
    absl::Status s = store.ReadSegments(&io, tile, 0, static_cast<uint32_t>(places.size()), places,
                                        aio::Priority::kDemand, choice);
    if (!s.ok()) return s;
    s = store.Wait(&io);
    if (!s.ok()) return s;
    return store.VerifyRead(io);
  }
  absl::Status ReadAll(Store& store, VersionChoice choice = VersionChoice::kNewest) {
    for (uint32_t t = 0; t < tiles(); ++t) {
      if (absl::Status s = ReadTile(store, t, choice); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  absl::Status Submit(Store& store, TileIo* io, uint32_t tile, uint64_t version) {
    std::vector<const void*> sources;
    for (const Segment& segment : tiles_[tile]) sources.push_back(segment.data());
    return store.WriteTile(io, tile, version, sources, aio::Priority::kWriteBehind);
  }
  absl::Status Note(Store& store, TileIo* io) {
    std::vector<uint64_t> checksums;
    const uint32_t t = io->tile();
    for (uint32_t s = io->first_segment(); s < io->first_segment() + io->segment_count(); ++s) {
      checksums.push_back(store.SegmentChecksum(t, s, io->version(), tiles_[t][s].data()));
    }
    return store.NoteWritten(io, checksums);
  }

 private:
  bool InParts(uint32_t tile, uint64_t version) const {
    return (tile + version) % 2 == 0 && tiles_[tile].size() > 1;
  }
  absl::Status SubmitPart(Store& store, TileIo* io, uint32_t tile, uint64_t version, int part) {
    if (!InParts(tile, version)) return Submit(store, io, tile, version);
    const size_t first = part == 0 ? 1 : 0, count = part == 0 ? tiles_[tile].size() - 1 : 1;
    std::vector<const void*> sources;
    for (size_t s = first; s < first + count; ++s) sources.push_back(tiles_[tile][s].data());
    return store.WriteSegments(io, tile, version, static_cast<uint32_t>(first), sources,
                               aio::Priority::kWriteBehind);
  }

  class Generator {
   public:
    explicit Generator(uint64_t seed) : state_(seed) {}
    uint64_t operator()() {  // splitmix64
      uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      return z ^ (z >> 31);
    }

   private:
    uint64_t state_;
  };

  // Replaces every word of a segment, its ragged end included.
  template <typename F>
  void Words(size_t tile, size_t segment, F next) {
    std::byte* data = tiles_[tile][segment].data();
    const uint64_t bytes = layout_.tiles[tile].segment_bytes[segment];
    for (uint64_t at = 0; at < bytes; at += 8) {
      uint64_t word = 0;
      const size_t n = std::min<uint64_t>(8, bytes - at);
      std::memcpy(&word, data + at, n);
      word = next(word);
      std::memcpy(data + at, &word, n);
    }
  }

  Layout layout_;
  uint64_t seed_;
  uint64_t updates_ = 0;
  std::vector<AlignedBuffer> memory_;
  std::vector<std::vector<Segment>> tiles_;
};

// Tiles as a training has them: 16-bit and 32-bit segments of the same parameters, odd sizes, one with
// scratch.
inline Layout SmallLayout(uint32_t tiles = 5, uint64_t params = 3000) {
  Layout layout;
  for (uint32_t t = 0; t < tiles; ++t) {
    const uint64_t n = params + 517 * t;
    layout.tiles.push_back({{2 * n, 2 * n, 4 * n, 4 * n}, t % 2 == 0 ? 2 * n : 0});
  }
  return layout;
}

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_FAKE_MODEL_H_
