#include "models/families/narrow_model.h"

#include <nlohmann/json.hpp>
#include <numeric>

#include "models/families/model_keys.h"
#include "models/families/vocabulary_cut.h"

namespace penstock::models {
namespace {

// By the names of both families (LanguageModel::ToJson).
constexpr const char* kDivided[] = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "n_embd", "n_head",
    "n_inner"};

}  // namespace

std::vector<int64_t> Narrowings(const LanguageModel& model) {
  const nlohmann::json json = model.ToJson();
  int64_t common = 0;
  for (const char* name : kDivided) {
    if (json.contains(name) && json[name].is_number_integer())
      common = std::gcd(common, json[name].get<int64_t>());
  }
  std::vector<int64_t> all;
  for (int64_t by = 2; by <= common; ++by) {
    if (common % by == 0) all.push_back(by);
  }
  return all;
}

std::shared_ptr<const LanguageModel> Narrower(const LanguageModel& model, int64_t by) {
  nlohmann::json json = model.ToJson();
  for (const char* name : kDivided) {
    if (json.contains(name) && json[name].is_number_integer()) json[name] = json[name].get<int64_t>() / by;
  }
  const int64_t vocabulary = RowsOfTiles(model.vocabulary(), by);
  json["vocab_size"] = vocabulary;
  if (json.contains(kTileRowsKey)) {
    const int tiles = VocabularyCut(model.vocabulary(), model.tile_rows()).tiles();
    json[kTileRowsKey] = RowsOfTiles(vocabulary, tiles);
  }
  const auto narrow = ModelFromJson(json);
  if (!narrow.ok()) return nullptr;
  const std::vector<BlockDescription> wide_blocks = model.Blocks(), blocks = (*narrow)->Blocks();
  if (blocks.size() != wide_blocks.size()) return nullptr;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b].name != wide_blocks[b].name) return nullptr;
  }
  return *narrow;
}

}  // namespace penstock::models
