#include "zero/compute/libtorch/lowered_model.h"

#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

std::vector<int> LoweredModel::BlocksOf(size_t stage) const {
  if (roles[stage].part != StageRole::kComputes) return {};
  std::vector<int> blocks = {model.stages[stage].block};
  const std::vector<int>& more = model.stages[stage].more_blocks;
  blocks.insert(blocks.end(), more.begin(), more.end());
  return blocks;
}

LoweredModel Lower(Model model) {
  LoweredModel lowered;
  std::vector<StageSpec> stages = std::exchange(model.stages, {});
  for (StageSpec& stage : stages) {
    const std::vector<int> more = stage.more_blocks;
    // It computes beside others, which may be of its kind.
    for (const int block : more) {
      if (block >= 0 && static_cast<size_t>(block) < model.blocks.size())
        model.blocks[static_cast<size_t>(block)].own_module = true;
    }
    const auto computes = static_cast<int>(model.stages.size() + more.size());
    const auto add = [&](StageRole::Part part, size_t which) {
      const char* const words = part == StageRole::kBefore ? " before " : " after ";
      const auto block = static_cast<size_t>(more[which]);
      const std::string name = block < model.blocks.size() ? model.blocks[block].name : "?";  // CheckBlocks
      model.stages.push_back({absl::StrCat(name, words, stage.name),
                              more[which],
                              nullptr,
                              [](StageCall&, const Values& inputs) { return inputs; },
                              {}});
      lowered.roles.push_back({part, computes, which});
    };
    for (size_t k = more.size(); k-- > 0;) add(StageRole::kBefore, k);
    lowered.roles.push_back({StageRole::kComputes, computes, 0});
    model.stages.push_back(stage);
    for (size_t k = 0; k < more.size(); ++k) add(StageRole::kAfter, k);
  }
  lowered.model = std::move(model);
  return lowered;
}

absl::Status CheckBlocks(const LoweredModel& lowered) {
  const Model& model = lowered.model;
  for (size_t s = 0; s < model.stages.size(); ++s) {
    if (lowered.roles[s].part != StageRole::kComputes) continue;
    const StageSpec& stage = model.stages[s];
    std::vector<int> blocks = {stage.block};
    blocks.insert(blocks.end(), stage.more_blocks.begin(), stage.more_blocks.end());
    std::set<int> seen;
    for (const int block : blocks) {
      if (block < 0 || static_cast<size_t>(block) >= model.blocks.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("stage ", stage.name, " uses block ", block, " of ", model.blocks.size()));
      }
      if (seen.insert(block).second) continue;
      return absl::InvalidArgumentError(absl::StrCat("stage ", stage.name, " names block ",
                                                     model.blocks[static_cast<size_t>(block)].name,
                                                     " twice: it computes with it once it has it"));
    }
    if (!stage.more_blocks.empty() && !stage.compute) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stage ", stage.name, " has several blocks: it needs a function of lists (ValuesFunction)"));
    }
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
