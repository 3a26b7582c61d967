// The drive behind the lanes: transfers of tiles, of gradients, sums and saved activations that wait there,
// and the commit.
//
//   kRead, kWrite  a transfer for each tile and purpose, reused every step; its I/O threads report the end
//   kCommit        of the store
//
// An operation has three parts. It is started, and its end is reported, on an I/O thread. Then Ended says how
// it ended, on the executor's thread. What was read is verified by kVerify and kUpdate, on a worker.
#ifndef PENSTOCK_ZERO_LANES_DRIVE_LANES_H_
#define PENSTOCK_ZERO_LANES_DRIVE_LANES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "zero/compute/compute.h"
#include "zero/compute/frozen_source.h"
#include "zero/compute/update.h"
#include "zero/lanes/device_lanes.h"
#include "zero/memory/activation_spill.h"
#include "zero/memory/arena_view.h"
#include "zero/memory/sums_spill.h"

namespace penstock::zero {

class DriveLanes {
 public:
  // An operation has ended, well or badly; on any thread.
  using Report =
      std::function<void(tiering::OpId id, const tiering::Op& op, absl::Status status, double start_seconds)>;

  struct Options {
    swap::Store* store = nullptr;       // null: nothing lives on a drive
    ActivationSpill* inputs = nullptr;  // null: no saved activations go there
    SumsSpill* sums = nullptr;          // null: no sums go there
    FrozenSource* frozen = nullptr;     // of tiles that are not in the store
    std::function<double()> now;
  };

  // `device` is null where the host computes. Everything passed in outlives this.
  DriveLanes(const tiering::Plan& plan, const ArenaView& arena_view, DeviceLanes* device,
             const Options& options, Report report);
  DriveLanes(const DriveLanes&) = delete;
  DriveLanes& operator=(const DriveLanes&) = delete;

  // ---- the executor's thread ----

  // Of kRead and kWrite. After an error nothing is reported.
  absl::Status Start(tiering::OpId id, const tiering::Op& op);
  // kWriteInput and kReadInput: these values, from their memory or to it.
  absl::Status StartInput(tiering::OpId id, const tiering::Op& op, std::span<const TensorView> values);
  absl::Status StartCommit(tiering::OpId id, const tiering::Op& op, const swap::CommitInfo& info);
  // What was written of the operation's tile since the last commit is forgotten.
  absl::Status DropWritten(const tiering::Op& op);
  // How an operation whose end was reported has ended, and what is left to do for it.
  absl::Status Ended(const tiering::Op& op);
  absl::Status FinishCommit();
  // The file that an operation reads or writes, for people.
  std::string PlaceOf(const tiering::Op& op) const;
  // Bytes of weights that were read from a drive to a device without host memory (GPUDirect Storage).
  int64_t past_host_bytes() const { return past_host_bytes_; }

  // ---- the worker that has the tile ----

  absl::Status Verify(const tiering::Op& op);              // what kVerify checks
  absl::Status VerifyBeforeUpdate(const tiering::Op& op);  // what was read for a kUpdate
  void ChecksumTile(const tiering::Op& op);                // with which a tile will be written
  void ChecksumGradient(const tiering::Op& op);            // of a block's that will wait on the drive
  absl::Status VerifyGradient(const tiering::Op& op, const TileMemory& memory) const;  // of a tile, come back
  uint64_t gradient_checksum(tiering::BlockIndex block, tiering::TileIndex tile) const {
    return tiles_[block][tile]->gradient_checksum;
  }

 private:
  struct Task {
    tiering::OpId id = 0;
    const tiering::Op* op = nullptr;
    double start = 0;
  };
  // One transfer object for each tile and purpose, reused every step.
  struct Transfer {
    swap::TileIo io;
    DriveLanes* lanes = nullptr;
    Task task;
  };
  struct TileTransfers {
    // `there`: weights past host memory to the device, maybe while they come to host memory for an update.
    Transfer weights, there, state, gradient, write, spill;
    std::unique_ptr<FrozenSource::Read> frozen;  // of one that is not in the store
    std::vector<uint64_t> checksums;             // of the new version, by segment
    uint64_t gradient_checksum = 0;              // of the tile's part of a spilled gradient
  };
  // Saved activations of a position, or a block's sums between the calls of a step.
  struct OtherTransfer {
    DriveLanes* lanes = nullptr;
    Task task;
  };
  // A block's gradient on its way to the drive: one transfer per tile.
  struct Spill {
    std::atomic<int> outstanding{0};
    absl::Status refused;  // of what the store did not take
    DriveLanes* lanes = nullptr;
    Task task;
  };

  TileTransfers& transfers(const tiering::Op& op) const { return *tiles_[op.block][op.tile]; }
  // The transfer with the store of a read or write of a tile.
  Transfer& TileTransfer(const tiering::Op& op) const;
  // Of one that is there.
  uint32_t StoreTile(tiering::BlockIndex block, tiering::TileIndex tile) const {
    return static_cast<uint32_t>(first_tile_[block] + tile.value());
  }
  bool IsElsewhere(const tiering::Op& op) const {
    return op.tile.valid() && !plan_.blocks[op.block].in_store(op.tile);
  }
  // Of the tile's segments those that the operation writes: first, and how many.
  std::pair<uint32_t, uint32_t> WrittenSegments(const tiering::Op& op) const;
  TileMemory MemoryOf(const tiering::Op& op) const {
    return arena_view_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  }
  absl::Status StartTile(const Task& task);
  absl::Status StartFrozen(const Task& task);
  void StartSpill(const Task& task);
  absl::Status StartSums(const Task& task);
  absl::Status SpillEnded(tiering::BlockIndex block) const;
  absl::Status WeightsEnded(const tiering::Op& op);
  void ReportEnd(const Task& task) { report_(task.id, *task.op, absl::OkStatus(), task.start); }
  static void OnTileDone(swap::TileIo& io, void* transfer);
  static void OnFrozenDone(void* transfer);
  static void OnSpillDone(swap::TileIo& io, void* spill);
  static void OnOtherDone(void* transfer);
  static void OnCommitDone(swap::CommitIo& io, void* lanes);

  const tiering::Plan& plan_;
  const ArenaView& arena_view_;
  DeviceLanes* const device_;
  const Options options_;
  swap::Store* const store_;
  const Report report_;
  tiering::PerBlock<int64_t> first_tile_;  // number in the store that its tile 0 has, or would
  tiering::PerBlock<tiering::PerTile<std::unique_ptr<TileTransfers>>> tiles_;
  tiering::PerBlock<std::unique_ptr<Spill>> spills_;
  tiering::PerBlock<OtherTransfer> sums_transfers_;
  tiering::PerPosition<std::vector<std::unique_ptr<OtherTransfer>>> input_transfers_;  // [micro_batch]
  swap::CommitIo commit_;
  Task commit_task_;
  int64_t past_host_bytes_ = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_DRIVE_LANES_H_
