// What a program is made of: an operation, the lane that it runs on, and the earlier ones that it waits for.
#ifndef PENSTOCK_TIERING_PROGRAM_OP_H_
#define PENSTOCK_TIERING_PROGRAM_OP_H_

#include <cstdint>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "tiering/plan/numbers.h"
#include "tiering/plan/slot.h"

namespace penstock::tiering {

// Where an operation runs. kHost operations are decisions of the executor's own thread and take no time.
enum class Lane : uint8_t {
  kRead,
  kWrite,
  kCompute,
  kUpdate,
  kCommit,
  kHost,
  kCopyIn,
  kCopyOut,
  kAllGather,
  kReduceScatter
};
inline constexpr int kLanes = 10;
std::string_view LaneName(Lane lane);
// Operations of the lane start in the order of the program.
inline bool KeepsOrder(Lane lane) {
  return lane == Lane::kCompute || lane == Lane::kAllGather || lane == Lane::kReduceScatter;
}

enum class OpKind : uint8_t {
  kReadWeights,    // a tile's weights into its place in the block's run, in host memory or on a device
  kReadState,      // a tile's state (all segments but the weights) into a tile slot
  kReadGradient,   // a tile's spilled gradient into a tile slot
  kVerify,         // checksum of weights that were read without an update, where they were read to
  kUpdate,         // optimizer step of one tile, in place: verify, update, checksum
  kWriteTile,      // weights and state of a tile to the slot that the last commit does not hold
  kWriteState,     // the same in two parts: its state
  kWriteWeights,   // and, when that is there, its weights: now the slot has the new version
  kWriteGradient,  // a block's gradient, rounded, to its scratch on the drive
  kWriteInput,     // the input that a stage keeps for backward, to its scratch on the drive
  kReadInput,      // and back
  kReadSums,       // a block's fp32 sums of its uses before in this step, from their scratch on the drive
  kWriteSums,      // and of this use and those before, to there: more uses or calls of the step come
  kForward,        // one stage, one micro-batch, without autograd: keep the input, hand on the output
  kBackward,       // one stage, one micro-batch: recompute with autograd
  kAccumulateGradient,  // its gradient from LibTorch's tensors to where it waits, or onto the sums there
  kRoundGradient,       // a block's accumulated gradient: round once, square norm, finite check
  kNorm,                // all gradients of the step are final: global norm, clip factor, skip or not
  kChecksumTile,        // checksums of a tile that stays in memory and is about to be written
  kCommit,         // the update of a step is applied; Op::durable: and on the drive, write the commit record
  kBatch,          // the step's batch is there (opened by the engine)
  kEvaluated,      // an evaluation pass is complete
  kSummed,         // a pass whose gradients wait for those of more calls is complete
  kCopyIn,         // a tile's weights from the block's run in host memory to its run on the device; where
                   // several ranks gather in host memory (tile -1) the whole run's, once it is gathered
  kRoundOnDevice,  // a block's fp32 sums on the device, rounded once, to its gradient's place there
  kCopyOut,  // a block's gradient from the device to its place in host memory, with its squares' partial sums
             // behind it, or these alone; where several ranks reduce in host memory what it has summed, or
             // its only addend, to an accumulator there
  kAllGather,  // the other ranks' parts of a block's weights into its run: in host memory, or where devices
               // exchange with each other (DevicePlan::collectives) on the device
  kReduceScatter,   // a block's gradients of all ranks, summed and rounded: this rank's part. From an
                    // accumulator in host memory to a gradient's place; on a device in place there, where the
                    // sums have this part, or, of a block that lives there, to its gradient's place, with its
                    // squares' partial sums
  kExchange,        // what all ranks must know before the norm
  kAgree,           // every rank has committed the step
  kSquareGradient,  // the partial sums of its gradient's squares, on a device (Plan::squares_on_device)
  // Of blocks that live on a device with its own memory (DevicePlan):
  kUpdateOnDevice,  // optimizer step of the whole block, in place there
  kCopyStateIn,     // a tile's state from a tile slot to its place there
  kCopyStateOut,    // a tile's weights and state from there to a run and a tile slot
  // Where an update needs the norms of whole parameters (Plan::tensor_norms):
  kUpdateNorms,    // of a tile's parts of them and of their updates: verifies what was read, changes nothing
  kExchangeNorms,  // and of the other ranks' parts
  kTrust,          // the trust ratios of all parameters, by which the step's updates go
};
inline constexpr int kOpKinds = 37;

// What the compute lane waits for between two of its operations. kHost: for the executor's own thread, which
// hands operations over, runs callbacks, and belongs to the caller between steps. kNone: it does not wait.
enum class Stall : uint8_t { kRead, kWrite, kUpdate, kCommit, kBatch, kCopy, kNetwork, kHost, kNone };
inline constexpr int kStalls = 8;  // causes; kNone is none
std::string_view StallName(Stall stall);

// What is true of every operation of a kind, whatever its lane and its block. A new kind is one more line of
// the table in op.cc.
struct OpTraits {
  OpKind kind;
  std::string_view name;
  // The cause of the wait where the compute lane waits for it. On the lanes of a device's copies it is kCopy
  // instead.
  Stall stall = Stall::kHost;
  // Whether it is skipped if its step is abandoned: its result is of use to that step alone.
  bool ends_with_its_step = false;
};
const OpTraits& TraitsOf(OpKind kind);
inline std::string_view OpKindName(OpKind kind) { return TraitsOf(kind).name; }

using OpId = int64_t;
// Operations that another waits for. Most wait for few: a list of them takes no memory of its own.
using Edges = absl::InlinedVector<OpId, 6>;

struct Op {
  OpKind kind;
  Lane lane;
  bool checks_weights = false;      // kUpdate, kUpdateNorms: the weights were just read
  bool checks_state = false;        // likewise the state. kVerify: of the state, not the weights
  bool speculative_update = false;  // reads, update and write of an update in backward
  bool preview = false;           // reads and update of one that nothing writes: it is made again in backward
  bool replay = false;            // makes an update in backward good whose assumption failed
  bool durable = false;           // kCommit: a restart finds it
  bool evaluates = false;         // kBatch, kForward, kAllGather: of a forward-only pass
  bool last_micro_batch = false;  // kForward, kBackward, kAccumulateGradient: of this stage
  BlockIndex block;
  TileIndex tile;  // within the block
  StageIndex stage;
  Position position;       // of the stage in the pass's order
  Position first_trained;  // of a stage's: where backward of the pass ends
  int micro_batch = -1;
  int64_t step = 0;        // training step whose work this is (an update belongs to the step of its gradient)
  WeightSlot weight_slot;  // where the block's weights are
  TileSlot tile_slot;      // where the tile's state is
  GradientSlot gradient_slot;  // where the block's gradient is
  // Where the block's fp32 sums are, in host memory (only where a gradient has more than one addend). Of
  // kCopyOut, where several ranks reduce in host memory: where the device's sums go, or its only addend.
  AccumulatorSlot accumulator_slot;
  // With a device with its own memory, its slots. Of the run: kReadWeights and kVerify past host memory,
  // kCopyIn, kAllGather there, kForward, kBackward, kUpdateOnDevice. Of the gradient or of its sums:
  // kAccumulateGradient, kReduceScatter there and kCopyOut, which have one of the two; kRoundOnDevice, which
  // has both; of the gradient alone: kSquareGradient.
  DeviceWeightSlot device_weight_slot;
  DeviceGradientSlot device_gradient_slot;
  DeviceAccumulatorSlot device_accumulator_slot;
  int64_t bytes = 0;   // moved (reads and writes) or touched (compute: 0)
  double seconds = 0;  // planned duration of compute and update operations, for the simulator
  Edges after;         // earlier operations that must be complete
};

// Whole or in part.
inline bool IsTileWrite(OpKind kind) {
  return kind == OpKind::kWriteTile || kind == OpKind::kWriteState || kind == OpKind::kWriteWeights;
}

// Edges to an operation that there may not be (-1), and to all of `ids`.
inline void AddIf(Edges* after, OpId id) {
  if (id >= 0) after->push_back(id);
}
inline void AddAll(Edges* after, const Edges& ids) { after->insert(after->end(), ids.begin(), ids.end()); }
inline Edges TakeAll(Edges* from) {
  Edges taken;
  taken.swap(*from);
  return taken;
}

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_OP_H_
