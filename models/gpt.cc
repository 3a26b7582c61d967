#include "models/gpt.h"

#include <torch/nn/module.h>

#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "models/causal_attention.h"

namespace penstock::tools {
namespace {

constexpr double kInitialDeviation = 0.02;

const std::map<std::string, GptConfig>& Presets() {
  static const auto* presets = new std::map<std::string, GptConfig>{
      {"gpt-tiny", {4, 64, 4, 128, 256, 0}},     {"gpt-small", {8, 384, 6, 512, 256, 0}},
      {"gpt-125m", {12, 768, 12, 1024, 256, 0}}, {"gpt-350m", {24, 1024, 16, 1024, 256, 0}},
      {"gpt-1b", {24, 1792, 14, 1024, 256, 0}},  {"gpt-3b", {32, 2816, 22, 2048, 256, 0}},
      {"gpt-7b", {32, 4096, 32, 2048, 256, 0}},  {"gpt-13b", {40, 5120, 40, 2048, 256, 0}},
  };
  return *presets;
}

// LayerNorm over the last dimension in fp32, whatever the type of input and parameters: in bf16 its gradients
// are sums of thousands of rounded terms.
torch::Tensor Normalize(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias) {
  return torch::layer_norm(x.to(torch::kFloat32), {weight.size(0)}, weight.to(torch::kFloat32),
                           bias.to(torch::kFloat32))
      .to(x.scalar_type());
}

// A weight and a bias under one name, as checkpoints of this architecture have them.
class WeightAndBias : public torch::nn::Module {
 public:
  WeightAndBias(torch::Tensor weight_value, torch::Tensor bias_value)
      : weight(register_parameter("weight", std::move(weight_value))),
        bias(register_parameter("bias", std::move(bias_value))) {}

  torch::Tensor Linear(const torch::Tensor& x) const { return torch::linear(x, weight, bias); }
  torch::Tensor Norm(const torch::Tensor& x) const { return Normalize(x, weight, bias); }

  torch::Tensor weight, bias;
};

std::shared_ptr<WeightAndBias> MakeLinear(int64_t in, int64_t out, double deviation) {
  return std::make_shared<WeightAndBias>(torch::normal(0, deviation, {out, in}), torch::zeros({out}));
}

std::shared_ptr<WeightAndBias> MakeNorm(int64_t width) {
  return std::make_shared<WeightAndBias>(torch::ones({width}), torch::zeros({width}));
}

class Embedding : public torch::nn::Module {
 public:
  explicit Embedding(const GptConfig& config) : dropout_(config.dropout) {
    tokens_ = register_parameter("wte", torch::normal(0, kInitialDeviation, {config.vocab, config.width}));
    positions_ =
        register_parameter("wpe", torch::normal(0, kInitialDeviation, {config.context, config.width}));
    norm_ = register_module("ln_f", MakeNorm(config.width));
  }

  torch::Tensor Embed(const torch::Tensor& ids) {
    // In fp32, so that the gradients of a token that occurs often are not summed in bf16.
    torch::Tensor x = torch::embedding(tokens_.to(torch::kFloat32), ids);
    x = (x + positions_.slice(0, 0, ids.size(1)).to(torch::kFloat32)).to(tokens_.scalar_type());
    return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
  }

  torch::Tensor Logits(const torch::Tensor& x) {
    return torch::linear(norm_->Norm(x), tokens_).to(torch::kFloat32);
  }

 private:
  torch::Tensor tokens_, positions_;
  std::shared_ptr<WeightAndBias> norm_;
  double dropout_;
};

class Layer : public torch::nn::Module {
 public:
  explicit Layer(const GptConfig& config) : heads_(config.heads), dropout_(config.dropout) {
    const int64_t d = config.width;
    const double projected = kInitialDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
    norm1_ = register_module("ln_1", MakeNorm(d));
    auto attention = register_module("attn", std::make_shared<torch::nn::Module>());
    qkv_ = attention->register_module("c_attn", MakeLinear(d, 3 * d, kInitialDeviation));
    out_ = attention->register_module("c_proj", MakeLinear(d, d, projected));
    norm2_ = register_module("ln_2", MakeNorm(d));
    auto mlp = register_module("mlp", std::make_shared<torch::nn::Module>());
    up_ = mlp->register_module("c_fc", MakeLinear(d, 4 * d, kInitialDeviation));
    down_ = mlp->register_module("c_proj", MakeLinear(4 * d, d, projected));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = x + Dropped(Attention(norm1_->Norm(x)));
    return y + Dropped(Mlp(norm2_->Norm(y)));
  }

 private:
  torch::Tensor Attention(const torch::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), depth = width / heads_;
    const torch::Tensor qkv = qkv_->Linear(x).view({batch, length, 3, heads_, depth});
    auto head = [&](int64_t i) {
      return qkv.select(2, i).transpose(1, 2).reshape({batch * heads_, length, depth});
    };
    const torch::Tensor mixed =
        CausalAttention(head(0), head(1), head(2)).view({batch, heads_, length, depth});
    return out_->Linear(mixed.transpose(1, 2).reshape({batch, length, width}));
  }

  torch::Tensor Mlp(const torch::Tensor& x) { return down_->Linear(torch::gelu(up_->Linear(x))); }

  torch::Tensor Dropped(const torch::Tensor& x) {
    return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
  }

  std::shared_ptr<WeightAndBias> norm1_, qkv_, out_, norm2_, up_, down_;
  int64_t heads_;
  double dropout_;
};

}  // namespace

int64_t GptConfig::Parameters() const {
  return layers * (12 * width * width + 13 * width) + (vocab + context + 2) * width;
}

nlohmann::json GptConfig::ToJson() const {
  return {{"architecture", "gpt"},  {"n_layer", layers},   {"n_embd", width},       {"n_head", heads},
          {"n_positions", context}, {"vocab_size", vocab}, {"resid_pdrop", dropout}};
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
        in_range("vocab_size", config.vocab, int64_t{1} << 32)}) {
    if (!status.ok()) return status;
  }
  if (config.width % config.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: n_embd ", config.width, " is not a multiple of n_head ", config.heads));
  }
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: resid_pdrop ", config.dropout, " is not in [0, 1)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<GptConfig> GptConfigFromJson(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("model: not a JSON object");
  GptConfig config;
  auto number = [&](const char* key, int64_t* value) -> absl::Status {
    if (!json.contains(key)) return absl::InvalidArgumentError(absl::StrCat("model: ", key, " is missing"));
    if (!json[key].is_number_integer()) {
      return absl::InvalidArgumentError(
          absl::StrCat("model: ", key, " is ", json[key].dump(), ", not a whole number"));
    }
    *value = json[key].get<int64_t>();
    return absl::OkStatus();
  };
  for (const auto& [key, value] : {std::pair{"n_layer", &config.layers},
                                   {"n_embd", &config.width},
                                   {"n_head", &config.heads},
                                   {"n_positions", &config.context},
                                   {"vocab_size", &config.vocab}}) {
    if (absl::Status status = number(key, value); !status.ok()) return status;
  }
  if (json.contains("resid_pdrop")) {
    if (!json["resid_pdrop"].is_number())
      return absl::InvalidArgumentError("model: resid_pdrop is not a number");
    config.dropout = json["resid_pdrop"].get<double>();
  }
  if (absl::Status status = ValidateGptConfig(config); !status.ok()) return status;
  return config;
}

absl::StatusOr<GptConfig> ParseGptConfig(const std::string& preset_or_path) {
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
  absl::StatusOr<GptConfig> config = GptConfigFromJson(json);
  if (!config.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model ", preset_or_path, ": ", std::string(config.status().message())));
  }
  return config;
}

zero::Model MakeGpt(const GptConfig& config, GptHead head) {
  zero::Model model;
  model.identity = config.ToJson();
  const int embedding =
      model.AddBlock("embedding", "embedding", [config] { return std::make_shared<Embedding>(config); });
  model.AddStage("embed", embedding,
                 [](torch::nn::Module& module, const torch::Tensor&, const zero::Batch& batch) {
                   return module.as<Embedding>()->Embed(batch.inputs);
                 });
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string name = absl::StrCat("h.", i);
    const int layer = model.AddBlock(name, "layer", [config] { return std::make_shared<Layer>(config); });
    model.AddStage(name, layer, zero::Apply<Layer>);
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

}  // namespace penstock::tools
