// The family of Llama: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM 1 to 3, Granite, OLMo 2, Phi 3 and 4,
// Gemma 2 and 3 (Touvron et al. 2023), gpt-oss, DeepSeek V2 and V3; and those of them whose inner networks
// are mixtures of experts (models/families/mixture.h), which generate and do not train. RMSNorm before each
// half of a layer, behind it (OLMo 2) or both (Gemma); rotary positions of all kinds
// (models/families/rope.h), in some layers none (SmolLM 3); grouped queries, windows in all layers or in
// some, SwiGLU or GeGLU; biases, norms of queries and keys, attention to latents
// (models/families/latent_attention.h), multipliers, soft caps, matrices that are several in one (Phi), and
// one embedding for input and output where a model has them.
//
// Block 0 is the embedding, blocks 1..L are the layers. With a head of its own (untied) the last block is the
// last norm and the head; else block 0 has the norm, and is the first stage and the last. With a vocabulary
// in tiles (models/families/vocabulary_tiles.h) embedding and head are some blocks each, or the same, and the
// norm is a block before the layers (tied) or behind them. Sums are made in fp32 where transformers has them:
// RMSNorm, softmax, cross-entropy; and the embedding's gradient. Rotary positions are made in fp32 and used
// in the compute type, as there.
#ifndef PENSTOCK_MODELS_FAMILIES_LLAMA_H_
#define PENSTOCK_MODELS_FAMILIES_LLAMA_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/families/family.h"
#include "models/families/latent_attention.h"
#include "models/families/mixture.h"
#include "models/families/rope.h"

namespace penstock::models {

struct LlamaConfig {
  std::string type = "llama";  // Hugging Face's model_type, one of those in IsLlamaType
  int64_t layers = 0, width = 0, heads = 0, key_heads = 0, depth = 0, inner = 0, vocab = 0;
  int64_t positions = 2048;  // that the model was made for
  int64_t window = 0;        // positions that layers with a window look at, their own included
  std::vector<bool> slides;  // by layer: whether it has the window; empty: none has
  double epsilon = 1e-6;
  double deviation = 0.02;  // of initial values
  double attention_dropout = 0;
  bool tied = false;
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  enum class QkNorm : uint8_t { kNone, kOfHeads, kOfAll };  // kOfAll: one norm over the queries of all heads
  QkNorm qk_norm = QkNorm::kNone;
  bool norms_inputs = true;     // of what attention and MLP take
  bool norms_results = false;   // of what they give
  bool norms_from_one = false;  // a norm's weights are added to 1 (Gemma)
  bool joined = false;          // queries, keys and values are one matrix, and so are gate and up (Phi)
  bool tangent_gelu = false;    // the activation is "gelu_pytorch_tanh" instead of silu
  bool sinks = false;           // attention has a score without a value for each head (gpt-oss), and what a
                                // norm's weights multiply is not rounded before
  // Granite's. Scores of attention are multiplied by attention_multiplier; 0: 1 / sqrt(depth).
  double embedding_multiplier = 1, residual_multiplier = 1, attention_multiplier = 0, logits_scaling = 1;
  // Gemma's. Scores are divided by the root of query_scalar; 0: as above. Soft caps: 0: none.
  bool scales_embedding = false;  // by sqrt(width), rounded to the compute type
  double query_scalar = 0, score_cap = 0, logit_cap = 0;
  std::vector<bool> turns;  // by layer: whether positions turn its queries and keys; empty: in all
  int64_t tile_rows = 0;    // of the vocabulary's blocks; 0: one has all of it
  Rope rope;
  MixtureConfig mixture;
  LatentConfig
      latent;  // with a rank, `depth` is what positions turn, and there are as many key heads as heads
  int64_t passed_layers = 0;        // behind the last, which files may have and generation does not use
  std::optional<Rope> window_rope;  // of layers with a window, where theirs is another
  // As given, for those who read what is exported: tokens, and which layers look back how far.
  nlohmann::json kept = nlohmann::json::object();

  // Of the scores.
  double AttentionScale() const;
  // Of what is looked up, in fp32: the compute type may round it.
  double EmbeddingScale() const;
  bool Slides(int64_t layer) const { return !slides.empty() && slides[static_cast<size_t>(layer)]; }
  // Elements of a head of what attention gives.
  int64_t ValueDepth() const { return latent.shape.rank > 0 ? latent.shape.value : depth; }
  // Positions that a layer looks at; 0: all before it.
  int64_t Window(int64_t layer) const { return Slides(layer) ? window : 0; }
  bool Turns(int64_t layer) const { return turns.empty() || turns[static_cast<size_t>(layer)]; }
  // What turns a layer's queries and keys: rope's, then window_rope's.
  std::vector<Rotation> Rotations() const;
  // Which of them; -1: none.
  int RotationOf(int64_t layer) const {
    return !Turns(layer) ? -1 : window_rope.has_value() && Slides(layer) ? 1 : 0;
  }
  int64_t Context() const;
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

#endif  // PENSTOCK_MODELS_FAMILIES_LLAMA_H_
