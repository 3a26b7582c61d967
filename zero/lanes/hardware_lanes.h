// The lanes of a real machine: a compute thread, update workers, and the drive behind the state store.
//
//   kCompute  one thread that calls the Compute, in the order of the program
//   kUpdate   workers that check, update and checksum tiles, and finish gradients
//   kCopyIn, kCopyOut       asynchronous copies of a device with its own memory
//   kAllGather, kReduceScatter, and kAgree of kCommit  where there are more ranks (zero/lanes/rank_lanes.h)
//   kRead, kWrite, kCommit  asynchronous transfers of the store; its I/O threads report completions
//
// Everything but the work itself happens on the executor's thread: it starts operations, takes completions,
// and talks to the store. Bits depend on none of the numbers of threads here.
#ifndef PENSTOCK_ZERO_LANES_HARDWARE_LANES_H_
#define PENSTOCK_ZERO_LANES_HARDWARE_LANES_H_

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/reduce.h"
#include "kernels/thread_pool.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "tiering/program/lanes.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/frozen_source.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/update.h"
#include "zero/lanes/compute_lane.h"
#include "zero/lanes/device_lanes.h"
#include "zero/lanes/drive_lanes.h"
#include "zero/lanes/rank_lanes.h"
#include "zero/lanes/tensor_norms.h"
#include "zero/memory/activation_spill.h"
#include "zero/memory/arena_view.h"
#include "zero/memory/sums_spill.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

struct LaneHooks {
  std::function<absl::Status(const tiering::Op&)> decide;  // kHost operations
  std::function<swap::CommitInfo(const tiering::Op&)>
      describe_commit;                                        // its payload lives until the commit is done
  std::function<absl::Status(const tiering::Op&)> committed;  // after it; Op::durable says what it is worth
  // The Compute failed at this operation. True: its pass is given up (FailPass), and the lanes go on; false:
  // the error is the executor's.
  std::function<bool(const tiering::Op&, const absl::Status&)> failed;
};

class HardwareLanes : public tiering::Lanes {
 public:
  struct Options {
    int update_workers = 1;
    TileFormat format;
    uint64_t seed = 1;  // of StageUse::seed
    int rank = 0, world = 1;
    // Where there are more ranks: what they talk over, Plan::network_bytes of memory, whether this one was
    // asked to stop.
    FrozenSource* frozen = nullptr;  // of tiles that are not in the store
    Comm* comm = nullptr;
    Comm* devices = nullptr;        // and what their devices exchange over, with DevicePlan::collectives
    ShardedState* parts = nullptr;  // in the place of comm (RankLanes)
    SumsSpill* sums = nullptr;      // null: no sums go to the drive
    std::span<std::byte> network_memory;
    std::function<bool()> stops;
    bool tells_what_came = false;  // StepTotals::came
  };

  // `store` is null where nothing lives on a drive, `inputs` where no input goes there, `lanes` where the
  // host computes; `device` is what computes. Everything passed in outlives the lanes.
  HardwareLanes(const tiering::Plan& plan, ArenaView& arena_view, GradientSums::Layouts layouts,
                Compute* compute, Device* device, swap::Store* store, ActivationSpill* inputs,
                DeviceLanes* lanes, const Options& options, LaneHooks hooks);
  // Waits for what is in flight.
  ~HardwareLanes() override;

  bool HasRoom(tiering::Lane lane) const override;
  bool Skips(const tiering::Op& op) const override;
  bool Moves(const tiering::Op& op) const override { return !UndoesWrite(op); }
  void Start(tiering::OpId id, const tiering::Op& op) override;
  absl::Status Decide(const tiering::Op& op) override;
  void Wait(std::vector<tiering::Completion>* completions) override;
  double Now() const override;

  // Where an operation runs, for people: the file of its tile, the device, the processor.
  std::string PlaceOf(const tiering::Op& op) const;

  // What updates go by from now on; set when the norm of their step is known.
  void set_decision(const UpdateDecision& decision) {
    decisions_[decision.step & 1] = decision;
    norms_.Clear();
    compute_lane_.ForgetCame();
  }
  // What the updates in backward of its step assume; set before the step computes.
  void set_assumption(const UpdateDecision& assumed) { assumed_[assumed.step & 1] = assumed; }
  // Compute, and the reads only it needs, of `step` become nothing: its batch will never come. 0: of none.
  void Abandon(int64_t step) { abandoned_step_ = step; }
  // Of the micro-batches of the call that comes, in their step. Set while nothing computes.
  void set_first_micro_batch(int number) { compute_lane_.set_first_micro_batch(number); }
  // Sums that wait for more calls of their step are of no use any more. Set while nothing computes.
  void ForgetSums();
  // The pass of this operation has failed. Of an evaluation: what is left of its compute becomes nothing. Of
  // a training step: everything of that step and of those behind it that has not begun, compute, reads,
  // updates, writes and commits; what belongs to the steps before goes on.
  void FailPass(const tiering::Op& op);
  // It is over, and nothing is in flight. What its backward updated in host memory is as it was.
  void ForgetFailedPass();
  // Of a tile's part of a finished gradient that waits on the drive.
  uint64_t gradient_checksum(tiering::BlockIndex block, tiering::TileIndex tile) const {
    return drive_.gradient_checksum(block, tile);
  }
  // Bytes of weights that were read from a drive to a device without host memory (GPUDirect Storage).
  int64_t past_host_bytes() const { return drive_.past_host_bytes(); }
  // Received from other ranks so far, of weights and of gradients.
  tiering::ExchangedBytes gathered() const {
    return ranks_ != nullptr ? ranks_->gathered() : tiering::ExchangedBytes();
  }
  tiering::ExchangedBytes reduced() const {
    return ranks_ != nullptr ? ranks_->reduced() : tiering::ExchangedBytes();
  }
  // Of inputs that stages keep for backward: that left memory and came back, and of these what the operations
  // of the read and write lanes have counted too much, since the last call, where an input has other sizes
  // than were planned for. On the executor's thread.
  const InputBytes& input_bytes() const { return input_bytes_; }
  InputBytes TakeInputsNotMoved() { return std::exchange(inputs_not_moved_, {}); }
  // What all ranks' gradients, losses and wishes come to, once they are final.
  StepTotals totals() const { return ranks_ != nullptr ? ranks_->totals() : OwnTotals(); }

 private:
  struct Task {
    tiering::OpId id = 0;
    const tiering::Op* op = nullptr;
  };
  struct Done {
    Task task;
    absl::Status status;
    double start = 0;
    double end = 0;
  };
  // The newest of its parity: of `step` once its norm is known.
  const UpdateDecision& DecisionFor(int64_t step) const { return decisions_[step & 1]; }
  StepTotals OwnTotals() const;
  bool UndoesWrite(const tiering::Op& op) const;
  void Report(const Task& task, absl::Status status, double start);
  // The same for a lane of the device, which takes up an operation when it has finished the one before.
  void ReportInOrder(const Task& task, absl::Status status, double start);
  absl::Status StartInput(const Task& task);
  // An error of this operation is one that the Compute has returned.
  bool IsOfCompute(const tiering::Op& op) const;
  absl::Status Run(const tiering::Op& op);  // on a worker
  absl::Status RunUpdate(const tiering::Op& op);
  // In backward without a drive: the version before stays where it is (BlockPlan::second_slot).
  absl::Status RunUpdateBesideVersion(const tiering::Op& op);
  // An update of `step` that was made so is undone, if there was one.
  void TakeBackUpdate(tiering::BlockIndex block, tiering::TileIndex tile, int64_t step);
  absl::Status RunUpdateNorms(const tiering::Op& op);
  // Checks the gradient of an update, and says where it is.
  absl::Status FindGradient(const tiering::Op& op, TileMemory* memory);
  absl::Status RunUpdateOnDevice(const tiering::Op& op);
  absl::Status RunRoundGradient(const tiering::Op& op);
  // What compact states of a block are rounded with in an update.
  static uint64_t SeedOf(const UpdateDecision& decision, tiering::BlockIndex block);
  // What is left to do for a finished operation on the executor's thread.
  absl::Status Settle(const Done& done);
  void Work(std::deque<Task>* queue, bool computes);

  const tiering::Plan& plan_;
  ArenaView& arena_view_;
  const GradientSums::Layouts layouts_;
  Compute* const compute_;
  // Takes gradients over, rounds and squares them: in backward, when update workers have little to do.
  kernels::ThreadPool pool_;
  ComputeLane compute_lane_;
  const bool has_store_;
  DeviceLanes* const device_;
  const Options options_;
  const LaneHooks hooks_;
  // [step & 1], both: writes of a step may start, and its last updates in backward run, when the next step
  // has begun or even been decided (the next update of a tile waits for its last write); not when that one
  // has been committed. Only of what lives on a device a write may start after that: of a skipped step, too,
  // which then writes what there was.
  std::array<UpdateDecision, 2> decisions_;
  std::array<UpdateDecision, 2> assumed_;
  int64_t abandoned_step_ = 0;
  int64_t failed_step_ = 0;  // from which on nothing is made any more
  bool evaluation_failed_ = false;
  // The last step whose update in backward has moved a tile of two places to the other one; 0: none that
  // stands.
  tiering::PerBlock<tiering::PerTile<int64_t>> moved_;
  tiering::PerBlock<kernels::SumOfSquares> squares_;
  TensorNorms norms_;
  tiering::PerPosition<std::vector<bool>> refused_inputs_;  // [micro_batch], by the Compute
  InputBytes input_bytes_, inputs_not_moved_;
  int computes_ = 0;  // started and not completed, executor's thread

  std::mutex mutex_;
  std::condition_variable compute_there_, updates_there_;  // work for the thread that computes, for a worker
  std::condition_variable completion_there_;
  std::deque<Task> compute_queue_;
  std::deque<Task> update_queue_;
  std::deque<Done> done_;
  std::array<double, tiering::kLanes> idle_since_{};  // lanes of the device
  bool stopping_ = false;
  DriveLanes drive_;  // behind what its reports need
  std::vector<std::thread> threads_;
  std::unique_ptr<RankLanes> ranks_;  // null: one rank
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_HARDWARE_LANES_H_
