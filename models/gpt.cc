#include "models/gpt.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "models/causal_attention.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/config/config_json.h"
#include "zero/config/nearest_name.h"

namespace penstock::models {
namespace {

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

// A weight and a bias under one name, as checkpoints of this architecture have them.
class WeightAndBias : public torch::nn::Module {
 public:
  WeightAndBias(torch::Tensor weight_value, torch::Tensor bias_value)
      : weight(register_parameter("weight", std::move(weight_value))),
        bias(register_parameter("bias", std::move(bias_value))) {}

  torch::Tensor Linear(const torch::Tensor& x) const { return torch::linear(x, weight, bias); }
  torch::Tensor Norm(const torch::Tensor& x, double epsilon) const {
    return Normalize(x, weight, bias, epsilon);
  }

  torch::Tensor weight, bias;
};

// Modules have shapes only; what they begin with stands in LayerValues and EmbeddingValues below.
std::shared_ptr<WeightAndBias> MakeLinear(int64_t in, int64_t out) {
  return std::make_shared<WeightAndBias>(zero::WithoutMemory({out, in}), zero::WithoutMemory({out}));
}

std::shared_ptr<WeightAndBias> MakeNorm(int64_t width) {
  return std::make_shared<WeightAndBias>(zero::WithoutMemory({width}), zero::WithoutMemory({width}));
}

constexpr zero::InitialValues kOnes{.mean = 1}, kZeros{.mean = 0};

// wte, wpe, ln_f.
std::vector<zero::InitialValues> EmbeddingValues(const GptConfig& config) {
  const zero::InitialValues table{.deviation = config.deviation};
  return {table, table, kOnes, kZeros};
}

// ln_1, c_attn, c_proj, ln_2, c_fc, c_proj: weight and bias of each.
std::vector<zero::InitialValues> LayerValues(const GptConfig& config) {
  const zero::InitialValues linear{.deviation = config.deviation};
  const zero::InitialValues projected{.deviation = config.deviation /
                                                   std::sqrt(2.0 * static_cast<double>(config.layers))};
  return {kOnes, kZeros, linear, kZeros, projected, kZeros, kOnes, kZeros, linear, kZeros, projected, kZeros};
}

class Embedding : public torch::nn::Module {
 public:
  explicit Embedding(const GptConfig& config) : dropout_(config.embedding_dropout), epsilon_(config.epsilon) {
    tokens_ = register_parameter("wte", zero::WithoutMemory({config.vocab, config.width}));
    positions_ = register_parameter("wpe", zero::WithoutMemory({config.context, config.width}));
    norm_ = register_module("ln_f", MakeNorm(config.width));
  }

  torch::Tensor Embed(const torch::Tensor& ids) {
    // In fp32, so that the gradients of a token that occurs often are not summed in bf16.
    torch::Tensor x = torch::embedding(tokens_.to(torch::kFloat32), ids);
    x = (x + positions_.slice(0, 0, ids.size(1)).to(torch::kFloat32)).to(tokens_.scalar_type());
    return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
  }

  torch::Tensor Logits(const torch::Tensor& x) {
    return torch::linear(norm_->Norm(x, epsilon_), tokens_).to(torch::kFloat32);
  }

 private:
  torch::Tensor tokens_, positions_;
  std::shared_ptr<WeightAndBias> norm_;
  double dropout_, epsilon_;
};

class Layer : public torch::nn::Module {
 public:
  explicit Layer(const GptConfig& config) : config_(config) {
    const int64_t d = config.width;
    norm1_ = register_module("ln_1", MakeNorm(d));
    auto attention = register_module("attn", std::make_shared<torch::nn::Module>());
    qkv_ = attention->register_module("c_attn", MakeLinear(d, 3 * d));
    out_ = attention->register_module("c_proj", MakeLinear(d, d));
    norm2_ = register_module("ln_2", MakeNorm(d));
    auto mlp = register_module("mlp", std::make_shared<torch::nn::Module>());
    up_ = mlp->register_module("c_fc", MakeLinear(d, config.Inner()));
    down_ = mlp->register_module("c_proj", MakeLinear(config.Inner(), d));
  }

  // `index`: of the layer, from 0. One module computes all of them in turn.
  torch::Tensor Forward(const torch::Tensor& x, int64_t index) {
    torch::Tensor y = x + Dropped(Attention(norm1_->Norm(x, config_.epsilon), index));
    return y + Dropped(Mlp(norm2_->Norm(y, config_.epsilon)));
  }

 private:
  torch::Tensor Attention(const torch::Tensor& x, int64_t index) {
    const int64_t heads = config_.heads;
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), depth = width / heads;
    torch::Tensor qkv = qkv_->Linear(x).view({batch, length, 3, heads, depth});
    if (config_.attention_in_fp32) qkv = qkv.to(torch::kFloat32);
    auto head = [&](int64_t i) {
      return qkv.select(2, i).transpose(1, 2).reshape({batch * heads, length, depth});
    };
    double scale = config_.scales_attention ? 1.0 / std::sqrt(static_cast<double>(depth)) : 1.0;
    if (config_.scales_attention_by_layer) scale /= static_cast<double>(index + 1);
    const double dropout = is_training() ? config_.attention_dropout : 0;
    const torch::Tensor mixed =
        CausalAttention(head(0), head(1), head(2), scale, dropout).view({batch, heads, length, depth});
    return out_->Linear(mixed.to(x.scalar_type()).transpose(1, 2).reshape({batch, length, width}));
  }

  torch::Tensor Mlp(const torch::Tensor& x) {
    return down_->Linear(Activate(config_.activation, up_->Linear(x)));
  }

  torch::Tensor Dropped(const torch::Tensor& x) {
    return config_.dropout > 0 ? torch::dropout(x, config_.dropout, is_training()) : x;
  }

  const GptConfig config_;
  std::shared_ptr<WeightAndBias> norm1_, qkv_, out_, norm2_, up_, down_;
};

// What transformers takes for others of its keys.
struct Alias {
  const char *name, *of;
};
constexpr Alias kAliases[] = {{"hidden_size", "n_embd"},
                              {"max_position_embeddings", "n_positions"},
                              {"num_attention_heads", "n_head"},
                              {"num_hidden_layers", "n_layer"}};

// One key of a model's JSON.
class ModelKeys {
 public:
  explicit ModelKeys(const nlohmann::json& json) : json_(json) {}

  const nlohmann::json* Find(const char* key) const {
    const auto it = json_.find(NameOf(key));
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  // What stands there in place of `key`, if that is absent.
  const char* NameOf(const char* key) const {
    const auto there = [this](const char* name) { return json_.contains(name) && !json_[name].is_null(); };
    for (const Alias& alias : kAliases) {
      if (std::string_view(alias.of) == key && !there(key) && there(alias.name)) return alias.name;
    }
    return key;
  }
  void Whole(const char* key, int64_t* value) {
    const nlohmann::json* given = Find(key);
    if (given == nullptr) return;
    const bool fits = given->is_number_integer() &&
                      !(given->is_number_unsigned() && given->get<uint64_t>() > uint64_t{1} << 62);
    if (!fits) return Wrong(key, "not a whole number");
    *value = given->get<int64_t>();
  }
  void Needed(const char* key, int64_t* value) {
    if (Find(key) == nullptr) return Fail(absl::StrCat("model: ", key, " is missing"));
    Whole(key, value);
  }
  void Number(const char* key, double* value) {
    const nlohmann::json* given = Find(key);
    if (given == nullptr) return;
    if (!given->is_number()) return Wrong(key, "not a number");
    *value = given->get<double>();
  }
  void Switch(const char* key, bool* value) {
    const nlohmann::json* given = Find(key);
    if (given == nullptr) return;
    if (!given->is_boolean()) return Wrong(key, "neither true nor false");
    *value = given->get<bool>();
  }
  void Wrong(const char* key, const std::string& what) {
    Fail(absl::StrCat("model: ", NameOf(key), " is ", zero::ShowValue(*Find(key)), ", ", what));
  }
  void Fail(const std::string& line) { status_.Update(absl::InvalidArgumentError(line)); }
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& json_;
  absl::Status status_;
};

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
  for (const char* key : {"pruned_heads", "quantization_config"}) {
    const nlohmann::json* given = keys->Find(key);
    if (given != nullptr && !given->empty()) {
      keys->Wrong(key, "which is not served: train from whole weights in fp32, bf16 or fp16");
    }
  }
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
                                                               "quantization_config"};
  return keys;
}

// And those that do not: of tokenizers, of generation, of other heads than the language model's, of files and
// of transformers itself, in this and former releases.
const std::vector<std::string_view>& OtherKeys() {
  static const auto& keys = *new std::vector<std::string_view>{
      "architecture", "architectures", "n_ctx", "n_special", "predict_special_tokens",
      // tokens
      "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
      "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "prefix", "bad_words_ids",
      // other heads
      "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
      "summary_use_proj", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
      "task_specific_params", "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size",
      // how it is run and kept
      "use_cache", "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss",
      "transformers_version", "gradient_checkpointing", "attn_implementation", "output_past",
      "output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate",
      "chunk_size_feed_forward", "auto_map",
      // generation
      "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
      "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
      "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences",
      "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
      "begin_suppress_tokens"};
  return keys;
}

// Some letters apart, or one of the names that people use for what `meant` is.
bool IsMisspelt(const std::string& key, const std::string& meant) {
  constexpr Alias kMeant[] = {{"resid_dropout", "resid_pdrop"},
                              {"activation", "activation_function"},
                              {"layer_norm_eps", "layer_norm_epsilon"},
                              {"scale_attn_by_inverse_layer_index", "scale_attn_by_inverse_layer_idx"}};
  for (const Alias& alias : kMeant) {
    if (key == alias.name && meant == alias.of) return true;
  }
  return zero::EditDistance(key, meant) <= 2;
}

// Keys that nobody reads: misspelt ones are refused, the others told.
void LookAtUnknownKeys(const nlohmann::json& json, ModelKeys* keys, std::vector<std::string>* notes) {
  const auto among = [](const std::vector<std::string_view>& names, const std::string& key) {
    return std::find(names.begin(), names.end(), key) != names.end();
  };
  std::vector<std::string_view> known = FunctionKeys();
  known.insert(known.end(), OtherKeys().begin(), OtherKeys().end());
  for (const Alias& alias : kAliases) {
    known.emplace_back(alias.name);
    const nlohmann::json* given = keys->Find(alias.name);
    const nlohmann::json* of = keys->Find(alias.of);
    if (given == nullptr || of == nullptr || *given == *of) continue;
    keys->Wrong(alias.name, absl::StrCat("and ", alias.of, " is ", zero::ShowValue(*of),
                                         ", which is the same thing: leave one of them out"));
  }
  std::vector<std::string> unknown;
  for (const auto& [key, value] : json.items()) {
    // Those of transformers' own bookkeeping begin with an underscore: "_name_or_path".
    if (among(known, key) || key.starts_with('_')) continue;
    // Nobody means anything by null. Whole words that are added or left out make another key, not a misspelt
    // one: "model_name" is not "model_type".
    if (value.is_null()) continue;
    const std::optional<std::string> nearest = zero::NearestName(key, known);
    if (nearest.has_value() && among(FunctionKeys(), *nearest) && IsMisspelt(key, *nearest)) {
      keys->Fail(
          absl::StrCat("model: unknown key ", zero::ShowValue(key), " (did you mean \"", *nearest, "\"?)"));
    }
    unknown.push_back(zero::ShowValue(key));
  }
  if (notes == nullptr || unknown.empty()) return;
  notes->push_back(absl::StrCat("model: unknown keys, of no effect: ", absl::StrJoin(unknown, ", ")));
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
  auto in_range = [](const char* name, int64_t value, int64_t most) {
    if (value >= 1 && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("model: ", name, " is ", value, ", not between 1 and ", most));
  };
  for (const absl::Status& status :
       {in_range("n_layer", config.layers, 10'000), in_range("n_embd", config.width, 1 << 20),
        in_range("n_head", config.heads, 1 << 16), in_range("n_positions", config.context, 1 << 24),
        in_range("n_inner", config.Inner(), 1 << 24),
        in_range("vocab_size", config.vocab, int64_t{1} << 32)}) {
    if (!status.ok()) return status;
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
  ModelKeys keys(json);
  RefuseOtherModels(&keys);
  LookAtUnknownKeys(json, &keys, notes);
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
  if (!keys.status().ok()) return keys.status();
  RETURN_IF_ERROR(ValidateGptConfig(config));
  return config;
}

absl::StatusOr<GptConfig> ParseGptConfig(const std::string& preset_or_path, std::vector<std::string>* notes) {
  if (const auto it = Presets().find(preset_or_path); it != Presets().end()) return it->second;
  std::ifstream file(preset_or_path);
  if (!file) {
    std::string names;
    for (const auto& [name, config] : Presets()) absl::StrAppend(&names, names.empty() ? "" : ", ", name);
    return absl::InvalidArgumentError(
        absl::StrCat("--model ", preset_or_path, ": neither a file that can be read nor one of ", names));
  }
  std::ostringstream text;
  text << file.rdbuf();
  const nlohmann::json json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat("--model ", preset_or_path, ": not valid JSON"));
  }
  absl::StatusOr<GptConfig> config = GptConfigFromJson(json, notes);
  if (!config.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model ", preset_or_path, ": ", std::string(config.status().message())));
  }
  return config;
}

zero::Model MakeGpt(const GptConfig& config, GptHead head) {
  zero::Model model;
  model.identity = config.ToJson();
  const int embedding = model.AddBlock(
      "embedding", "embedding", [config] { return std::make_shared<Embedding>(config); },
      EmbeddingValues(config));
  model.AddStage("embed", embedding,
                 [](torch::nn::Module& module, const torch::Tensor&, const zero::Batch& batch) {
                   return module.as<Embedding>()->Embed(batch.inputs);
                 });
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string name = absl::StrCat("h.", i);
    const int layer = model.AddBlock(
        name, "layer", [config] { return std::make_shared<Layer>(config); }, LayerValues(config));
    model.AddStage(name, layer, [i](torch::nn::Module& module, const torch::Tensor& x, const zero::Batch&) {
      return module.as<Layer>()->Forward(x, i);
    });
  }
  if (head == GptHead::kLoss) {
    model.AddStage("loss", embedding,
                   [](torch::nn::Module& module, const torch::Tensor& x, const zero::Batch& batch) {
                     const torch::Tensor logits = module.as<Embedding>()->Logits(x);
                     return torch::nll_loss(torch::log_softmax(logits.view({-1, logits.size(-1)}), -1),
                                            batch.targets.view({-1}));
                   });
  } else {
    model.AddStage("logits", embedding,
                   [](torch::nn::Module& module, const torch::Tensor& x, const zero::Batch&) {
                     return module.as<Embedding>()->Logits(x.slice(1, x.size(1) - 1)).squeeze(1);
                   });
  }
  return model;
}

}  // namespace penstock::models
