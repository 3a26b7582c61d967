// Small mixtures of experts: their configurations, and directories with a tensor for each matrix or for all
// experts of a layer.
#ifndef PENSTOCK_TESTS_TOOLS_MIXTURES_H_
#define PENSTOCK_TESTS_TOOLS_MIXTURES_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/families/family.h"
#include "swap/safetensors.h"
#include "tests/tools/golden_models.h"

namespace penstock::tools::testing_support {

// One of each kind; tokens are below 300.
inline std::vector<nlohmann::json> MixtureConfigs() {
  const nlohmann::json base = {{"hidden_size", 64},
                               {"intermediate_size", 96},
                               {"num_hidden_layers", 3},
                               {"num_attention_heads", 4},
                               {"num_key_value_heads", 2},
                               {"vocab_size", 300},
                               {"max_position_embeddings", 512}};
  std::vector<nlohmann::json> all = {
      {{"model_type", "mixtral"}, {"num_local_experts", 6}, {"sliding_window", 50}},
      {{"model_type", "qwen2_moe"},
       {"num_experts", 9},
       {"num_experts_per_tok", 3},
       {"moe_intermediate_size", 40},
       {"shared_expert_intermediate_size", 72},
       {"mlp_only_layers", {1}}},
      {{"model_type", "qwen3_moe"},
       {"num_experts", 16},
       {"num_experts_per_tok", 4},
       {"moe_intermediate_size", 24},
       {"head_dim", 24},
       {"norm_topk_prob", true},
       {"tie_word_embeddings", true}},
      {{"model_type", "olmoe"}, {"num_experts", 8}, {"num_experts_per_tok", 2}},
      {{"model_type", "granitemoe"},
       {"num_local_experts", 5},
       {"num_experts_per_tok", 2},
       {"residual_multiplier", 0.5},
       {"logits_scaling", 3.0}},
      {{"model_type", "gpt_oss"},
       {"num_local_experts", 7},
       {"num_experts_per_tok", 3},
       {"head_dim", 24},
       {"sliding_window", 40},
       {"swiglu_limit", 0.5}},
      {{"model_type", "deepseek_v2"},
       {"num_key_value_heads", 4},
       {"n_routed_experts", 12},
       {"num_experts_per_tok", 3},
       {"moe_intermediate_size", 40},
       {"topk_method", "group_limited_greedy"},
       {"n_group", 4},
       {"topk_group", 2},
       {"q_lora_rank", nullptr},
       {"kv_lora_rank", 34},
       {"qk_nope_head_dim", 20},
       {"qk_rope_head_dim", 6},
       {"v_head_dim", 12},
       {"rope_scaling",
        {{"type", "yarn"},
         {"factor", 4},
         {"original_max_position_embeddings", 128},
         {"mscale", 0.7},
         {"mscale_all_dim", 0.7}}}},
      {{"model_type", "deepseek_v3"},
       {"num_key_value_heads", 4},
       {"n_routed_experts", 8},
       {"num_experts_per_tok", 3},
       {"moe_intermediate_size", 24},
       {"first_k_dense_replace", 1},
       {"n_group", 2},
       {"topk_group", 1},
       {"q_lora_rank", 40},
       {"kv_lora_rank", 48},
       {"qk_nope_head_dim", 16},
       {"qk_rope_head_dim", 8},
       {"v_head_dim", 24}}};
  for (nlohmann::json& config : all) {
    nlohmann::json whole = base;
    whole.update(config);
    config = whole;
  }
  return all;
}

// The weights of WriteModel, where files have other places for them: the experts of a layer in two tensors.
// `other`: which of their other places.
inline void WriteFused(const std::string& directory, const nlohmann::json& config, size_t other = 0,
                       swap::Dtype dtype = swap::Dtype::kF32) {
  std::filesystem::create_directory(directory);
  WriteFile(directory + "/config.json", config.dump());
  const auto model = models::ModelFromJson(config);
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<swap::TensorInfo> infos;
  std::map<std::string, std::vector<float>> values;
  for (const models::PublishedTensor& tensor : (*model)->Layout().tensors) {
    const bool has_other = other < tensor.other_places.size();
    const std::string name = has_other ? tensor.other_places[other].name : tensor.name;
    const std::vector<uint64_t> shape =
        has_other ? tensor.other_places[other].shape : tensor.published_shape();
    const std::vector<float> own = Formula(tensor.name, tensor.elements());
    std::vector<float>& of = values[name];
    if (of.empty()) {
      infos.push_back({name, dtype, shape, 0});
      size_t elements = 1;
      for (const uint64_t each : shape) elements *= each;
      of.resize(elements);
    }
    const auto first = has_other ? tensor.other_places[other].first : 0;
    if (!has_other || !tensor.other_places[other].transposed) {
      std::copy(own.begin(), own.end(), of.begin() + first);
      continue;
    }
    for (int64_t row = 0; row < tensor.rows; ++row) {
      for (int64_t column = 0; column < tensor.columns; ++column) {
        of[static_cast<size_t>(first + column * tensor.rows + row)] =
            own[static_cast<size_t>(row * tensor.columns + column)];
      }
    }
  }
  auto writer =
      swap::SafetensorsWriter::Create(directory + "/model.safetensors", infos, {}, /*overwrite=*/true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const swap::TensorInfo& info : infos) {
    std::vector<uint16_t> narrow;
    for (const float value : values[info.name]) narrow.push_back(kernels::FloatToBf16(value));
    ASSERT_TRUE((*writer)
                    ->Append(dtype == swap::Dtype::kF32 ? std::as_bytes(std::span(values[info.name]))
                                                        : std::as_bytes(std::span(narrow)))
                    .ok());
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_MIXTURES_H_
