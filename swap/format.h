// The bytes of a state store: superblock, tile slots, commit records, and the checksums that bind them
// together.
//
// Everything here is a pure function of its arguments: no I/O, no clock, no global state. FORMAT.md describes
// the same bytes for someone without this code. What is decoded is never trusted: every count, length and
// offset is checked against limits and against the bytes at hand before it is used, so that a hostile file
// costs an error and never a crash, a huge allocation or a read out of bounds.
//
// A store is one file, `penstock.store`, in each of one or more directories:
//
//   superblock   two copies; which store, which of its directories, and the layout of all tiles. Never
//   rewritten. records      in directory 0 only: two places of two copies each. Commit number n goes to place
//   n % 2. tiles        for every tile of this directory, in order: slot 0, slot 1, ..., scratch.
//
// Numbers are little-endian whatever the machine. Units are bytes unless a name says otherwise.
#ifndef PENSTOCK_SWAP_FORMAT_H_
#define PENSTOCK_SWAP_FORMAT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::swap {

// ----------------------------------------------------------------------------------------------------
// Limits. A store beyond them is refused when it is made and rejected when it is read.

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr uint64_t kSectorBytes = 4096;  // unit of offsets, lengths and padding in the file
inline constexpr uint64_t kTileAreaAlignment = 1u
                                               << 20;  // the first tile of a file starts on such a boundary
inline constexpr uint32_t kMaxDirectories = 64;
inline constexpr uint32_t kMaxSegments = 8;  // in one tile
inline constexpr uint32_t kMaxSlots = 3;     // versions of one tile
inline constexpr uint32_t kMaxTiles = 1u << 20;
inline constexpr uint64_t kMaxTileBytes = uint64_t{1} << 30;      // one version of one tile; scratch likewise
inline constexpr uint64_t kMaxIdentityBytes = uint64_t{1} << 20;  // identity JSON
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 24;   // commit payload JSON
inline constexpr uint64_t kDefaultPayloadCapacity = uint64_t{1} << 16;
inline constexpr uint64_t kMaxPathBytes = 4096;
inline constexpr uint64_t kMaxFileBytes = uint64_t{1} << 56;
inline constexpr uint32_t kRecordPlaces = 2;
inline constexpr uint32_t kRecordCopies = 2;
// What this program's files begin with that stand beside a store and are no part of it.
inline constexpr std::string_view kOwnPrefix = ".penstock.";
inline constexpr std::string_view kStoreFileName = "penstock.store";

// The smallest multiple of kSectorBytes that is at least `bytes`: 0 -> 0, 1 -> 4096, 4096 -> 4096, 4097 ->
// 8192.
constexpr uint64_t PaddedBytes(uint64_t bytes) {
  return (bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
}

// ----------------------------------------------------------------------------------------------------
// Layout: what a store keeps.

// One tile: a piece of one block's state. Its segments (for instance high, low, m, v of the same parameters)
// lie one after the other in a slot, each padded to kSectorBytes, so that any run of consecutive segments is
// one read.
struct TileLayout {
  std::vector<uint64_t>
      segment_bytes;           // 1 to kMaxSegments lengths, each at least 1, together at most kMaxTileBytes
  uint64_t scratch_bytes = 0;  // beside the versions: one unversioned, unchecked area; 0 for none

  friend bool operator==(const TileLayout&, const TileLayout&) = default;
};

struct Layout {
  std::vector<TileLayout> tiles;  // index in this vector is the tile's number
};

using Uuid = std::array<uint8_t, 16>;
std::string UuidText(const Uuid& uuid);  // "01234567-89ab-cdef-0123-456789abcdef"

// A tile as the superblock holds it: its layout and its home directory.
struct TilePlacement {
  uint32_t directory = 0;
  TileLayout layout;

  friend bool operator==(const TilePlacement&, const TilePlacement&) = default;
};

// What every superblock of a store says, apart from which directory it stands in.
struct StoreShape {
  Uuid uuid{};
  uint32_t slots = 2;                                   // versions kept of each tile: 1 to kMaxSlots
  uint64_t payload_capacity = kDefaultPayloadCapacity;  // most bytes of commit payload
  std::string identity;                                 // the owner's JSON: what run this is; opaque here
  std::vector<std::string> directory_paths;  // where they were at creation; a hint for messages only
  std::vector<TilePlacement> tiles;

  uint32_t directories() const { return static_cast<uint32_t>(directory_paths.size()); }
  friend bool operator==(const StoreShape&, const StoreShape&) = default;
};

// Checks every limit above. kInvalidArgument names the tile, the value and the limit.
absl::Status Validate(const StoreShape& shape);

// Spreads tiles over directories so that bytes are in proportion to `weights` (all > 0, finite): each tile in
// turn goes to the directory that would be least full relative to its weight, the first of equals. Equal
// tiles and equal weights give round robin. The result is recorded, so a later version may choose otherwise.
std::vector<uint32_t> AssignDirectories(const Layout& layout, std::span<const double> weights);

// Where everything is, computed from a shape that Validate accepts. Immutable; cheap lookups; any thread.
class Geometry {
 public:
  // kInvalidArgument for a shape that Validate rejects or whose files would pass kMaxFileBytes.
  static absl::StatusOr<Geometry> Make(const StoreShape& shape);

  uint32_t tiles() const { return static_cast<uint32_t>(tiles_.size()); }
  uint32_t directories() const { return static_cast<uint32_t>(file_bytes_.size()); }
  uint32_t slots() const { return slots_; }
  uint32_t directory(uint32_t tile) const { return tiles_[tile].directory; }
  uint32_t segments(uint32_t tile) const { return tiles_[tile].segments; }
  // True length of a segment, without padding.
  uint64_t segment_bytes(uint32_t tile, uint32_t segment) const;
  // One padded version of a tile.
  uint64_t slot_bytes(uint32_t tile) const { return tiles_[tile].slot_bytes; }
  uint64_t largest_slot_bytes() const;
  uint64_t scratch_bytes(uint32_t tile) const { return tiles_[tile].scratch_bytes; }
  // Offset of a segment from the start of its slot; `segment == segments(tile)` gives the slot's padded
  // length.
  uint64_t segment_start(uint32_t tile, uint32_t segment) const {
    return segment_starts_[tiles_[tile].first_segment + tile + segment];
  }
  // Where the segments of a tile stand in memory that holds its slot, in `places`; as many as it has.
  std::span<void* const> SegmentPlaces(uint32_t tile, std::byte* memory,
                                       std::array<void*, kMaxSegments>* places) const;
  uint64_t slot_offset(uint32_t tile, uint32_t slot) const {
    return tiles_[tile].offset + slot * tiles_[tile].slot_bytes;
  }
  uint64_t segment_offset(uint32_t tile, uint32_t slot, uint32_t segment) const {
    return slot_offset(tile, slot) + segment_start(tile, segment);
  }
  uint64_t scratch_offset(uint32_t tile) const { return slot_offset(tile, slots_); }
  uint64_t file_bytes(uint32_t directory) const { return file_bytes_[directory]; }
  // Index of a tile's first checksum in a table that holds those of all segments of all tiles in order.
  size_t first_segment(uint32_t tile) const { return tiles_[tile].first_segment; }
  size_t total_segments() const { return total_segments_; }
  // True lengths of one version of everything, without padding.
  uint64_t state_bytes() const { return state_bytes_; }

  uint64_t record_capacity() const { return record_capacity_; }  // one copy of one record, padded
  uint64_t record_offset(uint32_t place, uint32_t copy) const {
    return records_offset_ + (place * kRecordCopies + copy) * record_capacity_;
  }
  uint64_t superblock_bytes() const { return records_offset_; }  // both copies, padded

 private:
  struct Tile {
    uint64_t offset;      // of slot 0 in its file
    uint64_t slot_bytes;  // padded
    uint64_t scratch_bytes;
    size_t first_segment;
    uint32_t directory;
    uint32_t segments;
  };
  std::vector<Tile> tiles_;
  std::vector<uint64_t> segment_starts_;  // segments(tile) + 1 entries a tile
  std::vector<uint64_t> segment_bytes_;
  std::vector<uint64_t> file_bytes_;
  uint32_t slots_ = 0;
  size_t total_segments_ = 0;
  uint64_t state_bytes_ = 0;
  uint64_t records_offset_ = 0;
  uint64_t record_capacity_ = 0;
};

// ----------------------------------------------------------------------------------------------------
// Checksums.

// XXH3-64 of `data` with a seed that is itself XXH3-64 of (uuid, tile, segment, version): data that is intact
// but belongs elsewhere (another tile, another segment, an older version, another store) does not pass.
uint64_t SegmentSeed(const Uuid& uuid, uint32_t tile, uint32_t segment, uint64_t version);
uint64_t SegmentChecksum(const Uuid& uuid, uint32_t tile, uint32_t segment, uint64_t version,
                         std::span<const std::byte> data);

// ----------------------------------------------------------------------------------------------------
// Superblock.

// The first bytes of a store file, both copies: superblock_bytes() long. `directory` is the index of the
// file's directory.
std::vector<std::byte> EncodeSuperblock(const StoreShape& shape, uint32_t directory);

// How many bytes from the start of the file DecodeSuperblock needs, told by the first 2 * kSectorBytes of it
// (fewer if the file is shorter). kDataLoss: neither header copy is whole; kNotFound: copy 0 is all zero and
// copy 1 not whole, as in an empty file (a creation that was cut short, unless a run stands behind them);
// kInvalidArgument: no store file at all; kFailedPrecondition: one of another format version.
absl::StatusOr<uint64_t> SuperblockBytesFromHeaders(std::span<const std::byte> first_sectors);

// Which of its store's directories a file belongs to, by the same bytes; nullopt if neither header is whole.
std::optional<uint32_t> DirectoryFromHeaders(std::span<const std::byte> first_sectors);

struct DecodedSuperblock {
  StoreShape shape;
  uint32_t directory = 0;
  std::vector<std::string>
      damage;  // copies that were not whole, as a range and a reason; empty when all is well
};
// Accepts the file if either copy is whole.
absl::StatusOr<DecodedSuperblock> DecodeSuperblock(std::span<const std::byte> bytes);

// ----------------------------------------------------------------------------------------------------
// Commit record.

// Where the live version of a tile is.
struct TileVersion {
  uint64_t version = 0;  // the owner's number, at least 1; part of every checksum of the tile
  uint32_t slot = 0;
};

// One commit in full. `checksums` holds those of all segments in the order of Geometry::first_segment.
struct Record {
  uint64_t sequence = 0;  // number of this commit in this store, from 1; place is sequence % 2
  // No commit, but a mark: the only version of each tile, that of `step`, is being overwritten from here on,
  // so that what the tiles hold is of no use until the next commit. In stores of one slot only.
  bool overwriting = false;
  uint64_t step = 0;
  uint64_t updates = 0;
  Uuid checkpoint{};  // of a checkpoint of several ranks: the same in all parts of it, and in no other. Zero:
                      // a run's, of one rank, or from before there were such numbers
  std::string payload;
  std::vector<TileVersion> tiles;
  std::vector<uint64_t> checksums;
};

// A sector begins like the header of a record, whatever else is in it.
bool StartsLikeRecord(std::span<const std::byte> sector);

// Length of a record with a payload of that many bytes, padded to kSectorBytes; at most record_capacity().
uint64_t RecordBytes(const Geometry& geometry, uint64_t payload_bytes);

// Writes the record into `out`, which has RecordBytes(...) bytes; allocates nothing. The sizes of `tiles` and
// `checksums` are those of the geometry (checked by assertion).
void EncodeRecord(const Geometry& geometry, const Uuid& uuid, const Record& record, std::span<std::byte> out);

// One copy of one record, read from `place`: `bytes` is record_capacity() long. kNotFound: never written (all
// zero); kDataLoss: not whole, with the reason: torn, damaged, of another store or meant for another place.
absl::StatusOr<Record> DecodeRecord(const Geometry& geometry, const Uuid& uuid, uint32_t place,
                                    std::span<const std::byte> bytes);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_FORMAT_H_
