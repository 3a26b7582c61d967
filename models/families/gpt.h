// The family of GPT-2, which is also the example model: a GPT with pre-LayerNorm, causal attention, learned
// positions and a tied embedding (Radford et al. 2019), as blocks for the engine.
//
// Block 0 holds the token embedding, the positions and the last LayerNorm; it is the first stage (embed) and
// the last (logits and loss). Blocks 1..L are the layers. With a vocabulary in tiles
// (models/families/vocabulary_tiles.h) the token embedding is the first blocks, and positions and LayerNorm
// are one behind them. Every function that Hugging Face's GPT2Config can ask for, but for what
// GptConfigFromJson refuses. Sums that bf16 would spoil (LayerNorm, cross-entropy, the embedding's gradient)
// are computed in fp32; matrix products in the compute type.
#ifndef PENSTOCK_MODELS_FAMILIES_GPT_H_
#define PENSTOCK_MODELS_FAMILIES_GPT_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/layer.h"
#include "models/families/family.h"

namespace penstock::models {

// What the two linear maps of a layer have between them.
using GptActivation = kernels::Activation;

struct GptConfig {
  int64_t layers = 4;
  int64_t width = 64;
  int64_t heads = 4;
  int64_t context = 128;  // longest sequence
  int64_t vocab = 256;
  double dropout = 0;  // of what a layer's two halves add

  double embedding_dropout = 0;
  double attention_dropout = 0;
  int64_t inner = 0;      // between the two linear maps of a layer; 0: four times the width
  double epsilon = 1e-5;  // of every LayerNorm
  GptActivation activation = GptActivation::kGelu;
  bool scales_attention = true;            // the scores, by 1 / sqrt(depth of a head)
  bool scales_attention_by_layer = false;  // and by 1 / number of the layer, from 1
  bool attention_in_fp32 = false;          // whatever the compute type
  double deviation = 0.02;                 // of initial values
  int64_t tile_rows = 0;                   // of the vocabulary's blocks; 0: one has all of it

  int64_t Inner() const { return inner > 0 ? inner : 4 * width; }
  // Of the scores of a layer, from 0.
  double AttentionScale(int64_t layer) const;
  int64_t Parameters() const;
  // Its keys are Hugging Face's; those that are at their defaults here are left out.
  nlohmann::json ToJson() const;
  // config.json of Hugging Face's GPT2LMHeadModel, complete but for the type of the weights.
  nlohmann::ordered_json ToPublished() const;
};

std::optional<GptConfig> GptPreset(const std::string& name);
std::string GptPresetNames();  // "gpt-125m, gpt-13b, ..."

// Every key of Hugging Face's GPT2Config that changes the function is served or refused. What is absent is
// what transformers has where the JSON says "model_type": "gpt2" (gelu_new, dropouts of 0.1), and else the
// defaults above, embd_pdrop that of resid_pdrop. An unknown key that is near to one of these is refused with
// that one's name; all other unknown keys are one line of `notes`, a line for people.
absl::StatusOr<GptConfig> GptConfigFromJson(const nlohmann::json& json,
                                            std::vector<std::string>* notes = nullptr);
absl::Status ValidateGptConfig(const GptConfig& config);

// Pure numbers; `config` must pass ValidateGptConfig.
std::vector<BlockDescription> BlocksOfGpt(const GptConfig& config);  // every parameter, once
int FirstLayerOfGpt(const GptConfig& config);                        // its block
ModelLayout LayoutOfGpt(const GptConfig& config);
std::shared_ptr<const LanguageModel> DescribeGpt(const GptConfig& config);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_GPT_H_
