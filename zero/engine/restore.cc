#include "zero/engine/restore.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "swap/verify.h"
#include "tiering/plan/plan_layout.h"
#include "zero/compute/tile_version.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/state_identity.h"
#include "zero/engine/store_layout.h"
#include "zero/engine/stripes.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kVerifyBytes = 8 * kMiB;  // what is in flight

absl::StatusOr<std::unique_ptr<aio::Engine>> MakeIo() {
  aio::EngineOptions options;
  options.log = [](std::string_view) {};
  return aio::Engine::Create(std::move(options));
}

// Of a commit, for counts of missed updates, beside what the checkpoint's has, which may be a model's
// buffers.
uint64_t MissedRoom(const EngineOptions& options) {
  return options.optimizer.missing_gradients == MissingGradients::kSkip ? uint64_t{1} << 18 : 0;
}

std::vector<swap::CommitSeen> CommitsSeen(const EngineOptions& options) {
  const zero::StorageOptions& storage = options.storage;
  return storage.overwrites_only.has_value() ? *storage.overwrites_only
                                             : swap::SeeCommits(storage.state_dirs);
}

// The parts whose number is `rank`, modulo `world`.
absl::Status VerifyParts(aio::Engine& io, const ShardDirectories& parts,
                         const std::vector<swap::Inspection>& inspections, int rank, int world) {
  aio::ArenaOptions arena_options;
  arena_options.lock = false;
  arena_options.bytes = kVerifyBytes;
  ASSIGN_OR_RETURN(const std::unique_ptr<aio::Arena> arena, aio::Arena::Create(arena_options));
  for (auto part = static_cast<size_t>(rank); part < parts.size(); part += static_cast<size_t>(world)) {
    swap::StoreOptions options;
    options.directories = parts[part];
    options.read_only = true;
    options.sequence = inspections[part].record.sequence;
    ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> store, swap::Store::Open(io, options));
    ASSIGN_OR_RETURN(const swap::VerifyReport report, swap::VerifyAll(*store, {arena->data(), kVerifyBytes}));
    if (report.damaged.empty()) continue;
    return absl::DataLossError(absl::StrCat("the checkpoint is damaged, and nothing was replaced: ",
                                            report.damaged.front().Text(), ": go on from another one"));
  }
  return absl::OkStatus();
}

// This rank's part of a checkpoint of another number of ranks.
absl::Status RestorePart(aio::Engine& io, const ShardDirectories& parts,
                         const std::vector<swap::Inspection>& inspections, const EngineOptions& options,
                         swap::StoreOptions to_options) {
  nlohmann::json identity = WholeIdentity(inspections.front().shape.identity);
  ASSIGN_OR_RETURN(tiering::Precision precision, PrecisionOf(identity, parts.front().front()));
  ASSIGN_OR_RETURN(std::vector<int64_t> elements, BlockElementsOf(identity, parts.front().front()));
  const uint64_t source_bytes = ShardedState::MemoryBytes(inspections);
  aio::ArenaOptions arena_options;
  arena_options.lock = false;
  arena_options.bytes = source_bytes;
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> source, aio::Arena::Create(arena_options));
  ASSIGN_OR_RETURN(
      std::unique_ptr<ShardedState> from,
      ShardedState::Open(io, parts, inspections, elements, precision, {source->data(), source_bytes}));

  // Tiles of the size that they had.
  struct Place {
    tiering::BlockIndex block;
    tiering::Tile range;  // of the run
  };
  std::vector<Place> places;
  swap::Layout layout;
  for (size_t b = 0; b < elements.size(); ++b) {
    const tiering::BlockIndex block(b);
    const int64_t part = tiering::ShardElements(elements[b], options.world());
    for (const tiering::Tile& tile : tiering::CutTiles(part, from->LargestTile(block))) {
      places.push_back({block, {options.rank() * part + tile.offset, tile.elements}});
      layout.tiles.push_back(from->WeightsAlone(block) ? WeightsAloneLayoutOf(precision, tile.elements)
                                                       : TileLayoutOf(precision, tile.elements));
    }
  }
  NameRank(options, &identity);
  to_options.payload_capacity += from->recovered().payload.size() + MissedRoom(options);
  ASSIGN_OR_RETURN(to_options.slots, AgreeOnVersions(options, to_options, layout, identity.dump()));
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> to,
                   swap::Store::Create(io, to_options, layout, identity.dump()));
  arena_options.bytes = std::max<uint64_t>(swap::kSectorBytes, to->geometry().largest_slot_bytes());
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> target, aio::Arena::Create(arena_options));
  const swap::Recovered& recovered = from->recovered();
  const uint64_t version = VersionAfter(static_cast<int64_t>(recovered.step));
  swap::TileIo io_of_tile;
  std::array<void*, swap::kMaxSegments> memory;
  for (uint32_t t = 0; t < places.size(); ++t) {
    const auto& [block, range] = places[t];
    const std::span<void* const> segments = to->geometry().SegmentPlaces(t, target->data(), &memory);
    absl::Status status = from->Read(block, range.offset, range.elements, segments);
    RETURN_IF_ERROR(status);
    const std::vector<const void*> sources(segments.begin(), segments.end());
    status = to->WriteTileNow(&io_of_tile, t, version, sources, aio::Priority::kWriteBehind);
    RETURN_IF_ERROR(status);
  }
  return to->CommitGiven(
      {.step = recovered.step, .updates = recovered.updates, .payload = recovered.payload});
}

}  // namespace

absl::StatusOr<bool> ReplacesCommits(const EngineOptions& options) {
  const auto mine = static_cast<int64_t>(CommitsSeen(options).size());
  if (options.comm == nullptr) return mine > 0;
  ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                   AllNumbers(*options.comm, "the commits that are replaced", mine));
  return std::any_of(all.begin(), all.end(), [](int64_t commits) { return commits > 0; });
}

absl::Status VerifyCheckpoint(const std::string& path, int rank, int world) {
  ASSIGN_OR_RETURN(const ShardDirectories parts, FindShards({path}));
  ASSIGN_OR_RETURN(const std::vector<swap::Inspection> inspections, InspectShards(parts));
  ASSIGN_OR_RETURN(const std::unique_ptr<aio::Engine> io, MakeIo());
  return VerifyParts(*io, parts, inspections, rank, world);
}

absl::Status RestoreRun(const std::string& path, const EngineOptions& options, bool is_verified) {
  return RestoreRun(std::vector<std::string>{path}, options, is_verified);
}

absl::Status RestoreRun(const std::vector<std::string>& directories, const EngineOptions& options,
                        bool is_verified) {
  ASSIGN_OR_RETURN(ShardDirectories parts, FindShards(directories));
  ASSIGN_OR_RETURN(std::vector<swap::Inspection> inspections, InspectShards(parts));
  ASSIGN_OR_RETURN(const std::unique_ptr<aio::Engine> io, MakeIo());
  swap::StoreOptions to_options;
  to_options.directories = options.storage.state_dirs;
  to_options.weights = ChooseStripes(options.storage, options.memory.host_memory_budget_bytes).weights;
  to_options.sync = options.storage.sync;
  to_options.overwrite = true;
  // What is there now, and nothing that another process makes while the checkpoint is read.
  to_options.overwrites_only = CommitsSeen(options);
  ASSIGN_OR_RETURN(const bool replaces, ReplacesCommits(options));
  if (replaces && !is_verified) {
    RETURN_IF_ERROR(VerifyParts(*io, parts, inspections, options.rank(), options.world()));
  }
  // Ranks meet here: none replaces anything before all have verified their share.
  if (options.comm != nullptr) {
    ASSIGN_OR_RETURN(to_options.uuid, AgreeOnNewStore(*options.comm, to_options));
  }
  if (parts.size() != static_cast<size_t>(options.world()))
    return RestorePart(*io, parts, inspections, options, std::move(to_options));
  swap::StoreOptions from_options;
  from_options.directories = parts[static_cast<size_t>(options.rank())];
  from_options.read_only = true;
  from_options.sequence = inspections.front().record.sequence;
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> from, swap::Store::Open(*io, from_options));
  ASSIGN_OR_RETURN(tiering::Precision precision,
                   PrecisionOf(WholeIdentity(from->identity()), from_options.directories.front()));
  const swap::Layout layout = LayoutWithScratch(from->shape(), precision);
  to_options.payload_capacity += from->committed_payload().size() + MissedRoom(options);
  const uint64_t tile_bytes = std::max<uint64_t>(kMiB, from->geometry().largest_slot_bytes());
  ASSIGN_OR_RETURN(to_options.slots, AgreeOnVersions(options, to_options, layout, from->identity()));
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> to,
                   swap::Store::Create(*io, to_options, layout, from->identity()));
  aio::ArenaOptions arena_options;
  arena_options.bytes = 2 * tile_bytes;
  arena_options.lock = false;
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> arena, aio::Arena::Create(arena_options));
  return swap::RestoreCheckpoint(*from, *to, {arena->data(), 2 * tile_bytes});
}

}  // namespace penstock::zero
