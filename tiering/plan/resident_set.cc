#include "tiering/plan/resident_set.h"

#include <algorithm>
#include <limits>

#include "base/index.h"
#include "tiering/plan/belady.h"
#include "tiering/plan/plan_layout.h"

namespace penstock::tiering {
namespace {

int64_t WeightBytes(const Plan& plan, const BlockPlan& block) {
  return AlignUp(block.elements * plan.shards_in_memory() * plan.precision.weight_bytes(), kPage);
}

}  // namespace

ResidentSet::ResidentSet(const ModelGraph& graph, const PlanOptions& options)
    : graph_(graph), options_(options) {
  for (const StageShape& stage : graph.stages) walk_.push_back(stage.block);
  // The last stage runs forward and backward in one go: one use.
  StageIndex stage = graph.stages.end_index() - 1;
  const StageIndex first = graph.first_trained();
  while (options.trains && stage > first) walk_.push_back(graph.stages[--stage].block);
}

int64_t ResidentSet::BytesOf(const Plan& plan, const PerBlock<char>& stays) {
  int64_t bytes = 0;
  for (const BlockIndex b : stays.indices()) bytes += stays[b] != 0 ? WeightBytes(plan, plan.blocks[b]) : 0;
  return bytes;
}

int64_t ResidentSet::LongestGap(BlockIndex block) const {
  int64_t since = 0, longest = 0;
  bool seen = false;
  for (size_t i = 0; i < 2 * walk_.size(); ++i) {
    const BlockIndex used = walk_[i % walk_.size()];
    if (used == block) {
      if (seen) longest = std::max(longest, since);
      seen = true;
      since = 0;
    } else {
      since += graph_.blocks[used].elements;
    }
  }
  return longest;
}

PerBlock<char> ResidentSet::ChooseWeights(const Plan& plan, int64_t free) const {
  const PlanBounds& bounds = options_.bounds;
  PerBlock<char> stays(plan.blocks.size(), 0);
  if (bounds.persistent_block_elements || bounds.persistent_elements) {
    int64_t may_persist = bounds.persistent_elements.value_or(std::numeric_limits<int64_t>::max());
    for (const BlockIndex b : plan.blocks.indices()) {
      const BlockPlan& block = plan.blocks[b];
      if (plan.on_device(b)) continue;
      if (block.elements > bounds.persistent_block_elements.value_or(100'000)) continue;  // DeepSpeed's
      if (block.elements > may_persist || WeightBytes(plan, block) > free) continue;
      stays[b] = 1;
      may_persist -= block.elements;
      free -= WeightBytes(plan, block);
    }
  }
  if (bounds.placement == Placement::kCpu) return stays;
  if (bounds.resident_elements) {
    free = std::min(free, *bounds.resident_elements * plan.precision.weight_bytes());
  }
  // What the shared slots save by themselves is not saved again by staying.
  std::vector<std::vector<int>> uses(plan.weight_classes.size());
  std::vector<int> members(plan.weight_classes.size(), 0);
  for (const BlockIndex block : walk_) {
    if (!plan.on_device(block)) uses[At(plan.blocks[block].weight_class)].push_back(block.value());
  }
  for (const BlockIndex b : plan.blocks.indices()) {
    if (!plan.on_device(b)) ++members[At(plan.blocks[b].weight_class)];
  }
  PerBlock<Keepable> items(plan.blocks.size());
  for (size_t c = 0; c < uses.size(); ++c) {
    const WeightClass& cls = plan.weight_classes[c];
    if (members[c] <= cls.slots) continue;  // the class keeps all its blocks anyway
    const Replacement replacement =
        BeladyMisses(uses[c], static_cast<int>(graph_.blocks.size()), std::max(1, cls.slots), 3,
                     /*keeps_previous=*/true);  // as UseOrder::WorthGivingUp
    for (const BlockIndex b : items.indices()) {
      if (At(plan.blocks[b].weight_class) != c || stays[b] != 0 || plan.on_device(b)) continue;
      if (bounds.reuse_elements && LongestGap(b) > *bounds.reuse_elements) continue;
      // A block that its class happens to keep has nothing to save now, but has once others stay.
      const int64_t bytes = WeightBytes(plan, plan.blocks[b]);
      items[b] = {bytes, static_cast<double>(bytes) *
                             std::max(0.5, static_cast<double>(replacement.misses_of[At(b)]))};
    }
  }
  // A device's own slots keep the last blocks of forward for backward; those of the host go with them.
  const PerBlock<char> chosen(ChooseResident(items.values(), free, /*spread=*/!plan.device.has_own_memory));
  for (const BlockIndex b : stays.indices()) {
    if (chosen[b] != 0 && !plan.on_device(b)) stays[b] = 1;
  }
  // As many as a class has shared slots need none of their own once the others have.
  std::vector<int> shared = members;
  for (const BlockIndex b : stays.indices()) shared[At(plan.blocks[b].weight_class)] -= stays[b];
  for (const BlockIndex b : stays.indices()) {
    const auto c = At(plan.blocks[b].weight_class);
    if (stays[b] == 0 || shared[c] >= plan.weight_classes[c].slots) continue;
    stays[b] = 0;
    ++shared[c];
  }
  return stays;
}

int64_t ResidentSet::KeepBlocks(const Plan& plan, int64_t free, PerBlock<char>* weights,
                                PerBlock<char>* whole) const {
  const int64_t ring = plan.tile_slots.empty() ? 0 : plan.tile_slots.front().bytes;
  const bool spills = ring > plan.tile_state_bytes;  // a gradient is read beside the state
  int64_t elements = options_.bounds.resident_elements.value_or(std::numeric_limits<int64_t>::max());
  int64_t taken = 0;
  for (const BlockIndex b : plan.blocks.indices()) {
    const BlockPlan& block = plan.blocks[b];
    if (plan.on_device(b)) continue;
    int64_t bytes = (*weights)[b] != 0 ? 0 : WeightBytes(plan, block);
    for (const TileIndex t : block.tiles.indices()) {
      if (!block.updates(t)) continue;  // its weights are all that moves
      bytes += AlignUp(spills ? ring : PlanLayout::StateBytes(plan, block.tiles[t].elements), kPage);
    }
    if (bytes > free - taken || block.elements > elements) continue;
    taken += bytes;
    elements -= block.elements;
    (*weights)[b] = (*whole)[b] = 1;
  }
  return taken;
}

}  // namespace penstock::tiering
