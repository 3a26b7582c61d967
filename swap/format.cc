#include "swap/format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"

namespace penstock::swap {
namespace {

constexpr std::string_view kSuperblockMagic = "PENSTOCK";
constexpr std::string_view kRecordMagic = "PNSTKCMT";
constexpr size_t kHeaderChecksumOffset = kSectorBytes - 8;

// ---- little-endian fields ----

template <typename T>
void Put(std::byte* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

template <typename T>
T Get(const std::byte* at) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(static_cast<T>(at[i]) << (8 * i));
  return value;
}

uint64_t Hash(std::span<const std::byte> bytes, uint64_t seed) {
  return kernels::Checksum(bytes.data(), bytes.size(), seed);
}

bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// Appends fields to a byte vector.
class Writer {
 public:
  template <typename T>
  void Number(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    Put(bytes_.data() + at, value);
  }
  void Text(std::string_view text) {
    const auto* begin = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), begin, begin + text.size());
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads fields from bytes that may be anything. After a read past the end everything is zero and ok() is
// false.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && bytes_.empty(); }
  size_t left() const { return bytes_.size(); }

  template <typename T>
  T Number() {
    const auto field = Take(sizeof(T));
    return field.empty() ? T{0} : Get<T>(field.data());
  }
  std::string Text(uint64_t length) {
    const auto field = Take(length);
    return std::string(reinterpret_cast<const char*>(field.data()), field.size());
  }

 private:
  std::span<const std::byte> Take(uint64_t length) {
    if (!ok_ || length > bytes_.size()) {
      ok_ = false;
      bytes_ = {};
      return {};
    }
    const auto field = bytes_.first(length);
    bytes_ = bytes_.subspan(length);
    return field;
  }
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

// ---- superblock ----

// Field offsets of the header; see FORMAT.md.
constexpr size_t kSuperVersion = 8;
constexpr size_t kSuperHeaderBytes = 12;
constexpr size_t kSuperUuid = 16;
constexpr size_t kSuperDirectory = 32;
constexpr size_t kSuperDirectories = 36;
constexpr size_t kSuperSlots = 40;
constexpr size_t kSuperTiles = 44;
constexpr size_t kSuperPayloadCapacity = 48;
constexpr size_t kSuperBodyBytes = 56;
constexpr size_t kSuperBodyChecksum = 64;

constexpr uint64_t kMaxBodyBytes = kMaxIdentityBytes + kMaxDirectories * (kMaxPathBytes + 4) +
                                   uint64_t{kMaxTiles} * (16 + 8 * kMaxSegments) + 64;

uint64_t UuidSeed(const Uuid& uuid) { return Hash(std::as_bytes(std::span(uuid)), 0); }

uint64_t BodyBytes(const StoreShape& shape) {
  uint64_t bytes = 8 + shape.identity.size();
  for (const std::string& path : shape.directory_paths) bytes += 4 + path.size();
  for (const TilePlacement& tile : shape.tiles) bytes += 16 + 8 * tile.layout.segment_bytes.size();
  return bytes;
}

uint64_t SuperblockBytes(uint64_t body_bytes) { return 2 * (kSectorBytes + PaddedBytes(body_bytes)); }

std::vector<std::byte> EncodeBody(const StoreShape& shape) {
  Writer out;
  for (const std::string& path : shape.directory_paths) {
    out.Number(static_cast<uint32_t>(path.size()));
    out.Text(path);
  }
  out.Number(static_cast<uint64_t>(shape.identity.size()));
  out.Text(shape.identity);
  for (const TilePlacement& tile : shape.tiles) {
    out.Number(tile.directory);
    out.Number(static_cast<uint32_t>(tile.layout.segment_bytes.size()));
    out.Number(tile.layout.scratch_bytes);
    for (uint64_t length : tile.layout.segment_bytes) out.Number(length);
  }
  return out.Take();
}

struct SuperHeader {
  Uuid uuid{};
  uint32_t directory = 0;
  uint32_t directories = 0;
  uint32_t slots = 0;
  uint32_t tiles = 0;
  uint64_t payload_capacity = 0;
  uint64_t body_bytes = 0;
  uint64_t body_checksum = 0;
};

absl::StatusOr<SuperHeader> ParseSuperHeader(std::span<const std::byte> sector) {
  const std::byte* at = sector.data();
  if (std::memcmp(at, kSuperblockMagic.data(), kSuperblockMagic.size()) != 0) {
    return absl::InvalidArgumentError("not a store file");
  }
  SuperHeader header;
  std::memcpy(header.uuid.data(), at + kSuperUuid, header.uuid.size());
  if (Get<uint64_t>(at + kHeaderChecksumOffset) !=
      Hash(sector.first(kHeaderChecksumOffset), UuidSeed(header.uuid))) {
    return absl::DataLossError("superblock header checksum does not match");
  }
  // The checksum holds: whatever follows was written on purpose.
  if (const uint32_t version = Get<uint32_t>(at + kSuperVersion); version != kFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("store format %u; this program reads format %u", version, kFormatVersion));
  }
  header.directory = Get<uint32_t>(at + kSuperDirectory);
  header.directories = Get<uint32_t>(at + kSuperDirectories);
  header.slots = Get<uint32_t>(at + kSuperSlots);
  header.tiles = Get<uint32_t>(at + kSuperTiles);
  header.payload_capacity = Get<uint64_t>(at + kSuperPayloadCapacity);
  header.body_bytes = Get<uint64_t>(at + kSuperBodyBytes);
  header.body_checksum = Get<uint64_t>(at + kSuperBodyChecksum);
  if (Get<uint32_t>(at + kSuperHeaderBytes) != kSectorBytes || header.directories == 0 ||
      header.directories > kMaxDirectories || header.directory >= header.directories ||
      header.tiles > kMaxTiles || header.body_bytes > kMaxBodyBytes) {
    return absl::DataLossError("superblock header has fields beyond the limits of the format");
  }
  return header;
}

absl::StatusOr<StoreShape> ParseBody(const SuperHeader& header, std::span<const std::byte> body) {
  if (Hash(body, UuidSeed(header.uuid)) != header.body_checksum) {
    return absl::DataLossError("superblock body checksum does not match");
  }
  StoreShape shape;
  shape.uuid = header.uuid;
  shape.slots = header.slots;
  shape.payload_capacity = header.payload_capacity;
  Reader in(body);
  for (uint32_t i = 0; i < header.directories && in.ok(); ++i) {
    shape.directory_paths.push_back(in.Text(in.Number<uint32_t>()));
  }
  shape.identity = in.Text(in.Number<uint64_t>());
  // A tile takes at least 16 bytes, so a count that the bytes cannot hold is seen before memory is taken for
  // it.
  if (!in.ok() || header.tiles > in.left() / 16) return absl::DataLossError("superblock body is cut short");
  shape.tiles.resize(header.tiles);
  for (TilePlacement& tile : shape.tiles) {
    tile.directory = in.Number<uint32_t>();
    const uint32_t segments = in.Number<uint32_t>();
    tile.layout.scratch_bytes = in.Number<uint64_t>();
    if (!in.ok() || segments > kMaxSegments) return absl::DataLossError("superblock tile table is malformed");
    for (uint32_t s = 0; s < segments; ++s) tile.layout.segment_bytes.push_back(in.Number<uint64_t>());
  }
  if (!in.at_end()) return absl::DataLossError("superblock body has a wrong length");
  if (const absl::Status valid = Validate(shape); !valid.ok()) {
    return absl::DataLossError(absl::StrCat("superblock: ", valid.message()));
  }
  return shape;
}

// ---- commit record ----

constexpr size_t kRecordVersion = 8;
constexpr size_t kRecordPlace = 12;
constexpr size_t kRecordUuid = 16;
constexpr size_t kRecordSequence = 32;
constexpr size_t kRecordStep = 40;
constexpr size_t kRecordUpdates = 48;
constexpr size_t kRecordBodyBytes = 56;
constexpr size_t kRecordPayloadBytes = 64;
constexpr size_t kRecordTiles = 72;
constexpr size_t kRecordOverwriting = 76;
constexpr size_t kRecordBodyChecksum = 80;
constexpr size_t kRecordCheckpoint = 88;

uint64_t TableBytes(const Geometry& geometry) {
  return uint64_t{geometry.tiles()} * 16 + geometry.total_segments() * 8;
}

// A body that belongs to another commit or another store does not match, even if it is whole.
uint64_t RecordSeed(const Uuid& uuid, uint64_t sequence) {
  std::array<std::byte, 24> key;
  std::memcpy(key.data(), uuid.data(), uuid.size());
  Put(key.data() + 16, sequence);
  return Hash(key, 0);
}

}  // namespace

std::string UuidText(const Uuid& uuid) {
  std::string text;
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", uuid[i]);
  }
  return text;
}

absl::Status Validate(const StoreShape& shape) {
  const auto refuse = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat(parts...)); };
  if (shape.directory_paths.empty() || shape.directory_paths.size() > kMaxDirectories) {
    return refuse("a store has 1 to ", kMaxDirectories, " directories, not ", shape.directory_paths.size());
  }
  for (const std::string& path : shape.directory_paths) {
    if (path.size() > kMaxPathBytes) {
      return refuse("a directory path of ", path.size(), " bytes; the most is ", kMaxPathBytes);
    }
  }
  if (shape.slots < 1 || shape.slots > kMaxSlots) {
    return refuse("a store keeps 1 to ", kMaxSlots, " versions of a tile, not ", shape.slots);
  }
  if (shape.payload_capacity > kMaxPayloadBytes) {
    return refuse("a commit payload of ", shape.payload_capacity, " bytes; the most is ", kMaxPayloadBytes);
  }
  if (shape.identity.size() > kMaxIdentityBytes) {
    return refuse("an identity of ", shape.identity.size(), " bytes; the most is ", kMaxIdentityBytes);
  }
  if (shape.tiles.empty() || shape.tiles.size() > kMaxTiles) {
    return refuse("a store has 1 to ", kMaxTiles, " tiles, not ", shape.tiles.size());
  }
  for (size_t t = 0; t < shape.tiles.size(); ++t) {
    const TilePlacement& tile = shape.tiles[t];
    if (tile.directory >= shape.directories()) {
      return refuse("tile ", t, " is in directory ", tile.directory, " of ", shape.directories());
    }
    const auto& lengths = tile.layout.segment_bytes;
    if (lengths.empty() || lengths.size() > kMaxSegments) {
      return refuse("tile ", t, " has ", lengths.size(), " segments; 1 to ", kMaxSegments, " are possible");
    }
    uint64_t total = 0;
    for (uint64_t length : lengths) {
      if (length == 0 || length > kMaxTileBytes) {
        return refuse("tile ", t, " has a segment of ", length, " bytes; 1 to ", kMaxTileBytes,
                      " are possible");
      }
      total += PaddedBytes(length);
    }
    if (total > kMaxTileBytes || tile.layout.scratch_bytes > kMaxTileBytes) {
      return refuse("tile ", t, " has ", std::max(total, tile.layout.scratch_bytes), " bytes; the most is ",
                    kMaxTileBytes);
    }
  }
  return absl::OkStatus();
}

std::vector<uint32_t> AssignDirectories(const Layout& layout, std::span<const double> weights) {
  std::vector<double> filled(weights.size(), 0.0);
  std::vector<uint32_t> assigned;
  assigned.reserve(layout.tiles.size());
  for (const TileLayout& tile : layout.tiles) {
    uint64_t bytes = PaddedBytes(tile.scratch_bytes);
    for (uint64_t length : tile.segment_bytes) bytes += PaddedBytes(length);
    uint32_t best = 0;
    double best_level = 0;
    for (uint32_t d = 0; d < weights.size(); ++d) {
      const double level = (filled[d] + static_cast<double>(bytes)) / weights[d];
      if (d == 0 || level < best_level) {
        best = d;
        best_level = level;
      }
    }
    filled[best] += static_cast<double>(bytes);
    assigned.push_back(best);
  }
  return assigned;
}

absl::StatusOr<Geometry> Geometry::Make(const StoreShape& shape) {
  RETURN_IF_ERROR(Validate(shape));
  Geometry g;
  g.slots_ = shape.slots;
  g.records_offset_ = SuperblockBytes(BodyBytes(shape));
  uint64_t table_bytes = 0;
  for (const TilePlacement& tile : shape.tiles) table_bytes += 16 + 8 * tile.layout.segment_bytes.size();
  g.record_capacity_ = kSectorBytes + PaddedBytes(table_bytes + shape.payload_capacity);

  g.file_bytes_.resize(shape.directories());
  for (uint32_t d = 0; d < shape.directories(); ++d) {
    const uint64_t records = d == 0 ? kRecordPlaces * kRecordCopies * g.record_capacity_ : 0;
    const uint64_t end = g.records_offset_ + records;
    g.file_bytes_[d] = (end + kTileAreaAlignment - 1) / kTileAreaAlignment * kTileAreaAlignment;
  }
  g.tiles_.reserve(shape.tiles.size());
  for (size_t t = 0; t < shape.tiles.size(); ++t) {
    const TileLayout& layout = shape.tiles[t].layout;
    Tile tile{};
    tile.directory = shape.tiles[t].directory;
    tile.segments = static_cast<uint32_t>(layout.segment_bytes.size());
    tile.first_segment = g.total_segments_;
    tile.scratch_bytes = layout.scratch_bytes;
    for (uint64_t length : layout.segment_bytes) {
      g.segment_starts_.push_back(tile.slot_bytes);
      g.segment_bytes_.push_back(length);
      tile.slot_bytes += PaddedBytes(length);
      g.state_bytes_ += length;
    }
    g.segment_starts_.push_back(tile.slot_bytes);
    g.total_segments_ += tile.segments;
    uint64_t& end = g.file_bytes_[tile.directory];
    tile.offset = end;
    end += shape.slots * tile.slot_bytes + PaddedBytes(layout.scratch_bytes);
    if (end > kMaxFileBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("directory ", tile.directory, " would hold more than ", kMaxFileBytes, " bytes"));
    }
    g.tiles_.push_back(tile);
  }
  return g;
}

uint64_t Geometry::largest_slot_bytes() const {
  uint64_t largest = 0;
  for (const Tile& tile : tiles_) largest = std::max(largest, tile.slot_bytes);
  return largest;
}

std::span<void* const> Geometry::SegmentPlaces(uint32_t tile, std::byte* memory,
                                               std::array<void*, kMaxSegments>* places) const {
  for (uint32_t s = 0; s < segments(tile); ++s) (*places)[s] = memory + segment_start(tile, s);
  return {places->data(), segments(tile)};
}

uint64_t Geometry::segment_bytes(uint32_t tile, uint32_t segment) const {
  return segment_bytes_[tiles_[tile].first_segment + segment];
}

uint64_t SegmentSeed(const Uuid& uuid, uint32_t tile, uint32_t segment, uint64_t version) {
  std::array<std::byte, 32> key;
  std::memcpy(key.data(), uuid.data(), uuid.size());
  Put(key.data() + 16, tile);
  Put(key.data() + 20, segment);
  Put(key.data() + 24, version);
  return Hash(key, 0);
}

uint64_t SegmentChecksum(const Uuid& uuid, uint32_t tile, uint32_t segment, uint64_t version,
                         std::span<const std::byte> data) {
  return Hash(data, SegmentSeed(uuid, tile, segment, version));
}

std::vector<std::byte> EncodeSuperblock(const StoreShape& shape, uint32_t directory) {
  const std::vector<std::byte> body = EncodeBody(shape);
  std::vector<std::byte> out(SuperblockBytes(body.size()));
  std::byte* at = out.data();
  std::memcpy(at, kSuperblockMagic.data(), kSuperblockMagic.size());
  Put(at + kSuperVersion, kFormatVersion);
  Put(at + kSuperHeaderBytes, static_cast<uint32_t>(kSectorBytes));
  std::memcpy(at + kSuperUuid, shape.uuid.data(), shape.uuid.size());
  Put(at + kSuperDirectory, directory);
  Put(at + kSuperDirectories, shape.directories());
  Put(at + kSuperSlots, shape.slots);
  Put(at + kSuperTiles, static_cast<uint32_t>(shape.tiles.size()));
  Put(at + kSuperPayloadCapacity, shape.payload_capacity);
  Put(at + kSuperBodyBytes, static_cast<uint64_t>(body.size()));
  Put(at + kSuperBodyChecksum, Hash(body, UuidSeed(shape.uuid)));
  Put(at + kHeaderChecksumOffset, Hash(std::span(out).first(kHeaderChecksumOffset), UuidSeed(shape.uuid)));
  std::memcpy(at + kSectorBytes, at, kSectorBytes);  // header, copy 1
  std::byte* bodies = at + 2 * kSectorBytes;
  std::memcpy(bodies, body.data(), body.size());
  std::memcpy(bodies + PaddedBytes(body.size()), body.data(), body.size());
  return out;
}

absl::StatusOr<uint64_t> SuperblockBytesFromHeaders(std::span<const std::byte> first_sectors) {
  // Creation writes header copy 0 last, and copy 1 before it: without the former and a whole one of the
  // latter it was cut short.
  const auto first = first_sectors.first(std::min<size_t>(first_sectors.size(), kSectorBytes));
  const auto second = first_sectors.subspan(first.size());
  const bool second_torn = second.size() < kSectorBytes || AllZero(second.first(kHeaderChecksumOffset)) ||
                           absl::IsDataLoss(ParseSuperHeader(second.first(kSectorBytes)).status());
  if (AllZero(first) && second_torn) return absl::NotFoundError("the file holds no superblock");
  absl::Status first_error = absl::InvalidArgumentError("not a store file");
  bool damaged = false;
  for (uint32_t copy = 0; copy < 2; ++copy) {
    if (first_sectors.size() < (copy + 1) * kSectorBytes) break;
    const auto header = ParseSuperHeader(first_sectors.subspan(copy * kSectorBytes, kSectorBytes));
    if (header.ok()) return SuperblockBytes(header->body_bytes);
    if (copy == 0) first_error = header.status();
    damaged = damaged || absl::IsDataLoss(header.status());
  }
  // One copy with our magic and a wrong checksum makes it a damaged store rather than a foreign file.
  if (damaged && !absl::IsDataLoss(first_error))
    first_error = absl::DataLossError("superblock header damaged");
  return first_error;
}

std::optional<uint32_t> DirectoryFromHeaders(std::span<const std::byte> first_sectors) {
  for (uint64_t at = 0; at + kSectorBytes <= first_sectors.size() && at < 2 * kSectorBytes;
       at += kSectorBytes) {
    const auto header = ParseSuperHeader(first_sectors.subspan(at, kSectorBytes));
    if (header.ok()) return header->directory;
  }
  return std::nullopt;
}

absl::StatusOr<DecodedSuperblock> DecodeSuperblock(std::span<const std::byte> bytes) {
  ASSIGN_OR_RETURN(const auto length,
                   SuperblockBytesFromHeaders(bytes.first(std::min<size_t>(bytes.size(), 2 * kSectorBytes))));
  if (bytes.size() < length) return absl::DataLossError("the file ends inside its superblock");
  const uint64_t padded_body = length / 2 - kSectorBytes;

  DecodedSuperblock decoded;
  std::vector<SuperHeader> headers;
  for (uint32_t copy = 0; copy < 2; ++copy) {
    const auto header = ParseSuperHeader(bytes.subspan(copy * kSectorBytes, kSectorBytes));
    if (header.ok()) {
      headers.push_back(*header);
    } else {
      decoded.damage.push_back(absl::StrFormat("superblock header copy %u (offset %u, length %u): %s", copy,
                                               copy * kSectorBytes, kSectorBytes,
                                               std::string(header.status().message())));
    }
  }
  if (headers.size() == 2 && std::memcmp(bytes.data(), bytes.data() + kSectorBytes, kSectorBytes) != 0) {
    return absl::DataLossError("the two superblock headers are both whole and say different things");
  }
  const SuperHeader& header = headers.front();
  decoded.directory = header.directory;
  bool found = false;
  for (uint32_t copy = 0; copy < 2; ++copy) {
    const uint64_t offset = 2 * kSectorBytes + copy * padded_body;
    auto shape = ParseBody(header, bytes.subspan(offset, header.body_bytes));
    if (!shape.ok()) {
      decoded.damage.push_back(absl::StrFormat("superblock body copy %u (offset %u, length %u): %s", copy,
                                               offset, header.body_bytes,
                                               std::string(shape.status().message())));
    } else if (!found) {
      decoded.shape = *std::move(shape);
      found = true;
    }
  }
  if (!found) return absl::DataLossError(decoded.damage.back());
  return decoded;
}

bool StartsLikeRecord(std::span<const std::byte> sector) {
  return sector.size() >= kRecordMagic.size() &&
         std::memcmp(sector.data(), kRecordMagic.data(), kRecordMagic.size()) == 0;
}

uint64_t RecordBytes(const Geometry& geometry, uint64_t payload_bytes) {
  return kSectorBytes + PaddedBytes(TableBytes(geometry) + payload_bytes);
}

void EncodeRecord(const Geometry& geometry, const Uuid& uuid, const Record& record,
                  std::span<std::byte> out) {
  PENSTOCK_CHECK(
      record.tiles.size() == geometry.tiles() && record.checksums.size() == geometry.total_segments(),
      "a record of another store's tiles");
  PENSTOCK_CHECK(out.size() == RecordBytes(geometry, record.payload.size()), "a record of another length");
  PENSTOCK_CHECK(out.size() <= geometry.record_capacity(), "a record that reaches into the next");
  std::byte* const at = out.data();
  std::byte* const body = at + kSectorBytes;
  const uint64_t body_bytes = TableBytes(geometry) + record.payload.size();

  std::byte* entry = body;
  for (uint32_t t = 0; t < geometry.tiles(); ++t) {
    Put(entry, record.tiles[t].version);
    Put(entry + 8, record.tiles[t].slot);
    Put(entry + 12, geometry.segments(t));
    entry += 16;
    for (uint32_t s = 0; s < geometry.segments(t); ++s, entry += 8) {
      Put(entry, record.checksums[geometry.first_segment(t) + s]);
    }
  }
  std::memcpy(entry, record.payload.data(), record.payload.size());
  std::memset(body + body_bytes, 0, out.size() - kSectorBytes - body_bytes);

  std::memset(at, 0, kSectorBytes);
  std::memcpy(at, kRecordMagic.data(), kRecordMagic.size());
  Put(at + kRecordVersion, kFormatVersion);
  Put(at + kRecordPlace, static_cast<uint32_t>(record.sequence % kRecordPlaces));
  std::memcpy(at + kRecordUuid, uuid.data(), uuid.size());
  Put(at + kRecordSequence, record.sequence);
  Put(at + kRecordStep, record.step);
  Put(at + kRecordUpdates, record.updates);
  Put(at + kRecordBodyBytes, body_bytes);
  Put(at + kRecordPayloadBytes, static_cast<uint64_t>(record.payload.size()));
  Put(at + kRecordTiles, geometry.tiles());
  Put(at + kRecordOverwriting, static_cast<uint32_t>(record.overwriting ? 1 : 0));
  std::memcpy(at + kRecordCheckpoint, record.checkpoint.data(), record.checkpoint.size());
  const uint64_t seed = RecordSeed(uuid, record.sequence);
  Put(at + kRecordBodyChecksum, Hash(out.subspan(kSectorBytes, body_bytes), seed));
  Put(at + kHeaderChecksumOffset, Hash(out.first(kHeaderChecksumOffset), seed));
}

absl::StatusOr<Record> DecodeRecord(const Geometry& geometry, const Uuid& uuid, uint32_t place,
                                    std::span<const std::byte> bytes) {
  if (bytes.size() != geometry.record_capacity())
    return absl::DataLossError("the file ends inside the record");
  const std::byte* const at = bytes.data();
  const auto header = bytes.first(kSectorBytes);
  if (AllZero(header)) return absl::NotFoundError("no record");
  if (std::memcmp(at, kRecordMagic.data(), kRecordMagic.size()) != 0) {
    return absl::DataLossError("no commit record magic");
  }
  Record record;
  record.sequence = Get<uint64_t>(at + kRecordSequence);
  const uint64_t seed = RecordSeed(uuid, record.sequence);
  if (Get<uint64_t>(at + kHeaderChecksumOffset) != Hash(header.first(kHeaderChecksumOffset), seed)) {
    return absl::DataLossError("record header checksum does not match");
  }
  if (Get<uint32_t>(at + kRecordVersion) != kFormatVersion) {
    return absl::DataLossError(absl::StrCat("record of format ", Get<uint32_t>(at + kRecordVersion)));
  }
  const auto overwriting = Get<uint32_t>(at + kRecordOverwriting);
  if (overwriting > 1 || (overwriting == 1 && geometry.slots() != 1)) {
    return absl::DataLossError(absl::StrCat("record of an unknown kind, ", overwriting));
  }
  record.overwriting = overwriting == 1;
  record.step = Get<uint64_t>(at + kRecordStep);
  record.updates = Get<uint64_t>(at + kRecordUpdates);
  std::memcpy(record.checkpoint.data(), at + kRecordCheckpoint, record.checkpoint.size());
  const uint64_t body_bytes = Get<uint64_t>(at + kRecordBodyBytes);
  const uint64_t payload_bytes = Get<uint64_t>(at + kRecordPayloadBytes);
  if (record.sequence == 0 || record.sequence % kRecordPlaces != place ||
      Get<uint32_t>(at + kRecordPlace) != place ||
      std::memcmp(at + kRecordUuid, uuid.data(), uuid.size()) != 0) {
    return absl::DataLossError(absl::StrCat("record of commit ", record.sequence, " is in the wrong place"));
  }
  if (Get<uint32_t>(at + kRecordTiles) != geometry.tiles() || body_bytes > bytes.size() - kSectorBytes ||
      body_bytes < TableBytes(geometry) || payload_bytes != body_bytes - TableBytes(geometry)) {
    return absl::DataLossError("record has lengths that do not fit the store");
  }
  const auto body = bytes.subspan(kSectorBytes, body_bytes);
  if (Hash(body, seed) != Get<uint64_t>(at + kRecordBodyChecksum)) {
    return absl::DataLossError(absl::StrCat("body of commit record ", record.sequence, " (step ", record.step,
                                            ") does not match its checksum"));
  }
  Reader in(body);
  record.tiles.resize(geometry.tiles());
  record.checksums.resize(geometry.total_segments());
  for (uint32_t t = 0; t < geometry.tiles(); ++t) {
    TileVersion& tile = record.tiles[t];
    tile.version = in.Number<uint64_t>();
    tile.slot = in.Number<uint32_t>();
    if (in.Number<uint32_t>() != geometry.segments(t) || tile.slot >= geometry.slots() || tile.version == 0) {
      return absl::DataLossError(absl::StrCat("record has an impossible entry for tile ", t));
    }
    for (uint32_t s = 0; s < geometry.segments(t); ++s) {
      record.checksums[geometry.first_segment(t) + s] = in.Number<uint64_t>();
    }
  }
  record.payload = in.Text(payload_bytes);
  if (!in.at_end()) return absl::DataLossError("record body has a wrong length");
  return record;
}

}  // namespace penstock::swap
