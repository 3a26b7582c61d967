// One parameter's state in full precision, wherever it lives: what Engine::ReadState and WriteState do.
//
// Everything must be at rest: nothing in flight, every update applied. State is read from and written to the
// drive where it has its home there, a tile at a time; where it has not, in memory, the host's or the
// device's. A write is a new version of each tile that it touches and counts once it is committed.
//
// Over several ranks all of them make the same calls. Each reads its part, and all are given the whole; each
// writes its part of a value that is the same on all. An error of one is everybody's, and ends nothing.
#ifndef PENSTOCK_ZERO_ENGINE_PARAMETER_ACCESS_H_
#define PENSTOCK_ZERO_ENGINE_PARAMETER_ACCESS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"
#include "tiering/plan/plan.h"
#include "zero/compute/device_state.h"
#include "zero/compute/frozen_source.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/tile_format.h"
#include "zero/memory/arena_view.h"
#include "zero/memory/values.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

class ParameterAccess {
 public:
  // Everything passed in outlives this. `store` is null where nothing lives on a drive, `device` where none
  // is apart, `comm` where there is one rank, `frozen` where the state has all that is frozen.
  ParameterAccess(const tiering::ModelGraph& graph, const GradientSums::Layouts& layouts,
                  const tiering::Plan& plan, const TileFormat& format, const ArenaView& arena_view,
                  swap::Store* store, const DeviceState* device, Comm* comm, FrozenSource* frozen = nullptr)
      : graph_(graph),
        layouts_(layouts),
        plan_(plan),
        format_(format),
        arena_view_(arena_view),
        store_(store),
        device_(device),
        comm_(comm),
        frozen_(frozen) {}

  // Names of all parameters: the block's, a dot, the parameter's within it.
  static std::vector<std::string> NamesOf(const tiering::ModelGraph& graph,
                                          const GradientSums::Layouts& layouts);
  // Where a parameter's values are put: room for its elements, or why there is none.
  using Place = std::function<absl::StatusOr<float*>(const Parameter&)>;
  // A tensor that is made of them.
  static absl::StatusOr<HostTensor> Made(const std::function<absl::Status(const Place&)>& read);

  // kNotFound: no such parameter (says which name is nearest). kFailedPrecondition: the optimizer has no such
  // state. Memory: one tile's.
  absl::Status Read(std::string_view name, StateKind kind, const Place& place);
  // Elements [first, first + elements) of a block's run: masters and both moments, each to its place. Every
  // rank calls it, for the same range, and gets all of it. Best asked for in ascending order: the tile that
  // was read last is kept. Memory: one tile's.
  absl::Status ReadRange(tiering::BlockIndex block, int64_t first, int64_t elements,
                         const std::array<float*, 3>& to);
  // `gradient_checksum(block, tile)`: of the part of a gradient that waits on the drive. Values are divided
  // by `scale`, the loss scale of their step; `speculative_update`: that step was updated so, where the
  // plan says it.
  absl::Status ReadGradient(
      std::string_view name, double scale, bool speculative_update,
      const std::function<uint64_t(tiering::BlockIndex, tiering::TileIndex)>& gradient_checksum,
      const Place& place);
  // kInvalidArgument: another shape or type than fp32 in host memory, or values that differ between ranks.
  // `start` is called, on all ranks, when nothing is wrong with the call and before anything is changed.
  absl::Status Write(std::string_view name, StateKind kind, const TensorView& value,
                     const std::function<absl::Status()>& start);

 private:
  struct Found {
    tiering::BlockIndex block;
    const Parameter* parameter = nullptr;
  };
  // A tile in memory: its own place, or a copy of what is on the drive or the device.
  struct Loaded {
    HostBuffer copy;
    TileMemory memory;
  };
  absl::StatusOr<Found> Find(std::string_view name) const;
  // OK where the optimizer keeps it.
  absl::Status CheckKept(StateKind kind) const;
  // It is frozen, and neither master nor moments of it are kept.
  bool KeepsWeightsAlone(const Found& found) const {
    const tiering::BlockPlan& block = plan_.blocks[found.block];
    return !found.parameter->trains && (block.trained_from > 0 || block.frozen_alone);
  }
  // Its only place is the device's memory.
  bool OnDeviceAlone(tiering::BlockIndex block) const {
    return store_ == nullptr && device_ != nullptr && device_->has(block);
  }
  absl::StatusOr<Loaded> Load(tiering::BlockIndex block, tiering::TileIndex tile) const;
  absl::Status Store(tiering::BlockIndex block, tiering::TileIndex tile, const Loaded& loaded) const;
  uint32_t StoreTile(tiering::BlockIndex block, tiering::TileIndex tile) const;
  // Calls `body(tile, begin in tile, n, begin in parameter)` for each tile of this rank that the parameter
  // touches.
  absl::Status ForEachTile(
      const Found& found,
      const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, int64_t)>& body) const;
  // `mine`, or the error of another rank.
  absl::Status OfAll(const absl::Status& mine) const;
  // A parameter's values: this rank's by `read(tile, begin in tile, n, to)`, the others' from them. Returns
  // where they are.
  absl::StatusOr<float*> ReadParts(
      const Found& found, const Place& place,
      const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, float*)>& read) const;
  // What this rank has of a range.
  absl::Status ReadOwnRange(const Found& found, const std::array<float*, 3>& to);
  // Fills in the other ranks' parts of a parameter's values, by way of `gathered`.
  absl::Status Share(const Found& found, float* gathered, float* values) const;
  absl::Status CheckShape(const Found& found, std::string_view name, const TensorView& value) const;
  absl::Status CheckSame(std::string_view name, const TensorView& values) const;

  const tiering::ModelGraph& graph_;
  const GradientSums::Layouts& layouts_;
  const tiering::Plan& plan_;
  const TileFormat format_;
  const ArenaView& arena_view_;
  swap::Store* const store_;
  const DeviceState* const device_;
  Comm* const comm_;
  FrozenSource* const frozen_;
  // ReadRange's.
  tiering::BlockIndex kept_block_;
  tiering::TileIndex kept_tile_;
  Loaded kept_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_PARAMETER_ACCESS_H_
