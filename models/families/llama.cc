#include "models/families/llama.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/families/vocabulary_cut.h"

namespace penstock::models {
namespace {

using QkNorm = LlamaConfig::QkNorm;

constexpr const char* kPrefix = "model.";
// Longest sequence of a training where nobody says: the contexts of these models are made for reading.
constexpr int64_t kUsualLength = 1024;

}  // namespace

double LlamaConfig::AttentionScale() const {
  if (attention_multiplier > 0) return attention_multiplier;
  if (const LatentShape& l = latent.shape; l.rank > 0)
    return rope.AllDimensionsScale(positions) / std::sqrt(static_cast<double>(l.query_depth()));
  return 1.0 / std::sqrt(query_scalar > 0 ? query_scalar : static_cast<double>(depth));
}

double LlamaConfig::EmbeddingScale() const {
  return scales_embedding ? std::sqrt(static_cast<double>(width)) : embedding_multiplier;
}

std::vector<Rotation> LlamaConfig::Rotations() const {
  std::vector<Rotation> made = {rope.RotationOf(depth, positions)};
  if (window_rope.has_value()) made.push_back(window_rope->RotationOf(depth, positions));
  return made;
}

int64_t LlamaConfig::Context() const {
  // Yarn is made for contexts that are longer by its factor; some who publish it leave the number as it was.
  if (rope.kind != Rope::Kind::kYarn) return positions;
  const double scaled = rope.factor.value_or(1) * static_cast<double>(rope.original_context);
  return std::max(positions, static_cast<int64_t>(scaled));
}

std::vector<BlockDescription> BlocksOfLlama(const LlamaConfig& c) {
  std::vector<BlockDescription> blocks;
  std::string prefix;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns, double mean) {
    blocks.back().parameters.push_back({.name = name,
                                        .published = prefix + name,
                                        .rows = rows,
                                        .columns = columns,
                                        .mean = mean,
                                        .deviation = columns > 0 ? c.deviation : 0});
  };
  const auto add_norm = [&](const std::string& name, int64_t width) {
    add(name + ".weight", width, 0, c.norms_from_one ? 0 : 1);
  };
  const auto add_linear = [&](const std::string& name, int64_t in, int64_t out, bool bias) {
    add(name + ".weight", out, in, 0);
    if (bias) add(name + ".bias", out, 0, 0);
  };
  const VocabularyCut cut(c.vocab, c.tile_rows);
  const bool tiled = cut.tiles() > 1;
  const auto begin = [&](const std::string& name) {
    blocks.push_back({.name = name, .kind = name, .parameters = {}});
  };
  // In the block that has begun, or in tiles, blocks of that name.
  const auto add_matrix = [&](const std::string& block, const std::string& name) {
    if (!tiled) return add_linear(name, c.width, c.vocab, false);
    AddTiles(cut, block,
             {.name = name + ".weight",
              .published = prefix + name + ".weight",
              .rows = c.vocab,
              .columns = c.width,
              .deviation = c.deviation},
             &blocks);
  };
  prefix = kPrefix;
  if (!tiled) begin("embedding");
  add_matrix("embedding", "embed_tokens");
  if (tiled && c.tied) begin("norm");
  if (c.tied) add_norm("norm", c.width);
  for (int64_t i = 0; i < c.layers; ++i) {
    prefix = absl::StrCat(kPrefix, "layers.", i, ".");
    blocks.push_back({.name = absl::StrCat("layers.", i),
                      .kind = c.mixture.Has(i) ? "mixture" : "layer",
                      .parameters = {}});
    if (c.norms_inputs) add_norm("input_layernorm", c.width);
    if (c.sinks) add("self_attn.sinks", c.heads, 0, 0);
    if (c.latent.shape.rank > 0) {
      ForLatentParameters(c.latent.shape, c.width, c.heads, c.qkv_bias, add_linear, add_norm);
    } else if (c.joined) {
      add_linear("self_attn.qkv_proj", c.width, (c.heads + 2 * c.key_heads) * c.depth, c.qkv_bias);
    } else {
      add_linear("self_attn.q_proj", c.width, c.heads * c.depth, c.qkv_bias);
      add_linear("self_attn.k_proj", c.width, c.key_heads * c.depth, c.qkv_bias);
      add_linear("self_attn.v_proj", c.width, c.key_heads * c.depth, c.qkv_bias);
    }
    add_linear("self_attn.o_proj", c.heads * c.ValueDepth(), c.width, c.output_bias);
    if (c.qk_norm != QkNorm::kNone) {
      const bool of_all = c.qk_norm == QkNorm::kOfAll;
      add_norm("self_attn.q_norm", of_all ? c.heads * c.depth : c.depth);
      add_norm("self_attn.k_norm", of_all ? c.key_heads * c.depth : c.depth);
    }
    add_norm("post_attention_layernorm", c.width);
    if (c.norms_inputs && c.norms_results) add_norm("pre_feedforward_layernorm", c.width);
    if (c.mixture.Has(i)) {
      AddMixture(c.type, c.mixture, prefix, c.width, c.deviation, &blocks.back());
      continue;
    }
    if (c.joined) {
      add_linear("mlp.gate_up_proj", c.width, 2 * c.inner, c.mlp_bias);
    } else {
      add_linear("mlp.gate_proj", c.width, c.inner, c.mlp_bias);
      add_linear("mlp.up_proj", c.width, c.inner, c.mlp_bias);
    }
    add_linear("mlp.down_proj", c.inner, c.width, c.mlp_bias);
    if (c.norms_results) add_norm("post_feedforward_layernorm", c.width);
  }
  if (!c.tied) {
    begin(tiled ? "norm" : "head");
    prefix = kPrefix;
    add_norm("norm", c.width);
    prefix.clear();
    add_matrix("head", "lm_head");
  }
  return blocks;
}

LlamaBlocks::LlamaBlocks(const LlamaConfig& c) {
  const int tiles = VocabularyCut(c.vocab, c.tile_rows).tiles();
  const auto layers = static_cast<int>(c.layers);
  if (tiles == 1) {
    layer = 1;
    norm = head = c.tied ? 0 : layers + 1;
  } else {
    layer = c.tied ? tiles + 1 : tiles;
    norm = c.tied ? tiles : tiles + layers;
    head = c.tied ? 0 : norm + 1;
  }
}

namespace {

Decoder DecoderOf(const LlamaConfig& c) {
  LlamaConfig whole = c;  // its tensors are the same, wherever they lie
  whole.tile_rows = 0;
  Decoder decoder;
  const MixtureConfig& m = c.mixture;
  const bool dense = std::find(m.layers.begin(), m.layers.end(), false) != m.layers.end();
  const int64_t inner = m.experts == 0 || dense ? std::max(c.inner, m.shared_inner) : m.shared_inner;
  decoder.shape = {
      .layers = c.layers,
      .width = c.width,
      .inner = inner,
      .vocab = c.vocab,
      .inner_rows = c.joined ? 2 * c.inner : inner,
      .rotations = c.window_rope.has_value() ? 2 : 1,
      .heads = c.heads,
      .key_heads = c.key_heads,
      .depth = c.depth,
      .token_table = "embed_tokens.weight",
      .position_table = "",
      .matrices_before_attention = c.joined ? 1 : 3,
      .head_block = c.tied ? 0 : static_cast<int>(c.layers) + 1,
      .head = c.tied ? "embed_tokens.weight" : "lm_head.weight",
      .mixture = {.experts = m.experts, .chosen = m.chosen, .inner = m.inner, .paired = m.pair_limit > 0},
      .latent = c.latent.shape};
  if (const LatentShape& l = c.latent.shape; l.rank > 0) {
    decoder.shape.key_heads = 1;
    decoder.shape.depth = l.turned + l.rank;
    decoder.shape.matrices_before_attention = l.query_rank > 0 ? 4 : 3;
  }
  DecoderFunction& f = decoder.function;
  f.norm = DecoderFunction::Norm::kRootMeanSquare;
  f.epsilon = c.epsilon;
  f.norms_from_one = c.norms_from_one;
  f.rounds_normal = !c.sinks;
  if (c.sinks) f.sinks = "self_attn.sinks";
  if (c.norms_inputs) {
    f.attention_norm = "input_layernorm";
    f.inner_norm = c.norms_results ? "pre_feedforward_layernorm" : "post_attention_layernorm";
  }
  if (c.norms_results) {
    f.attention_result_norm = "post_attention_layernorm";
    f.inner_result_norm = "post_feedforward_layernorm";
  }
  f.last_norm = "norm";
  f.embedding_scale = c.EmbeddingScale();
  f.rounds_embedding_scale = c.scales_embedding;
  f.residual_scale = c.residual_multiplier;
  f.logits_divisor = c.logits_scaling;
  f.score_cap = c.score_cap;
  f.logit_cap = c.logit_cap;
  if (c.latent.shape.rank > 0) {
    f.latent = LatentFunctionOf(c.latent);
  } else if (c.joined) {
    f.joined = "self_attn.qkv_proj";
  } else {
    f.query = "self_attn.q_proj";
    f.key = "self_attn.k_proj";
    f.value = "self_attn.v_proj";
  }
  if (c.qk_norm != QkNorm::kNone) {
    f.query_norm = "self_attn.q_norm";
    f.key_norm = "self_attn.k_norm";
  }
  f.output = "self_attn.o_proj";
  f.gate_in_up = c.joined;
  if (!c.joined) f.gate = "mlp.gate_proj";
  f.up = c.joined ? "mlp.gate_up_proj" : "mlp.up_proj";
  f.down = "mlp.down_proj";
  f.mixture = MixtureFunctionOf(c.type, c.mixture);
  f.activation = c.tangent_gelu ? kernels::Activation::kGeluNew : kernels::Activation::kSilu;
  f.scales.assign(static_cast<size_t>(c.layers), c.AttentionScale());
  f.rotations = c.Rotations();
  for (int64_t i = 0; i < c.layers; ++i) {
    f.rotation.push_back(c.RotationOf(i));
    f.windows.push_back(c.Window(i));
  }
  decoder.blocks = BlocksOfLlama(whole);
  return decoder;
}

// Parameters of a mixture that a row is multiplied with.
int64_t ActiveInMixture(const LlamaConfig& c) {
  const MixtureConfig& m = c.mixture;
  const int64_t shared = 3 * m.shared_inner + (m.shared_inner > 0 && c.latent.shape.rank == 0 ? 1 : 0);
  return c.width * (m.experts + 3 * m.chosen * m.inner + shared);
}

class Llama : public LanguageModel {
 public:
  explicit Llama(LlamaConfig config) : config_(std::move(config)) {}

  int64_t vocabulary() const override { return config_.vocab; }
  int64_t context() const override { return config_.Context(); }
  int64_t usual_length() const override { return std::min(config_.Context(), kUsualLength); }
  nlohmann::json ToJson() const override { return config_.ToJson(); }
  nlohmann::ordered_json ToPublished() const override { return config_.ToPublished(); }
  std::shared_ptr<const LanguageModel> WithVocabulary(int64_t vocabulary) const override {
    LlamaConfig config = config_;
    config.vocab = vocabulary;
    return DescribeLlama(config);
  }
  int64_t tile_rows() const override { return config_.tile_rows; }
  std::shared_ptr<const LanguageModel> WithTileRows(int64_t rows) const override {
    LlamaConfig config = config_;
    config.tile_rows = rows < config.vocab ? rows : 0;
    return DescribeLlama(config);
  }

  absl::Status CheckTrains() const override {
    if (config_.mixture.experts == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("model_type ", config_.type,
                     " is a mixture of experts, which is not trained from the command line yet: `penstock "
                     "generate` makes its texts, and penstock.initialize trains transformers' module of it"));
  }
  std::optional<Decoder> decoder() const override { return DecoderOf(config_); }
  const LlamaConfig* llama() const override { return &config_; }
  std::vector<std::string> AdapterTargets() const override {
    if (config_.joined) return {"qkv_proj"};
    return {"q_proj", "v_proj"};
  }
  std::vector<BlockDescription> Blocks() const override { return BlocksOfLlama(config_); }
  ModelLayout Layout() const override {
    ModelLayout layout = LayoutOf(Blocks());
    layout.prefix = kPrefix;
    layout.passed_over = {".rotary_emb.inv_freq"};
    if (config_.type == "gemma3_text") {  // as the text part of a Gemma3ForConditionalGeneration
      layout.wrapped_prefixes = {"language_model.model.", "model.language_model.", "language_model."};
      layout.other_parts = {"vision_tower.", "multi_modal_projector."};
    }
    for (int64_t i = 0; i < config_.passed_layers; ++i)
      layout.other_parts.push_back(absl::StrCat("layers.", config_.layers + i, "."));
    return layout;
  }

  std::vector<StageProducts> Products() const override {
    const LlamaConfig& c = config_;
    const VocabularyCut cut(c.vocab, c.tile_rows);
    const LlamaBlocks blocks(c);
    std::vector<StageProducts> products;
    for (int tile = 0; tile < cut.tiles(); ++tile)
      products.push_back({.stage = cut.StageOf("embed", tile), .block = tile});
    for (int64_t i = 0; i < c.layers; ++i) {
      const LatentShape& l = c.latent.shape;
      const int64_t in_attention = l.rank > 0
                                       ? LatentParameters(l, c.width, c.heads) + c.heads * l.value * c.width
                                       : 2 * c.width * (c.heads + c.key_heads) * c.depth,
                    of_head = l.rank > 0 ? (l.query_depth() + l.value) / 2 : c.depth,
                    in_between = c.mixture.Has(i) ? ActiveInMixture(c) : 3 * c.width * c.inner;
      products.push_back({.stage = absl::StrCat("layers.", i),
                          .block = blocks.layer + static_cast<int>(i),
                          .parameters = in_attention + in_between,
                          .attention_width = c.heads * of_head});
    }
    if (cut.tiles() > 1) products.push_back({.stage = "norm", .block = blocks.norm});
    for (int tile = 0; tile < cut.tiles(); ++tile) {
      products.push_back({.stage = cut.StageOf("loss", tile),
                          .block = blocks.head + tile,
                          .parameters = cut.rows(tile) * c.width});
    }
    return products;
  }

 private:
  const LlamaConfig config_;
};

}  // namespace

std::shared_ptr<const LanguageModel> DescribeLlama(const LlamaConfig& config) {
  return std::make_shared<Llama>(config);
}

}  // namespace penstock::models
