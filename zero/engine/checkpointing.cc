#include "zero/engine/checkpointing.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/file.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "zero/compute/tile_version.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/store_layout.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

// Block and tile of every tile of a store, in the store's order.
std::vector<std::pair<tiering::BlockIndex, tiering::TileIndex>> TileNumbers(const tiering::Plan& plan) {
  std::vector<std::pair<tiering::BlockIndex, tiering::TileIndex>> numbers;
  for (const tiering::BlockIndex b : plan.blocks.indices()) {
    for (const tiering::TileIndex t : plan.blocks[b].tiles.indices()) {
      if (plan.blocks[b].in_store(t)) numbers.emplace_back(b, t);
    }
  }
  return numbers;
}

std::vector<void*> PlacesIn(const TileMemory& memory) {
  std::vector<void*> places = {memory.weights};
  places.insert(places.end(), memory.state.begin(), memory.state.end());
  return places;
}

// Of a plan that has everything in memory.
std::vector<void*> PlacesOf(const tiering::Plan& plan, const ArenaView& arena_view, const DeviceState* device,
                            tiering::BlockIndex block, tiering::TileIndex tile) {
  if (device != nullptr && device->has(block)) return PlacesIn(device->staged(block, tile));
  const tiering::BlockPlan& of = plan.blocks[block];
  return PlacesIn(arena_view.tile(block, tile, of.private_weight_slot, of.private_tile_slot[tile]));
}

// A tile was read to its places: on to the device, where it lives there.
absl::Status HandOn(const DeviceState* device, tiering::BlockIndex block, tiering::TileIndex tile) {
  if (device == nullptr || !device->has(block)) return absl::OkStatus();
  return device->Write(block, tile, device->staged(block, tile));
}

}  // namespace

Checkpointing::Checkpointing(CheckpointSchedule schedule, std::span<std::byte> tile_memory, Comm* comm,
                             Report report, CheckpointTotals* totals)
    : schedule_(std::move(schedule)),
      tile_memory_(tile_memory),
      comm_(comm),
      report_(std::move(report)),
      totals_(totals) {}

absl::Status Checkpointing::CleanUp() const {
  if (comm_ != nullptr && comm_->rank() > 0) return absl::OkStatus();
  return swap::RemovePartialCheckpoints(schedule_.parent);
}

absl::Status Checkpointing::KeepNewest() const {
  if (comm_ != nullptr && comm_->rank() > 0) return absl::OkStatus();
  return swap::KeepNewestCheckpoints(schedule_.parent, Options(0).keep);
}

swap::CheckpointOptions Checkpointing::Options(uint64_t step) const {
  swap::CheckpointOptions options;
  options.parent = schedule_.parent;
  options.lock = schedule_.lock.get();
  options.memory = tile_memory_;
  options.keep = static_cast<uint32_t>(std::max<int64_t>(0, schedule_.keep));
  if (schedule_.replaces.has_value()) options.replaces = *schedule_.replaces;
  options.naming = naming_;
  if (comm_ != nullptr) {
    options.rank = comm_->rank();
    options.id = series_;
    for (size_t i = 0; i < sizeof(step); ++i) options.id[i] ^= static_cast<uint8_t>(step >> (8 * i));
    options.meet = [this](const absl::Status& mine) {
      return AgreeOnStatus(*comm_, Channel::kCheckpoint, mine);
    };
  }
  return options;
}

absl::Status Checkpointing::Begin(std::unique_ptr<swap::CheckpointCopy> copy, int64_t steps) {
  copy_ = std::move(copy);
  credit_ = 0;
  tiles_per_step_ = 0;
  if (steps > 1) {
    tiles_per_step_ = static_cast<double>(copy_->tiles()) / static_cast<double>(steps);
  } else {
    copy_->AllowAll();
  }
  // A commit may end later than the step after it begins.
  BeforeUpdate(begun_step_);
  return absl::OkStatus();
}

absl::Status Checkpointing::BeginOfStore(swap::Store& store, bool commits_every_step) {
  RETURN_IF_ERROR(Finish());
  ASSIGN_OR_RETURN(std::unique_ptr<swap::CheckpointCopy> copy,
                   swap::CheckpointCopy::OfStore(store, Options(store.committed_step())));
  const uint32_t slots = store.geometry().slots();
  const bool at_leisure = slots > 2 || (slots == 2 && !commits_every_step);
  const auto step = static_cast<int64_t>(store.committed_step());
  last_step_ = at_leisure ? 0 : step + (slots == 1 ? 1 : 2);
  const int64_t next_in = schedule_.every > 0 ? schedule_.every : next_in_;
  return Begin(std::move(copy), at_leisure ? std::min(next_in - 1, kSpreadSteps) : 1);
}

absl::Status Checkpointing::BeginOfMemory(aio::Engine& io, swap::CheckpointSource source) {
  RETURN_IF_ERROR(Finish());
  last_step_ = static_cast<int64_t>(source.step) + 1;
  const swap::CheckpointOptions options = Options(source.step);
  return Begin(swap::CheckpointCopy::OfMemory(io, options, std::move(source)), 1);
}

absl::Status Checkpointing::MakeUpFor(swap::Store& store, bool commits_every_step) {
  const uint64_t step = store.committed_step();
  if (step == 0 || !Due(static_cast<int64_t>(step))) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<swap::CheckpointEntry> all, swap::ListCheckpoints(schedule_.parent));
  for (const swap::CheckpointEntry& kept : all) {
    if (kept.step == step) return absl::OkStatus();
  }
  return BeginOfStore(store, commits_every_step);
}

absl::Status Checkpointing::Advance(int64_t operations) {
  ++ended_;
  if (copy_ == nullptr) return absl::OkStatus();
  if (copy_->finished()) return Finish();
  // Those that find nothing to do are not heard of: a step's are as many as the last one's.
  credit_ +=
      tiles_per_step_ / static_cast<double>(std::max<int64_t>(1, of_step_ > 0 ? of_step_ : operations));
  if (credit_ < 1) return absl::OkStatus();
  const auto tiles = static_cast<uint32_t>(credit_);
  credit_ -= tiles;
  copy_->Allow(tiles);
  return absl::OkStatus();
}

void Checkpointing::BeforeUpdate(int64_t step) {
  begun_step_ = step;
  if (step > paced_step_) {
    const bool whole = paced_step_ > 0;  // it was heard of from its beginning
    paced_step_ = step;
    const int64_t ended = std::exchange(ended_, 0);
    of_step_ = whole ? ended : 0;
  }
  if (last_step_ > 0 && step >= last_step_) FinishTiles();
}

void Checkpointing::FinishTiles() {
  if (copy_ == nullptr) return;
  const double begun = copy_->seconds();
  copy_->FinishTiles();
  totals_->waited_seconds += std::max(0.0, copy_->seconds() - begun);
}

std::optional<double> Checkpointing::under_way() const {
  return copy_ == nullptr || copy_->finished() ? std::nullopt : std::optional(copy_->seconds());
}

absl::Status Checkpointing::Finish() {
  if (copy_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<swap::CheckpointCopy> copy = std::move(copy_);
  const double begun = copy->seconds();
  const absl::Status status = copy->Finish();
  totals_->waited_seconds += std::max(0.0, copy->seconds() - begun);
  totals_->seconds += copy->seconds();
  last_status_ = status;
  if (status.ok()) {
    ++totals_->written;
    kept_step_ = static_cast<int64_t>(copy->step());
    kept_path_ = copy->path();
    ForgetReplaced();
  }
  if (report_) report_(static_cast<int64_t>(copy->step()), copy->path(), status);
  const bool goes_on = absl::IsResourceExhausted(status) || absl::IsAlreadyExists(status) ||
                       absl::IsNotFound(status);  // the directory, which may come back
  return goes_on ? absl::OkStatus() : status;
}

absl::Status Checkpointing::RemoveReplaced() {
  if (comm_ != nullptr && comm_->rank() > 0) return absl::OkStatus();
  const auto newer = [this]() -> std::string {
    const std::string kept = std::filesystem::path(kept_path_).filename();
    for (const swap::CheckpointSeen& each :
         schedule_.replaces.value_or(std::vector<swap::CheckpointSeen>())) {
      if (each.name > kept) return each.name;
    }
    return "";
  };
  ForgetReplaced();
  if (newer().empty()) return absl::OkStatus();
  const absl::Status again =
      swap::KeepNewestCheckpoints(schedule_.parent, Options(0).keep, *schedule_.replaces, kept_path_);
  ForgetReplaced();
  const std::string left = newer();
  if (left.empty()) return absl::OkStatus();
  return absl::Status(again.ok() ? absl::StatusCode::kFailedPrecondition : again.code(),
                      absl::StrCat("the last step is kept in ", kept_path_, ", and ", schedule_.parent, "/",
                                   left, ", of the run that this one replaces, could not be removed",
                                   again.ok() ? "" : absl::StrCat(" (", again.message(), ")"),
                                   ": remove it, or `resume` goes on from there"));
}

// What is gone is not removed again, should somebody put it back.
void Checkpointing::ForgetReplaced() {
  if (!schedule_.replaces.has_value() || schedule_.replaces->empty()) return;
  const absl::StatusOr<std::vector<swap::CheckpointSeen>> there = swap::SeeCheckpoints(schedule_.parent);
  if (!there.ok()) return;
  std::erase_if(*schedule_.replaces, [&](const swap::CheckpointSeen& each) {
    return std::none_of(there->begin(), there->end(), [&](const swap::CheckpointSeen& now) {
      // One that cannot be read is taken to be what it was.
      return now.name == each.name && (now.uuid == each.uuid || now.uuid == swap::Uuid());
    });
  });
}

absl::Status CheckPlace(const std::string& parent, int64_t bytes, int rank) {
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (error) {
    const bool full = error == std::errc::no_space_on_device;
    return absl::Status(
        full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kFailedPrecondition,
        absl::StrCat(
            "checkpoints go to ", parent, ", which cannot be made: ", error.message(),
            full ? ": make room, or give another `checkpoint_dir`" : ": give another `checkpoint_dir`"));
  }
  aio::FileOptions trial;
  trial.path = absl::StrCat(parent, "/.trial-", rank, "-", ::getpid());
  trial.nameless = true;
  absl::StatusOr<std::unique_ptr<aio::File>> file = aio::File::Open(trial);
  if (!file.ok()) {  // not every file system has nameless ones
    trial.nameless = false;
    trial.create = trial.exclusive = true;
    file = aio::File::Open(trial);
    if (file.ok()) ::unlink(trial.path.c_str());
  }
  if (!file.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoints go to ", parent, ", where none can be written: ", file.status().message(),
                     ": give another `checkpoint_dir`"));
  }
  ASSIGN_OR_RETURN(const aio::FileSystemSpace space, aio::QueryFileSystem(parent));
  if (static_cast<uint64_t>(bytes) <= space.free_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the checkpoint of the last step needs ",
                                                   aio::FormatBytes(static_cast<uint64_t>(bytes)), " in ",
                                                   parent, ", and ", aio::FormatBytes(space.free_bytes),
                                                   " are free: make room, or give another `checkpoint_dir`"));
}

swap::CheckpointSource SourceOfMemory(const tiering::Plan& plan, const ArenaView& arena_view,
                                      const DeviceState* device, const std::string& identity, int64_t step,
                                      int64_t updates, std::string payload) {
  swap::CheckpointSource source;
  source.layout = LayoutOf(plan);
  for (swap::TileLayout& tile : source.layout.tiles) tile.scratch_bytes = 0;
  source.identity = identity;
  source.step = static_cast<uint64_t>(step);
  source.updates = static_cast<uint64_t>(updates);
  source.payload = std::move(payload);
  source.fetch = [&plan, &arena_view, device, step, numbers = TileNumbers(plan)](
                     const swap::Store& target, uint32_t tile, aio::Priority, swap::CheckpointTile* to) {
    const auto [block, of_block] = numbers[tile];
    if (device != nullptr && device->has(block)) {
      absl::Status read = device->Read(block, of_block, device->staged(block, of_block));
      RETURN_IF_ERROR(read);
    }
    const std::vector<void*> places = PlacesOf(plan, arena_view, device, block, of_block);
    to->version = VersionAfter(step);
    for (size_t s = 0; s < places.size(); ++s) {
      to->data[s] = places[s];
      to->checksums[s] = target.SegmentChecksum(tile, static_cast<uint32_t>(s), to->version, places[s]);
    }
    return absl::OkStatus();
  };
  return source;
}

static absl::StatusOr<swap::Recovered> LoadParts(aio::Engine& io, const ShardDirectories& parts,
                                                 const tiering::ModelGraph& graph, const tiering::Plan& plan,
                                                 const ArenaView& arena_view, const DeviceState* device) {
  ASSIGN_OR_RETURN(std::vector<swap::Inspection> inspections, InspectShards(parts));
  std::vector<int64_t> elements;
  for (const tiering::BlockShape& block : graph.blocks) elements.push_back(block.elements);
  // A tensor's memory, so that it is counted and bounded like any other.
  const uint64_t bytes = ShardedState::MemoryBytes(inspections);
  ASSIGN_OR_RETURN(const HostBuffer memory, HostBuffer::Of(static_cast<int64_t>(bytes + swap::kSectorBytes),
                                                           "memory for a tile of the checkpoint"));
  void* start = memory.data();
  size_t room = bytes + swap::kSectorBytes;
  std::align(swap::kSectorBytes, bytes, start, room);
  ASSIGN_OR_RETURN(std::unique_ptr<ShardedState> reader,
                   ShardedState::Open(io, parts, inspections, elements, plan.precision,
                                      {static_cast<std::byte*>(start), bytes}));
  for (const auto& [block, tile] : TileNumbers(plan)) {
    const tiering::Tile range = arena_view.InWholeBlock(block, plan.blocks[block].tiles[tile]);
    const std::vector<void*> places = PlacesOf(plan, arena_view, device, block, tile);
    absl::Status read = reader->Read(block, range.offset, range.elements, places);
    if (read.ok()) read = HandOn(device, block, tile);
    RETURN_IF_ERROR(read);
  }
  return reader->recovered();
}

absl::StatusOr<swap::Recovered> LoadIntoMemory(aio::Engine& io, const ShardDirectories& parts,
                                               const tiering::ModelGraph& graph, const tiering::Plan& plan,
                                               const ArenaView& arena_view, const DeviceState* device,
                                               int rank) {
  if (static_cast<int>(parts.size()) != plan.world)
    return LoadParts(io, parts, graph, plan, arena_view, device);
  const std::vector<std::string>& directories = parts[static_cast<size_t>(rank)];
  absl::StatusOr<std::vector<swap::Inspection>> inspections = InspectShards(parts);
  RETURN_IF_ERROR(inspections.status());
  swap::StoreOptions options;
  options.directories = directories;
  options.read_only = true;
  options.sequence = inspections->front().record.sequence;
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> store, swap::Store::Open(io, options));
  const std::vector<std::pair<tiering::BlockIndex, tiering::TileIndex>> numbers = TileNumbers(plan);
  if (numbers.size() != store->geometry().tiles()) {
    return absl::DataLossError(absl::StrCat(directories.front(), " has ", store->geometry().tiles(),
                                            " tiles, its model ", numbers.size()));
  }
  for (uint32_t tile = 0; tile < numbers.size(); ++tile) {
    const size_t places =
        PlacesOf(plan, arena_view, device, numbers[tile].first, numbers[tile].second).size();
    // What is frozen has its weights alone there, and more here.
    if (store->geometry().segments(tile) >= places) continue;
    store.reset();
    return LoadParts(io, parts, graph, plan, arena_view, device);
  }
  // One ahead: the next tile is on its way while this one is checked.
  swap::TileIo ios[2];
  const auto read = [&](uint32_t tile) {
    const std::vector<void*> places =
        PlacesOf(plan, arena_view, device, numbers[tile].first, numbers[tile].second);
    return store->ReadSegments(&ios[tile % 2], tile, 0, static_cast<uint32_t>(places.size()), places,
                               aio::Priority::kDemand, swap::VersionChoice::kCommitted);
  };
  // But not into the same places.
  const auto staged = [&](uint32_t tile) { return device != nullptr && device->has(numbers[tile].first); };
  absl::Status status = read(0);
  for (uint32_t tile = 0; tile < numbers.size() && status.ok(); ++tile) {
    const bool more = tile + 1 < numbers.size(), ahead = more && !(staged(tile) && staged(tile + 1));
    if (ahead) status = read(tile + 1);
    absl::Status arrived = store->Wait(&ios[tile % 2]);
    if (arrived.ok()) arrived = store->VerifyRead(ios[tile % 2]);
    if (arrived.ok()) arrived = HandOn(device, numbers[tile].first, numbers[tile].second);
    status.Update(arrived);
    if (more && !ahead && status.ok()) status = read(tile + 1);
  }
  for (swap::TileIo& each : ios) {
    if (each.pending()) (void)store->Wait(&each);  // the error before it is the one to tell
  }
  RETURN_IF_ERROR(status);
  return store->recovered();
}

}  // namespace penstock::zero
