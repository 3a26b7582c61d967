#include "swap/checkpoint.h"

#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/checkpoint_copy.h"
#include "swap/checkpoint_files.h"

namespace penstock::swap {

absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<CheckpointCopy> copy, CheckpointCopy::OfStore(store, options));
  return copy->Finish();
}

absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory) {
  const Geometry& g = from.geometry();
  if (g.tiles() != to.geometry().tiles()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint has ", g.tiles(), " tiles, the new state ", to.geometry().tiles()));
  }
  if (memory.size() < g.largest_slot_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("restoring needs memory for one tile: ", g.largest_slot_bytes(), " bytes"));
  }
  TileIo io;
  std::array<void*, kMaxSegments> places;
  for (uint32_t tile = 0; tile < g.tiles(); ++tile) {
    if (from.shape().tiles[tile].layout.segment_bytes != to.shape().tiles[tile].layout.segment_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("tile ", tile, " of the checkpoint has other segments"));
    }
    const std::span<void* const> segments = g.SegmentPlaces(tile, memory.data(), &places);
    RETURN_IF_ERROR(from.ReadTileNow(&io, tile, segments, aio::Priority::kDemand, VersionChoice::kCommitted));
    const std::vector<const void*> sources(segments.begin(), segments.end());
    RETURN_IF_ERROR(
        to.WriteTileNow(&io, tile, from.committed(tile).version, sources, aio::Priority::kWriteBehind));
  }
  return to.CommitGiven({from.committed_step(), from.committed_updates(), from.committed_payload()});
}

}  // namespace penstock::swap
