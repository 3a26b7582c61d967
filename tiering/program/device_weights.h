// The device's places for weights, where a device has memory of its own (tiering/plan/device_plan.h): copies
// of weights to it, and all that happens to blocks that live there with their state.
//
// Invariants:
//   what compute finds on the device is of the newest update: a tile's content there has a version, and is
//   copied again when the version rises.
//   a slot there is filled again only after everyone who computed with its former content.
//   what host memory has of a block that lives on the device is old, and nobody looks for it.
#ifndef PENSTOCK_TIERING_PROGRAM_DEVICE_WEIGHTS_H_
#define PENSTOCK_TIERING_PROGRAM_DEVICE_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/device_gradients.h"
#include "tiering/program/op.h"
#include "tiering/program/op_list.h"
#include "tiering/program/slot_allocator.h"
#include "tiering/program/tile_writer.h"
#include "tiering/program/update_emitter.h"
#include "tiering/program/use_order.h"
#include "tiering/program/weight_fetcher.h"

namespace penstock::tiering {

class DeviceWeights {
 public:
  // What it works with; all of it outlives it.
  struct Parts {
    const UseOrder& uses;
    OpList& ops;
    SlotAllocator& slots;
    TileWriter& writer;
    UpdateEmitter& updates;
    WeightFetcher& fetcher;
    DeviceGradients& gradients;
  };
  DeviceWeights(const ModelGraph& graph, const Plan& plan, const Parts& parts);

  // Brings a block's weights for a use; returns their slot there. `weight_slot`: the one in
  // host memory that they came through or that an update needs, or none. `updates`: an update in backward
  // will need them in host memory.
  DeviceWeightSlot FetchForCompute(BlockIndex block, UseIndex use, bool updates, WeightSlot* weight_slot);
  // The same of a block that lives there: brings it if it never was, and makes the update that is due.
  DeviceWeightSlot FetchResident(BlockIndex block, UseIndex use);
  // `last` is the last operation that computes with them in this use.
  void ComputedWith(DeviceWeightSlot device_slot, OpId last);
  // Makes the update that is due of a block that lives there.
  void Update(BlockIndex block, UseIndex use);
  // All of its tiles to the drive: after every update, or when a step is persisted.
  void WriteBlock(BlockIndex block, UseIndex use, int64_t step);

  // What was gathered comes again, with the others' shards, before it is computed with.
  void ForgetGathered();

  // Complete when the content is there.
  const PerTile<OpId>& ready(DeviceWeightSlot device_slot) const { return held_[device_slot].ready; }

 private:
  // What a slot holds.
  struct Held {
    BlockIndex block;
    PerTile<OpId> ready;       // the copy that made the content
    PerTile<int64_t> version;  // of the content, as UpdateEmitter counts them
    OpId last_compute = -1;
    bool whole = false;  // over several ranks: with the others' shards, as new as this one's
    // Of a block that lives there: what filled it or updated it last, weights and state, and what has copied
    // them out since.
    Edges made, copies;
  };

  DeviceWeightSlot Find(
      BlockIndex block) const;  // the slot of a block that comes and goes; none: it is not there
  bool IsCurrent(BlockIndex block, DeviceWeightSlot device_slot) const;
  bool IsInHostMemory(BlockIndex block) const;
  // Of a block that comes and goes, its former slot, an empty one, or the one most worth giving up; of one
  // that lives there, its own.
  DeviceWeightSlot Acquire(BlockIndex block, UseIndex use);
  // Who still computes with the former content of a slot, and the uses that must be over.
  void AddUsers(Edges* after, const Held& held) const;
  // Copies what is not there; returns its slot there.
  DeviceWeightSlot CopyIn(BlockIndex block, UseIndex use, WeightSlot weight_slot);
  // The same past host memory, from the drive.
  DeviceWeightSlot ReadPastHost(BlockIndex block, UseIndex use);
  // Among devices that exchange with each other: the other ranks' shards.
  void Gather(BlockIndex block, DeviceWeightSlot device_slot);
  // Weights and state of a block that will live there.
  void Load(BlockIndex block, UseIndex use);
  OpId LoadState(BlockIndex block, TileIndex tile);
  // A tile on its way out, to be written: through the weight slot and a slot of the ring, which it returns.
  // `former` must be over.
  TileSlot EmitStateOut(BlockIndex block, TileIndex tile, WeightSlot weight_slot, const Edges& former,
                        int64_t step);

  const ModelGraph& graph_;
  const Plan& plan_;
  const UseOrder& uses_;
  OpList& ops_;
  SlotAllocator& slots_;
  TileWriter& writer_;
  UpdateEmitter& updates_;
  WeightFetcher& fetcher_;
  DeviceGradients& gradients_;
  IndexedVector<DeviceWeightSlot, Held> held_;
  std::deque<OpId> used_;  // the last operations of the newest uses, oldest first
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_DEVICE_WEIGHTS_H_
