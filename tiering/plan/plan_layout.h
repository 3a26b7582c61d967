// A working set as tiles, slots and places in the arena: what a plan is made of before anything is chosen to
// stay.
#ifndef PENSTOCK_TIERING_PLAN_PLAN_LAYOUT_H_
#define PENSTOCK_TIERING_PLAN_PLAN_LAYOUT_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"

namespace penstock::tiering {

// One size of working set: how many blocks' weights are in memory at once, how large a tile, how many bytes
// of tiles. `sums_leave`: the sums of a block that several stages use are on the drive between its uses.
struct Level {
  int runs;
  int64_t tile_elements;
  int64_t ring_bytes;
  int least_ring;
  int gradient_ring;
  bool sums_leave = false;
  int64_t adapter_tile_elements = 0;  // of what trains beside what is frozen; 0: as of all others
};

// An arena is made of whole ones.
inline constexpr int64_t kHugePage = int64_t{2} << 20;

// Tiles of at most `tile_elements`, as even as alignment lets them be.
PerTile<Tile> CutTiles(int64_t elements, int64_t tile_elements);

class PlanLayout {
 public:
  // Both outlive it.
  PlanLayout(const ModelGraph& graph, const PlanOptions& options, DevicePlan device)
      : graph_(graph), options_(options), device_(std::move(device)) {}

  // The working set of `level` within the user's bounds, with the gradients of `resident_gradients` blocks in
  // memory; within `budget` as far as inputs can go to the drive (0: they stay).
  Plan Build(const Level& level, int resident_gradients, int64_t budget) const;

  // Numbers the slots and gives each its place: shared runs by class, private runs, tiles, gradients,
  // accumulators. A block's private_weight_slot, and a private_tile_slot, of 0 or more asks for one of its
  // own.
  void LayOut(Plan* plan) const;

  // Of everything that is not on a device: nothing is shared.
  static void MakeAllPrivate(Plan* plan);
  // Of a tile in memory.
  static int64_t StateBytes(const Plan& plan, int64_t elements);

  const DevicePlan& device() const { return device_; }
  // Bytes of the sums that may leave between uses (Level::sums_leave); 0: none may.
  int64_t SumsThatMayLeave() const;

 private:
  Level Bounded(Level level) const;
  void KeepInputs(Plan* plan, int kept) const;
  void SpillInputs(Plan* plan, int resident_gradients, int64_t budget) const;
  void PlaceGradients(Plan* plan, const Level& level, int resident_gradients) const;
  static int64_t GradientElements(const Plan& plan, size_t weight_class);
  int Count() const { return static_cast<int>(graph_.blocks.size()); }

  const ModelGraph& graph_;
  const PlanOptions& options_;
  const DevicePlan device_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_PLAN_LAYOUT_H_
