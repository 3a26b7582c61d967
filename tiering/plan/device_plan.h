// The tier above host memory: what lives in the memory of a device that computes apart from the
// host.
//
// Weights come from a block's run in host memory (a copy in), gradients leave for their place there (a copy
// out), with one rank followed by the partial sums of their squares, so that the host reads no gradient for
// the norm; inputs that stages keep for backward stay on the device as long as there is room and wait in host
// memory otherwise. A device that is the host itself (`cpu`) has no such tier, and its programs have none of
// these copies.
//
// A block may live here with everything: weights, optimizer state, and its gradient from backward to the
// update, which the device makes as soon as the norm is known and the block is next used, while the processor
// updates the others. Only the partial sums of its gradient's squares (8 bytes for 4096 elements) leave for
// the norm. Without a drive the device is the only place of its state. With one, it is read from there once,
// and written, by way of host memory, after every update, or where not every step is durable when one is
// persisted (Plan::written_at_checkpoint).
//
// Over several ranks the device holds whole runs. Where devices exchange with each other (`collectives`), a
// rank copies in its own part and gathers the others' on the device; what backward leaves is reduced there,
// in the order of the ranks, and this rank's part of the sum leaves: host memory never has more than parts.
// Where they cannot, a run is copied in when the others' parts have been gathered into it in host memory, and
// sums leave as they are, for the host to add those of the other ranks and round. The bits are the same.
//
// Weights that only the device needs, because no update is due that the processor makes, and that host memory
// does not hold, may come to it from the drive past host memory (`gds`: GPUDirect Storage); they are checked
// there.
//
// Slots of runs are what is left of the budget after everything else: with n of them a class keeps its last
// n - 1 blocks from forward to backward, so memory that is spent on slots is residency as well. When a class
// has as many as it has blocks, their weights come once a step, after their update.
#ifndef PENSTOCK_TIERING_PLAN_DEVICE_PLAN_H_
#define PENSTOCK_TIERING_PLAN_DEVICE_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/plan/exchange_codes.h"
#include "tiering/plan/ledger.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/numbers.h"
#include "tiering/plan/slot.h"

namespace penstock::tiering {

// What LibTorch's allocator may hold of a device beyond the tensors that there are.
struct TensorSlack {
  int64_t fixed_bytes = 0;  // pieces that are partly used, workspaces of libraries
  int64_t gap_bytes = 0;    // the most that gaps between large tensors take, where none fits in

  // Beside tensors of `tensor_bytes`: few and small ones leave few gaps.
  int64_t Beside(int64_t tensor_bytes) const { return fixed_bytes + std::min(tensor_bytes / 4, gap_bytes); }
};

// Where the inputs that stages keep for backward wait for it. kAuto: where they are computed as far as memory
// goes, after gradients, and the others in the next tier: a device's in host memory, the host's on the drive.
// kMemory: all where they are computed. kHost: none on a device that has its own memory beyond those on their
// way; without one, as kAuto. kDrive: none in host memory beyond those on their way; of a device, as kHost.
enum class SavedActivations : uint8_t { kAuto, kMemory, kHost, kDrive };

struct DeviceOptions {
  bool has_own_memory = false;  // has memory of its own
  int64_t budget_bytes = 0;     // 0: as much as is of use
  TensorSlack tensor_slack;
  bool collectives = false;   // over several ranks: devices hand each other their parts without the host
  ExchangeCodes codes;        // with collectives: what they hand each other in fewer bits
  bool gds = false;           // weights may come from the drive past host memory
  bool writes_state = false;  // what lives there is written to a drive after every update
  double state_share = 0;     // most of the elements that may be in blocks that live there
  SavedActivations saved_activations = SavedActivations::kAuto;
};

struct DevicePlan {
  struct Block {
    int weight_class = 0;
    // Its gradient is summed in fp32 and rounded once: several addends, or over several ranks one that is
    // fp32 until theirs are added.
    bool sums_apart = false;
    // Of a block that several stages use: where its gradient is from the first use to the last, as fp32 sums
    // or, where gradients are fp32 anyway, as it is. None: the rings.
    DeviceAccumulatorSlot accumulator_slot;
    DeviceGradientSlot gradient_slot;
    // Of a block that lives here: its run, its gradient above, and its state, each for itself. Over several
    // ranks the run is whole, and gradient and state are this rank's part: what backward leaves passes
    // through the rings and is reduced from there. The state is that of one tile of the whole part: its
    // segments, each in whole pages (Plan::state_segment_offset), and behind them the partial sums of its
    // gradient's squares.
    DeviceWeightSlot weight_slot;
    DeviceStateSlot state_slot;  // none: its state is not here
  };

  bool has_own_memory = false;  // everything below is empty where it is not
  bool collectives = false;     // DeviceOptions::collectives, of several ranks
  bool gds = false;             // DeviceOptions::gds, where weights are not gathered in host memory
  PerBlock<Block> blocks;
  std::vector<DeviceWeightClass> weight_classes;
  IndexedVector<DeviceWeightSlot, Slot>
      weight_slots;  // shared ones by class, of blocks that come and go; then single ones
  std::vector<DeviceGradientRing> gradient_rings;          // parallel to weight_classes
  IndexedVector<DeviceGradientSlot, Slot> gradient_slots;  // the rings by class, then those of single blocks
  int accumulator_ring = 0;
  IndexedVector<DeviceAccumulatorSlot, Slot> accumulator_slots;  // the ring, then those of single blocks
  IndexedVector<DeviceStateSlot, Slot> state_slots;
  // Where gradients are reduced on the device: the sums of one piece, then two pieces of every rank.
  Slot network;
  int64_t network_piece = 0;  // elements, 4 bytes each
  // Of `network`: what gradients are reduced in; coded weights arrive behind it.
  int64_t reduce_bytes(int world) const { return (2 * int64_t{world} + 1) * network_piece * 4; }
  int saved_activations = 0;       // positions whose inputs stay on the device (Plan::SpillsInput)
  int evaluate_micro_batches = 1;  // of a forward-only pass, in the memory of the saved activations

  int64_t arena_bytes = 0;   // slots
  int64_t tensor_bytes = 0;  // bound for LibTorch's tensors on the device
  int64_t budget_bytes = 0;  // 0: no bound
  int64_t least_bytes = 0;   // the smallest budget that works

  // Steady state, per step.
  int64_t h2d_bytes = 0;
  int64_t d2h_bytes = 0;

  int64_t bytes() const { return arena_bytes + tensor_bytes; }
  int64_t resident_elements = 0;  // of the blocks, or of this rank's parts of them, that live here
  bool lives_here(BlockIndex block) const { return has_own_memory && blocks[block].state_slot.valid(); }
  Ledger ledger() const;  // adds up to bytes()
};

// The best plan within the budget. frozen_apart: PlanOptions::keeps_frozen_apart(). kFailedPrecondition (a
// budget too small) names the least that would do.
absl::StatusOr<DevicePlan> PlanDevice(const ModelGraph& graph, const Precision& precision, int micro_batches,
                                      int world, bool trains, bool frozen_apart,
                                      const DeviceOptions& options);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_DEVICE_PLAN_H_
