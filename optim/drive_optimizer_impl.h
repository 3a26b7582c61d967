// What DriveOptimizer holds and does, for the files that make it. Each has one idea:
//   drive_optimizer.cc         the facade, and where parameters' states go: in memory or on the drive, tile
//   by tile drive_optimizer_sweep.cc   tiles pass through the ring drive_optimizer_step.cc    the update of
//   what is in a tile drive_optimizer_states.cc  states set from outside, and copied out
#ifndef PENSTOCK_OPTIM_DRIVE_OPTIMIZER_IMPL_H_
#define PENSTOCK_OPTIM_DRIVE_OPTIMIZER_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"
#include "kernels/reduce.h"
#include "kernels/thread_pool.h"
#include "optim/drive_optimizer.h"

namespace penstock::optim {

inline constexpr uint64_t kNone = UINT64_MAX;
inline constexpr size_t kBlock = kernels::kReduceBlock;

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

inline uint64_t MasterBytes(kernels::DType type) {
  return type == kernels::DType::kFp32 ? 0 : type == kernels::DType::kBf16 ? 2 : 4;
}

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

class DriveOptimizer::Impl {
 public:
  explicit Impl(DriveOptimizerOptions options) : options_(std::move(options)), pool_(options_.threads) {}
  ~Impl() { engine_.reset(); }

  absl::Status Open();

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

  Added Cut(std::span<const Parameter> parameters, uint64_t slot_bytes) const;
  absl::Status Place(Added& added);
  absl::Status MakeRing(uint64_t bytes);

  absl::Status CheckUsable();
  absl::Status CheckUpdates(std::span<const Update> updates);

  // Brings the tiles into memory, hands each to act(tile, data), and those with `write` back. Nothing is on
  // its way when it returns. `changes`: what act does cannot be taken back.
  absl::Status Sweep(const std::vector<Work>& work, bool changes,
                     absl::FunctionRef<absl::Status(const Tile& tile, std::byte* data)> act);
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

}  // namespace penstock::optim

#endif  // PENSTOCK_OPTIM_DRIVE_OPTIMIZER_IMPL_H_
