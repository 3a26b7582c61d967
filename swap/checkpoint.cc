#include "swap/checkpoint.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "swap/checkpoint_copy.h"
#include "swap/checkpoint_files.h"

namespace penstock::swap {

absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options) {
  absl::StatusOr<std::unique_ptr<CheckpointCopy>> copy = CheckpointCopy::OfStore(store, options);
  if (!copy.ok()) return copy.status();
  return (*copy)->Finish();
}

absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory) {
  const Geometry& g = from.geometry();
  if (g.tiles() != to.geometry().tiles()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint has ", g.tiles(), " tiles, the new state ", to.geometry().tiles()));
  }
  if (memory.size() < LargestSlot(g)) {
    return absl::InvalidArgumentError(
        absl::StrCat("restoring needs memory for one tile: ", LargestSlot(g), " bytes"));
  }
  TileIo io;
  std::array<void*, kMaxSegments> places;
  std::array<const void*, kMaxSegments> sources;
  std::array<uint64_t, kMaxSegments> checksums;
  for (uint32_t tile = 0; tile < g.tiles(); ++tile) {
    if (from.shape().tiles[tile].layout.segment_bytes != to.shape().tiles[tile].layout.segment_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("tile ", tile, " of the checkpoint has other segments"));
    }
    const uint32_t segments = SegmentPlaces(g, tile, memory.data(), &places);
    absl::Status status =
        from.ReadSegments(&io, tile, 0, segments, std::span<void* const>(places.data(), segments),
                          aio::Priority::kDemand, Which::kCommitted);
    if (status.ok()) status = from.Wait(&io);
    if (status.ok()) status = from.VerifyRead(io);
    if (!status.ok()) return status;
    const uint64_t version = from.committed(tile).version;
    std::copy_n(places.begin(), segments, sources.begin());
    status = to.WriteTile(&io, tile, version, std::span<const void* const>(sources.data(), segments),
                          aio::Priority::kWriteBehind);
    if (!status.ok()) return status;
    for (uint32_t s = 0; s < segments; ++s) checksums[s] = to.SegmentChecksum(tile, s, version, sources[s]);
    (void)to.Wait(&io);  // NoteWritten returns its error
    status = to.NoteWritten(&io, std::span<const uint64_t>(checksums.data(), segments));
    if (!status.ok()) return status;
  }
  return to.CommitNow({from.committed_step(), from.committed_updates(), from.committed_payload()});
}

}  // namespace penstock::swap
