#include "tiering/program/step_ops.h"

#include <map>
#include <tuple>

#include "tiering/program/program.h"

namespace penstock::tiering {

CondensedPlan::CondensedPlan(const Plan& plan) : plan_(plan) {
  for (const BlockIndex b : plan.blocks.indices()) {
    const BlockPlan& from = plan.blocks[b];
    BlockPlan& to = plan_.blocks[b];
    to.tiles.clear();
    to.private_tile_slot.clear();
    to.speculative_update.clear();
    to.previews.clear();
    to.second_slot.clear();
    PerTile<int64_t>& times = times_.emplace_back();
    std::map<std::tuple<int64_t, bool, bool, bool, char, char>, TileIndex> seen;
    for (const TileIndex t : from.tiles.indices()) {
      const auto [like, first] =
          seen.try_emplace({from.tiles[t].elements, from.in_store(t), from.updates(t),
                            from.private_tile_slot[t].valid(), from.speculative_update[t], from.previews[t]},
                           times.end_index());
      if (!first) {
        ++times[like->second];
        continue;
      }
      times.push_back(1);
      to.tiles.push_back(from.tiles[t]);
      to.private_tile_slot.push_back(from.private_tile_slot[t]);
      to.speculative_update.push_back(from.speculative_update[t]);
      to.previews.push_back(from.previews[t]);
      to.second_slot.push_back(from.second_slot[t]);
    }
  }
}

void ForStepOps(const ModelGraph& graph, const Plan& plan, bool speculative_update,
                const std::function<void(const Op&)>& visit) {
  ProgramBuilder builder(graph, plan, 1);
  // The first finds nothing in memory, and what the second finds the first has left.
  builder.Append(Pass::kTrain, 0, speculative_update);
  builder.Append(Pass::kTrain, 0, speculative_update);
  for (const Op& op : builder.Append(Pass::kTrain, 0, speculative_update)) {
    if (!op.replay) visit(op);
  }
}

}  // namespace penstock::tiering
