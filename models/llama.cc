#include "models/llama.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "models/model_keys.h"
#include "models/vocabulary_cut.h"
#include "zero/config/config_json.h"

namespace penstock::models {
namespace {

using nlohmann::json;

constexpr const char* kPrefix = "model.";
// Longest sequence of a training where nobody says: the contexts of these models are made for reading.
constexpr int64_t kUsualLength = 1024;

// What a model_type has where its config.json says nothing, as transformers.
struct TypeDefaults {
  std::string_view type;
  const char* architecture;
  int64_t key_heads, depth;  // 0: as many as heads; width / heads
  int64_t positions;
  int64_t window;        // of sliding_window
  bool switches_window;  // use_sliding_window says whether it is used
  bool attention_bias;   // the key is there; of all four maps
  bool qkv_bias;         // always
  LlamaConfig::QkNorm qk_norm;
  bool mlp_bias;  // the key is there
  double theta = 10000;
  double epsilon = 1e-6;
  bool tied = false;
  int64_t padding = -1;  // of pad_token_id
};
using QkNorm = LlamaConfig::QkNorm;
constexpr auto kTypes = std::to_array<TypeDefaults>(
    {{"llama", "LlamaForCausalLM", 0, 0, 2048, 0, false, true, false, QkNorm::kNone, true},
     {"mistral", "MistralForCausalLM", 8, 0, 131072, 4096, false, false, false, QkNorm::kNone, false},
     {"qwen2", "Qwen2ForCausalLM", 32, 0, 32768, 4096, true, false, true, QkNorm::kNone, false},
     {"qwen3", "Qwen3ForCausalLM", 32, 128, 32768, 4096, true, true, false, QkNorm::kOfHeads, false},
     {"smollm3", "SmolLM3ForCausalLM", 4, 0, 32768, 0, true, true, false, QkNorm::kNone, true, 2e6, 1e-6,
      true, 128004},
     {"granite", "GraniteForCausalLM", 0, 0, 2048, 0, false, true, false, QkNorm::kNone, true},
     {"olmo2", "Olmo2ForCausalLM", 0, 0, 2048, 0, false, true, false, QkNorm::kOfAll, false, 10000, 1e-5,
      false, 1}});

const TypeDefaults* DefaultsOf(std::string_view type) {
  const auto found =
      std::find_if(kTypes.begin(), kTypes.end(), [type](const TypeDefaults& t) { return t.type == type; });
  return found == kTypes.end() ? nullptr : &*found;
}

constexpr const char* kKeptKeys[] = {"bos_token_id",   "eos_token_id",       "pad_token_id",
                                     "sliding_window", "use_sliding_window", "max_window_layers",
                                     "layer_types"};

// ---- config.json.

const std::vector<std::string_view>& FunctionKeys() {
  static const auto& keys = *new std::vector<std::string_view>{"model_type",
                                                               "vocab_size",
                                                               "hidden_size",
                                                               "intermediate_size",
                                                               "num_hidden_layers",
                                                               "num_attention_heads",
                                                               "num_key_value_heads",
                                                               "head_dim",
                                                               "hidden_act",
                                                               "max_position_embeddings",
                                                               "initializer_range",
                                                               "rms_norm_eps",
                                                               "tie_word_embeddings",
                                                               "rope_theta",
                                                               "rope_scaling",
                                                               "rope_parameters",
                                                               "rope_interleaved",
                                                               "partial_rotary_factor",
                                                               "attention_bias",
                                                               "attention_dropout",
                                                               "mlp_bias",
                                                               "sliding_window",
                                                               "use_sliding_window",
                                                               "max_window_layers",
                                                               "layer_types",
                                                               "no_rope_layers",
                                                               "no_rope_layer_interval",
                                                               "embedding_multiplier",
                                                               "residual_multiplier",
                                                               "attention_multiplier",
                                                               "logits_scaling",
                                                               "pruned_heads",
                                                               "quantization_config",
                                                               "add_cross_attention",
                                                               kTileRowsKey};
  return keys;
}

constexpr KeyAlias kMeant[] = {{"layer_norm_eps", "rms_norm_eps"},
                               {"n_layer", "num_hidden_layers"},
                               {"n_embd", "hidden_size"},
                               {"n_head", "num_attention_heads"},
                               {"n_positions", "max_position_embeddings"}};

// The keys of rope_parameters (transformers 5) or rope_scaling (4). What this kind does not compute is
// refused; so is what nobody knows, since it may change the function.
void ReadRopeKind(const json& given, const char* name, ModelKeys* all, Rope* rope) {
  if (!given.is_object()) return all->Wrong(name, "not a JSON object");
  const auto wrong = [&](const std::string& what) {
    all->Fail(absl::StrCat("model: ", name, " is ", zero::ShowValue(given), ", ", what));
  };
  const json kind = given.contains("rope_type") ? given["rope_type"]
                    : given.contains("type")    ? given["type"]
                                                : json("default");
  if (kind == "default") {
    rope->kind = Rope::Kind::kDefault;
  } else if (kind == "linear") {
    rope->kind = Rope::Kind::kLinear;
  } else if (kind == "llama3") {
    rope->kind = Rope::Kind::kLlama3;
  } else {
    return wrong("and of the kinds of rotary positions default, linear and llama3 are served");
  }
  ModelKeys keys(given);
  keys.Number("rope_theta", &rope->theta);
  if (rope->kind != Rope::Kind::kDefault) {
    if (keys.Find("factor") == nullptr) return wrong("without a factor");
    keys.Number("factor", &rope->factor);
    if (!(rope->factor >= 1)) return wrong("and a factor below 1 is none");
  }
  if (rope->kind == Rope::Kind::kLlama3) {
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
      if (keys.Find(key) == nullptr) return wrong(absl::StrCat("without ", key));
    }
    keys.Number("low_freq_factor", &rope->low);
    keys.Number("high_freq_factor", &rope->high);
    keys.Whole("original_max_position_embeddings", &rope->original_context);
    if (!(rope->low > 0 && rope->high > rope->low && rope->original_context > 0))
      return wrong("and its factors are not 0 < low < high, or the context is not above 0");
  }
  double part = 1;
  keys.Number("partial_rotary_factor", &part);
  if (part != 1) return wrong("and rotary positions of a part of a head are not computed");
  for (const auto& [key, value] : given.items()) {
    constexpr std::string_view kKnown[] = {"rope_type",
                                           "type",
                                           "rope_theta",
                                           "factor",
                                           "low_freq_factor",
                                           "high_freq_factor",
                                           "original_max_position_embeddings",
                                           "partial_rotary_factor",
                                           "finetuned"};
    if (!value.is_null() && std::find(std::begin(kKnown), std::end(kKnown), key) == std::end(kKnown))
      return wrong(absl::StrCat("and its key ", zero::ShowValue(key), " is not served"));
  }
  if (!keys.status().ok()) wrong("which is not as it should be");
}

void ReadRope(ModelKeys* keys, Rope* rope) {
  keys->Number("rope_theta", &rope->theta);
  const double theta = rope->theta;
  const bool has_theta = keys->Find("rope_theta") != nullptr;
  const json *parameters = keys->Find("rope_parameters"), *scaling = keys->Find("rope_scaling");
  if (scaling != nullptr) ReadRopeKind(*scaling, "rope_scaling", keys, rope);
  if (parameters != nullptr) {
    if (scaling != nullptr && *scaling != *parameters)
      keys->Wrong("rope_scaling", "and rope_parameters is not the same: leave one of them out");
    ReadRopeKind(*parameters, "rope_parameters", keys, rope);
  }
  if (has_theta && rope->theta != theta)
    keys->Wrong("rope_theta",
                absl::StrCat("and in rope_parameters ", rope->theta, ": leave one of them out"));
  if (!(rope->theta > 0)) keys->Fail(absl::StrCat("model: rope_theta ", rope->theta, " is not above 0"));
  bool interleaved = false;
  keys->Switch("rope_interleaved", &interleaved);
  if (interleaved) keys->Wrong("rope_interleaved", "which is not computed");
  double part = 1;
  keys->Number("partial_rotary_factor", &part);
  if (part != 1)
    keys->Wrong("partial_rotary_factor", "and rotary positions of a part of a head are not computed");
}

// Granite's multipliers. In a model of another type, which would not use them, each must be 1 or absent.
void ReadMultipliers(ModelKeys* keys, LlamaConfig* c) {
  const bool has_them = c->type == "granite";
  if (has_them) c->attention_multiplier = 1;
  for (const auto& [key, to] : {std::pair{"embedding_multiplier", &c->embedding_multiplier},
                                {"residual_multiplier", &c->residual_multiplier},
                                {"attention_multiplier", &c->attention_multiplier},
                                {"logits_scaling", &c->logits_scaling}}) {
    double value = has_them ? *to : 1;
    keys->Number(key, &value);
    if (!has_them && value != 1) keys->Wrong(key, absl::StrCat("which no ", c->type, " has"));
    if (!(value > 0 && value <= 1e6)) keys->Wrong(key, "not above 0 and at most 1e6");
    if (has_them) *to = value;
  }
}

// SmolLM 3: which layers turn queries and keys by positions.
void ReadTurns(ModelKeys* keys, LlamaConfig* c) {
  const bool has_them = c->type == "smollm3";
  const json* given = keys->Find("no_rope_layers");
  int64_t interval = 4;
  keys->Whole("no_rope_layer_interval", &interval);
  if (!has_them) {
    if (given != nullptr) keys->Wrong("no_rope_layers", absl::StrCat("which no ", c->type, " has"));
    return;
  }
  if (interval < 1) return keys->Wrong("no_rope_layer_interval", "not 1 or more");
  if (given == nullptr) {
    for (int64_t i = 0; i < c->layers; ++i) c->turns.push_back((i + 1) % interval != 0);
    return;
  }
  if (!given->is_array() || given->size() != static_cast<size_t>(std::max<int64_t>(c->layers, 0)))
    return keys->Wrong("no_rope_layers", "not a list with a number for each layer");
  for (const json& each : *given) {
    if (!each.is_number_integer() && !each.is_boolean())
      return keys->Wrong("no_rope_layers", "not a list with a number for each layer");
    c->turns.push_back(each.is_boolean() ? each.get<bool>() : each.get<int64_t>() != 0);
  }
}

// Whether some layer looks back over a part of the sequence alone, and how far.
void ReadWindow(const TypeDefaults& defaults, const json& config, ModelKeys* keys, int64_t layers,
                int64_t* window) {
  int64_t width = defaults.window;
  // Null switches it off, which is not what absence does.
  if (config.contains("sliding_window") && config["sliding_window"].is_null()) width = 0;
  keys->Whole("sliding_window", &width);
  bool used = width > 0 && !defaults.switches_window && defaults.window > 0;
  if (defaults.switches_window) {
    keys->Switch("use_sliding_window", &used);
    int64_t full = defaults.window > 0 ? 28 : 0;
    keys->Whole("max_window_layers", &full);
    used = used && width > 0 && full < layers;
    if (keys->Find("use_sliding_window") == nullptr) used = false;
  } else if (const json* given = keys->Find("use_sliding_window"); given != nullptr && *given != false) {
    keys->Wrong("use_sliding_window", absl::StrCat("which no ", std::string(defaults.type), " has"));
  }
  if (const json* types = keys->Find("layer_types"); types != nullptr) {
    if (!types->is_array() || types->size() != static_cast<size_t>(std::max<int64_t>(layers, 0)))
      return keys->Wrong("layer_types", "not a list with a word for each layer");
    bool slides = false;
    for (const json& type : *types) {
      if (type == "sliding_attention") {
        slides = true;
      } else if (type != "full_attention") {
        return keys->Wrong("layer_types", "and full_attention alone is computed");
      }
    }
    if (defaults.switches_window) used = slides;
    if (slides && width <= 0) return keys->Wrong("layer_types", "without a sliding_window");
  }
  *window = used ? width : 0;
}

absl::Status Validate(const LlamaConfig& c) {
  for (const absl::Status& status :
       {CheckSize("num_hidden_layers", c.layers, 10'000), CheckSize("hidden_size", c.width, 1 << 20),
        CheckSize("num_attention_heads", c.heads, 1 << 16),
        CheckSize("num_key_value_heads", c.key_heads, 1 << 16), CheckSize("head_dim", c.depth, 1 << 16),
        CheckSize("intermediate_size", c.inner, 1 << 24),
        CheckSize("max_position_embeddings", c.positions, 1 << 28),
        CheckSize("vocab_size", c.vocab, int64_t{1} << 32)}) {
    RETURN_IF_ERROR(status);
  }
  if (c.heads % c.key_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model: num_attention_heads ", c.heads, " is not a multiple of num_key_value_heads ", c.key_heads));
  }
  if (c.depth % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: head_dim ", c.depth, " is odd: rotary positions turn pairs"));
  }
  if (!(c.attention_dropout >= 0 && c.attention_dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: attention_dropout ", c.attention_dropout, " is not in [0, 1)"));
  }
  for (const auto& [name, value] :
       {std::pair{"rms_norm_eps", c.epsilon}, {"initializer_range", c.deviation}}) {
    if (value >= 0 && value <= 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("model: ", name, " ", value, " is not in [0, 1]"));
  }
  return absl::OkStatus();
}

}  // namespace

double LlamaConfig::AttentionScale() const {
  return attention_multiplier > 0 ? attention_multiplier : 1.0 / std::sqrt(static_cast<double>(depth));
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
  const auto add_norm = [&](const std::string& name, int64_t width) { add(name + ".weight", width, 0, 1); };
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
    blocks.push_back({.name = absl::StrCat("layers.", i), .kind = "layer", .parameters = {}});
    if (!c.norms_results) add_norm("input_layernorm", c.width);
    add_linear("self_attn.q_proj", c.width, c.heads * c.depth, c.qkv_bias);
    add_linear("self_attn.k_proj", c.width, c.key_heads * c.depth, c.qkv_bias);
    add_linear("self_attn.v_proj", c.width, c.key_heads * c.depth, c.qkv_bias);
    add_linear("self_attn.o_proj", c.heads * c.depth, c.width, c.output_bias);
    if (c.qk_norm != QkNorm::kNone) {
      const bool of_all = c.qk_norm == QkNorm::kOfAll;
      add_norm("self_attn.q_norm", of_all ? c.heads * c.depth : c.depth);
      add_norm("self_attn.k_norm", of_all ? c.key_heads * c.depth : c.depth);
    }
    add_norm("post_attention_layernorm", c.width);
    add_linear("mlp.gate_proj", c.width, c.inner, c.mlp_bias);
    add_linear("mlp.up_proj", c.width, c.inner, c.mlp_bias);
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
  decoder.shape = {.layers = c.layers,
                   .width = c.width,
                   .inner = c.inner,
                   .vocab = c.vocab,
                   .heads = c.heads,
                   .key_heads = c.key_heads,
                   .depth = c.depth,
                   .token_table = "embed_tokens.weight",
                   .position_table = "",
                   .matrices_before_attention = 3,
                   .head_block = c.tied ? 0 : static_cast<int>(c.layers) + 1,
                   .head = c.tied ? "embed_tokens.weight" : "lm_head.weight"};
  DecoderFunction& f = decoder.function;
  f.norm = DecoderFunction::Norm::kRootMeanSquare;
  f.epsilon = c.epsilon;
  if (c.norms_results) {
    f.attention_result_norm = "post_attention_layernorm";
    f.inner_result_norm = "post_feedforward_layernorm";
  } else {
    f.attention_norm = "input_layernorm";
    f.inner_norm = "post_attention_layernorm";
  }
  f.last_norm = "norm";
  f.embedding_scale = c.embedding_multiplier;
  f.residual_scale = c.residual_multiplier;
  f.logits_divisor = c.logits_scaling;
  f.query = "self_attn.q_proj";
  f.key = "self_attn.k_proj";
  f.value = "self_attn.v_proj";
  if (c.qk_norm != QkNorm::kNone) {
    f.query_norm = "self_attn.q_norm";
    f.key_norm = "self_attn.k_norm";
  }
  f.output = "self_attn.o_proj";
  f.gate = "mlp.gate_proj";
  f.up = "mlp.up_proj";
  f.down = "mlp.down_proj";
  f.activation = kernels::Activation::kSilu;
  f.scales.assign(static_cast<size_t>(c.layers), c.AttentionScale());
  f.frequencies = c.rope.Frequencies(c.depth);
  f.turns = c.turns;
  decoder.blocks = BlocksOfLlama(whole);
  return decoder;
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

  std::optional<Decoder> decoder() const override { return DecoderOf(config_); }
  const LlamaConfig* llama() const override { return &config_; }
  std::vector<std::string> AdapterTargets() const override { return {"q_proj", "v_proj"}; }
  std::vector<BlockDescription> Blocks() const override { return BlocksOfLlama(config_); }
  ModelLayout Layout() const override {
    ModelLayout layout = LayoutOf(Blocks());
    layout.prefix = kPrefix;
    layout.passed_over = {".rotary_emb.inv_freq"};
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
      const int64_t in_attention = 2 * c.width * (c.heads + c.key_heads) * c.depth,
                    in_between = 3 * c.width * c.inner;
      products.push_back({.stage = absl::StrCat("layers.", i),
                          .block = blocks.layer + static_cast<int>(i),
                          .parameters = in_attention + in_between,
                          .attention_width = c.heads * c.depth});
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

// In fp32, rounded where transformers does: a last bit of a frequency is a hundredth of a turn at position
// 100,000.
std::vector<float> Rope::Frequencies(int64_t depth) const {
  std::vector<float> all;
  for (int64_t pair = 0; pair < depth / 2; ++pair) {
    const float power = static_cast<float>(2 * pair) / static_cast<float>(depth);
    const auto raised = static_cast<float>(std::pow(theta, static_cast<double>(power)));
    float each = 1.0F / raised;
    if (kind == Kind::kLinear) each /= static_cast<float>(factor);
    if (kind == Kind::kLlama3) {
      const auto original = static_cast<double>(original_context);
      const float length = static_cast<float>(2 * std::numbers::pi) / each;
      const auto longest = static_cast<float>(original / low), shortest = static_cast<float>(original / high);
      if (length > longest) {
        each /= static_cast<float>(factor);
      } else if (length >= shortest) {
        const float smooth = (static_cast<float>(original) / length - static_cast<float>(low)) /
                             static_cast<float>(high - low);
        each = (1.0F - smooth) * each / static_cast<float>(factor) + smooth * each;
      }
    }
    all.push_back(each);
  }
  return all;
}

bool IsLlamaType(const std::string& model_type) { return DefaultsOf(model_type) != nullptr; }

nlohmann::json LlamaConfig::ToJson() const {
  nlohmann::json json = ToPublished();
  json.erase("architectures");
  json["architecture"] = "llama";
  if (tile_rows > 0) json[kTileRowsKey] = tile_rows;
  return json;
}

nlohmann::ordered_json LlamaConfig::ToPublished() const {
  const TypeDefaults& defaults = *DefaultsOf(type);
  nlohmann::ordered_json json = {{"architectures", {defaults.architecture}},
                                 {"model_type", type},
                                 {"vocab_size", vocab},
                                 {"hidden_size", width},
                                 {"intermediate_size", inner},
                                 {"num_hidden_layers", layers},
                                 {"num_attention_heads", heads},
                                 {"num_key_value_heads", key_heads},
                                 {"head_dim", depth},
                                 {"hidden_act", "silu"},
                                 {"max_position_embeddings", positions},
                                 {"initializer_range", deviation},
                                 {"rms_norm_eps", epsilon},
                                 {"attention_dropout", attention_dropout},
                                 {"tie_word_embeddings", tied},
                                 {"rope_theta", rope.theta},
                                 {"rope_scaling", nullptr}};
  if (rope.kind == Rope::Kind::kLinear)
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope.factor}};
  if (rope.kind == Rope::Kind::kLlama3) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", rope.factor},
                            {"low_freq_factor", rope.low},
                            {"high_freq_factor", rope.high},
                            {"original_max_position_embeddings", rope.original_context}};
  }
  if (defaults.attention_bias) json["attention_bias"] = qkv_bias;
  if (defaults.mlp_bias) json["mlp_bias"] = mlp_bias;
  if (type == "granite") {
    json["embedding_multiplier"] = embedding_multiplier;
    json["residual_multiplier"] = residual_multiplier;
    json["attention_multiplier"] = attention_multiplier;
    json["logits_scaling"] = logits_scaling;
  }
  if (!turns.empty()) {
    json["no_rope_layers"] = nlohmann::ordered_json::array();
    for (const bool each : turns) json["no_rope_layers"].push_back(each ? 1 : 0);
  }
  for (const auto& [key, value] : kept.items()) json[key] = value;
  return json;
}

absl::StatusOr<LlamaConfig> LlamaConfigFromJson(const nlohmann::json& json, std::vector<std::string>* notes) {
  if (!json.is_object()) return absl::InvalidArgumentError("model: not a JSON object");
  ModelKeys keys(json);
  const nlohmann::json* type = keys.Find("model_type");
  const TypeDefaults* defaults =
      type != nullptr && type->is_string() ? DefaultsOf(type->get<std::string>()) : nullptr;
  if (defaults == nullptr) return absl::InvalidArgumentError("model: model_type is none of Llama's family");
  keys.LookAtUnknown(FunctionKeys(), {"pretraining_tp", "is_llama_config", "transformers.js_config"}, kMeant,
                     notes);
  keys.RefuseOtherForms();
  LlamaConfig c;
  c.type = defaults->type;
  keys.Needed("vocab_size", &c.vocab);
  keys.Needed("hidden_size", &c.width);
  keys.Needed("intermediate_size", &c.inner);
  keys.Needed("num_hidden_layers", &c.layers);
  keys.Needed("num_attention_heads", &c.heads);
  c.key_heads = defaults->key_heads > 0 ? defaults->key_heads : c.heads;
  keys.Whole("num_key_value_heads", &c.key_heads);
  if (keys.status().ok() && c.heads < 1) keys.Wrong("num_attention_heads", "not 1 or more");
  RETURN_IF_ERROR(keys.status());
  c.depth = defaults->depth > 0 ? defaults->depth : c.width / c.heads;
  keys.Whole("head_dim", &c.depth);
  c.positions = defaults->positions;
  keys.Whole("max_position_embeddings", &c.positions);
  c.epsilon = defaults->epsilon;
  keys.Number("rms_norm_eps", &c.epsilon);
  keys.Number("initializer_range", &c.deviation);
  keys.Number("attention_dropout", &c.attention_dropout);
  c.tied = defaults->tied;
  keys.Switch("tie_word_embeddings", &c.tied);
  if (const nlohmann::json* act = keys.Find("hidden_act");
      act != nullptr && *act != "silu" && *act != "swish")
    keys.Wrong("hidden_act", "and silu alone is computed");
  bool crosses = false;
  keys.Switch("add_cross_attention", &crosses);
  if (crosses) keys.Wrong("add_cross_attention", "and this model has no encoder to look at");
  // Where the model_type has no such key, what it always has is the one answer.
  c.qkv_bias = defaults->qkv_bias;
  keys.Switch("attention_bias", &c.qkv_bias);
  if (defaults->attention_bias) {
    c.output_bias = c.qkv_bias;
  } else if (c.qkv_bias != defaults->qkv_bias) {
    keys.Wrong("attention_bias", absl::StrCat("which no ", c.type, " has"));
  }
  keys.Switch("mlp_bias", &c.mlp_bias);
  if (c.mlp_bias && !defaults->mlp_bias) keys.Wrong("mlp_bias", absl::StrCat("which no ", c.type, " has"));
  c.qk_norm = defaults->qk_norm;
  c.norms_results = c.type == "olmo2";
  c.rope.theta = defaults->theta;
  ReadMultipliers(&keys, &c);
  ReadTurns(&keys, &c);
  ReadTileRows(c.vocab, &keys, &c.tile_rows);
  ReadRope(&keys, &c.rope);
  ReadWindow(*defaults, json, &keys, c.layers, &c.window);
  for (const char* key : kKeptKeys) {
    if (json.contains(key)) c.kept[key] = json[key];
  }
  if (!json.contains("pad_token_id") && defaults->padding >= 0 && defaults->padding < c.vocab)
    c.kept["pad_token_id"] = defaults->padding;
  RETURN_IF_ERROR(keys.status());
  RETURN_IF_ERROR(Validate(c));
  if (c.window > 0 && c.window < c.positions && notes != nullptr) {
    notes->push_back(
        absl::StrCat("model: sliding_window ", c.window,
                     ": sequences are at most so long, where every position sees all before it"));
  }
  return c;
}

std::shared_ptr<const LanguageModel> DescribeLlama(const LlamaConfig& config) {
  return std::make_shared<Llama>(config);
}

}  // namespace penstock::models
