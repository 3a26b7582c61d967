#include "swap/verify.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/checksum.h"
#include "swap/stream.h"

namespace penstock::swap {
namespace {

// As long as one block of the engine: a longer chunk is waited for in one piece, and while it is checked less
// is in flight than the drive needs (4 MiB: 0.7 of the bandwidth of reading alone; 1 MiB: 0.99).
constexpr uint64_t kChunkBytes = uint64_t{1} << 20;
constexpr uint64_t kProgressBytes = uint64_t{64} << 20;

// Takes the bytes of one tile in order and checks each segment at its end.
class TileChecker {
 public:
  TileChecker(const Store& store, VerifyReport* report) : store_(store), report_(report) {}

  void Begin(uint32_t tile) {
    tile_ = tile;
    segment_ = 0;
    at_ = 0;
    BeginSegment();
  }

  // `status` says whether `data` can be believed.
  void Take(std::span<const std::byte> data, const absl::Status& status) {
    const Geometry& g = store_.geometry();
    while (!data.empty() && segment_ < g.segments(tile_)) {
      const uint64_t end = g.segment_start(tile_, segment_) + g.segment_bytes(tile_, segment_);
      const uint64_t next = g.segment_start(tile_, segment_ + 1);
      const uint64_t meant = std::min<uint64_t>(data.size(), end > at_ ? end - at_ : 0);
      if (meant > 0) {
        if (status.ok()) {
          sum_.Update(data.data(), meant);
        } else if (reason_.empty()) {
          reason_ = std::string(status.message());
        }
      }
      const uint64_t step = std::min<uint64_t>(data.size(), next - at_);
      at_ += step;
      data = data.subspan(step);
      if (at_ >= end && !judged_) Judge();
      if (at_ == next) {
        ++segment_;
        BeginSegment();
      }
    }
  }

 private:
  void BeginSegment() {
    if (segment_ >= store_.geometry().segments(tile_)) return;
    judged_ = false;
    reason_.clear();
    sum_.Reset(SegmentSeed(store_.uuid(), tile_, segment_, store_.committed(tile_).version));
  }

  void Judge() {
    judged_ = true;
    const Geometry& g = store_.geometry();
    const uint64_t bytes = g.segment_bytes(tile_, segment_);
    report_->bytes += bytes;
    if (reason_.empty()) {
      if (sum_.Digest() == store_.committed_checksum(tile_, segment_)) return;
      reason_ = "checksum does not match";
    }
    const TileVersion live = store_.committed(tile_);
    report_->damaged.push_back({store_.path(tile_), g.segment_offset(tile_, live.slot, segment_), bytes,
                                tile_, segment_, live.version, reason_});
  }

  const Store& store_;
  VerifyReport* report_;
  kernels::Checksummer sum_;
  uint32_t tile_ = 0;
  uint32_t segment_ = 0;
  uint64_t at_ = 0;  // within the slot
  bool judged_ = false;
  std::string reason_;
};

}  // namespace

std::string DamagedRange::Text() const {
  return absl::StrFormat("%s offset %u length %u: tile %u segment %u version %u: %s", path, offset, bytes,
                         tile, segment, version, reason);
}

absl::StatusOr<VerifyReport> VerifyAll(Store& store, std::span<std::byte> memory,
                                       const std::function<bool(uint64_t, uint64_t)>& progress) {
  if (store.committed_sequence() == 0)
    return absl::FailedPreconditionError("nothing is committed: nothing to verify");
  if (memory.size() < 2 * kSectorBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("verifying needs at least ", 2 * kSectorBytes, " bytes of memory"));
  }
  const Geometry& g = store.geometry();
  // At least four chunks, so that reading goes on while one is being checked, and none larger than the
  // largest tile, so that small tiles are read many at a time.
  const uint64_t largest = std::max<uint64_t>(kSectorBytes, g.largest_slot_bytes());
  const uint64_t chunk_bytes = std::clamp(std::min(largest, memory.size() / 4 / kSectorBytes * kSectorBytes),
                                          kSectorBytes, kChunkBytes);
  VerifyReport report;
  report.notes = store.recovered().damage;
  const auto start = std::chrono::steady_clock::now();

  uint32_t next_tile = 0;
  ReadStream stream(store.engine(), memory, chunk_bytes, [&]() -> std::optional<ReadStream::Range> {
    if (next_tile == g.tiles()) return std::nullopt;
    const uint32_t tile = next_tile++;
    return ReadStream::Range{&store.file(g.directory(tile)), g.slot_offset(tile, store.committed(tile).slot),
                             g.slot_bytes(tile)};
  });
  TileChecker checker(store, &report);
  uint64_t told = 0;
  while (const auto chunk = stream.Next()) {
    const auto tile = static_cast<uint32_t>(chunk->range);
    if (chunk->offset == 0) {
      checker.Begin(tile);
      ++report.tiles;
    }
    checker.Take(chunk->data, chunk->status);
    if (progress && report.bytes - told >= kProgressBytes) {
      told = report.bytes;
      if (!progress(report.bytes, g.state_bytes())) return absl::CancelledError("verify was cancelled");
    }
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace penstock::swap
