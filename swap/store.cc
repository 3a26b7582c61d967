#include "swap/store.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace penstock::swap {
namespace {

// Segments as bits of Written::there.
uint32_t BitsOf(uint32_t first, uint32_t count) { return ((uint32_t{1} << count) - 1) << first; }

// The memory of consecutive segments of a tile from `first` on, in their order, those that are adjacent
// merged.
std::span<const aio::Segment> MemoryOf(const Geometry& geometry, uint32_t tile, uint32_t first,
                                       std::span<void* const> places,
                                       std::array<aio::Segment, kMaxSegments>* memory) {
  size_t runs = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const uint64_t bytes = PaddedBytes(geometry.segment_bytes(tile, first + static_cast<uint32_t>(i)));
    aio::Segment* last = runs > 0 ? &(*memory)[runs - 1] : nullptr;
    if (last != nullptr && static_cast<std::byte*>(last->data) + last->bytes == places[i]) {
      last->bytes += bytes;
    } else {
      (*memory)[runs++] = {places[i], bytes};
    }
  }
  return std::span<const aio::Segment>(memory->data(), runs);
}

}  // namespace

std::string_view CrashPointName(CrashPoint stage) {
  static constexpr std::array<std::string_view, kCrashPoints> kNames = {
      "create-file",    "create-reserved", "create-superblock", "create-done",         "overwrite-removed",
      "tile-submitted", "tile-written",    "commit-begin",      "commit-tiles-synced", "commit-submitted",
      "commit-written", "commit-synced",   "commit-done"};
  return kNames[static_cast<size_t>(stage)];
}

absl::Status TileIo::status() const {
  absl::Status status = request_.status();
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("tile ", tile_, " slot ", slot_, " version ", version_,
                                                  ": ", status.message()));
}

Store::~Store() {
  if (!made_in_.here()) return;  // what is in flight is the parent's, and ends there
  AwaitAll();
  NoteOwnCommit();
}

void Store::AwaitAll() {
  // Callers' transfers and commits point into this object. Nothing here can fail to end: the engine reports
  // every request, well or not.
  while (transfers_.load(std::memory_order_acquire) > 0 || (commit_ != nullptr && commit_->pending())) {
    (void)engine_.Drain();
  }
}

// ---- any thread ----

uint64_t Store::SegmentChecksum(uint32_t tile, uint32_t segment, uint64_t version, const void* data) const {
  return swap::SegmentChecksum(
      shape_.uuid, tile, segment, version,
      std::span(static_cast<const std::byte*>(data), geometry_.segment_bytes(tile, segment)));
}

absl::Status Store::CheckReadSegment(const TileIo& io, uint32_t i) const {
  if (io.kind_ != TileIo::Kind::kRead || i >= io.segment_count_) {
    return absl::FailedPreconditionError("not a segment of a tile that was read");
  }
  return io.request_.ok() ? absl::OkStatus() : io.status();
}

absl::Status Store::VerifySegment(const TileIo& io, uint32_t i) const {
  RETURN_IF_ERROR(CheckReadSegment(io, i));
  return VerifyChecksum(io, i, SegmentChecksum(io.tile_, io.first_segment_ + i, io.version_, io.data_[i]));
}

Store::ChecksumOf Store::ChecksumFor(const TileIo& io, uint32_t i) const {
  const uint32_t segment = io.first_segment_ + i;
  return {geometry_.segment_bytes(io.tile_, segment),
          SegmentSeed(shape_.uuid, io.tile_, segment, io.version_)};
}

absl::Status Store::VerifyChecksum(const TileIo& io, uint32_t i, uint64_t checksum) const {
  RETURN_IF_ERROR(CheckReadSegment(io, i));
  const uint32_t segment = io.first_segment_ + i;
  if (checksum == io.expected_[i]) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrFormat("read %s offset %u length %u: tile %u segment %u does not match the checksum of "
                      "version %u (damaged, lost "
                      "or misdirected on the way to the disk): go back to a checkpoint",
                      path(io.tile_), geometry_.segment_offset(io.tile_, io.slot_, segment),
                      geometry_.segment_bytes(io.tile_, segment), io.tile_, segment, io.version_));
}

absl::Status Store::VerifyRead(const TileIo& io) const {
  if (io.kind_ != TileIo::Kind::kRead) return absl::FailedPreconditionError("not a tile that was read");
  for (uint32_t i = 0; i < io.segment_count_; ++i) {
    RETURN_IF_ERROR(VerifySegment(io, i));
  }
  return absl::OkStatus();
}

absl::Status Store::Wait(TileIo* io) const {
  // Its error comes from status(), which names the tile.
  (void)engine_.Wait(&io->request_);
  return io->status();
}

// ---- transfers ----

absl::Status Store::CheckTile(uint32_t tile) const {
  if (tile < geometry_.tiles()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tile ", tile, " of ", geometry_.tiles()));
}

absl::Status Store::CheckWritable() const {
  if (options_.read_only) return absl::FailedPreconditionError("the store was opened for reading only");
  switch (health_) {
    case Health::kGood:
      break;
    case Health::kCommitFailed:
      return absl::FailedPreconditionError("the last commit failed: commit again before writing");
    case Health::kSyncFailed:
      return absl::FailedPreconditionError(
          "a sync of the store failed, so what the disk holds is unknown: open the store again");
  }
  if (commit_ != nullptr) return absl::FailedPreconditionError("a commit is in flight: writes wait for it");
  return absl::OkStatus();
}

void Store::OnTileDone(aio::Request&, void* context) {
  auto* io = static_cast<TileIo*>(context);
  // The owner may reuse or free `io` as soon as its callback says so, and this store when nothing is pending.
  std::atomic<uint64_t>& transfers = io->store_->transfers_;
  if (io->callback_ != nullptr) io->callback_(*io, io->context_);
  transfers.fetch_sub(1, std::memory_order_release);
}

absl::Status Store::Submit(TileIo* io, TileIo::Kind kind, uint32_t tile, aio::Priority priority) {
  io->kind_ = kind;
  io->tile_ = tile;
  io->store_ = this;
  io->request_.set_priority(priority);
  io->request_.set_on_complete(&Store::OnTileDone, io);
  transfers_.fetch_add(1, std::memory_order_relaxed);
  absl::Status submitted = engine_.Submit(&io->request_);
  if (!submitted.ok()) {
    transfers_.fetch_sub(1, std::memory_order_relaxed);
    io->kind_ = TileIo::Kind::kNone;
  }
  return submitted;
}

absl::Status Store::ReadSegments(TileIo* io, uint32_t tile, uint32_t first, uint32_t count,
                                 std::span<void* const> destinations, aio::Priority priority,
                                 VersionChoice choice) {
  RETURN_IF_ERROR(CheckTile(tile));
  if (io->pending()) return absl::FailedPreconditionError("the transfer object is in use");
  const uint32_t segments = geometry_.segments(tile);
  if (count == 0 || first >= segments || count > segments - first || destinations.size() != count) {
    return absl::InvalidArgumentError(absl::StrFormat("segments %u to %u of the %u of tile %u, to %u places",
                                                      first, first + count, segments, tile,
                                                      destinations.size()));
  }
  const size_t table = geometry_.first_segment(tile) + first;
  const Written& written = written_[tile];
  TileVersion source;
  const uint64_t* checksums = nullptr;
  if (choice == VersionChoice::kRetained) {
    if (retained_.has_value()) {
      source = retained_->tiles[tile];
      checksums = &retained_->checksums[table];
    }
  } else if (choice == VersionChoice::kNewest && written.state == Written::State::kNoted) {
    source = {written.version, written.slot};
    checksums = &written_checksums_[table];
  } else if (!record_.overwriting || written.state == Written::State::kNone) {
    source = record_.tiles[tile];
    checksums = &record_.checksums[table];
  }
  if (source.version == 0) {
    return absl::FailedPreconditionError(absl::StrCat("tile ", tile, " has no such version"));
  }

  io->slot_ = source.slot;
  io->version_ = source.version;
  io->first_segment_ = first;
  io->segment_count_ = count;
  std::copy(destinations.begin(), destinations.end(), io->data_.begin());
  std::copy_n(checksums, count, io->expected_.begin());
  io->request_.PrepareRead(*files_[geometry_.directory(tile)],
                           geometry_.segment_offset(tile, source.slot, first),
                           MemoryOf(geometry_, tile, first, destinations, &io->memory_));
  return Submit(io, TileIo::Kind::kRead, tile, priority);
}

uint32_t Store::FreeSlot(uint32_t tile) const {
  const TileVersion live = record_.tiles[tile];
  for (uint32_t slot = 0; slot < geometry_.slots(); ++slot) {
    const bool committed = live.version != 0 && live.slot == slot && !record_.overwriting;
    const bool held =
        retained_.has_value() && retained_->tiles[tile].version != 0 && retained_->tiles[tile].slot == slot;
    if (!committed && !held) return slot;
  }
  return geometry_.slots();
}

absl::Status Store::WriteTile(TileIo* io, uint32_t tile, uint64_t version,
                              std::span<const void* const> sources, aio::Priority priority) {
  RETURN_IF_ERROR(CheckTile(tile));
  const uint32_t segments = geometry_.segments(tile);
  if (sources.size() != segments) {
    return absl::InvalidArgumentError(
        absl::StrCat(sources.size(), " sources for the ", segments, " segments of tile ", tile));
  }
  return WriteSegments(io, tile, version, 0, sources, priority);
}

absl::Status Store::WriteSegments(TileIo* io, uint32_t tile, uint64_t version, uint32_t first,
                                  std::span<const void* const> sources, aio::Priority priority) {
  RETURN_IF_ERROR(CheckTile(tile));
  RETURN_IF_ERROR(CheckWritable());
  if (io->pending()) return absl::FailedPreconditionError("the transfer object is in use");
  const uint32_t segments = geometry_.segments(tile);
  if (sources.empty() || first >= segments || sources.size() > segments - first) {
    return absl::InvalidArgumentError(absl::StrFormat("segments %u to %u of the %u of tile %u", first,
                                                      first + sources.size(), segments, tile));
  }
  if (version <= record_.tiles[tile].version) {
    return absl::InvalidArgumentError(absl::StrCat(
        "version ", version, " of tile ", tile, " is not above the committed ", record_.tiles[tile].version));
  }
  Written& written = written_[tile];
  if (written.state == Written::State::kWriting) {
    return absl::FailedPreconditionError(absl::StrCat("tile ", tile, " has a write in flight"));
  }
  const bool goes_on = written.state == Written::State::kInParts && written.version == version;
  const uint32_t slot = goes_on ? written.slot : FreeSlot(tile);
  if (slot == geometry_.slots()) {
    return absl::FailedPreconditionError(
        absl::StrCat("tile ", tile,
                     geometry_.slots() == 1
                         ? " has one slot, and what stands there is committed (StartOverwriting comes first)"
                         : " has no slot left: a checkpoint still holds one of its versions"));
  }

  // What a restart would find is never written over.
  PENSTOCK_CHECK(record_.overwriting || record_.tiles[tile].version == 0 || record_.tiles[tile].slot != slot,
                 "a write over the committed version of a tile");
  PENSTOCK_CHECK(
      !retained_.has_value() || retained_->tiles[tile].version == 0 || retained_->tiles[tile].slot != slot,
      "a write over a version that a checkpoint holds");
  const auto count = static_cast<uint32_t>(sources.size());
  io->slot_ = slot;
  io->version_ = version;
  io->first_segment_ = first;
  io->segment_count_ = count;
  // The engine only reads them.
  for (uint32_t i = 0; i < count; ++i) io->data_[i] = const_cast<void*>(sources[i]);
  io->request_.PrepareWrite(
      *files_[geometry_.directory(tile)], geometry_.segment_offset(tile, slot, first),
      MemoryOf(geometry_, tile, first, std::span(io->data_).first(count), &io->memory_));
  // From here on these segments of the slot hold nothing that can be relied on.
  const Written before = written;
  const uint32_t others = goes_on ? written.there & ~BitsOf(first, count) : 0;
  written = {Written::State::kWriting, slot, version, others};
  ++writing_;
  absl::Status submitted = Submit(io, TileIo::Kind::kWrite, tile, priority);
  if (!submitted.ok()) {
    written = before;
    --writing_;
    return submitted;
  }
  At(CrashPoint::kTileSubmitted);
  return submitted;
}

absl::Status Store::NoteWritten(TileIo* io, std::span<const uint64_t> checksums) {
  if (io->kind_ != TileIo::Kind::kWrite || !io->finished()) {
    return absl::FailedPreconditionError("not a finished write of a tile");
  }
  const uint32_t tile = io->tile_;
  Written& written = written_[tile];
  if (written.state != Written::State::kWriting || written.version != io->version_) {
    return absl::FailedPreconditionError(absl::StrCat("tile ", tile, " was noted already"));
  }
  if (checksums.size() != io->segment_count_) {
    return absl::InvalidArgumentError(absl::StrCat(checksums.size(), " checksums for the ",
                                                   io->segment_count_, " segments that were written of tile ",
                                                   tile));
  }
  --writing_;
  io->kind_ = TileIo::Kind::kNone;
  if (!io->request_.ok()) {
    written.state = Written::State::kFailed;
    return io->status();
  }
  std::copy(checksums.begin(), checksums.end(),
            written_checksums_.begin() +
                static_cast<ptrdiff_t>(geometry_.first_segment(tile) + io->first_segment_));
  written.there |= BitsOf(io->first_segment_, io->segment_count_);
  const bool whole = written.there == BitsOf(0, geometry_.segments(tile));
  written.state = whole ? Written::State::kNoted : Written::State::kInParts;
  At(CrashPoint::kTileWritten);
  return absl::OkStatus();
}

absl::Status Store::ReadTileNow(TileIo* io, uint32_t tile, std::span<void* const> destinations,
                                aio::Priority priority, VersionChoice choice) {
  absl::Status status =
      ReadSegments(io, tile, 0, static_cast<uint32_t>(destinations.size()), destinations, priority, choice);
  if (status.ok()) status = Wait(io);
  if (status.ok()) status = VerifyRead(*io);
  return status;
}

absl::Status Store::WriteTileNow(TileIo* io, uint32_t tile, uint64_t version,
                                 std::span<const void* const> sources, aio::Priority priority) {
  RETURN_IF_ERROR(WriteTile(io, tile, version, sources, priority));
  std::array<uint64_t, kMaxSegments> checksums;
  for (uint32_t s = 0; s < sources.size(); ++s) checksums[s] = SegmentChecksum(tile, s, version, sources[s]);
  (void)Wait(io);  // NoteWritten returns its error
  return NoteWritten(io, std::span<const uint64_t>(checksums.data(), sources.size()));
}

absl::Status Store::DropWritten(uint32_t tile) {
  RETURN_IF_ERROR(CheckTile(tile));
  if (commit_ != nullptr || health_ != Health::kGood) {
    return absl::FailedPreconditionError("what a commit in flight refers to cannot be dropped");
  }
  Written& written = written_[tile];
  if (record_.overwriting && written.state != Written::State::kNone) {
    return absl::FailedPreconditionError(
        absl::StrCat("tile ", tile, " has one slot, and what stood there before is gone"));
  }
  if (written.state == Written::State::kWriting) {
    return absl::FailedPreconditionError(absl::StrCat("tile ", tile, " has a write in flight"));
  }
  written.state = Written::State::kNone;
  return absl::OkStatus();
}

absl::Status Store::DropAllWritten() {
  if (writing_ > 0)
    return absl::FailedPreconditionError(absl::StrCat(writing_, " tiles have writes in flight"));
  for (uint32_t tile = 0; tile < geometry_.tiles(); ++tile) {
    RETURN_IF_ERROR(DropWritten(tile));
  }
  return absl::OkStatus();
}

absl::Status Store::WriteScratch(TileIo* io, uint32_t tile, uint64_t offset, const void* source,
                                 uint64_t bytes, aio::Priority priority) {
  return Scratch(io, TileIo::Kind::kWriteScratch, tile, offset, const_cast<void*>(source), bytes, priority);
}

absl::Status Store::ReadScratch(TileIo* io, uint32_t tile, uint64_t offset, void* destination, uint64_t bytes,
                                aio::Priority priority) {
  return Scratch(io, TileIo::Kind::kReadScratch, tile, offset, destination, bytes, priority);
}

absl::Status Store::Scratch(TileIo* io, TileIo::Kind kind, uint32_t tile, uint64_t offset, void* data,
                            uint64_t bytes, aio::Priority priority) {
  RETURN_IF_ERROR(CheckTile(tile));
  if (io->pending()) return absl::FailedPreconditionError("the transfer object is in use");
  const uint64_t size = geometry_.scratch_bytes(tile);
  if (bytes == 0 || offset > size || bytes > size - offset) {
    return absl::InvalidArgumentError(
        absl::StrFormat("scratch bytes %u to %u of the %u of tile %u", offset, offset + bytes, size, tile));
  }
  const bool write = kind == TileIo::Kind::kWriteScratch;
  // Scratch is no part of any commit, so that writing it need not wait for one.
  if (write && options_.read_only) return CheckWritable();
  io->slot_ = geometry_.slots();
  io->version_ = 0;
  io->first_segment_ = 0;
  io->segment_count_ = 0;
  aio::File& file = *files_[geometry_.directory(tile)];
  const uint64_t at = geometry_.scratch_offset(tile) + offset;
  if (write) {
    io->request_.PrepareWrite(file, at, data, bytes);
  } else {
    io->request_.PrepareRead(file, at, data, bytes);
  }
  return Submit(io, kind, tile, priority);
}

uint64_t Store::newest_version(uint32_t tile) const {
  return written_[tile].state == Written::State::kNoted ? written_[tile].version
                                                        : record_.tiles[tile].version;
}

// ---- retained versions ----

absl::Status Store::Retain() {
  if (retained_.has_value())
    return absl::FailedPreconditionError("a version is held already: release it first");
  if (record_.sequence == 0) return absl::FailedPreconditionError("nothing is committed yet");
  if (commit_ != nullptr) return absl::FailedPreconditionError("a commit is in flight");
  if (record_.overwriting) return absl::FailedPreconditionError("what was committed is being overwritten");
  retained_ = record_;
  return absl::OkStatus();
}

void Store::Release() { retained_.reset(); }

}  // namespace penstock::swap
