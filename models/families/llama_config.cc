// Llama's config.json: read, written and refused.
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "models/families/llama.h"
#include "models/families/model_keys.h"
#include "models/families/vocabulary_cut.h"
#include "zero/config/config_json.h"

namespace penstock::models {
namespace {

using nlohmann::json;

using QkNorm = LlamaConfig::QkNorm;

// Which layers have a window where layer_types does not say.
enum class Windows : uint8_t {
  kNone,
  kAll,
  kSwitched,     // use_sliding_window: those from max_window_layers on
  kUnturned,     // use_sliding_window: those without positions
  kAllSwitched,  // use_sliding_window: all
  kAllButNth,    // all but every sliding_window_pattern-th
};

// What a model_type has where its config.json says nothing, as transformers.
struct TypeDefaults {
  std::string_view type;
  const char* architecture;
  int64_t heads = 0;      // 0: config.json has to say it
  int64_t key_heads = 0;  // 0: as many as heads
  int64_t depth = 0;      // 0: width / heads
  int64_t vocab = 0;      // 0: config.json has to say it
  int64_t positions = 2048;
  Windows windows = Windows::kNone;
  int64_t window = 0;           // of sliding_window
  int64_t pattern = 0;          // of sliding_window_pattern
  bool attention_bias = false;  // the key is there; of all four maps
  bool qkv_bias = false;        // always, or with attention_bias where that key is absent
  bool mlp_bias = false;        // the key is there
  QkNorm qk_norm = QkNorm::kNone;
  bool norms_inputs = true, norms_results = false;
  bool phi = false, gemma = false, sinks = false;
  double score_cap = 0, logit_cap = 0;
  double theta = 10000;
  double epsilon = 1e-6;
  bool tied = false;
  int64_t padding = -1;  // of pad_token_id
};
constexpr auto kTypes = std::to_array<TypeDefaults>(
    {{.type = "llama", .architecture = "LlamaForCausalLM", .attention_bias = true, .mlp_bias = true},
     {.type = "mistral",
      .architecture = "MistralForCausalLM",
      .key_heads = 8,
      .positions = 131072,
      .windows = Windows::kAll,
      .window = 4096},
     {.type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .key_heads = 32,
      .positions = 32768,
      .windows = Windows::kSwitched,
      .window = 4096,
      .qkv_bias = true},
     {.type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .key_heads = 32,
      .depth = 128,
      .positions = 32768,
      .windows = Windows::kSwitched,
      .window = 4096,
      .attention_bias = true,
      .qk_norm = QkNorm::kOfHeads},
     {.type = "mixtral",
      .architecture = "MixtralForCausalLM",
      .key_heads = 8,
      .positions = 131072,
      .windows = Windows::kAll,
      .theta = 1e6,
      .epsilon = 1e-5},
     {.type = "qwen2_moe",
      .architecture = "Qwen2MoeForCausalLM",
      .key_heads = 16,
      .positions = 32768,
      .windows = Windows::kSwitched,
      .window = 4096,
      .qkv_bias = true},
     {.type = "qwen3_moe",
      .architecture = "Qwen3MoeForCausalLM",
      .key_heads = 4,
      .positions = 32768,
      .windows = Windows::kAllSwitched,
      .window = 4096,
      .attention_bias = true,
      .qk_norm = QkNorm::kOfHeads},
     {.type = "olmoe",
      .architecture = "OlmoeForCausalLM",
      .positions = 4096,
      .attention_bias = true,
      .qk_norm = QkNorm::kOfAll,
      .epsilon = 1e-5,
      .padding = 1},
     {.type = "granitemoe", .architecture = "GraniteMoeForCausalLM", .attention_bias = true},
     {.type = "gpt_oss",
      .architecture = "GptOssForCausalLM",
      .heads = 64,
      .key_heads = 8,
      .depth = 64,
      .vocab = 201088,
      .positions = 131072,
      .windows = Windows::kAllButNth,
      .window = 128,
      .pattern = 2,
      .attention_bias = true,
      .qkv_bias = true,
      .sinks = true,
      .theta = 150000,
      .epsilon = 1e-5},
     {.type = "deepseek_v2", .architecture = "DeepseekV2ForCausalLM", .attention_bias = true},
     {.type = "deepseek_v3",
      .architecture = "DeepseekV3ForCausalLM",
      .positions = 4096,
      .attention_bias = true},
     {.type = "smollm3",
      .architecture = "SmolLM3ForCausalLM",
      .key_heads = 4,
      .positions = 32768,
      .windows = Windows::kUnturned,
      .attention_bias = true,
      .mlp_bias = true,
      .theta = 2e6,
      .tied = true,
      .padding = 128004},
     {.type = "granite", .architecture = "GraniteForCausalLM", .attention_bias = true, .mlp_bias = true},
     {.type = "olmo2",
      .architecture = "Olmo2ForCausalLM",
      .attention_bias = true,
      .qk_norm = QkNorm::kOfAll,
      .norms_inputs = false,
      .norms_results = true,
      .epsilon = 1e-5,
      .padding = 1},
     {.type = "phi3",
      .architecture = "Phi3ForCausalLM",
      .positions = 4096,
      .windows = Windows::kAll,
      .phi = true,
      .epsilon = 1e-5,
      .padding = 32000},
     {.type = "gemma2",
      .architecture = "Gemma2ForCausalLM",
      .key_heads = 4,
      .depth = 256,
      .positions = 8192,
      .windows = Windows::kAllButNth,
      .window = 4096,
      .pattern = 2,
      .attention_bias = true,
      .norms_results = true,
      .gemma = true,
      .score_cap = 50,
      .logit_cap = 30,
      .tied = true,
      .padding = 0},
     {.type = "gemma3_text",
      .architecture = "Gemma3ForCausalLM",
      .heads = 8,
      .key_heads = 4,
      .depth = 256,
      .vocab = 262208,
      .positions = 131072,
      .windows = Windows::kAllButNth,
      .window = 4096,
      .pattern = 6,
      .attention_bias = true,
      .qk_norm = QkNorm::kOfHeads,
      .norms_results = true,
      .gemma = true,
      .theta = 1e6,
      .tied = true,
      .padding = 0}});
constexpr const char* kGemma3 = "gemma3_text";  // whose layers with a window have positions of their own
constexpr double kLocalTheta = 10000;           // of these
constexpr const char* kPredictsFurther = "deepseek_v3";  // in layers behind the last (multi-token prediction)

const TypeDefaults* DefaultsOf(std::string_view type) {
  const auto found =
      std::find_if(kTypes.begin(), kTypes.end(), [type](const TypeDefaults& t) { return t.type == type; });
  return found == kTypes.end() ? nullptr : &*found;
}

constexpr const char* kKeptKeys[] = {"bos_token_id",   "eos_token_id",          "pad_token_id",
                                     "sliding_window", "use_sliding_window",    "max_window_layers",
                                     "layer_types",    "sliding_window_pattern"};

// Of Gemma alone, and of Phi alone: in a model of another type, which would not use them, they must be
// absent.
constexpr const char* kGemmaKeys[] = {"hidden_activation",           "query_pre_attn_scalar",
                                      "final_logit_softcapping",     "attn_logit_softcapping",
                                      "use_bidirectional_attention", "rope_local_base_freq",
                                      "sliding_window_pattern"};
constexpr const char* kPhiKeys[] = {"resid_pdrop", "embd_pdrop"};

// ---- config.json.

const std::vector<std::string_view>& FunctionKeys() {
  static const auto& keys = *new std::vector<std::string_view>{"num_local_experts",
                                                               "num_experts",
                                                               "num_experts_per_tok",
                                                               "moe_intermediate_size",
                                                               "shared_expert_intermediate_size",
                                                               "norm_topk_prob",
                                                               "decoder_sparse_step",
                                                               "mlp_only_layers",
                                                               "clip_qkv",
                                                               "n_routed_experts",
                                                               "n_shared_experts",
                                                               "n_group",
                                                               "topk_group",
                                                               "topk_method",
                                                               "scoring_func",
                                                               "routed_scaling_factor",
                                                               "moe_layer_freq",
                                                               "first_k_dense_replace",
                                                               "num_nextn_predict_layers",
                                                               "num_mtp_layers",
                                                               "kv_lora_rank",
                                                               "q_lora_rank",
                                                               "qk_nope_head_dim",
                                                               "qk_rope_head_dim",
                                                               "v_head_dim",
                                                               "rope_interleave",
                                                               "swiglu_limit",
                                                               "swiglu_alpha",
                                                               "qkv_bias",
                                                               "model_type",
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
                                                               "original_max_position_embeddings",
                                                               "no_rope_layers",
                                                               "no_rope_layer_interval",
                                                               "embedding_multiplier",
                                                               "residual_multiplier",
                                                               "attention_multiplier",
                                                               "logits_scaling",
                                                               "hidden_activation",
                                                               "query_pre_attn_scalar",
                                                               "final_logit_softcapping",
                                                               "attn_logit_softcapping",
                                                               "use_bidirectional_attention",
                                                               "rope_local_base_freq",
                                                               "sliding_window_pattern",
                                                               "resid_pdrop",
                                                               "embd_pdrop",
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

bool IsGranite(std::string_view type) { return type == "granite" || type == "granitemoe"; }

// Granite's multipliers. In a model of another type, which would not use them, each must be 1 or absent.
void ReadMultipliers(ModelKeys* keys, LlamaConfig* c) {
  const bool has_them = IsGranite(c->type);
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

// DeepSeek's attention, and the layers behind the last that predict further tokens.
void ReadLatents(ModelKeys* keys, LlamaConfig* c) {
  ReadLatent(c->type, keys, &c->latent);
  if (c->type == kPredictsFurther) {
    c->passed_layers = 1;
    for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"})
      keys->Whole(key, &c->passed_layers);
  }
  if (c->passed_layers < 0 || c->passed_layers > 1000)
    keys->Fail(absl::StrCat("model: num_nextn_predict_layers is ", c->passed_layers, ", not from 0 to 1000"));
  if (!IsLatentType(c->type)) return;
  // What files have as head_dim is the same, or of no effect.
  c->depth = c->latent.shape.turned;
  if (c->key_heads != c->heads)
    keys->Wrong("num_key_value_heads",
                absl::StrCat("and a ", c->type, " has as many as num_attention_heads ", c->heads));
}

// What transformers takes for a gpt_oss whose config.json says nothing of positions.
Rope GptOssRope() {
  Rope rope;
  rope.kind = Rope::Kind::kYarn;
  rope.theta = 150000;
  rope.factor = 32;
  rope.truncate = false;
  rope.original_context = 4096;
  return rope;
}

// Which layers look at a part of the sequence alone, and how long it is.
void ReadWindows(const TypeDefaults& defaults, ModelKeys* keys, LlamaConfig* c) {
  const std::string type(defaults.type);
  const bool switched = defaults.windows == Windows::kSwitched || defaults.windows == Windows::kAllSwitched ||
                        defaults.windows == Windows::kUnturned;
  int64_t width = defaults.window, full = 28, pattern = defaults.pattern;
  if (keys->IsNull("sliding_window")) width = 0;
  keys->Whole("sliding_window", &width);
  keys->Whole("max_window_layers", &full);
  keys->Whole("sliding_window_pattern", &pattern);
  bool used = defaults.windows != Windows::kNone;
  if (switched) {
    used = false;
    keys->Switch("use_sliding_window", &used);
  } else if (const json* given = keys->Find("use_sliding_window"); given != nullptr && *given != false) {
    keys->Wrong("use_sliding_window", absl::StrCat("which no ", type, " has"));
  }
  if (used && width <= 0 && keys->Find("sliding_window") != nullptr)
    return keys->Wrong("sliding_window", "not 1 or more");
  used = used && width > 0;
  if (defaults.windows == Windows::kAllButNth) {
    if (width == 0) return keys->Fail("model: sliding_window is null, which no layer with a window can have");
    if (pattern < 1) return keys->Wrong("sliding_window_pattern", "not 1 or more");
    if (defaults.type == "gemma2" && pattern != 2)
      return keys->Wrong("sliding_window_pattern", "and transformers takes 2 for gemma2");
  }
  std::vector<bool> slides;
  for (int64_t i = 0; used && i < c->layers; ++i) {
    slides.push_back(defaults.windows == Windows::kAll           ? true
                     : defaults.windows == Windows::kAllSwitched ? true
                     : defaults.windows == Windows::kSwitched    ? i >= full
                     : defaults.windows == Windows::kUnturned    ? !c->Turns(i)
                                                                 : (i + 1) % pattern != 0);
  }
  if (const json* types = keys->Find("layer_types"); types != nullptr) {
    if (!types->is_array() || types->size() != static_cast<size_t>(std::max<int64_t>(c->layers, 0)))
      return keys->Wrong("layer_types", "not a list with a word for each layer");
    std::vector<bool> given;
    for (const json& each : *types) {
      if (each != "sliding_attention" && each != "full_attention")
        return keys->Wrong("layer_types", "and full_attention and sliding_attention alone are computed");
      given.push_back(each == "sliding_attention");
    }
    const bool some = std::find(given.begin(), given.end(), true) != given.end();
    if (some && !used)
      return keys->Wrong("layer_types", defaults.windows == Windows::kNone
                                            ? absl::StrCat("and no ", type, " has a window")
                                        : switched ? "without use_sliding_window and a sliding_window"
                                                   : "without a sliding_window");
    if (used && defaults.windows == Windows::kAll && given != slides)
      return keys->Wrong("layer_types", absl::StrCat("and every layer of a ", type, " has its window"));
    if (used) slides = given;
  }
  if (std::find(slides.begin(), slides.end(), true) == slides.end()) return;
  c->window = width;
  c->slides = slides;
}

// Gemma's scalars and its activation, and Phi's dropouts; which no other type has.
void ReadTypesOwn(const TypeDefaults& defaults, ModelKeys* keys, LlamaConfig* c) {
  const auto refuse = [&](const char* key) {
    const json* given = keys->Find(key);
    if (given != nullptr && *given != false && *given != 0)
      keys->Wrong(key, absl::StrCat("which no ", c->type, " has"));
  };
  if (defaults.phi) {
    for (const char* key : kPhiKeys) {
      double dropout = 0;
      keys->Number(key, &dropout);
      if (dropout != 0) keys->Wrong(key, "and dropout of probabilities alone is computed");
    }
  }
  if (!defaults.gemma) {
    for (const char* key : kGemmaKeys) refuse(key);
    if (const json* act = keys->Find("hidden_act"); act != nullptr && *act != "silu" && *act != "swish")
      keys->Wrong("hidden_act", "and silu alone is computed");
    return;
  }
  for (const char* key : {"hidden_activation", "hidden_act"}) {
    const json* act = keys->Find(key);
    if (act != nullptr && *act != "gelu_pytorch_tanh" && *act != "gelu_new")
      keys->Wrong(key, "and gelu_pytorch_tanh alone is computed");
  }
  c->query_scalar = 256;
  keys->Number("query_pre_attn_scalar", &c->query_scalar);
  if (!(c->query_scalar > 0)) keys->Wrong("query_pre_attn_scalar", "not above 0");
  for (const auto& [key, cap] :
       {std::pair{"attn_logit_softcapping", &c->score_cap}, {"final_logit_softcapping", &c->logit_cap}}) {
    keys->Number(key, cap);
    if (!(*cap >= 0)) keys->Wrong(key, "not above 0");
    if (*cap == 0 && keys->Find(key) != nullptr) keys->Wrong(key, "not above 0");
  }
  if (c->type == kGemma3 && c->score_cap != 0)
    keys->Wrong("attn_logit_softcapping", "which transformers reads of no gemma3");
  bool both_ways = false;
  keys->Switch("use_bidirectional_attention", &both_ways);
  if (both_ways) keys->Wrong("use_bidirectional_attention", "and positions look back alone");
}

absl::Status Validate(const LlamaConfig& c) {
  if (IsLatentType(c.type)) RETURN_IF_ERROR(CheckLatent(c.latent));
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
  const int64_t turning = c.rope.Turning(c.depth);
  if (turning % 2 != 0 || turning == 0) {
    return absl::InvalidArgumentError(absl::StrCat("model: of head_dim ", c.depth, " rotary positions turn ",
                                                   turning,
                                                   " elements, which is odd or none: they turn pairs"));
  }
  for (const std::vector<double>* factors : {&c.rope.short_factors, &c.rope.long_factors}) {
    if (c.rope.kind != Rope::Kind::kLongRope || static_cast<int64_t>(factors->size()) == turning / 2)
      continue;
    return absl::InvalidArgumentError(
        absl::StrCat("model: rope_scaling: short_factor and long_factor are not lists of ", turning / 2,
                     " numbers, one for each pair that turns"));
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
  nlohmann::ordered_json json = {
      {"architectures", {defaults.architecture}},
      {"model_type", type},
      {"vocab_size", vocab},
      {"hidden_size", width},
      {"intermediate_size", inner},
      {"num_hidden_layers", layers},
      {"num_attention_heads", heads},
      {"num_key_value_heads", key_heads},
      {"head_dim", depth},
      {defaults.gemma ? "hidden_activation" : "hidden_act", tangent_gelu ? "gelu_pytorch_tanh" : "silu"},
      {"max_position_embeddings", positions},
      {"initializer_range", deviation},
      {"rms_norm_eps", epsilon},
      {"attention_dropout", attention_dropout},
      {"tie_word_embeddings", tied},
      {"rope_theta", rope.theta},
      {"rope_scaling", rope.ToJson()}};
  if (rope.part != 1) json["partial_rotary_factor"] = rope.part;
  if (window_rope.has_value()) json["rope_local_base_freq"] = window_rope->theta;
  if (defaults.phi && rope.original_context > 0)
    json["original_max_position_embeddings"] = rope.original_context;
  if (defaults.gemma) {
    const auto cap = [](double value) {
      return value > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
    };
    json["query_pre_attn_scalar"] = query_scalar;
    json["attn_logit_softcapping"] = cap(score_cap);
    json["final_logit_softcapping"] = cap(logit_cap);
  }
  if (defaults.attention_bias) json["attention_bias"] = qkv_bias;
  if (defaults.mlp_bias) json["mlp_bias"] = mlp_bias;
  if (type == "qwen2_moe") json["qkv_bias"] = qkv_bias;
  if (IsGranite(type)) {
    json["embedding_multiplier"] = embedding_multiplier;
    json["residual_multiplier"] = residual_multiplier;
    json["attention_multiplier"] = attention_multiplier;
    json["logits_scaling"] = logits_scaling;
  }
  WriteMixture(type, mixture, &json);
  WriteLatent(type, latent, &json);
  if (type == kPredictsFurther) json["num_nextn_predict_layers"] = passed_layers;
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
  keys.LookAtUnknown(
      FunctionKeys(),
      {"pretraining_tp", "is_llama_config", "transformers.js_config", "cache_implementation",
       "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "experts_per_token",
       "initial_context_length", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"},
      kMeant, notes);
  keys.RefuseOtherForms();
  LlamaConfig c;
  c.type = defaults->type;
  const auto needed = [&keys](const char* key, int64_t by_default, int64_t* value) {
    *value = by_default;
    if (by_default > 0) return keys.Whole(key, value);
    keys.Needed(key, value);
  };
  needed("vocab_size", defaults->vocab, &c.vocab);
  keys.Needed("hidden_size", &c.width);
  keys.Needed("intermediate_size", &c.inner);
  keys.Needed("num_hidden_layers", &c.layers);
  needed("num_attention_heads", defaults->heads, &c.heads);
  c.key_heads = defaults->key_heads > 0 ? defaults->key_heads : c.heads;
  keys.Whole("num_key_value_heads", &c.key_heads);
  if (keys.status().ok() && c.heads < 1) keys.Wrong("num_attention_heads", "not 1 or more");
  RETURN_IF_ERROR(keys.status());
  RETURN_IF_ERROR(CheckSize("num_hidden_layers", c.layers, 10'000));
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
  if (c.type == "qwen2_moe") {
    keys.Switch("qkv_bias", &c.qkv_bias);
  } else if (bool given = defaults->qkv_bias; keys.Find("qkv_bias") != nullptr) {
    keys.Switch("qkv_bias", &given);
    if (given != c.qkv_bias) keys.Wrong("qkv_bias", absl::StrCat("which no ", c.type, " has"));
  }
  keys.Switch("mlp_bias", &c.mlp_bias);
  if (c.mlp_bias && IsLatentType(c.type)) keys.Wrong("mlp_bias", "which is not computed");
  if (c.mlp_bias && !defaults->mlp_bias) keys.Wrong("mlp_bias", absl::StrCat("which no ", c.type, " has"));
  c.qk_norm = defaults->qk_norm;
  c.norms_inputs = defaults->norms_inputs;
  c.norms_results = defaults->norms_results;
  c.joined = defaults->phi;
  c.sinks = defaults->sinks;
  c.norms_from_one = c.tangent_gelu = c.scales_embedding = defaults->gemma;
  c.score_cap = defaults->score_cap;
  c.logit_cap = defaults->logit_cap;
  for (const auto& [key, cap] :
       {std::pair{"attn_logit_softcapping", &c.score_cap}, {"final_logit_softcapping", &c.logit_cap}}) {
    if (keys.IsNull(key)) *cap = 0;
  }
  c.rope.theta = defaults->theta;
  ReadTypesOwn(*defaults, &keys, &c);
  ReadMultipliers(&keys, &c);
  ReadTurns(&keys, &c);
  ReadMixture(c.type, c.layers, c.inner, &keys, &c.mixture);
  ReadLatents(&keys, &c);
  ReadTileRows(c.vocab, &keys, &c.tile_rows);
  bool interleaved = false;
  keys.Switch("rope_interleaved", &interleaved);
  if (interleaved) keys.Wrong("rope_interleaved", "which is not computed");
  if (c.type == kGemma3) {
    c.window_rope.emplace();
    c.window_rope->theta = kLocalTheta;
    ReadRopes(c.positions, &keys, &c.rope, &*c.window_rope);
  } else {
    if (c.sinks && keys.Find("rope_scaling") == nullptr && keys.Find("rope_parameters") == nullptr)
      c.rope = GptOssRope();
    ReadRope({.takes_part = defaults->phi, .phi3 = defaults->phi}, c.positions, &keys, &c.rope);
  }
  ReadWindows(*defaults, &keys, &c);
  for (const char* key : kKeptKeys) {
    if (json.contains(key)) c.kept[key] = json[key];
  }
  if (!json.contains("pad_token_id") && defaults->padding >= 0 && defaults->padding < c.vocab)
    c.kept["pad_token_id"] = defaults->padding;
  RETURN_IF_ERROR(keys.status());
  RETURN_IF_ERROR(Validate(c));
  return c;
}

}  // namespace penstock::models
