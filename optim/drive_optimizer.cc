#include "optim/drive_optimizer.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/file.h"
#include "aio/io_error.h"
#include "aio/request.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "kernels/split_master.h"
#include "kernels/thread_pool.h"

namespace penstock::optim {
namespace {

using aio::kMiB;
using kernels::DType;

constexpr uint64_t kNone = UINT64_MAX;
constexpr uint64_t kMostRing = 128 * kMiB;  // more than any drive wants in flight, reads and writes together
constexpr uint64_t kMostTile = 4 * kMiB;
constexpr uint64_t kSlots = 8;     // at least so many tiles on their way
constexpr uint64_t kSegment = 64;  // what a segment of a tile begins at a multiple of
constexpr size_t kBlock = kernels::kReduceBlock;

// The part of a parameter that lies in one tile. Segments: their byte offsets in the tile.
struct Piece {
  int parameter = 0;
  uint64_t first = 0;  // element
  uint64_t n = 0;
  uint64_t master = kNone;  // bf16: the low halves; fp16: the masters
  uint64_t m = kNone;
  uint64_t v = kNone;
  // Of the bf16 values that the low halves belong to.
  uint64_t checksum = 0;
  bool has_checksum = false;
};

struct Tile {
  uint64_t bytes = 0;   // whole sectors; 0: its pieces have no state
  uint64_t offset = 0;  // in the file
  std::byte* resident = nullptr;
  bool holds_state = false;  // false: its content is the initial one, wherever it lives
  size_t first_piece = 0;
  size_t pieces = 0;
};

struct Known {
  Parameter given;
  size_t first_piece = 0;
  size_t pieces = 0;
};

uint64_t MasterBytes(DType type) { return type == DType::kFp32 ? 0 : type == DType::kBf16 ? 2 : 4; }

template <class T>
T* At(std::byte* tile, uint64_t offset) {
  return offset == kNone ? nullptr : reinterpret_cast<T*>(tile + offset);
}

struct Slot {
  aio::Region region;
  aio::Request read;
  aio::Request write;
  bool reading = false;
  bool writing = false;
};

struct Work {
  size_t tile = 0;
  bool write = false;
  bool replaced = false;  // all of the old content goes: it is not read
};

}  // namespace

class DriveOptimizer::Impl {
 public:
  explicit Impl(DriveOptimizerOptions options) : options_(std::move(options)), pool_(options_.threads) {}
  ~Impl() { engine_.reset(); }

  absl::Status Open() {
    if (options_.directory.empty()) return absl::InvalidArgumentError("a directory for the states is needed");
    options_.host_memory_bytes = aio::AlignDown(options_.host_memory_bytes, 2 * kMiB);
    if (options_.host_memory_bytes == 0) {
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

  absl::StatusOr<int> Add(std::span<const Parameter> parameters);
  absl::Status Step(std::span<const Update> updates);
  absl::Status SetStates(std::span<const StateValues> states);
  absl::Status CopyStates(std::span<const StatePlaces> states, int descriptor);

  const absl::Status& broken() const { return broken_; }
  const FailedTransfer& failed_transfer() const { return failed_; }
  DriveOptimizerStats stats() const { return stats_; }
  std::string backend_name() const { return engine_ == nullptr ? "" : engine_->backend_name(); }
  int descriptor() const { return file_->fd(); }

 private:
  // What Add has made before it is known whether there is room for it.
  struct Added {
    std::vector<Known> known;
    std::vector<Piece> pieces;
    std::vector<Tile> tiles;
  };

  static uint64_t SlotBytes(uint64_t ring) {
    return std::min(kMostTile, aio::AlignDown(ring / kSlots, aio::kSectorBytes));
  }
  Added Cut(std::span<const Parameter> parameters, uint64_t slot_bytes) const;
  absl::Status Place(Added& added);
  absl::Status MakeRing(uint64_t bytes);

  absl::Status CheckUsable() {
    failed_ = {};
    if (broken_.ok()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the optimizer's states and its parameters do not belong together any more since: ",
                     broken_.message(), "; load a checkpoint of both, model and optimizer"));
  }
  absl::Status CheckUpdates(std::span<const Update> updates);

  // Brings the tiles into memory, hands each to act(tile, data), and those with `write` back. Nothing is on
  // its way when it returns. `changes`: what act does cannot be taken back.
  template <class Act>
  absl::Status Sweep(const std::vector<Work>& work, bool changes, const Act& act);
  absl::Status Ended(aio::Request& request);
  absl::Status StartRead(Slot& slot, const Tile& tile, bool wanted_now);
  void Settle();
  void FillInitial(const Tile& tile, std::byte* data);

  void UpdatePiece(const Update& update, Piece& piece, std::byte* tile, bool second_sweep);
  void NoticeChange(const Piece& piece, const void* values, std::byte* tile);
  void SetPiece(const StateValues& state, Piece& piece, std::byte* tile);
  absl::Status CopyPiece(const StatePlaces& place, const Piece& piece, std::byte* tile, int descriptor);
  absl::Status CopyMaster(const StatePlaces& place, const Piece& piece, std::byte* tile, int descriptor);
  absl::Status WriteOut(int descriptor, const void* data, uint64_t bytes, uint64_t offset);

  DriveOptimizerOptions options_;
  kernels::ThreadPool pool_;
  std::unique_ptr<aio::File> file_;
  std::vector<std::unique_ptr<aio::Arena>> resident_;
  std::unique_ptr<aio::Arena> ring_;
  std::unique_ptr<aio::Engine> engine_;
  std::vector<std::unique_ptr<Slot>> slots_;
  uint64_t file_bytes_ = 0;

  std::vector<Known> known_;
  std::vector<Piece> pieces_;
  std::vector<Tile> tiles_;

  // Of the step under way, by parameter.
  std::vector<const Update*> updates_;
  std::vector<kernels::LambNorms> norms_;

  absl::Status broken_;
  FailedTransfer failed_;
  DriveOptimizerStats stats_;
};

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
    const uint64_t left = options_.host_memory_bytes - stats_.resident_bytes - stats_.ring_bytes;
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
      RETURN_IF_ERROR(MakeRing(std::min(kMostRing, options_.host_memory_bytes - kept)));
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
      options_.host_memory_bytes - (options_.drive_share >= 0.0 ? 0 : stats_.resident_bytes);
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

void DriveOptimizer::Impl::FillInitial(const Tile& tile, std::byte* data) {
  std::memset(data, 0, tile.bytes);
  for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
    const Piece& piece = pieces_[i];
    const float initial = known_[static_cast<size_t>(piece.parameter)].given.initial_v;
    if (piece.v != kNone && initial != 0.0f) std::fill_n(At<float>(data, piece.v), piece.n, initial);
  }
}

absl::Status DriveOptimizer::Impl::Ended(aio::Request& request) {
  absl::Status status = engine_->Wait(&request);
  if (request.op() == aio::Op::kRead) {
    stats_.read_bytes += request.done_bytes();
  } else {
    stats_.written_bytes += request.done_bytes();
  }
  if (!status.ok() && !failed_.any) {
    failed_ = {.any = true, .path = file_->path(), .offset = request.offset(), .bytes = request.bytes()};
  }
  return status;
}

absl::Status DriveOptimizer::Impl::StartRead(Slot& slot, const Tile& tile, bool wanted_now) {
  slot.read.PrepareRead(*file_, tile.offset, slot.region.data(), tile.bytes);
  slot.read.set_priority(wanted_now ? aio::Priority::kDemand : aio::Priority::kPrefetch);
  RETURN_IF_ERROR(engine_->Submit(&slot.read));
  slot.reading = true;
  return absl::OkStatus();
}

// After a failure: nothing may still move into the ring or out of it.
void DriveOptimizer::Impl::Settle() {
  for (const auto& slot : slots_) {
    if (slot->reading) {
      engine_->Cancel(&slot->read);
      (void)engine_->Wait(&slot->read);
    }
    if (slot->writing) (void)engine_->Wait(&slot->write);
    slot->reading = slot->writing = false;
  }
}

template <class Act>
absl::Status DriveOptimizer::Impl::Sweep(const std::vector<Work>& work, bool changes, const Act& act) {
  std::vector<Work> far;
  std::vector<Work> near;
  for (const Work& one : work) {
    const Tile& tile = tiles_[one.tile];
    (tile.resident != nullptr || tile.bytes == 0 ? near : far).push_back(one);
  }
  bool changed = false;
  const auto run = [&]() -> absl::Status {
    const size_t ring = slots_.size();
    size_t started = 0;
    // Starts reads as far ahead as there are free slots. The one of `now` is waited for.
    const auto start = [&](size_t now) -> absl::Status {
      for (; started < far.size() && started < now + ring; ++started) {
        Slot& slot = *slots_[started % ring];
        if (slot.writing) {
          if (!slot.write.finished() && started != now) break;
          slot.writing = false;
          RETURN_IF_ERROR(Ended(slot.write));
        }
        const Tile& tile = tiles_[far[started].tile];
        if (tile.holds_state && !far[started].replaced)
          RETURN_IF_ERROR(StartRead(slot, tile, started == now));
      }
      return absl::OkStatus();
    };
    if (!far.empty()) RETURN_IF_ERROR(start(0));
    for (const Work& one : near) {
      Tile& tile = tiles_[one.tile];
      changed = true;
      if (!tile.holds_state && tile.bytes != 0) FillInitial(tile, tile.resident);
      RETURN_IF_ERROR(act(tile, tile.resident));
      tile.holds_state = tile.holds_state || one.write;
    }
    for (size_t now = 0; now < far.size(); ++now) {
      RETURN_IF_ERROR(start(now));
      Slot& slot = *slots_[now % ring];
      Tile& tile = tiles_[far[now].tile];
      std::byte* const data = slot.region.data();
      if (slot.reading) {
        slot.reading = false;
        RETURN_IF_ERROR(Ended(slot.read));
      } else {
        FillInitial(tile, data);
      }
      changed = true;
      RETURN_IF_ERROR(act(tile, data));
      if (!far[now].write) continue;
      slot.write.PrepareWrite(*file_, tile.offset, data, tile.bytes);
      slot.write.set_priority(aio::Priority::kWriteBehind);
      RETURN_IF_ERROR(engine_->Submit(&slot.write));
      slot.writing = true;
      tile.holds_state = true;
    }
    for (const auto& slot : slots_) {
      if (!slot->writing) continue;
      slot->writing = false;
      RETURN_IF_ERROR(Ended(slot->write));
    }
    return absl::OkStatus();
  };
  absl::Status status = run();
  if (!status.ok()) {
    if (engine_ != nullptr) Settle();
    if (changes && changed) broken_ = status;
  }
  return status;
}

// Where the values are not those that the master was last rounded to, the master begins anew at them.
void DriveOptimizer::Impl::NoticeChange(const Piece& piece, const void* values, std::byte* tile) {
  if (piece.master == kNone) return;
  const uint16_t* const now = static_cast<const uint16_t*>(values) + piece.first;
  if (known_[static_cast<size_t>(piece.parameter)].given.type == DType::kBf16) {
    if (!piece.has_checksum || kernels::Checksum(now, 2 * piece.n) != piece.checksum) {
      std::memset(tile + piece.master, 0, 2 * piece.n);
    }
    return;
  }
  float* const master = At<float>(tile, piece.master);
  pool_.ParallelFor(piece.n, 4 * kBlock, [&](size_t begin, size_t end) {
    uint16_t rounded[kBlock];
    for (size_t i = begin; i < end; i += kBlock) {
      const size_t n = std::min(kBlock, end - i);
      kernels::Fp32ToFp16(master + i, rounded, n);
      if (std::memcmp(rounded, now + i, 2 * n) == 0) continue;
      for (size_t j = 0; j < n; ++j) {
        if (rounded[j] != now[i + j]) master[i + j] = kernels::Fp16ToFloat(now[i + j]);
      }
    }
  });
}

void DriveOptimizer::Impl::UpdatePiece(const Update& update, Piece& piece, std::byte* tile,
                                       bool second_sweep) {
  const DType type = known_[static_cast<size_t>(piece.parameter)].given.type;
  const size_t pieces = known_[static_cast<size_t>(piece.parameter)].pieces;
  std::byte* const values =
      static_cast<std::byte*>(update.values) + piece.first * kernels::BytesPerElement(type);
  if (!second_sweep) NoticeChange(piece, update.values, tile);
  kernels::UpdateArrays arrays;
  arrays.n = piece.n;
  arrays.param = values;
  if (type == DType::kBf16) {
    arrays.param_type = kernels::ParamType::kSplit;
    arrays.master_low = At<int16_t>(tile, piece.master);
  } else if (type == DType::kFp16) {
    arrays.param = At<float>(tile, piece.master);
    arrays.copy_out = reinterpret_cast<uint16_t*>(values);
    arrays.copy_type = DType::kFp16;
  }
  arrays.grad_type = update.gradient_type;
  arrays.grad = static_cast<const std::byte*>(update.gradient) +
                piece.first * kernels::BytesPerElement(update.gradient_type);
  arrays.m = At<float>(tile, piece.m);
  arrays.v = At<float>(tile, piece.v);
  arrays.first_element = piece.first;
  bool values_changed = true;
  std::visit(
      [&](const auto& options) {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, kernels::LambOptions>) {
          const kernels::LambStep step = kernels::MakeLambStep(options, update.update, update.gradient_scale);
          kernels::LambNorms& norms = norms_[static_cast<size_t>(piece.parameter)];
          if (!second_sweep) kernels::LambMoments(step, arrays, &norms, nullptr, &pool_);
          values_changed = second_sweep || pieces == 1;
          if (values_changed) kernels::LambApply(step, kernels::LambTrust(step, norms), arrays, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::AdamOptions>) {
          kernels::ApplyUpdate(kernels::MakeAdamStep(options, update.update, update.gradient_scale), arrays,
                               nullptr, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) {
          kernels::ApplyUpdate(kernels::MakeAdagradStep(options, update.update, update.gradient_scale),
                               arrays, nullptr, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::LionOptions>) {
          kernels::ApplyUpdate(kernels::MakeLionStep(options, update.gradient_scale), arrays, nullptr,
                               &pool_);
        } else {
          kernels::ApplyUpdate(kernels::MakeSgdStep(options, update.update, update.gradient_scale), arrays,
                               nullptr, &pool_);
        }
      },
      update.options);
  if (type == DType::kBf16 && values_changed) {
    piece.checksum = kernels::Checksum(values, 2 * piece.n);
    piece.has_checksum = true;
  }
}

absl::Status DriveOptimizer::Impl::CheckUpdates(std::span<const Update> updates) {
  updates_.assign(known_.size(), nullptr);
  for (const Update& update : updates) {
    const auto refuse = [&](const std::string& what) {
      return absl::InvalidArgumentError(absl::StrCat("update of parameter ", update.parameter, ": ", what));
    };
    if (update.parameter < 0 || static_cast<size_t>(update.parameter) >= known_.size()) {
      return refuse("no such parameter");
    }
    const Parameter& given = known_[static_cast<size_t>(update.parameter)].given;
    if (updates_[static_cast<size_t>(update.parameter)] != nullptr) return refuse("it occurs twice");
    if (given.n != 0 && (update.values == nullptr || update.gradient == nullptr)) return refuse("no memory");
    if (update.update < 1) return refuse("updates count from 1");
    const auto [m, v] = std::visit(
        [](const auto& options) -> std::pair<bool, bool> {
          using Options = std::decay_t<decltype(options)>;
          if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) return {false, true};
          if constexpr (std::is_same_v<Options, kernels::LionOptions>) return {true, false};
          if constexpr (std::is_same_v<Options, kernels::SgdOptions>) {
            return {options.momentum != 0.0, false};
          } else {
            return {true, true};
          }
        },
        update.options);
    if ((m && !given.has_m) || (v && !given.has_v)) {
      return refuse("this optimizer has a state that the parameter was not added with");
    }
    updates_[static_cast<size_t>(update.parameter)] = &update;
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::Step(std::span<const Update> updates) {
  RETURN_IF_ERROR(CheckUsable());
  RETURN_IF_ERROR(CheckUpdates(updates));
  const auto update_of = [&](const Piece& piece) { return updates_[static_cast<size_t>(piece.parameter)]; };
  // LAMB of a parameter in several tiles takes its norms from a sweep of their own.
  const auto twice = [&](const Piece& piece) {
    const Update* const update = update_of(piece);
    return update != nullptr && std::holds_alternative<kernels::LambOptions>(update->options) &&
           known_[static_cast<size_t>(piece.parameter)].pieces > 1;
  };
  std::vector<Work> first, second;
  bool lamb = false;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    bool any = false, again = false, stores = false;
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      const Update* const update = update_of(pieces_[i]);
      if (update == nullptr) continue;
      any = true;
      lamb = lamb || std::holds_alternative<kernels::LambOptions>(update->options);
      if (twice(pieces_[i])) {
        again = true;
        stores = stores || pieces_[i].master != kNone;
      }
    }
    if (any) first.push_back({.tile = t, .write = true});
    if (again) second.push_back({.tile = t, .write = stores});
  }
  if (lamb) norms_.assign(known_.size(), {});
  const auto sweep = [&](const std::vector<Work>& work, bool second_sweep) {
    return Sweep(work, true, [&](const Tile& tile, std::byte* data) {
      for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
        if (update_of(pieces_[i]) == nullptr || (second_sweep && !twice(pieces_[i]))) continue;
        UpdatePiece(*update_of(pieces_[i]), pieces_[i], data, second_sweep);
      }
      return absl::OkStatus();
    });
  };
  RETURN_IF_ERROR(sweep(first, false));
  if (second.empty()) return absl::OkStatus();
  const absl::Status status = sweep(second, true);
  if (!status.ok()) broken_ = status;  // moments have moved already
  return status;
}

void DriveOptimizer::Impl::SetPiece(const StateValues& state, Piece& piece, std::byte* tile) {
  const Parameter& given = known_[static_cast<size_t>(piece.parameter)].given;
  if (float* const m = At<float>(tile, piece.m)) {
    if (state.m != nullptr) {
      std::memcpy(m, state.m + piece.first, 4 * piece.n);
    } else {
      std::fill_n(m, piece.n, 0.0f);
    }
  }
  if (float* const v = At<float>(tile, piece.v)) {
    if (state.v != nullptr) {
      std::memcpy(v, state.v + piece.first, 4 * piece.n);
    } else {
      std::fill_n(v, piece.n, given.initial_v);
    }
  }
  if (piece.master == kNone) return;
  piece.has_checksum = false;
  if (state.master == nullptr) {
    std::memset(tile + piece.master, 0, MasterBytes(given.type) * piece.n);
    return;
  }
  const float* const master = state.master + piece.first;
  if (given.type == DType::kFp16) {
    std::memcpy(tile + piece.master, master, 4 * piece.n);
    return;
  }
  // The low halves are good for the values that this master is rounded to, whether the parameter has them
  // already or is yet to be loaded.
  kernels::Checksummer checksum;
  uint16_t high[kBlock];
  for (size_t i = 0; i < piece.n; i += kBlock) {
    const size_t n = std::min<size_t>(kBlock, piece.n - i);
    kernels::SplitMaster(master + i, high, At<int16_t>(tile, piece.master) + i, n);
    checksum.Update(high, 2 * n);
  }
  piece.checksum = checksum.Digest();
  piece.has_checksum = true;
}

absl::Status DriveOptimizer::Impl::SetStates(std::span<const StateValues> states) {
  std::vector<const StateValues*> state_of(known_.size(), nullptr);
  for (const StateValues& state : states) {
    if (state.parameter < 0 || static_cast<size_t>(state.parameter) >= known_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("states of parameter ", state.parameter, ": no such one"));
    }
    state_of[static_cast<size_t>(state.parameter)] = &state;
  }
  const bool all = std::find(state_of.begin(), state_of.end(), nullptr) == state_of.end();
  if (!all) RETURN_IF_ERROR(CheckUsable());
  failed_ = {};
  std::vector<Work> work;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    if (tiles_[t].bytes == 0) continue;
    size_t set = 0;
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      if (state_of[static_cast<size_t>(pieces_[i].parameter)] != nullptr) ++set;
    }
    if (set != 0) work.push_back({.tile = t, .write = true, .replaced = set == tiles_[t].pieces});
  }
  RETURN_IF_ERROR(Sweep(work, true, [&](const Tile& tile, std::byte* data) {
    for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
      const StateValues* const state = state_of[static_cast<size_t>(pieces_[i].parameter)];
      if (state != nullptr) SetPiece(*state, pieces_[i], data);
    }
    return absl::OkStatus();
  }));
  if (all) broken_ = absl::OkStatus();
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::WriteOut(int descriptor, const void* data, uint64_t bytes,
                                            uint64_t offset) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes != 0) {
    const ssize_t moved =
        pwrite(descriptor, next, std::min<uint64_t>(bytes, kMiB), static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      failed_ = {.any = true, .path = "the copy of the states", .offset = offset, .bytes = bytes};
      return aio::MakeIoError({.op = "write",
                               .path = "the copy of the states",
                               .offset = offset,
                               .bytes = bytes,
                               .error = moved == 0 ? ENOSPC : errno});
    }
    next += moved;
    offset += static_cast<uint64_t>(moved);
    bytes -= static_cast<uint64_t>(moved);
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::CopyMaster(const StatePlaces& place, const Piece& piece, std::byte* tile,
                                              int descriptor) {
  const auto* const values = static_cast<const uint16_t*>(place.values) + piece.first;
  const bool bf16 = known_[static_cast<size_t>(piece.parameter)].given.type == DType::kBf16;
  const bool joined = bf16 && piece.has_checksum && kernels::Checksum(values, 2 * piece.n) == piece.checksum;
  constexpr size_t kMost = 16 * kBlock;
  std::vector<float> master(std::min<size_t>(kMost, piece.n));
  for (size_t i = 0; i < piece.n; i += kMost) {
    const size_t n = std::min<size_t>(kMost, piece.n - i);
    if (joined) {
      kernels::JoinMaster(values + i, At<int16_t>(tile, piece.master) + i, master.data(), n, &pool_);
    } else if (bf16) {
      kernels::Bf16ToFp32(values + i, master.data(), n, &pool_);
    } else {
      for (size_t j = 0; j < n; ++j) {
        const float kept = At<float>(tile, piece.master)[i + j];
        master[j] = kernels::FloatToFp16(kept) == values[i + j] ? kept : kernels::Fp16ToFloat(values[i + j]);
      }
    }
    RETURN_IF_ERROR(WriteOut(descriptor, master.data(), 4 * n,
                             static_cast<uint64_t>(place.master) + 4 * (piece.first + i)));
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::CopyPiece(const StatePlaces& place, const Piece& piece, std::byte* tile,
                                             int descriptor) {
  const auto copy = [&](uint64_t segment, int64_t offset) {
    if (segment == kNone || offset < 0) return absl::OkStatus();
    return WriteOut(descriptor, tile + segment, 4 * piece.n, static_cast<uint64_t>(offset) + 4 * piece.first);
  };
  RETURN_IF_ERROR(copy(piece.m, place.m));
  RETURN_IF_ERROR(copy(piece.v, place.v));
  if (piece.master == kNone || place.master < 0) return absl::OkStatus();
  return CopyMaster(place, piece, tile, descriptor);
}

absl::Status DriveOptimizer::Impl::CopyStates(std::span<const StatePlaces> states, int descriptor) {
  RETURN_IF_ERROR(CheckUsable());
  std::vector<const StatePlaces*> place_of(known_.size(), nullptr);
  for (const StatePlaces& place : states) {
    if (place.parameter < 0 || static_cast<size_t>(place.parameter) >= known_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("states of parameter ", place.parameter, ": no such one"));
    }
    if (place.master >= 0 && place.values == nullptr &&
        known_[static_cast<size_t>(place.parameter)].given.n != 0) {
      return absl::InvalidArgumentError(absl::StrCat("states of parameter ", place.parameter,
                                                     ": a master is known by its parameter's values"));
    }
    place_of[static_cast<size_t>(place.parameter)] = &place;
  }
  std::vector<Work> work;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      if (tiles_[t].bytes == 0 || place_of[static_cast<size_t>(pieces_[i].parameter)] == nullptr) continue;
      work.push_back({.tile = t});
      break;
    }
  }
  return Sweep(work, false, [&](const Tile& tile, std::byte* data) {
    for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
      const StatePlaces* const place = place_of[static_cast<size_t>(pieces_[i].parameter)];
      if (place != nullptr) RETURN_IF_ERROR(CopyPiece(*place, pieces_[i], data, descriptor));
    }
    return absl::OkStatus();
  });
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
