// A step as a program: operations on lanes, with every wait spelled out as an edge to an earlier operation.
//
// Memory is part of the program. Each buffer (a block's run of weights, a tile's state, a gradient) is given
// its slot when the program is built, and an operation that reuses a slot depends on every operation that
// still uses it. Edges point backwards only, so a program cannot deadlock and cannot use more memory than its
// plan, whatever the timing; the executor needs no allocator and no lock order. Because the future of a
// training step is known, the slot to reuse is the one whose content is needed furthest in the future
// (Belady, "A study of replacement algorithms", 1966), but for the one that computes just before; on the walk
// 0..S-1, S-1..0 of a step (or down to the first stage that trains) that keeps the last blocks of forward for
// the start of backward, and the last of backward for the next forward.
//
// A tile is updated in one of two orders, which the plan chooses tile by tile:
//   in the next forward  when the next pass first needs its block: the global norm is known by then, and the
//                        weights that the update reads would have been read anyway
//   in backward          as soon as its block's gradient is final, while the weights are still in memory, on
//                        the assumption that the norm will ask for no clipping. The committed version stays
//                        in its own slot on the drive, so when the assumption fails, the tile is read again
//                        and updated as in the other order: those operations (Op::replay) are always part of
//                        the next pass, and are skipped (Lanes::Skips) when there is nothing to make good.
//                        Without a drive that version stands in the tile's other place in host memory
//                        (BlockPlan::second_slot), and nothing is read
// Both move the same bytes as long as nothing is made again, and both end in the same bits. A mix spreads the
// drive's work over forward and backward as compute is spread. Where all updates of a pass wait for the next
// forward, as while every step is clipped, what they leave in memory anyway (weights that stay there, state
// that does) is written while backward computes, as much of it as gives the drive's work the proportions of
// compute, and the step is committed after that.
//
// In such passes tiles may also be previewed (BlockPlan::previews): forward updates them, computes with the
// result and writes it nowhere; before backward comes to their block they are read and updated again, and
// written. A tile so costs forward one transfer of its state instead of two, and backward two more.
//
// Where an update needs the norms of whole parameters (Plan::tensor_norms), no tile is updated in backward. A
// pass over all blocks follows the norm: it reads what the updates will read, adds up norms, changes nothing,
// and ends with kTrust, for which the updates wait. So a step reads its state twice.
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
#include <memory>
#include <vector>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

// What to append next.
enum class Pass : uint8_t {
  kTrain,     // forward and backward of one step, applying pending updates on the way
  kSum,       // the same, but that more calls of the step come: its gradients are summed and wait for them
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
  ~ProgramBuilder();

  // Operations of the next pass, numbered on from the last. `evaluate_micro_batches` counts for kEvaluate;
  // `speculative_update` for kTrain: the tiles that the plan updates in backward are; otherwise none.
  // `continues`: a kSum of the same step was before, and what it has left is added to.
  std::vector<Op> Append(Pass pass, int evaluate_micro_batches = 0, bool speculative_update = true,
                         bool continues = false);

  // The order in which the stages run from the next pass on: a permutation of 0..S-1, which is the order
  // until then. What is in memory stays of use.
  void SetOrder(const std::vector<int>& stages);

  // The norm of the last step is known and asks for no update to be made again: the next pass need not
  // provide for it.
  void AssumptionHeld();

  OpId next_id() const;
  int64_t next_step() const;
  bool has_pending_update() const;
  // The step whose updates the passes so far apply and whose commit no restart would find; 0: none. Where the
  // passes behind it came to nothing, it is set back.
  int64_t unsaved_step() const;
  void SetBackUnsavedStep(int64_t step);

 private:
  struct Parts;  // each owns one idea: slots, writes, updates, gradients, the device's copies, passes
  const std::unique_ptr<Parts> parts_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_PROGRAM_H_
