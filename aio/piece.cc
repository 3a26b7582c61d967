#include "aio/piece.h"

#include <algorithm>
#include <cstring>

#include "aio/bytes.h"

namespace penstock::aio {
namespace {

// Segments shorter than this are gathered: copying 64 KiB costs less than a transfer of its own.
constexpr uint64_t kInPlaceBytes = 64 * kKiB;

uint64_t Address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Bytes from the cursor on that are best moved through one bounce buffer: up to the limit, or up to a segment
// that can go in place again.
uint64_t BounceRun(const Request& request, const Segment* segments, uint32_t count, uint32_t segment,
                   uint64_t segment_offset, uint64_t lead, const Alignment& alignment, uint64_t limit) {
  (void)request;
  const Segment& first = segments[segment];
  const uint64_t here = first.bytes - segment_offset;
  const uint64_t to_sector = alignment.offset - lead;
  // Only the head is ragged and the rest of this segment is fit to go in place.
  if (lead != 0 && here >= to_sector + kInPlaceBytes &&
      IsAligned(Address(first.data) + segment_offset + to_sector, alignment.memory)) {
    return std::min(limit, to_sector);
  }
  uint64_t run = here;
  for (uint32_t i = segment + 1; i < count && run < limit; ++i) {
    const bool fit = IsAligned(lead + run, alignment.offset) && segments[i].bytes >= kInPlaceBytes &&
                     IsAligned(Address(segments[i].data), alignment.memory);
    if (fit) break;
    run += segments[i].bytes;
  }
  return std::min(run, limit);
}

}  // namespace

bool Cutter::Next(const Request& request, const CutLimits& limits, Piece& piece) {
  const uint64_t remaining = request.bytes_ - request.cut_bytes_;
  if (remaining == 0) return false;
  const Segment* const segments = request.segments();
  uint32_t segment = request.cut_segment_;
  uint64_t segment_offset = request.cut_segment_offset_;
  while (segments[segment].bytes == segment_offset) {
    ++segment;
    segment_offset = 0;
  }
  const Alignment& alignment = request.file_->alignment();
  const uint64_t sector = alignment.offset;
  const uint64_t offset = request.offset_ + request.cut_bytes_;
  std::byte* const data = static_cast<std::byte*>(segments[segment].data) + segment_offset;
  const uint64_t here = segments[segment].bytes - segment_offset;

  piece.op = request.op_;
  piece.segment = segment;
  piece.segment_offset = segment_offset;
  piece.lead_bytes = 0;

  if (IsAligned(offset, sector) && IsAligned(Address(data), alignment.memory)) {
    const uint64_t run = AlignDown(std::min(here, limits.block_bytes), sector);
    if (run != 0 && (run >= kInPlaceBytes || run >= AlignDown(remaining, sector) ||
                     request.segment_count_ == 1 || !request.file_->direct())) {
      piece.kind = Piece::Kind::kInPlace;
      piece.offset = offset;
      piece.bytes = piece.user_bytes = run;
      piece.data = data;
      return true;
    }
  }

  const uint64_t lead = offset - AlignDown(offset, sector);
  piece.offset = offset - lead;
  piece.lead_bytes = lead;
  piece.data = nullptr;
  const uint64_t bounce_bytes = std::max(limits.bounce_bytes, sector);
  if (request.op_ == Op::kWrite && (lead != 0 || remaining < sector)) {
    piece.kind = Piece::Kind::kOneSector;
    piece.user_bytes = std::min(sector - lead, remaining);
    piece.bytes = sector;
    return true;
  }
  piece.kind = Piece::Kind::kBounced;
  uint64_t run = std::min(remaining, BounceRun(request, segments, request.segment_count_, segment,
                                               segment_offset, lead, alignment, bounce_bytes - lead));
  // A write takes whole sectors only, what is left becomes a one-sector piece; a read ends raggedly only at
  // its end.
  const uint64_t whole = AlignDown(lead + run, sector);
  if ((request.op_ == Op::kWrite || run < remaining) && whole > lead) run = whole - lead;
  piece.user_bytes = run;
  piece.bytes = AlignUp(lead + run, sector);
  return true;
}

void Cutter::Take(Request& request, const Piece& piece) {
  request.cut_segment_ = piece.segment;
  request.cut_segment_offset_ = piece.segment_offset;
  request.cut_bytes_ += piece.user_bytes;
  Advance(request, request.cut_segment_, request.cut_segment_offset_, piece.user_bytes);
}

void Cutter::Advance(const Request& request, uint32_t& segment, uint64_t& segment_offset, uint64_t bytes) {
  const Segment* const segments = request.segments();
  while (bytes != 0) {
    const uint64_t step = std::min(bytes, segments[segment].bytes - segment_offset);
    segment_offset += step;
    bytes -= step;
    if (segment_offset == segments[segment].bytes && segment + 1 < request.segment_count_) {
      ++segment;
      segment_offset = 0;
    }
  }
}

namespace {

// Visits the caller's memory of a piece run by run, beside the matching part of the bounce buffer.
template <typename Copy>
void ForEachRun(const Segment* segments, const Piece& piece, const Copy& copy) {
  std::byte* at = piece.data + piece.lead_bytes;
  uint64_t left = piece.user_bytes;
  uint32_t segment = piece.segment;
  uint64_t segment_offset = piece.segment_offset;
  while (left != 0) {
    const uint64_t run = std::min(left, segments[segment].bytes - segment_offset);
    if (run != 0) copy(at, static_cast<std::byte*>(segments[segment].data) + segment_offset, run);
    at += run;
    left -= run;
    ++segment;
    segment_offset = 0;
  }
}

}  // namespace

void Cutter::CopyIn(const Piece& piece) {
  ForEachRun(piece.request->segments(), piece, [](std::byte* bounce, const std::byte* user, uint64_t bytes) {
    std::memcpy(bounce, user, bytes);
  });
}

void Cutter::CopyOut(const Piece& piece) {
  ForEachRun(piece.request->segments(), piece, [](const std::byte* bounce, std::byte* user, uint64_t bytes) {
    std::memcpy(user, bounce, bytes);
  });
}

}  // namespace penstock::aio
