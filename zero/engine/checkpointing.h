// Checkpoints of a training: when one is due, at which pace it is written, and the way back from one.
//
// A checkpoint is a complete copy of a commit (swap/checkpoint_copy.h), written by a thread of its own with
// the lowest priority on the drive. How long it may take depends on what it copies, since what it holds must
// not change meanwhile:
//
//   a store of three slots   as long as it likes: spread over the steps until the next one is due, but over
//                            no more than kSpreadSteps, which keeps its traffic below 5% of the training's.
//                            Where they are asked for, the next one is due as late as the last one was
//   of two, where only       the same, and until the next commit
//   checkpoints are commits
//   a store of two slots     until the step after the next is to be updated: about one step
//   of one slot, and         until the next update: a forward and a backward
//   state in memory
//
// Training waits where that is not enough, and where one is due while the last is still being written.
//
// Threads: all of it on the executor's.
#ifndef PENSTOCK_ZERO_ENGINE_CHECKPOINTING_H_
#define PENSTOCK_ZERO_ENGINE_CHECKPOINTING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/checkpoint_copy.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "zero/compute/device_state.h"
#include "zero/engine/engine.h"
#include "zero/memory/arena_view.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {

// A checkpoint copies 24 bytes a parameter (12 read, 12 written) where a step of training moves 26: spread
// over this many steps that is 3.8% more for each.
inline constexpr int64_t kSpreadSteps = 24;

class Checkpointing {
 public:
  using Report = std::function<void(int64_t step, const std::string& path, const absl::Status& status)>;

  // `report` hears how each checkpoint ended. Everything passed in outlives this. `tile_memory`: for one
  // padded tile, where a store is copied. `comm`: the other ranks, each of which writes its part of every
  // checkpoint; null: there are none. A checkpoint gets its name when all parts are there, which training
  // does not wait for before the next one is due. `totals` is added to.
  Checkpointing(CheckpointSchedule schedule, std::span<std::byte> tile_memory, Comm* comm, Report report,
                CheckpointTotals* totals);
  // Gives up what is not finished.
  ~Checkpointing() = default;
  // Of several ranks, before the first checkpoint: a number that all of them have, and no other run or object
  // of this one. Each checkpoint's own is made of it and of the step, so that its parts know each other.
  void set_series(const swap::Uuid& series) { series_ = series; }
  // Of every checkpoint from here on.
  void set_naming(swap::CheckpointNaming naming) { naming_ = std::move(naming); }

  // Of one that is asked for: steps until the next one is expected. Default: more than kSpreadSteps.
  void set_next_in(int64_t steps) { next_in_ = steps; }

  // Removes what killed runs left in the directory. Of several ranks, rank 0 does.
  absl::Status CleanUp() const;
  // Removes all but the newest checkpoints that are to be kept. Must not be called before what the run goes
  // on from has been read and checked: it may be the newest, which is no reason to remove an older one that
  // is whole. Of several ranks, rank 0 does.
  absl::Status KeepNewest() const;
  // After the last checkpoint: of the run that this one replaces none is left that a resume would take for
  // the newest. An error names one that is.
  absl::Status RemoveReplaced();
  bool Due(int64_t step) const { return schedule_.every > 0 && step % schedule_.every == 0; }
  // The commit that is due is done. Errors are those of Finish.
  absl::Status BeginOfStore(swap::Store& store, bool commits_every_step);
  absl::Status BeginOfMemory(aio::Engine& io, swap::CheckpointSource source);
  // The run goes on from the store's last commit. Where that is due and a kill cut its checkpoint short, it
  // is written now.
  absl::Status MakeUpFor(swap::Store& store, bool commits_every_step);
  // An operation has ended, of about `operations` in a step: lets the copy go on, and notices its end.
  absl::Status Advance(int64_t operations);
  // The update of `step` may begin from here on, in memory or on the drive: what it would change must have
  // been copied. Advance or Finish returns how the copy ended.
  void BeforeUpdate(int64_t step);
  // The same for whatever is being copied.
  void FinishTiles();
  // Waits for the checkpoint that is being written. Without room, with one of this step there already, or
  // where the directory was moved away, training goes on: that is reported and no error here. Damage in the
  // run is.
  absl::Status Finish();
  // Seconds since the checkpoint that is being written began; none: there is none.
  std::optional<double> under_way() const;
  // Finish would not wait.
  bool ended() const { return copy_ == nullptr || copy_->finished(); }
  // Of this process: the newest that was written, and how the last one ended. Step 0: none.
  int64_t kept_step() const { return kept_step_; }
  const std::string& kept_path() const { return kept_path_; }
  const absl::Status& last_status() const { return last_status_; }

 private:
  absl::Status Begin(std::unique_ptr<swap::CheckpointCopy> copy, int64_t steps);
  swap::CheckpointOptions Options(uint64_t step) const;
  void ForgetReplaced();

  CheckpointSchedule schedule_;
  const std::span<std::byte> tile_memory_;
  Comm* const comm_;
  swap::Uuid series_{};
  std::optional<swap::CheckpointNaming> naming_;
  const Report report_;
  CheckpointTotals* const totals_;
  std::unique_ptr<swap::CheckpointCopy> copy_;
  int64_t next_in_ = kSpreadSteps + 1;
  int64_t last_step_ = 0;   // whose update must wait for the copy; 0: none
  int64_t begun_step_ = 0;  // whose update has begun or may begin any time
  double tiles_per_step_ = 0;
  double credit_ = 0;                // tiles that may be copied and have not been allowed yet
  int64_t ended_ = 0, of_step_ = 0;  // operations since the step's updates began, and of the step before
  int64_t paced_step_ = 0;
  int64_t kept_step_ = 0;
  std::string kept_path_;
  absl::Status last_status_;
};

// That a checkpoint of `bytes` can be written below `parent`, which is made: its file system has the room and
// does direct I/O. A checkpoint that is found impossible after the training comes too late.
absl::Status CheckPlace(const std::string& parent, int64_t bytes, int rank);

// State in memory as a checkpoint's source: the tiles of `plan` where `arena_view` or `device` (null: none is
// apart) has them, as the update of `step` left them. All of it stays as it is until the end of the
// copy, which has the use of the device's staging memory.
swap::CheckpointSource SourceOfMemory(const tiering::Plan& plan, const ArenaView& arena_view,
                                      const DeviceState* device, const std::string& identity, int64_t step,
                                      int64_t updates, std::string payload);

// The way back: reads every tile of `plan` from the checkpoint (or run) in `parts` to its place in memory and
// checks it. Of as many ranks as there are now, with their tiles, or of another number of them.
absl::StatusOr<swap::Recovered> LoadIntoMemory(aio::Engine& io, const ShardDirectories& parts,
                                               const tiering::ModelGraph& graph, const tiering::Plan& plan,
                                               const ArenaView& arena_view, const DeviceState* device,
                                               int rank);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_CHECKPOINTING_H_
