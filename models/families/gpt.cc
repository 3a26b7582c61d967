#include "models/families/gpt.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "models/families/model_keys.h"
#include "models/families/vocabulary_cut.h"

namespace penstock::models {
namespace {

constexpr const char* kPrefix = "transformer.";

struct NamedActivation {
  std::string_view name;
  GptActivation value;
};
// The first name of a function is the one that is written.
constexpr auto kActivations = std::to_array<NamedActivation>({{"gelu", GptActivation::kGelu},
                                                              {"gelu_python", GptActivation::kGelu},
                                                              {"gelu_new", GptActivation::kGeluNew},
                                                              {"gelu_pytorch_tanh", GptActivation::kGeluNew},
                                                              {"gelu_python_tanh", GptActivation::kGeluNew},
                                                              {"gelu_accurate", GptActivation::kGeluNew},
                                                              {"gelu_fast", GptActivation::kGeluNew},
                                                              {"quick_gelu", GptActivation::kQuickGelu},
                                                              {"relu", GptActivation::kRelu},
                                                              {"silu", GptActivation::kSilu},
                                                              {"swish", GptActivation::kSilu},
                                                              {"tanh", GptActivation::kTanh}});

std::string NameOf(GptActivation activation) {
  for (const auto& [name, value] : kActivations) {
    if (value == activation) return std::string(name);
  }
  return "?";
}

const std::map<std::string, GptConfig>& Presets() {
  static const auto* presets = new std::map<std::string, GptConfig>{
      {"gpt-tiny", {4, 64, 4, 128}},     {"gpt-small", {8, 384, 6, 512}},
      {"gpt-125m", {12, 768, 12, 1024}}, {"gpt-350m", {24, 1024, 16, 1024}},
      {"gpt-1b", {24, 1792, 14, 1024}},  {"gpt-3b", {32, 2816, 22, 2048}},
      {"gpt-7b", {32, 4096, 32, 2048}},  {"gpt-13b", {40, 5120, 40, 2048}},
  };
  return *presets;
}

constexpr KeyAlias kAliases[] = {{"hidden_size", "n_embd"},
                                 {"max_position_embeddings", "n_positions"},
                                 {"num_attention_heads", "n_head"},
                                 {"num_hidden_layers", "n_layer"}};
// What people write for these.
constexpr KeyAlias kMeant[] = {{"resid_dropout", "resid_pdrop"},
                               {"activation", "activation_function"},
                               {"layer_norm_eps", "layer_norm_epsilon"},
                               {"scale_attn_by_inverse_layer_index", "scale_attn_by_inverse_layer_idx"}};

// What asks for another model than this one.
void RefuseOtherModels(ModelKeys* keys) {
  constexpr const char* kServed = "this model is GPT-2";
  const nlohmann::json* type = keys->Find("model_type");
  if (type != nullptr && *type != "gpt2") {
    keys->Wrong("model_type", absl::StrCat(kServed, ", of \"model_type\": \"gpt2\""));
  }
  bool tied = true, crosses = false;
  keys->Switch("tie_word_embeddings", &tied);
  if (!tied)
    keys->Wrong("tie_word_embeddings", "and this model has one embedding for input and output: tie them");
  keys->Switch("add_cross_attention", &crosses);
  if (crosses) keys->Wrong("add_cross_attention", "and this model has no encoder to look at");
  keys->RefuseOtherForms();
}

// Keys of GPT2Config that change the function, served or refused.
const std::vector<std::string_view>& FunctionKeys() {
  static const auto& keys = *new std::vector<std::string_view>{"n_layer",
                                                               "n_embd",
                                                               "n_head",
                                                               "n_positions",
                                                               "vocab_size",
                                                               "n_inner",
                                                               "resid_pdrop",
                                                               "embd_pdrop",
                                                               "attn_pdrop",
                                                               "activation_function",
                                                               "initializer_range",
                                                               "layer_norm_epsilon",
                                                               "model_type",
                                                               "scale_attn_weights",
                                                               "pruned_heads",
                                                               "scale_attn_by_inverse_layer_idx",
                                                               "tie_word_embeddings",
                                                               "reorder_and_upcast_attn",
                                                               "add_cross_attention",
                                                               "quantization_config",
                                                               kTileRowsKey};
  return keys;
}

}  // namespace

double GptConfig::AttentionScale(int64_t layer) const {
  const int64_t depth = width / heads;
  const double scale = scales_attention ? 1.0 / std::sqrt(static_cast<double>(depth)) : 1.0;
  return scales_attention_by_layer ? scale / static_cast<double>(layer + 1) : scale;
}

int64_t GptConfig::Parameters() const {
  return layers * (4 * width * width + 2 * width * Inner() + Inner() + 9 * width) +
         (vocab + context + 2) * width;
}

nlohmann::json GptConfig::ToJson() const {
  nlohmann::json json = {{"architecture", "gpt"}, {"n_layer", layers},      {"n_embd", width},
                         {"n_head", heads},       {"n_positions", context}, {"vocab_size", vocab},
                         {"resid_pdrop", dropout}};
  const GptConfig plain;
  if (embedding_dropout != dropout) json["embd_pdrop"] = embedding_dropout;
  if (attention_dropout != 0) json["attn_pdrop"] = attention_dropout;
  if (Inner() != 4 * width) json["n_inner"] = inner;
  if (epsilon != plain.epsilon) json["layer_norm_epsilon"] = epsilon;
  if (activation != plain.activation) json["activation_function"] = NameOf(activation);
  if (!scales_attention) json["scale_attn_weights"] = false;
  if (scales_attention_by_layer) json["scale_attn_by_inverse_layer_idx"] = true;
  if (attention_in_fp32) json["reorder_and_upcast_attn"] = true;
  if (deviation != plain.deviation) json["initializer_range"] = deviation;
  if (tile_rows > 0) json[kTileRowsKey] = tile_rows;
  return json;
}

nlohmann::ordered_json GptConfig::ToPublished() const {
  nlohmann::ordered_json json = {{"architectures", {"GPT2LMHeadModel"}},
                                 {"model_type", "gpt2"},
                                 {"n_layer", layers},
                                 {"n_embd", width},
                                 {"n_head", heads},
                                 {"n_positions", context},
                                 {"n_ctx", context},
                                 {"n_inner", nullptr},
                                 {"vocab_size", vocab},
                                 {"activation_function", NameOf(activation)},
                                 {"layer_norm_epsilon", epsilon},
                                 {"initializer_range", deviation},
                                 {"scale_attn_weights", scales_attention},
                                 {"scale_attn_by_inverse_layer_idx", scales_attention_by_layer},
                                 {"reorder_and_upcast_attn", attention_in_fp32},
                                 {"resid_pdrop", dropout},
                                 {"embd_pdrop", embedding_dropout},
                                 {"attn_pdrop", attention_dropout},
                                 {"tie_word_embeddings", true}};
  if (Inner() != 4 * width) json["n_inner"] = inner;
  return json;
}

absl::Status ValidateGptConfig(const GptConfig& config) {
  for (const absl::Status& status :
       {CheckSize("n_layer", config.layers, 10'000), CheckSize("n_embd", config.width, 1 << 20),
        CheckSize("n_head", config.heads, 1 << 16), CheckSize("n_positions", config.context, 1 << 24),
        CheckSize("n_inner", config.Inner(), 1 << 24),
        CheckSize("vocab_size", config.vocab, int64_t{1} << 32)}) {
    RETURN_IF_ERROR(status);
  }
  if (config.width % config.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: n_embd ", config.width, " is not a multiple of n_head ", config.heads));
  }
  for (const auto& [name, value] : {std::pair{"resid_pdrop", config.dropout},
                                    {"embd_pdrop", config.embedding_dropout},
                                    {"attn_pdrop", config.attention_dropout}}) {
    if (value >= 0 && value < 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("model: ", name, " ", value, " is not in [0, 1)"));
  }
  for (const auto& [name, value] :
       {std::pair{"layer_norm_epsilon", config.epsilon}, {"initializer_range", config.deviation}}) {
    if (value >= 0 && value <= 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("model: ", name, " ", value, " is not in [0, 1]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<GptConfig> GptConfigFromJson(const nlohmann::json& json, std::vector<std::string>* notes) {
  if (!json.is_object()) return absl::InvalidArgumentError("model: not a JSON object");
  GptConfig config;
  ModelKeys keys(json, kAliases);
  RefuseOtherModels(&keys);
  keys.LookAtUnknown(FunctionKeys(), {"n_ctx", "n_special", "predict_special_tokens"}, kMeant, notes);
  const bool published = keys.Find("model_type") != nullptr;
  if (published) {
    config.activation = GptActivation::kGeluNew;
    config.dropout = config.embedding_dropout = config.attention_dropout = 0.1;
  }
  keys.Needed("n_layer", &config.layers);
  keys.Needed("n_embd", &config.width);
  keys.Needed("n_head", &config.heads);
  keys.Needed("n_positions", &config.context);
  keys.Needed("vocab_size", &config.vocab);
  keys.Number("resid_pdrop", &config.dropout);
  if (!published) config.embedding_dropout = config.dropout;
  keys.Number("embd_pdrop", &config.embedding_dropout);
  keys.Number("attn_pdrop", &config.attention_dropout);
  keys.Whole("n_inner", &config.inner);
  if (keys.Find("n_inner") != nullptr && config.inner < 1) keys.Wrong("n_inner", "not 1 or more");
  if (config.inner == 4 * config.width) config.inner = 0;
  keys.Number("layer_norm_epsilon", &config.epsilon);
  keys.Number("initializer_range", &config.deviation);
  keys.Switch("scale_attn_weights", &config.scales_attention);
  keys.Switch("scale_attn_by_inverse_layer_idx", &config.scales_attention_by_layer);
  keys.Switch("reorder_and_upcast_attn", &config.attention_in_fp32);
  if (const nlohmann::json* given = keys.Find("activation_function"); given != nullptr) {
    const auto named =
        std::find_if(kActivations.begin(), kActivations.end(),
                     [given](const NamedActivation& a) { return *given == std::string(a.name); });
    if (named == kActivations.end()) {
      keys.Wrong("activation_function",
                 absl::StrCat("not one of ", absl::StrJoin(kActivations, ", ",
                                                           [](std::string* out, const NamedActivation& a) {
                                                             out->append(a.name);
                                                           })));
    } else {
      config.activation = named->value;
    }
  }
  ReadTileRows(config.vocab, &keys, &config.tile_rows);
  RETURN_IF_ERROR(keys.status());
  RETURN_IF_ERROR(ValidateGptConfig(config));
  return config;
}

std::optional<GptConfig> GptPreset(const std::string& name) {
  const auto it = Presets().find(name);
  return it == Presets().end() ? std::nullopt : std::optional<GptConfig>(it->second);
}

std::string GptPresetNames() {
  return absl::StrJoin(Presets(), ", ",
                       [](std::string* out, const auto& preset) { out->append(preset.first); });
}

// Every parameter of the model, once.
std::vector<BlockDescription> BlocksOfGpt(const GptConfig& config) {
  const int64_t d = config.width;
  const double drawn = config.deviation;
  const double projected = config.deviation / std::sqrt(2.0 * static_cast<double>(config.layers));
  std::vector<BlockDescription> blocks;
  std::vector<ParameterDescription>* to = nullptr;
  std::string prefix;
  const auto add_norm = [&](const std::string& name) {
    to->push_back({.name = name + ".weight", .published = prefix + name + ".weight", .rows = d, .mean = 1});
    to->push_back({.name = name + ".bias", .published = prefix + name + ".bias", .rows = d});
  };
  // Conv1D has them turned.
  const auto add_linear = [&](const std::string& name, int64_t in, int64_t out, double deviation) {
    to->push_back({.name = name + ".weight",
                   .published = prefix + name + ".weight",
                   .rows = out,
                   .columns = in,
                   .deviation = deviation,
                   .transposed = true});
    to->push_back({.name = name + ".bias", .published = prefix + name + ".bias", .rows = out});
  };
  const auto add_table = [&](const std::string& name, int64_t rows) {
    to->push_back({.name = name,
                   .published = prefix + name + ".weight",
                   .rows = rows,
                   .columns = d,
                   .deviation = drawn});
  };
  const VocabularyCut cut(config.vocab, config.tile_rows);
  prefix = kPrefix;
  if (cut.tiles() > 1) {
    AddTiles(cut, "embedding",
             {.name = "wte",
              .published = prefix + "wte.weight",
              .rows = config.vocab,
              .columns = d,
              .deviation = drawn},
             &blocks);
    // Two stages use it that compute different functions of the same shapes: it is like no other.
    blocks.push_back({.name = "positions", .kind = "", .parameters = {}});
    to = &blocks.back().parameters;
  } else {
    blocks.push_back({.name = "embedding", .kind = "embedding", .parameters = {}});
    to = &blocks.back().parameters;
    add_table("wte", config.vocab);
  }
  add_table("wpe", config.context);
  add_norm("ln_f");
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.push_back({.name = absl::StrCat("h.", i), .kind = "layer", .parameters = {}});
    to = &blocks.back().parameters;
    prefix = absl::StrCat(kPrefix, "h.", i, ".");
    add_norm("ln_1");
    add_linear("attn.c_attn", d, 3 * d, drawn);
    add_linear("attn.c_proj", d, d, projected);
    add_norm("ln_2");
    add_linear("mlp.c_fc", d, config.Inner(), drawn);
    add_linear("mlp.c_proj", config.Inner(), d, projected);
  }
  return blocks;
}
ModelLayout LayoutOfGpt(const GptConfig& config) {
  ModelLayout layout = LayoutOf(BlocksOfGpt(config));
  layout.prefix = kPrefix;
  layout.passed_over = {".attn.bias", ".attn.masked_bias"};  // causal masks
  return layout;
}

int FirstLayerOfGpt(const GptConfig& config) {
  const int tiles = VocabularyCut(config.vocab, config.tile_rows).tiles();
  return tiles == 1 ? 1 : tiles + 1;
}

namespace {

// The embedding is looked up first and multiplied with last.
std::vector<StageProducts> ProductsOf(const GptConfig& config) {
  const VocabularyCut cut(config.vocab, config.tile_rows);
  std::vector<StageProducts> products;
  for (int tile = 0; tile < cut.tiles(); ++tile)
    products.push_back({.stage = cut.StageOf("embed", tile), .block = tile});
  if (cut.tiles() > 1) products.push_back({.stage = "positions", .block = cut.tiles()});
  for (int64_t i = 0; i < config.layers; ++i) {
    const int64_t in_attention = 4 * config.width * config.width,
                  in_between = 2 * config.width * config.Inner();
    products.push_back({.stage = absl::StrCat("h.", i),
                        .block = FirstLayerOfGpt(config) + static_cast<int>(i),
                        .parameters = in_attention + in_between,
                        .attention_width = config.width});
  }
  if (cut.tiles() > 1) products.push_back({.stage = "norm", .block = cut.tiles()});
  for (int tile = 0; tile < cut.tiles(); ++tile) {
    products.push_back(
        {.stage = cut.StageOf("loss", tile), .block = tile, .parameters = cut.rows(tile) * config.width});
  }
  return products;
}

Decoder DecoderOf(const GptConfig& config) {
  GptConfig whole = config;  // its tensors are the same, wherever they lie
  whole.tile_rows = 0;
  Decoder decoder;
  decoder.shape = {.layers = config.layers,
                   .width = config.width,
                   .inner = config.Inner(),
                   .vocab = config.vocab,
                   .heads = config.heads,
                   .key_heads = config.heads,
                   .depth = config.width / config.heads,
                   .token_table = "wte",
                   .position_table = "wpe",
                   .matrices_before_attention = 1,
                   .head_block = 0,
                   .head = "wte"};
  DecoderFunction& f = decoder.function;
  f.norm = DecoderFunction::Norm::kLayer;
  f.epsilon = config.epsilon;
  f.attention_norm = "ln_1";
  f.inner_norm = "ln_2";
  f.last_norm = "ln_f";
  f.joined = "attn.c_attn";
  f.output = "attn.c_proj";
  f.up = "mlp.c_fc";
  f.down = "mlp.c_proj";
  f.activation = config.activation;
  for (int64_t layer = 0; layer < config.layers; ++layer) f.scales.push_back(config.AttentionScale(layer));
  decoder.blocks = BlocksOfGpt(whole);
  return decoder;
}

class Gpt : public LanguageModel {
 public:
  explicit Gpt(const GptConfig& config) : config_(config) {}

  int64_t vocabulary() const override { return config_.vocab; }
  int64_t context() const override { return config_.context; }
  int64_t usual_length() const override { return config_.context; }
  std::optional<Decoder> decoder() const override { return DecoderOf(config_); }
  const GptConfig* gpt() const override { return &config_; }
  std::vector<std::string> AdapterTargets() const override { return {"c_attn"}; }
  std::vector<BlockDescription> Blocks() const override { return BlocksOfGpt(config_); }
  ModelLayout Layout() const override { return LayoutOfGpt(config_); }
  std::vector<StageProducts> Products() const override { return ProductsOf(config_); }
  nlohmann::json ToJson() const override { return config_.ToJson(); }
  nlohmann::ordered_json ToPublished() const override { return config_.ToPublished(); }
  std::shared_ptr<const LanguageModel> WithVocabulary(int64_t vocabulary) const override {
    GptConfig config = config_;
    config.vocab = vocabulary;
    return DescribeGpt(config);
  }
  int64_t tile_rows() const override { return config_.tile_rows; }
  std::shared_ptr<const LanguageModel> WithTileRows(int64_t rows) const override {
    GptConfig config = config_;
    config.tile_rows = rows < config.vocab ? rows : 0;
    return DescribeGpt(config);
  }

 private:
  const GptConfig config_;
};

}  // namespace

std::shared_ptr<const LanguageModel> DescribeGpt(const GptConfig& config) {
  return std::make_shared<Gpt>(config);
}

}  // namespace penstock::models