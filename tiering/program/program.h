// A step as a program: operations on lanes, with every wait spelled out as an edge to an earlier operation.
//
// Memory is part of the program. Each buffer (a block's run of weights, a tile's state, a gradient) is given
// its slot when the program is built, and an operation that reuses a slot depends on every operation that
// still uses it. Edges point backwards only, so a program cannot deadlock and cannot use more memory than its
// plan, whatever the timing; the executor needs no allocator and no lock order. Because the future of a
// training step is known, the slot to reuse is the one whose content is needed furthest in the future
// (Belady, "A study of replacement algorithms", 1966), but for the one that computes just before; on the walk
// 0..S-1, S-1..0 of a step that keeps the last blocks of forward for the start of backward, and the last of
// backward for the next forward.
//
// A tile is updated in one of two orders, which the plan chooses tile by tile:
//   in the next forward  when the next pass first needs its block: the global norm is known by then, and the
//                        weights that the update reads would have been read anyway
//   in backward          as soon as its block's gradient is final, while the weights are still in memory, on
//                        the assumption that the norm will ask for no clipping. The committed version stays
//                        in its own slot on the drive, so when the assumption fails, the tile is read again
//                        and updated as in the other order: those operations (Op::replay) are always part of
//                        the next pass, and are skipped (Lanes::Skips) when there is nothing to make good
// Both move the same bytes as long as nothing is made again, and both end in the same bits. A mix spreads the
// drive's work over forward and backward as compute is spread. Where all updates of a pass wait for the next
// forward, as while every step is clipped, what they leave in memory anyway (weights that stay there, state
// that does) is written while backward computes, as much of it as gives the drive's work the proportions of
// compute, and the step is committed after that.
//
// Over several ranks (Plan::world) each reads and updates its part of every block. kAllGather fills in the
// rest of the run before it computes, kReduceScatter makes the whole run's gradient into this rank's part of
// the sum over ranks, and kAgree follows a commit: only when every rank has committed a step may any of them
// overwrite the one before. These operations wait for the other ranks, which run the same program: each kind
// has a lane of its own that keeps to program order, so that all ranks come to them in one order. The
// earliest unfinished operation of all ranks can always run, so they cannot wait for each other in a circle.
#ifndef PENSTOCK_TIERING_PROGRAM_PROGRAM_H_
#define PENSTOCK_TIERING_PROGRAM_PROGRAM_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

// What to append next.
enum class Pass : uint8_t {
  kTrain,     // forward and backward of one step, applying pending updates on the way
  kEvaluate,  // forward only, applying pending updates on the way
  kFlush,     // pending updates only
  kPersist,   // where not every step is durable: tiles that are written late, and a commit of the step whose
              // updates are applied; what is pending stays so
};

class ProgramBuilder {
 public:
  // `first_step` is the number of the first training step that will be appended (1 for a new run). Nothing is
  // pending and, with a drive, nothing is in memory. `first_id`: where an executor's numbering goes on. Both
  // graph and plan are looked at as long as passes are appended.
  ProgramBuilder(const ModelGraph& graph, const Plan& plan, int64_t first_step, OpId first_id = 0);

  // Operations of the next pass, numbered on from the last. `evaluate_micro_batches` counts for kEvaluate;
  // `in_backward` for kTrain: the tiles that the plan updates in backward are; otherwise none.
  std::vector<Op> Append(Pass pass, int evaluate_micro_batches = 0, bool in_backward = true);

  // The order in which the stages run from the next pass on: a permutation of 0..S-1, which is the order
  // until then. What is in memory stays of use.
  void SetOrder(std::vector<int> stages) { stage_order_ = std::move(stages); }

  // The norm of the last step is known and asks for no update to be made again: the next pass need not
  // provide for it.
  void AssumptionHeld();

  OpId next_id() const { return next_id_; }
  int64_t next_step() const { return next_step_; }
  bool has_pending_update() const { return pending_step_ != 0; }
  // The step whose updates the passes so far apply and whose commit no restart would find; 0: none.
  int64_t unsaved_step() const { return unsaved_step_; }

 private:
  struct WeightSlot {
    int block = -1;            // whose weights it holds or will hold
    std::vector<OpId> ready;   // [tile] complete when the content is there: verified or updated
    std::vector<OpId> writes;  // [tile] that read the content to the drive, -1: none
    std::vector<OpId> copies;  // [tile] the last that reads the content to the device, -1: none
    OpId last_compute = -1;    // the compute lane runs in order: its last use stands for all
    OpId gather = -1;          // the last of this content, -1: none
    bool whole = false;        // no part has changed since
  };
  // What is still to be appended of a tile's update.
  enum class Due : uint8_t { kNothing, kUpdate, kReplay };
  struct TileSlot {
    int block = -1, tile = -1;  // kept content (resident tiles only)
    Edges users;
  };
  struct GradientSlot {
    Edges users;
  };

  // A run on a device apart.
  struct DeviceRun {
    int block = -1;
    std::vector<OpId> ready;       // [tile] the copy that made the content
    std::vector<int64_t> version;  // [tile] of the content, as in version_
    OpId last_compute = -1;
    bool whole = false;  // over several ranks: with the others' parts, as new as this one's
    // Of a block that lives there: what filled it or updated it last, weights and state, and what has copied
    // them out since.
    Edges made, copies;
  };
  // Where compute finds a block's weights, and what it waits for.
  struct Weights {
    int weight_slot = -1;  // in host memory; -1: not needed there
    int device_slot = -1;  // -1: the device is the host
    const std::vector<OpId>* ready = nullptr;
    OpId* last_compute = nullptr;
    int compute_slot() const { return device_slot >= 0 ? -1 : weight_slot; }
  };

  Op& Emit(OpKind kind, Lane lane, int64_t step);
  int AcquireRun(int block, size_t position);
  // Whether the block is not the one that computes while that at `position` is fetched, and its next use: the
  // content that compares greatest is given up. Furthest in the future alone would keep, of two slots, the
  // one of an embedding that is used again at the other end, and leave every block to wait for the other.
  using GiveUp = std::pair<bool, size_t>;
  GiveUp WorthGivingUp(int block, size_t position) const;
  // Makes the block's weights present (with the pending update applied if there is one) for a use at
  // `position` of the pass's order of uses; returns the run slot.
  int Fetch(int block, size_t position);
  // The same for a use by compute: on a device apart the weights are copied there, unless what it
  // has is of the newest update; host memory then needs them only if `updates`: for an update in backward.
  Weights FetchForCompute(int block, size_t position, bool updates);
  // `last` is the last operation that computes with them in this use.
  void Used(const Weights& weights, OpId last);
  // Of a block that lives on the device: brings it there if it never was, and makes the update that is due.
  int FetchOnDevice(int block, size_t position);
  void LoadOnDevice(int block, size_t position);
  void UpdateOnDevice(int block, size_t position);
  // All of its tiles to the drive: after every update, or when a step is persisted.
  void WriteFromDevice(int block, size_t position, int64_t step);
  // A tile on its way out, to be written: through the run slot and a slot of the ring, which it returns.
  // `former` must be over.
  int EmitStateOut(int block, int tile, int weight_slot, const Edges& former, int64_t step);
  // Copies what is not on the device; returns its run slot there. `weight_slot`: -1, where nothing is
  // missing.
  int CopyToDevice(int block, size_t position, int weight_slot);
  // The same past host memory, from the drive.
  int ReadToDevice(int block, size_t position);
  // Of a block that comes and goes, its former run there, an empty one, or the one most worth
  // giving up; of one that lives there, its own.
  int AcquireDeviceRun(int block, size_t position);
  // Who still computes with the former content of a device's run, and the uses that must be over.
  void AddUsers(Edges* after, const DeviceRun& run) const;
  bool IsInHostMemory(int block) const;
  bool IsOnDevice(int block, int* device_slot) const;
  // The device's places for a block's gradient while it is summed; what waits for them goes to `wait`.
  void TakeDevicePlaces(int block, Edges* wait);
  // When `last`, its last addend, is taken: rounds sums and copies the gradient to its slot in host memory;
  // where several ranks reduce in host memory copies what there is to `host_accumulator`. `wait`: who still
  // uses that place.
  OpId EmitCopyOut(int block, int gradient_slot, int host_accumulator, OpId last, const Edges& wait,
                   int64_t step);
  // Over several ranks, for a use of the run by compute: gathers what is not there or has changed.
  void Gather(int block, int weight_slot);
  void AddGather(Edges* after, int weight_slot) const;
  // The same among devices: into the run there; and what backward left there, when `last` is taken.
  void GatherOnDevice(int block, int device_slot);
  OpId ReduceOnDevice(int block, OpId last, int64_t step);
  int64_t GatheredBytes(int block) const;
  int64_t ReducedBytes(int block) const;
  // Reads what is not in memory, updates, and writes. `replay`: reads everything, weights too, from the
  // committed version.
  struct Update {
    int64_t step = 0;
    OpId decided = -1;       // the norm, or in backward the final gradient
    OpId weights_read = -1;  // to be checked first; -1: they were in memory
    bool in_backward = false;
    bool replay = false;
  };
  void EmitUpdate(int block, int tile, int weight_slot, const Update& of);
  void SizeRun(int slot, const BlockPlan& block);
  // Whoever still uses the content of a run slot, which is given up.
  Edges GiveUpRun(int slot);
  // Writes of what stays in memory until the next update, not yet emitted. (Plan::written_at_checkpoint is
  // another matter: tiles that not every step writes.)
  struct DeferredWrite {
    OpKind kind;
    int block, tile, weight_slot, tile_slot;
    int64_t step;
    OpId ready;  // the update or, where only the weights stay, the write of the state
  };
  // The share of tiles whose writes are deferred, among those that can be.
  double DeferredShare() const;
  // Of a tile that was updated in forward: what has to go to the drive at once, and what can wait.
  void WriteUpdated(int block, int tile, int weight_slot, int tile_slot, const Update& of, OpId update);
  // The oldest `most` of those that can wait, to be started when `after` is done.
  void EmitDeferredWrites(size_t most, OpId after);
  int NextTileSlot() { return static_cast<int>(next_tile_slot_++ % rotating_tile_slots_); }
  bool IsDue(int block) const;
  // Makes what is due of the block's update, outside of a use by compute.
  void ApplyDue(int block, size_t position);
  Op& EmitForStage(OpKind kind, Lane lane, int position, int micro_batch, int64_t step);
  // The write or read of the input at a position that does not stay in memory; a list by micro-batch.
  Op& EmitInput(OpKind kind, int position, int micro_batch, int64_t step);
  // Returns the last operation that computes, or the batch.
  OpId AppendForward(bool train, int micro_batches, int64_t step);
  // The places in this pass where a block's gradient is summed, or goes to where it is not, unless an earlier
  // use has taken them; returns who still uses them.
  Edges TakePlaces(int block);
  Edges TakeGradientSlot(int block);
  Edges TakeAccumulatorSlot(int block);
  // One stage, all micro-batches; `wait`: who still uses the gradient's place. Returns the last operation.
  OpId EmitBackward(int position, const Weights& weights, const Edges& wait, int64_t step);
  // When `last`, its last addend, is taken: from there to a gradient that waits for the norm; returns what
  // makes it final. And, of one that does not wait in memory, its way to the drive.
  OpId EmitFinal(int block, OpId last, int64_t step);
  void EmitGradientWrite(int block, OpId final_id, int64_t step);
  // `before`: the last operation of forward.
  void AppendBackward(int64_t step, bool in_backward, OpId before);
  // kWriteTile, or a part of it.
  OpId EmitTileWrite(OpKind kind, int block, int tile, int weight_slot, int tile_slot, const Update& of,
                     OpId ready);
  // The write of a tile that was not updated here: its checksums first.
  void EmitSealedWrite(int block, int tile, int weight_slot, int tile_slot, int64_t step);
  // Of `step`, when `after` is done; over several ranks all of them agree on it.
  void EmitCommit(int64_t step, bool durable, Edges after);
  void CommitPending();
  void Persist();
  size_t NextUse(int block, size_t position) const;
  // What every program promises: edges point backwards, so that no timing makes it wait for itself, and no
  // operation has a place outside the plan.
  void CheckAppended() const;

  const ModelGraph& graph_;
  const Plan& plan_;
  std::vector<int> stage_order_;
  OpId next_id_ = 0;
  int64_t next_step_;
  int64_t computing_step_ = 0;  // of the pass being appended
  int64_t pending_step_ = 0;    // step whose update is not applied yet; 0 = none
  int64_t unsaved_step_ = 0;
  std::vector<std::vector<Due>> due_;  // [block][tile] of the pending update
  OpId batch_ = -1;                    // kBatch of the pass
  OpId norm_ = -1;                     // kNorm of the pending step
  OpId last_commit_ = -1;
  Edges pending_writes_;        // of the pending step, for its commit
  bool defers_writes_ = false;  // in the forward being appended, since nothing is updated in its backward
  double deferred_share_ = 0;
  double deferred_due_ = 0;                     // of the next one; from 1 on it is deferred
  std::vector<DeferredWrite> deferred_writes_;  // oldest first
  std::vector<WeightSlot> runs_;
  std::vector<TileSlot> tiles_;
  std::vector<GradientSlot> gradients_;
  std::vector<GradientSlot> accumulators_;
  size_t next_tile_slot_ = 0;
  size_t rotating_tile_slots_ = 1;
  std::vector<size_t> next_gradient_slot_;  // per size class
  size_t next_accumulator_ = 0;
  std::vector<std::vector<OpId>> last_write_;     // [block][tile] -> last write of it, -1 if none
  std::vector<OpId> gradient_written_;            // [block] -> last kWriteGradient, -1
  std::vector<int> gradient_of_block_;            // [block] -> slot of its finished gradient
  std::vector<char> loaded_;                      // [block] private run slot holds the weights
  std::vector<char> stays_;                       // [block] nothing ever takes its run slot
  std::vector<std::vector<OpId>> input_written_;  // [position][micro_batch] of this pass, -1
  std::vector<OpId> input_used_;                  // [position] last backward of this pass, -1
  // [block][tile] updates appended: the version of the weights in host memory.
  std::vector<std::vector<int64_t>> version_;
  std::vector<DeviceRun> device_runs_;
  std::deque<OpId> used_;  // the last operations of the newest uses, oldest first
  std::vector<GradientSlot> device_gradients_, device_accumulators_;
  std::vector<size_t> next_device_gradient_;  // per size class
  size_t next_device_accumulator_ = 0;
  // [block] its gradient's places in this pass, -1
  std::vector<int> gradient_, accumulator_, device_gradient_, device_accumulator_;
  // [block] positions of its uses in this pass and, counted on, in the next, rising.
  std::vector<std::vector<size_t>> uses_;
  std::vector<Op> out_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_PROGRAM_H_
