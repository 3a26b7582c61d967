// The family of Llama: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM 1 to 3, Granite, OLMo 2 (Touvron et al.
// 2023). RMSNorm before each half of a layer, or behind it (OLMo 2); rotary positions, in some layers none
// (SmolLM 3); grouped queries, SwiGLU; biases, norms of queries and keys, multipliers (Granite), and one
// embedding for input and output where a model has them.
//
// Block 0 is the embedding, blocks 1..L are the layers. With a head of its own (untied) the last block is the
// last norm and the head; else block 0 has the norm, and is the first stage and the last. With a vocabulary
// in tiles (models/vocabulary_tiles.h) embedding and head are some blocks each, or the same, and the norm is
// a block before the layers (tied) or behind them. Sums are made in fp32 where transformers has them:
// RMSNorm, softmax, cross-entropy; and the embedding's gradient. Rotary positions are made in fp32 and used
// in the compute type, as there.
#ifndef PENSTOCK_MODELS_LLAMA_H_
#define PENSTOCK_MODELS_LLAMA_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/family.h"

namespace penstock::models {

// How positions turn queries and keys.
struct Rope {
  enum class Kind : uint8_t {
    kDefault,
    kLinear,  // all frequencies divided by `factor`
    kLlama3,  // the low ones, with a ramp between them and the high ones
  };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  double factor = 1, low = 1, high = 4;
  int64_t original_context = 0;

  // One for each pair of a head's elements, in fp32 as transformers has them.
  std::vector<float> Frequencies(int64_t depth) const;
};

struct LlamaConfig {
  std::string type =
      "llama";  // Hugging Face's model_type: llama, mistral, qwen2, qwen3, smollm3, granite or olmo2
  int64_t layers = 0, width = 0, heads = 0, key_heads = 0, depth = 0, inner = 0, vocab = 0;
  int64_t positions = 2048;  // that the model was made for
  int64_t window = 0;        // positions that a layer looks back; 0: all. Longer sequences are not computed
  double epsilon = 1e-6;
  double deviation = 0.02;  // of initial values
  double attention_dropout = 0;
  bool tied = false;
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  enum class QkNorm : uint8_t { kNone, kOfHeads, kOfAll };  // kOfAll: one norm over the queries of all heads
  QkNorm qk_norm = QkNorm::kNone;
  bool norms_results = false;  // norms are of what attention and MLP give, not of what they take
  // Granite's. Scores of attention are multiplied by attention_multiplier; 0: 1 / sqrt(depth).
  double embedding_multiplier = 1, residual_multiplier = 1, attention_multiplier = 0, logits_scaling = 1;
  std::vector<bool> turns;  // by layer: whether positions turn its queries and keys; empty: in all
  int64_t tile_rows = 0;    // of the vocabulary's blocks; 0: one has all of it
  Rope rope;
  // As given, for those who read what is exported: tokens, and which layers look back how far.
  nlohmann::json kept = nlohmann::json::object();

  // Of the scores.
  double AttentionScale() const;
  bool Turns(int64_t layer) const { return turns.empty() || turns[static_cast<size_t>(layer)]; }
  int64_t Context() const { return window > 0 && window < positions ? window : positions; }
  nlohmann::json ToJson() const;
  nlohmann::ordered_json ToPublished() const;
};

// Numbers of blocks: the first layer's, the last norm's, and that of the head or its first tile.
struct LlamaBlocks {
  explicit LlamaBlocks(const LlamaConfig& c);
  int layer = 0, norm = 0, head = 0;
};

bool IsLlamaType(const std::string& model_type);

// config.json as transformers 4 and 5 write it. What is absent is what transformers has for this model_type,
// but for the shape, which must be there. Errors and `notes` as GptConfigFromJson's.
absl::StatusOr<LlamaConfig> LlamaConfigFromJson(const nlohmann::json& json,
                                                std::vector<std::string>* notes = nullptr);

std::vector<BlockDescription> BlocksOfLlama(const LlamaConfig& config);  // every parameter, once
std::shared_ptr<const LanguageModel> DescribeLlama(const LlamaConfig& config);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_LLAMA_H_
