#include "models/gpt.h"

#include <torch/nn/module.h>

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
#include "models/causal_attention.h"
#include "models/described_module.h"
#include "models/model_keys.h"
#include "models/vocabulary_tiles.h"
#include "zero/compute/libtorch/model.h"

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

torch::Tensor Activate(GptActivation activation, const torch::Tensor& x) {
  switch (activation) {
    case GptActivation::kGelu:
      return torch::gelu(x);
    case GptActivation::kGeluNew:
      return torch::gelu(x, "tanh");
    case GptActivation::kQuickGelu:
      return x * torch::sigmoid(x * 1.702);
    case GptActivation::kRelu:
      return torch::relu(x);
    case GptActivation::kSilu:
      return torch::silu(x);
    case GptActivation::kTanh:
      break;
  }
  return torch::tanh(x);
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

// LayerNorm over the last dimension in fp32, whatever the type of input and parameters: in bf16 its gradients
// are sums of thousands of rounded terms.
torch::Tensor Normalize(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                        double epsilon) {
  return torch::layer_norm(x.to(torch::kFloat32), {weight.size(0)}, weight.to(torch::kFloat32),
                           bias.to(torch::kFloat32), epsilon)
      .to(x.scalar_type());
}

// NAME.weight and NAME.bias.
template <typename Block>
torch::Tensor Norm(const Block& block, const std::string& name, const torch::Tensor& x, double epsilon) {
  return Normalize(x, block.Get(name + ".weight"), block.Get(name + ".bias"), epsilon);
}

torch::Tensor AtPositions(const torch::Tensor& tokens, const torch::Tensor& positions, torch::Dtype type) {
  return (tokens.to(torch::kFloat32) + positions.to(torch::kFloat32)).to(type);
}

torch::Tensor Embed(const GptConfig& config, const DescribedModule& block, const torch::Tensor& ids) {
  const torch::Tensor tokens = block.Get("wte"), positions = block.Get("wpe");
  // In fp32, so that the gradients of a token that occurs often are not summed in bf16.
  const torch::Tensor rows = torch::embedding(tokens.to(torch::kFloat32), ids);
  const torch::Tensor x = AtPositions(rows, positions.slice(0, 0, ids.size(1)), tokens.scalar_type());
  const double dropout = config.embedding_dropout;
  return dropout > 0 ? torch::dropout(x, dropout, block.is_training()) : x;
}

torch::Tensor Logits(const GptConfig& config, const DescribedModule& block, const torch::Tensor& x) {
  return torch::linear(Norm(block, "ln_f", x, config.epsilon), block.Get("wte")).to(torch::kFloat32);
}

// `index`: of the layer, from 0. One module computes all of them in turn.
double ScaleOf(const GptConfig& config, int64_t index) {
  const int64_t depth = config.width / config.heads;
  const double scale = config.scales_attention ? 1.0 / std::sqrt(static_cast<double>(depth)) : 1.0;
  return config.scales_attention_by_layer ? scale / static_cast<double>(index + 1) : scale;
}

// One layer, in training and in generation. `block` has the weights, in the order of their description;
// `attend` makes [..., width] of the queries, keys and values in [..., 3 * width]; `dropped` is dropout.
template <typename Block, typename Attend, typename Dropped>
torch::Tensor Layer(const GptConfig& config, Block& block, const torch::Tensor& x, Attend attend,
                    Dropped dropped) {
  const torch::Tensor mixed = attend(block.Linear("attn.c_attn", Norm(block, "ln_1", x, config.epsilon)));
  const torch::Tensor y = x + dropped(block.Linear("attn.c_proj", mixed));
  const torch::Tensor inner =
      block.Map(block.Linear("mlp.c_fc", Norm(block, "ln_2", y, config.epsilon)),
                [&config](const torch::Tensor& t) { return Activate(config.activation, t); });
  return y + dropped(block.Linear("mlp.c_proj", inner));
}

// Of whole sequences: x is [batch, length, width].
torch::Tensor TrainedLayer(const GptConfig& config, const DescribedModule& block, const torch::Tensor& x,
                           int64_t index) {
  const int64_t heads = config.heads;
  const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), depth = width / heads;
  const auto attend = [&](const torch::Tensor& joined) {
    torch::Tensor qkv = joined.view({batch, length, 3, heads, depth});
    if (config.attention_in_fp32) qkv = qkv.to(torch::kFloat32);
    const auto head = [&](int64_t i) {
      return qkv.select(2, i).transpose(1, 2).reshape({batch * heads, length, depth});
    };
    const double dropout = block.is_training() ? config.attention_dropout : 0;
    const torch::Tensor mixed = CausalAttention(head(0), head(1), head(2), ScaleOf(config, index), dropout)
                                    .view({batch, heads, length, depth});
    return mixed.to(x.scalar_type()).transpose(1, 2).reshape({batch, length, width});
  };
  return Layer(config, block, x, attend, [&](const torch::Tensor& t) {
    return config.dropout > 0 ? torch::dropout(t, config.dropout, block.is_training()) : t;
  });
}

// Every parameter of the model, once.
std::vector<BlockDescription> Describe(const GptConfig& config) {
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

// What transformers takes for others of its keys.
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

ModelLayout LayoutOfGpt(const GptConfig& config) {
  ModelLayout layout = LayoutOf(Describe(config));
  layout.prefix = kPrefix;
  layout.passed_over = {".attn.bias", ".attn.masked_bias"};  // causal masks
  return layout;
}

namespace {

// With the vocabulary in tiles: positions are added by a stage of their own.
void AddTiledEmbedding(const GptConfig& config, const VocabularyCut& cut, zero::Model* model) {
  AddEmbeddingTiles(cut, "wte", /*padding=*/-1, model);
  model->AddStage("positions", cut.tiles(),
                  [config](torch::nn::Module& module, const torch::Tensor& tokens, const zero::TensorBatch&) {
                    const auto& block = *module.as<DescribedModule>();
                    const torch::Tensor positions = block.Get("wpe").slice(0, 0, tokens.size(1));
                    const torch::Tensor x = AtPositions(tokens, positions, tokens.scalar_type());
                    const double dropout = config.embedding_dropout;
                    return dropout > 0 ? torch::dropout(x, dropout, block.is_training()) : x;
                  });
}

void AddTiledHead(const GptConfig& config, const VocabularyCut& cut, Head head, zero::Model* model) {
  const auto norm = [config](const DescribedModule& block, const torch::Tensor& x) {
    return Norm(block, "ln_f", x, config.epsilon);
  };
  AddLastNorm(cut.tiles(), norm, head, model);
  AddHeadTiles(cut, "wte", /*block=*/0, head, model);
}

void AddHead(const GptConfig& config, Head head, zero::Model* model) {
  if (head == Head::kLoss) {
    model->AddStage(
        "loss", 0,
        [config](torch::nn::Module& module, const torch::Tensor& x, const zero::TensorBatch& batch) {
          const torch::Tensor logits = Logits(config, *module.as<DescribedModule>(), x);
          return torch::nll_loss(torch::log_softmax(logits.view({-1, logits.size(-1)}), -1),
                                 batch.targets.view({-1}));
        });
  } else {
    model->AddStage("logits", 0,
                    [config](torch::nn::Module& module, const torch::Tensor& x, const zero::TensorBatch&) {
                      const torch::Tensor last = x.slice(1, x.size(1) - 1);
                      return Logits(config, *module.as<DescribedModule>(), last).squeeze(1);
                    });
  }
}

// Of the first layer.
int LayerBlock(const VocabularyCut& cut) { return cut.tiles() == 1 ? 1 : cut.tiles() + 1; }

}  // namespace

zero::Model MakeGpt(const GptConfig& config, Head head) {
  zero::Model model;
  model.identity = config.ToJson();
  for (const BlockDescription& block : Describe(config)) AddBlock(block, &model);
  const VocabularyCut cut(config.vocab, config.tile_rows);
  if (cut.tiles() > 1) {
    AddTiledEmbedding(config, cut, &model);
  } else {
    model.AddStage("embed", 0,
                   [config](torch::nn::Module& module, const torch::Tensor&, const zero::TensorBatch& batch) {
                     return Embed(config, *module.as<DescribedModule>(), batch.inputs);
                   });
  }
  for (int64_t i = 0; i < config.layers; ++i) {
    model.AddStage(absl::StrCat("h.", i), LayerBlock(cut) + static_cast<int>(i),
                   [config, i](torch::nn::Module& module, const torch::Tensor& x, const zero::TensorBatch&) {
                     return TrainedLayer(config, *module.as<DescribedModule>(), x, i);
                   });
  }
  if (cut.tiles() > 1) {
    AddTiledHead(config, cut, head, &model);
  } else {
    AddHead(config, head, &model);
  }
  return model;
}

namespace {

class GptDecoder : public Decoder {
 public:
  explicit GptDecoder(const GptConfig& config) : config_(config) {}

  DecoderShape shape() const override {
    return {.layers = config_.layers,
            .width = config_.width,
            .inner = config_.Inner(),
            .vocab = config_.vocab,
            .heads = config_.heads,
            .key_heads = config_.heads,
            .depth = config_.width / config_.heads,
            .token_table = "wte",
            .position_table = "wpe",
            .matrices_before_attention = 1,
            .head_block = 0,
            .head = "wte"};
  }
  std::vector<BlockDescription> Blocks() const override { return Describe(config_); }

  torch::Tensor Embed(const torch::Tensor& tokens, const torch::Tensor& positions) const override {
    return AtPositions(tokens, positions, tokens.scalar_type());
  }
  torch::Tensor Layer(int64_t layer, BlockAccess& block, const torch::Tensor& x,
                      const torch::Tensor& /*positions*/) const override {
    const auto attend = [&](const torch::Tensor& joined) {
      const torch::Tensor qkv = joined.view({x.size(0), 3, config_.heads, config_.width / config_.heads});
      return block.Attend(qkv.select(1, 0), qkv.select(1, 1), qkv.select(1, 2), ScaleOf(config_, layer),
                          config_.attention_in_fp32);
    };
    return models::Layer(config_, block, x, attend, [](const torch::Tensor& t) { return t; });
  }
  torch::Tensor Logits(BlockAccess& block, const torch::Tensor& x) const override {
    return block.Linear("wte", Norm(block, "ln_f", x, config_.epsilon)).to(torch::kFloat32);
  }

 private:
  const GptConfig config_;
};

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
                        .block = LayerBlock(cut) + static_cast<int>(i),
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

class Gpt : public LanguageModel {
 public:
  explicit Gpt(const GptConfig& config) : config_(config) {}

  int64_t vocabulary() const override { return config_.vocab; }
  int64_t context() const override { return config_.context; }
  int64_t usual_length() const override { return config_.context; }
  std::unique_ptr<const Decoder> MakeDecoder() const override {
    GptConfig whole = config_;  // its tensors are the same, wherever they lie
    whole.tile_rows = 0;
    return std::make_unique<GptDecoder>(whole);
  }
  std::vector<std::string> AdapterTargets() const override { return {"c_attn"}; }
  std::vector<BlockDescription> Blocks() const override { return Describe(config_); }
  ModelLayout Layout() const override { return LayoutOfGpt(config_); }
  zero::Model Make(Head head) const override { return MakeGpt(config_, head); }
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
