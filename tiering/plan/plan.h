// A plan: where every byte of training state lives, and how much of each kind of memory that takes.
//
// All memory that the engine manages is either the arena (runs of weights, tile slots, gradients,
// accumulators: laid out here, byte by byte) or LibTorch's tensors (bounded here, enforced by the counting
// allocator). Their sum never exceeds the host budget. The plan is what the program builder, the simulator
// and the executor all go by.
#ifndef PENSTOCK_TIERING_PLAN_PLAN_H_
#define PENSTOCK_TIERING_PLAN_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/plan/device_plan.h"
#include "tiering/plan/exchange_codes.h"
#include "tiering/plan/ledger.h"
#include "tiering/plan/machine.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/numbers.h"
#include "tiering/plan/slot.h"

namespace penstock::tiering {

struct Tile {
  int64_t offset = 0;    // of its first element in this rank's part of the block's run
  int64_t elements = 0;  // a multiple of kElementAlignment
};

struct BlockPlan {
  int64_t elements = 0;  // of a rank's part of the run: what its store, tiles, state and gradient hold
  PerTile<Tile> tiles;
  int weight_class = 0;
  int uses = 0;        // stages that use it
  bool trains = true;  // false: its weights are read, nothing else of it moves or is made
  // Its elements before this one are frozen and have tiles of their own, of which the weights are read and
  // nothing else is kept: neither state nor gradient. 0: all of it has both.
  int64_t trained_from = 0;
  // It is frozen whole, and its weights are all that is kept of it.
  bool frozen_alone = false;
  // Its elements before this one are frozen and no part of the store: they are read from elsewhere, which
  // moves so many bytes for all of them. 0: all of it is in the store.
  int64_t elsewhere_to = 0;
  int64_t elsewhere_bytes = 0;
  WeightSlot private_weight_slot;       // its weights never leave host memory
  PerTile<TileSlot> private_tile_slot;  // per tile, none: streams. Its state never leaves host memory
  // Per tile: its update is made in backward, on the assumption that the gradients will not be clipped and
  // are finite, and made again if they are (see tiering/program/program.h). Otherwise in the next forward.
  PerTile<char> speculative_update;
  // Per tile, for passes whose backward updates nothing: its update in forward is made for that forward alone
  // and written nowhere, and made again in backward for good. More is read, and forward writes less. Not of a
  // tile whose state stays, nor of a block that several stages use.
  PerTile<char> previews;
  // Per tile, none: without a drive, of a tile that is updated in backward. There its other version has its
  // place, weights and state: an update in backward is made from one place to the other, which the tile has
  // in turn, so that the version before it stands until the norm is known.
  PerTile<TileSlot> second_slot;
  // Its gradient waits in host memory; none: spilled to the drive as 16 bit (or fp32). Of a block that lives
  // on a device: the partial sums of its squares.
  GradientSlot gradient_slot;
  // Its own fp32 sums (a block that several stages use); none: the shared ring, or it has no sums.
  AccumulatorSlot accumulator_slot;

  bool in_store(TileIndex tile) const { return tiles[tile].offset >= elsewhere_to; }
  int64_t tiles_elsewhere() const {
    int64_t count = 0;
    for (const TileIndex t : tiles.indices()) count += in_store(t) ? 0 : 1;
    return count;
  }
  // That reading a tile's weights moves.
  int64_t read_bytes(TileIndex tile, int64_t weight_bytes) const {
    const int64_t of_tile = tiles[tile].elements;
    if (in_store(tile)) return of_tile * weight_bytes;
    return static_cast<int64_t>(static_cast<double>(elsewhere_bytes) * static_cast<double>(of_tile) /
                                static_cast<double>(elsewhere_to));
  }
  bool weights_alone(TileIndex tile) const {
    return frozen_alone || tiles[tile].offset < trained_from || !in_store(tile);
  }
  bool updates(TileIndex tile) const { return trains && !weights_alone(tile); }
  // All updates of its tiles are made in backward.
  bool all_speculative() const {
    for (const TileIndex t : tiles.indices()) {
      if (!weights_alone(t) && speculative_update[t] == 0) return false;
    }
    return true;
  }
  // What its gradient, its sums and their places hold, from `trained_from` on.
  int64_t gradient_elements() const { return elements - trained_from; }
};

// Over `world` ranks (ZeRO-3) all of them have one plan. A run in memory is whole, its parts in the order of
// the ranks: a rank reads and updates its part in place, and gathers the others for compute. What backward
// leaves of the whole run waits in an accumulator until it is reduced to this rank's part. Where devices
// exchange with each other (DevicePlan::collectives) whole runs are on the device alone, and in memory is a
// part.
struct Plan {
  Precision precision;
  int world = 1;
  int micro_batches = 1;
  int calls = 1;         // of a step, each over `micro_batches`
  bool on_nvme = false;  // state has its home on the drive; otherwise everything is resident
  bool trains = true;    // false: forward only, no state, no gradients
  // Every step is one that a restart finds. Otherwise only steps with Pass::kPersist
  // are, and tiles that stay in host memory are written for them alone.
  bool commits_every_step = true;
  int64_t tile_elements = 0;        // of the largest tile
  int64_t state_tile_elements = 0;  // of the largest one that has state
  PerBlock<BlockPlan> blocks;

  std::vector<WeightClass> weight_classes;
  IndexedVector<WeightSlot, Slot> weight_slots;  // shared ones by class, then private ones
  // The ring first, then private ones, then places of second versions.
  IndexedVector<TileSlot, Slot> tile_slots;
  int tile_ring = 0;
  int second_versions = 0;
  IndexedVector<GradientSlot, Slot>
      gradient_slots;  // resident ones, then the ring of spilled ones by run class
  std::vector<GradientRing>
      gradient_rings;  // parallel to weight_classes; slots = 0 where no block of the class spills
  IndexedVector<AccumulatorSlot, Slot> accumulator_slots;  // the ring first, then private ones
  int accumulator_ring = 0;

  int64_t tile_state_bytes = 0;          // of a tile slot: state segments, each padded to a page
  int64_t tile_gradient_offset = 0;      // in a ring tile slot, where a spilled gradient is read to
  int64_t slot_bytes = 0;                // of all slots together
  int64_t arena_bytes = 0;               // slots and the checkpoint's tile, in whole huge pages
  int64_t tensor_bytes = 0;              // bound for LibTorch's tensors: training, initialisation, evaluation
  int64_t host_memory_budget_bytes = 0;  // 0: no bound
  int64_t least_host_memory_bytes = 0;
  int evaluate_micro_batches = 1;  // per forward-only pass, in the memory of the saved activations

  // Inputs that stages keep for backward: those of the last `saved_activations` positions stay in memory, the
  // others go to the drive, at most `input_ring` positions of them on their way there or back. Position 0
  // keeps the batch itself.
  int saved_activations = 0;
  int input_ring = 0;
  int positions = 0;
  int64_t input_scratch_bytes = 0;  // on the drive
  IndexRange<Position> all_positions() const { return {Position(0), Position(positions)}; }
  bool SpillsInput(Position position) const {
    return position.value() > 0 && position.value() < positions - saved_activations;
  }
  int spilled_inputs() const { return trains ? std::max(0, positions - saved_activations - 1) : 0; }

  // Some tiles are updated in backward; `clips`: a gradient may still be needed after that.
  bool speculates = false;
  bool clips = true;
  // An update needs the norms of whole parameters (LAMB): when the norm of a step is known, a pass over all
  // that has state reads it for them, and the updates follow in the next forward.
  bool tensor_norms = false;
  // Updates in backward pay while they have to be made again in fewer steps than this share.
  double worthwhile_replay_rate = 0;

  // Steady state, per step.
  int64_t nvme_read_bytes = 0;
  int64_t nvme_write_bytes = 0;
  int64_t late_write_bytes = 0;  // of tiles that are written late, once: what a step writes less
  // Read in a step that is clipped, like those before it; as many bytes as in any other are written.
  int64_t clipped_read_bytes = 0;

  // A device's own memory; inputs that do not stay there wait in host memory, a place for
  // each position and micro-batch, instead of going to the drive.
  DevicePlan device;
  IndexedVector<InputSlot, Slot> input_slots;
  InputSlot input_slot(Position position, int micro_batch) const {
    return InputSlot((position.value() - 1) * micro_batches + micro_batch);
  }

  // Of the arena, beyond the slots: one tile on its way into a checkpoint, or to or from the device that is
  // the only place of its state.
  int64_t checkpoint_bytes = 0;
  int64_t network_bytes = 0;  // and the pieces of other ranks' gradients that are being summed

  // What ranks hand each other in fewer bits, and what one receives in a step: weights, gradients.
  ExchangeCodes codes;
  ExchangedBytes gathered, reduced;

  // What was chosen and why, a line each, for people.
  std::vector<std::string> reasons;

  int64_t host_bytes() const { return arena_bytes + tensor_bytes; }
  int64_t tile_count() const;        // of all blocks
  int64_t trained_tiles() const;     // of those that are updated
  double speculative_share() const;  // of the trained tiles
  double previewed_share() const;    // of them
  int64_t second_version_bytes() const;
  // A tile that is updated in backward has its version before on the drive, or in BlockPlan::second_slot.
  bool keeps_second_versions() const {
    return !on_nvme && trains && world == 1 && device.has_own_memory && !tensor_norms;
  }
  // "next_forward", "in_backward" or, tile by tile, "mixed": while nothing is clipped.
  std::string_view order_of_update() const;
  // Weights and state of the block live on a device with its own memory, which updates them.
  bool on_device(BlockIndex block) const { return device.lives_here(block); }
  double on_device_share() const;  // of the elements, in such blocks
  // A device makes the partial sums of its gradients' squares, which the norm is made of. Those of a block
  // that does not live there leave behind its gradient, in one copy. Ranks square what they have reduced.
  bool squares_on_device() const { return device.has_own_memory && world == 1; }
  // What waits in host memory of a block's gradient, without its partial sums, and with them.
  int64_t gradient_bytes(BlockIndex block) const {
    return on_device(block) ? 0 : blocks[block].gradient_elements() * precision.gradient_bytes;
  }
  int64_t gradient_place_bytes(BlockIndex block) const {
    const bool squared = squares_on_device() || on_device(block);
    return gradient_bytes(block) + (squared ? PartialSumBytes(blocks[block].gradient_elements()) : 0);
  }
  // The tile never leaves host memory, or the device, and is written only when a step is persisted.
  bool written_at_checkpoint(BlockIndex block, TileIndex tile) const {
    const BlockPlan& of = blocks[block];
    const bool in_memory = of.private_weight_slot.valid() && of.private_tile_slot[tile].valid();
    return on_nvme && !commits_every_step && (in_memory || on_device(block));
  }
  // What backward leaves of a block has more than one addend.
  bool sums_gradients(BlockIndex block) const {
    return micro_batches > 1 || blocks[block].uses > 1 || calls > 1;
  }
  // While other blocks compute its sums stay where they are made.
  bool keeps_sums(BlockIndex block) const {
    const BlockPlan& of = blocks[block];
    return needs_accumulator(block) ? of.accumulator_slot.valid() : of.gradient_slot.valid();
  }
  // They go to the drive and come back: between the calls of a step, and between the block's uses in one.
  bool moves_sums(BlockIndex block) const {
    const BlockPlan& of = blocks[block];
    const bool waits = calls > 1 || of.uses > 1;
    return waits && on_nvme && of.trains && !device.has_own_memory && !keeps_sums(block);
  }
  bool needs_accumulator(BlockIndex block) const {
    if (world > 1 && !device.collectives) return true;  // what goes to the other ranks
    if (device.has_own_memory) return false;            // the device sums, and rounds
    return precision.gradient_bytes < 4 && sums_gradients(block);
  }
  // Of an element in the block's accumulator: fp32 sums, or over several ranks a single addend as backward
  // leaves it.
  int accumulator_bytes(BlockIndex block) const {
    return sums_gradients(block) ? 4 : precision.addend_bytes();
  }
  // Of how many ranks a run in memory has the parts: of all, or of this one.
  int shards_in_memory() const { return device.collectives ? 1 : world; }
  int64_t flat_elements(BlockIndex block) const { return blocks[block].elements * shards_in_memory(); }
  // What an accumulator holds of the block: the whole run, or what trains of it.
  int64_t summed_elements(BlockIndex block) const {
    return flat_elements(block) - blocks[block].trained_from;
  }
  // What a rank gets from the others when it gathers a block's weights, or reduces its gradient; and what
  // that would be with all their bits.
  int64_t gathered_bytes(BlockIndex block) const {
    return codes.weights ? CodedBytes(kWeightCodeBits, blocks[block].elements) * (world - 1)
                         : whole_gathered_bytes(block);
  }
  int64_t reduced_bytes(BlockIndex block) const {
    return codes.gradients ? CodedBytes(kGradientCodeBits, blocks[block].elements) * (world - 1)
                           : whole_reduced_bytes(block);
  }
  int64_t whole_gathered_bytes(BlockIndex block) const {
    return blocks[block].elements * precision.weight_bytes() * (world - 1);
  }
  int64_t whole_reduced_bytes(BlockIndex block) const {
    return blocks[block].elements * accumulator_bytes(block) * (world - 1);
  }
  // Where everything lives, a line per kind.
  Ledger ledger() const;
  // Offset of state segment `segment` (1-based in Precision::segment_bytes) in a tile slot of `elements`.
  int64_t state_segment_offset(int segment, int64_t elements) const;
};

// Gradients are reduced over ranks, and coded weights gathered, in pieces of this many elements, two at a
// time: one arrives while one is summed or decoded.
inline constexpr int64_t kNetworkPiece = 1 << 16;
// What the pieces of all ranks take, and the fp32 sums of one.
constexpr int64_t NetworkBytes(int world) {
  return world == 1 ? 0 : (2 * int64_t{world} + 1) * kNetworkPiece * 4;
}

// What stays in host memory beyond the step's working set (ColossalAI's placements, with host memory as the
// fast tier and the drive as the slow one).
enum class Placement : uint8_t {
  kAuto,   // what saves most time within the budget
  kCpu,    // nothing: all weights and state stream, whatever the budget
  kCuda,   // all weights; a budget that does not hold them is refused
  kConst,  // weights and state up to PlanBounds::const_bytes
};
std::string_view PlacementName(Placement placement);  // "auto", "cpu", "cuda", "const"

// Upper bounds that a user has set, in DeepSpeed's units (elements of weights). Empty: the planner's choice.
struct PlanBounds {
  std::optional<int64_t> live_elements;      // stage3_max_live_parameters: weights in flight at once
  std::optional<int64_t> prefetch_elements;  // stage3_prefetch_bucket_size: weights read ahead of their use
  std::optional<int64_t> weight_slots;       // offload_param.buffer_count: blocks in flight at once
  std::optional<int64_t> resident_elements;  // offload_param.max_in_cpu: weights that stay in host memory
  // stage3_max_reuse_distance: weights stay only where no more elements are used between two of their uses.
  std::optional<int64_t> reuse_elements;
  // stage3_param_persistence_threshold: weights of blocks up to this size stay, before all others;
  // stage3_model_persistence_threshold: at most this many elements of them.
  std::optional<int64_t> persistent_block_elements;
  std::optional<int64_t> persistent_elements;
  // offload_optimizer.pipeline_read and _write: tiles in flight at once; its buffer_count, buffers of
  // sub_group_size elements of 4 bytes: bytes of state in flight (one tile always may be).
  std::optional<int64_t> tile_slots;
  std::optional<int64_t> state_bytes;
  Placement placement = Placement::kAuto;
  int64_t const_bytes = 512 << 20;
  double state_fraction = 1;  // gpu_margin_mem_ratio: of what is left, for state that stays
  // offload_optimizer.ratio: at least this share of the elements is updated by the processor, and of the rest
  // as much by a device as its own memory holds.
  std::optional<double> processor_share;
  // Where time is preferred: so many of the tiles that may be are previewed, whatever that gains. Empty: as
  // many as make a clipped step shortest.
  std::optional<double> previewed_share;
};

// When a tile's update is made. kAuto: the share of tiles updated in backward with which a step takes the
// least time; the bits are the same in every order.
enum class UpdateOrder : uint8_t { kAuto, kInNextForward, kInBackward };

// What counts more where a clipped step is shorter if more is read: its time, or the drive.
enum class Prefer : uint8_t { kWear, kTime };

struct PlanOptions {
  Precision precision = Precision::Bf16();
  int micro_batches = 1;
  // Of the engine's, in each of which so many micro-batches are summed, to make one step.
  int calls = 1;
  UpdateOrder update_order = UpdateOrder::kAuto;
  Prefer prefer = Prefer::kWear;
  bool clips = true;          // gradients are clipped by their global norm
  bool tensor_norms = false;  // see Plan
  // Parameters that share a scale of 8-bit states may be updated each by itself, which the processor can.
  bool updates_within_scales = false;
  bool on_nvme = true;
  bool trains = true;
  bool commits_every_step = true;  // see Plan
  // What is frozen of a block that trains has its weights alone, with one rank. false: it has state like the
  // rest, as a store that is there may want it.
  bool frozen_apart = true;
  // Whether a block has its weights alone, as a store that is there has fixed it; empty: frozen ones have.
  PerBlock<char> blocks_alone;
  // What is frozen, also whole blocks, is no part of the store and is read from elsewhere, by way of host
  // memory. One rank, with frozen_apart.
  bool frozen_elsewhere = false;
  int world = 1;                         // ranks
  ExchangeCodes codes;                   // what these hand each other in fewer bits
  int64_t host_memory_budget_bytes = 0;  // 0: as much as the comfortable plan takes
  // Without a budget: up to here a plan may grow by what it can do without, as by second versions of tiles.
  // 0: no bound.
  int64_t host_memory_to_spare_bytes = 0;
  bool copies_checkpoints = false;  // of the store, while training goes on: room for a tile
  int64_t tile_bytes = 0;           // bound for one slot of a tile (all segments); 0: chosen
  PlanBounds bounds;
  SavedActivations saved_activations = SavedActivations::kAuto;
  DeviceOptions device;
  MachineModel machine;  // what candidates are compared on
  // A model of few tiles is also planned under the bounds that users like to set, and the best is taken: up
  // to 1% of a step, for some searches more.
  bool compares_policies = true;
  // Elements of every tile of every block that is in the store, where it has fixed them; empty: chosen.
  PerBlock<std::vector<int64_t>> fixed_tiles;

  // Over several ranks a block is cut evenly, whatever trains in it.
  bool keeps_frozen_apart() const { return frozen_apart && world == 1; }
  // Where there is no state, only the place for a gradient would go, which who trains it later on wants.
  bool keeps_block_alone(BlockIndex block, bool block_trains) const {
    if (!blocks_alone.empty()) return blocks_alone[block] != 0;
    return !block_trains && (!trains || precision.segment_bytes.size() > 1);
  }
};

// The best plan within the budget. kFailedPrecondition (a budget too small) names the least that would do.
absl::StatusOr<Plan> MakePlan(const ModelGraph& graph, const PlanOptions& options);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_PLAN_H_
