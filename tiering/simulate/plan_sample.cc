#include "tiering/simulate/plan_sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace penstock::tiering {
namespace {

// Says yes to so large a share of what it is asked, evenly over all of it.
class Spread {
 public:
  bool Next(double share) {
    sum_ += share;
    if (share <= 0 || sum_ < 1 - 1e-9) return false;
    sum_ -= 1;
    return true;
  }

 private:
  double sum_ = 0;
};

// Takes tiles of one block after the other, those that train and the others each in proportion.
class Sampler {
 public:
  Sampler(const Plan& plan, double share) : plan_(plan), share_(share) {}

  BlockPlan Take(BlockIndex block) {
    const BlockPlan& from = plan_.blocks[block];
    BlockPlan to = from;
    to.elements = 0;
    to.tiles.clear();
    to.private_tile_slot.clear();
    to.speculative_update.clear();
    to.previews.clear();
    to.second_slot.clear();
    std::vector<TileIndex> alone, trained;
    for (const TileIndex t : from.tiles.indices()) (from.weights_alone(t) ? alone : trained).push_back(t);
    TakeSome(from, alone, &to);
    const int64_t frozen = to.elements;
    TakeSome(from, trained, &to);
    if (from.trained_from > 0) to.trained_from = frozen;
    if (from.elsewhere_to > 0) {
      to.elsewhere_to = frozen;
      to.elsewhere_bytes =
          static_cast<int64_t>(static_cast<double>(from.elsewhere_bytes) * static_cast<double>(frozen) /
                               static_cast<double>(from.elsewhere_to));
    }
    return to;
  }

 private:
  void TakeSome(const BlockPlan& from, const std::vector<TileIndex>& tiles, BlockPlan* to) {
    if (tiles.empty()) return;
    const auto all = static_cast<double>(tiles.size());
    const size_t taken = std::clamp<size_t>(static_cast<size_t>(std::llround(all * share_)), 1, tiles.size());
    std::vector<TileSlot> own;
    double early = 0, previewed = 0;
    for (const TileIndex t : tiles) {
      if (from.private_tile_slot[t].valid()) own.push_back(from.private_tile_slot[t]);
      early += from.speculative_update[t] != 0 ? 1 : 0;
      previewed += from.previews[t] != 0 ? 1 : 0;
    }
    size_t next_own = 0;
    for (size_t i = 0; i < taken; ++i) {
      const TileIndex t = tiles[(2 * i + 1) * tiles.size() / (2 * taken)];
      to->tiles.push_back({to->elements, from.tiles[t].elements});
      to->elements += from.tiles[t].elements;
      const bool stays = own_.Next(static_cast<double>(own.size()) / all) && next_own < own.size();
      to->private_tile_slot.push_back(stays ? own[next_own++] : TileSlot());
      to->speculative_update.push_back(early_.Next(early / all) ? 1 : 0);
      to->previews.push_back(previewed_.Next(previewed / all) && !stays ? 1 : 0);
      to->second_slot.push_back(from.second_slot[t]);
    }
  }

  const Plan& plan_;
  const double share_;
  Spread own_, early_, previewed_;
};

}  // namespace

PlanSample SampleOf(const ModelGraph& graph, const Plan& plan, double share) {
  PlanSample sample{graph, plan};
  Sampler sampler(plan, share);
  PerBlock<double> of_block;
  for (const BlockIndex b : plan.blocks.indices()) {
    sample.plan.blocks[b] = sampler.Take(b);
    of_block.push_back(static_cast<double>(sample.plan.blocks[b].elements) /
                       static_cast<double>(plan.blocks[b].elements));
    BlockShape& shape = sample.graph.blocks[b];
    shape.elements = static_cast<int64_t>(static_cast<double>(shape.elements) * of_block[b]);
  }
  for (StageShape& stage : sample.graph.stages) {
    stage.forward_seconds *= of_block[stage.block];
    stage.backward_seconds *= of_block[stage.block];
    stage.input_scratch_bytes = static_cast<int64_t>(static_cast<double>(stage.input_scratch_bytes) * share);
  }
  return sample;
}

}  // namespace penstock::tiering
