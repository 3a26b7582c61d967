#include "optim/drive_optimizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/file.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "optim/drive_optimizer_impl.h"

namespace penstock::optim {
namespace {

using aio::kMiB;

constexpr uint64_t kMostRing = 128 * kMiB;  // more than any drive wants in flight, reads and writes together
constexpr uint64_t kMostTile = 4 * kMiB;
constexpr uint64_t kSlots = 8;     // at least so many tiles on their way
constexpr uint64_t kSegment = 64;  // what a segment of a tile begins at a multiple of

uint64_t SlotBytes(uint64_t ring) {
  return std::min(kMostTile, aio::AlignDown(ring / kSlots, aio::kSectorBytes));
}

}  // namespace

absl::Status DriveOptimizer::Impl::Open() {
  if (options_.directory.empty()) return absl::InvalidArgumentError("a directory for the states is needed");
  options_.host_memory_budget_bytes = aio::AlignDown(options_.host_memory_budget_bytes, 2 * kMiB);
  if (options_.host_memory_budget_bytes == 0) {
    return absl::InvalidArgumentError("host memory for the states must be at least 2 MiB");
  }
  if (options_.drive_share > 1.0) {
    return absl::InvalidArgumentError("the share of the states on the drive must be at most 1");
  }
  aio::FileOptions file;
  file.path = absl::StrCat(options_.directory, "/optimizer-states");
  file.nameless = true;
  file.allow_unaligned_file_system = true;
  ASSIGN_OR_RETURN(file_, aio::File::Open(file));
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::CheckUsable() {
  failed_ = {};
  if (broken_.ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the optimizer's states and its parameters do not belong together any more since: ", broken_.message(),
      "; load a checkpoint of both, model and optimizer"));
}

// All parameters one after another, a tile ending where no further block of elements fits.
DriveOptimizer::Impl::Added DriveOptimizer::Impl::Cut(std::span<const Parameter> parameters,
                                                      uint64_t slot_bytes) const {
  Added added;
  for (const Parameter& parameter : parameters) {
    const int id = static_cast<int>(known_.size() + added.known.size());
    Known known = {.given = parameter, .first_piece = pieces_.size() + added.pieces.size(), .pieces = 0};
    const uint64_t master = MasterBytes(parameter.type);
    const uint64_t per_element = master + (parameter.has_m ? 4 : 0) + (parameter.has_v ? 4 : 0);
    for (uint64_t first = 0; first < parameter.n;) {
      uint64_t n = parameter.n - first;
      const bool stateless = per_element == 0;
      if (added.tiles.empty() || stateless || added.tiles.back().bytes == 0) {
        added.tiles.push_back({.first_piece = pieces_.size() + added.pieces.size()});
      }
      if (!stateless) {
        const auto fits = [&] {
          const uint64_t used = added.tiles.back().bytes + 3 * kSegment;
          const uint64_t room = used >= slot_bytes ? 0 : (slot_bytes - used) / per_element;
          return n <= room ? n : room / kBlock * kBlock;
        };
        if (fits() == 0) added.tiles.push_back({.first_piece = pieces_.size() + added.pieces.size()});
        n = fits();
        PENSTOCK_CHECK(n != 0, "a tile holds a block of every parameter");
      }
      Tile& tile = added.tiles.back();
      Piece piece = {.parameter = id, .first = first, .n = n};
      const auto take = [&](uint64_t width) {
        const uint64_t begin = aio::AlignUp(tile.bytes, kSegment);
        tile.bytes = begin + width * n;
        return begin;
      };
      if (master != 0) piece.master = take(master);
      if (parameter.has_m) piece.m = take(4);
      if (parameter.has_v) piece.v = take(4);
      added.pieces.push_back(piece);
      ++tile.pieces;
      ++known.pieces;
      first += n;
    }
    added.known.push_back(known);
  }
  for (Tile& tile : added.tiles) tile.bytes = aio::AlignUp(tile.bytes, aio::kSectorBytes);
  return added;
}

absl::Status DriveOptimizer::Impl::MakeRing(uint64_t bytes) {
  aio::ArenaOptions arena;
  arena.bytes = bytes;
  ASSIGN_OR_RETURN(ring_, aio::Arena::Create(arena));
  aio::EngineOptions engine;
  engine.backend = options_.backend;
  engine.backend_factory = options_.backend_factory;
  engine.log = options_.log;
  engine.arenas = {ring_.get()};
  engine.max_read_bytes_in_flight = 32 * kMiB;
  engine.max_write_bytes_in_flight = 32 * kMiB;
  absl::StatusOr<std::unique_ptr<aio::Engine>> made = aio::Engine::Create(std::move(engine));
  if (!made.ok()) {
    ring_.reset();
    return made.status();
  }
  engine_ = std::move(*made);
  const uint64_t slot_bytes = SlotBytes(bytes);
  for (uint64_t i = 0; i < bytes / slot_bytes; ++i) {
    auto slot = std::make_unique<Slot>();
    ASSIGN_OR_RETURN(slot->region, ring_->Allocate(slot_bytes));
    slots_.push_back(std::move(slot));
  }
  stats_.ring_bytes = bytes;
  return absl::OkStatus();
}

// Decides which tiles stay in memory, and takes memory and space on the drive for them.
absl::Status DriveOptimizer::Impl::Place(Added& added) {
  uint64_t all = 0;
  for (const Tile& tile : added.tiles) all += tile.bytes;
  uint64_t most = 0;  // bytes of these tiles that may stay in memory
  if (options_.drive_share >= 0.0) {
    most = static_cast<uint64_t>((1.0 - options_.drive_share) * static_cast<double>(all));
  } else {
    const uint64_t left = options_.host_memory_budget_bytes - stats_.resident_bytes - stats_.ring_bytes;
    if (ring_ != nullptr) {
      most = left;
    } else if (aio::AlignUp(all, 2 * kMiB) + 2 * kMiB <= left) {
      most = all;  // with room for a small ring, should more come
    } else {
      most = left - std::min(left, kMostRing);
    }
  }
  uint64_t resident = 0;
  size_t residents = 0;
  while (residents < added.tiles.size() && resident + added.tiles[residents].bytes <= most) {
    const uint64_t more = resident + added.tiles[residents].bytes;
    if (options_.drive_share < 0.0 && most != all && aio::AlignUp(more, 2 * kMiB) > most) break;
    resident = more;
    ++residents;
  }
  std::unique_ptr<aio::Arena> memory;
  if (resident != 0) {
    aio::ArenaOptions arena;
    arena.bytes = resident;
    arena.lock = false;
    arena.touch = false;
    arena.try_hugetlb = false;
    ASSIGN_OR_RETURN(memory, aio::Arena::Create(arena));
    std::byte* next = memory->data();
    for (size_t i = 0; i < residents; ++i) {
      added.tiles[i].resident = next;
      next += added.tiles[i].bytes;
    }
  }
  uint64_t end = file_bytes_;
  for (size_t i = residents; i < added.tiles.size(); ++i) {
    added.tiles[i].offset = end;
    end += added.tiles[i].bytes;
  }
  if (end != file_bytes_) {
    if (ring_ == nullptr) {
      const uint64_t kept =
          options_.drive_share >= 0.0 ? 0 : aio::AlignUp(resident, 2 * kMiB) + stats_.resident_bytes;
      RETURN_IF_ERROR(MakeRing(std::min(kMostRing, options_.host_memory_budget_bytes - kept)));
    }
    RETURN_IF_ERROR(file_->Preallocate(end));
    stats_.drive_bytes += end - file_bytes_;
    file_bytes_ = end;
  }
  if (memory != nullptr) {
    stats_.resident_bytes += memory->bytes();
    resident_.push_back(std::move(memory));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> DriveOptimizer::Impl::Add(std::span<const Parameter> parameters) {
  failed_ = {};
  const uint64_t left =
      options_.host_memory_budget_bytes - (options_.drive_share >= 0.0 ? 0 : stats_.resident_bytes);
  const uint64_t slot_bytes =
      slots_.empty() ? SlotBytes(std::min(kMostRing, left)) : slots_.front()->region.bytes();
  Added added = Cut(parameters, slot_bytes);
  RETURN_IF_ERROR(Place(added));
  const int first = static_cast<int>(known_.size());
  known_.insert(known_.end(), added.known.begin(), added.known.end());
  pieces_.insert(pieces_.end(), added.pieces.begin(), added.pieces.end());
  tiles_.insert(tiles_.end(), added.tiles.begin(), added.tiles.end());
  stats_.tiles = tiles_.size();
  return first;
}

DriveOptimizer::DriveOptimizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DriveOptimizer::~DriveOptimizer() {
  if (!made_in_.here()) (void)impl_.release();
}

absl::StatusOr<std::unique_ptr<DriveOptimizer>> DriveOptimizer::Create(DriveOptimizerOptions options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<DriveOptimizer>(new DriveOptimizer(std::move(impl)));
}

absl::StatusOr<int> DriveOptimizer::Add(std::span<const Parameter> parameters) {
  RETURN_IF_ERROR(made_in_.Check("this optimizer"));
  return impl_->Add(parameters);
}
absl::Status DriveOptimizer::Step(std::span<const Update> updates) {
  RETURN_IF_ERROR(made_in_.Check("this optimizer"));
  return impl_->Step(updates);
}
absl::Status DriveOptimizer::SetStates(std::span<const StateValues> states) {
  RETURN_IF_ERROR(made_in_.Check("this optimizer"));
  return impl_->SetStates(states);
}
absl::Status DriveOptimizer::CopyStates(std::span<const StatePlaces> states, int descriptor) {
  RETURN_IF_ERROR(made_in_.Check("this optimizer"));
  return impl_->CopyStates(states, descriptor);
}
const absl::Status& DriveOptimizer::broken() const { return impl_->broken(); }
const FailedTransfer& DriveOptimizer::failed_transfer() const { return impl_->failed_transfer(); }
DriveOptimizerStats DriveOptimizer::stats() const { return impl_->stats(); }
std::string DriveOptimizer::backend_name() const { return impl_->backend_name(); }
int DriveOptimizer::descriptor() const { return impl_->descriptor(); }

}  // namespace penstock::optim
