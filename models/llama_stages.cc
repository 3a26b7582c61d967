// Llama's stages and decoder in LibTorch.
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/causal_attention.h"
#include "models/described_module.h"
#include "models/llama.h"
#include "models/stages.h"
#include "models/tensor_decoder.h"
#include "models/vocabulary_tiles.h"

namespace penstock::models {
namespace {

using torch::Tensor;

struct Function {
  LlamaConfig config;
  std::vector<float> frequencies;
};

// In fp32, whatever the type of x; the weight is applied to the rounded result, as in transformers.
Tensor Normalize(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor wide = x.to(torch::kFloat32);
  const Tensor scale = torch::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + epsilon);
  return weight * (wide * scale).to(x.scalar_type());
}

// Cosine and sine of the angles of each position [n]: [n, 1, depth / 2], of x's type.
std::pair<Tensor, Tensor> Angles(const std::vector<float>& frequencies, const Tensor& positions,
                                 const Tensor& x) {
  const auto pairs = static_cast<int64_t>(frequencies.size());
  Tensor each = torch::empty({1, pairs}, torch::kFloat32);
  std::copy(frequencies.begin(), frequencies.end(), each.data_ptr<float>());
  // A few bytes, which CUDA takes at once: nothing waits for what a device computes.
  const Tensor there = each.to(x.device(), torch::kFloat32, /*non_blocking=*/true);
  const Tensor angles = positions.to(torch::kFloat32).unsqueeze(1) * there;
  return {angles.cos().unsqueeze(1).to(x.scalar_type()), angles.sin().unsqueeze(1).to(x.scalar_type())};
}

// x: [..., n, heads, depth]. The halves of a head are the pairs' first and second elements.
Tensor Turn(const Tensor& x, const std::pair<Tensor, Tensor>& angles) {
  const int64_t half = x.size(-1) / 2;
  const Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  const auto& [cosine, sine] = angles;
  return torch::cat({a * cosine - b * sine, b * cosine + a * sine}, -1);
}

// One layer, in training and in generation. `block` has the weights, in the order of their description.
// `arrange` is applied to queries, keys and values [..., heads, depth]; `attend` makes [..., heads * depth]
// of the three.
template <typename Block, typename Arrange, typename Attend>
Tensor Attention(const Function& f, int64_t layer, Block& block, const Tensor& x, const Tensor& positions,
                 Arrange arrange, Attend attend) {
  const LlamaConfig& c = f.config;
  using QkNorm = LlamaConfig::QkNorm;
  std::pair<Tensor, Tensor> angles;
  if (c.Turns(layer)) angles = Angles(f.frequencies, positions, x);
  const auto heads = [&](const char* projection, int64_t count, const char* norm) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = count;
    sizes.push_back(c.depth);
    Tensor y = block.Linear(projection, x);
    if (norm != nullptr && c.qk_norm == QkNorm::kOfAll) y = Normalize(y, block.Get(norm), c.epsilon);
    y = y.view(sizes);
    if (norm != nullptr && c.qk_norm == QkNorm::kOfHeads) y = Normalize(y, block.Get(norm), c.epsilon);
    if (norm != nullptr && c.Turns(layer)) y = Turn(y, angles);
    return arrange(y);
  };
  const Tensor q = heads("self_attn.q_proj", c.heads, "self_attn.q_norm.weight");
  const Tensor k = heads("self_attn.k_proj", c.key_heads, "self_attn.k_norm.weight");
  const Tensor v = heads("self_attn.v_proj", c.key_heads, nullptr);
  return block.Linear("self_attn.o_proj", attend(q, k, v));
}

template <typename Block, typename Arrange, typename Attend>
Tensor Layer(const Function& f, int64_t layer, Block& block, const Tensor& before, const Tensor& positions,
             Arrange arrange, Attend attend) {
  const LlamaConfig& c = f.config;
  const auto normal = [&](const char* name, const Tensor& of) {
    return Normalize(of, block.Get(name), c.epsilon);
  };
  const auto scaled = [](const Tensor& of, double factor) { return factor == 1 ? of : of * factor; };
  const Tensor x = layer == 0 ? scaled(before, c.embedding_multiplier) : before;
  const Tensor input = c.norms_results ? x : normal("input_layernorm.weight", x);
  Tensor mixed = Attention(f, layer, block, input, positions, arrange, attend);
  if (c.norms_results) mixed = normal("post_attention_layernorm.weight", mixed);
  const Tensor y = x + scaled(mixed, c.residual_multiplier);
  const Tensor z = c.norms_results ? y : normal("post_attention_layernorm.weight", y);
  // Matrices may come one by one: each is asked for in a statement of its own.
  Tensor gated = torch::silu(block.Linear("mlp.gate_proj", z));
  gated = gated * block.Linear("mlp.up_proj", z);
  Tensor result = block.Linear("mlp.down_proj", gated);
  if (c.norms_results) result = normal("post_feedforward_layernorm.weight", result);
  return y + scaled(result, c.residual_multiplier);
}

// Of whole sequences: x is [batch, length, width].
Tensor TrainedLayer(const Function& f, int64_t layer, const DescribedModule& block, const Tensor& x) {
  const LlamaConfig& c = f.config;
  const int64_t batch = x.size(0), length = x.size(1);
  const Tensor positions = torch::arange(length, x.options().dtype(torch::kFloat32));
  const auto arrange = [&](const Tensor& y) {
    return y.transpose(1, 2).reshape({batch * y.size(2), length, c.depth});
  };
  const auto attend = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    const double dropout = block.is_training() ? c.attention_dropout : 0;
    const Tensor mixed =
        CausalAttention(q, k, v, c.AttentionScale(), dropout).view({batch, c.heads, length, c.depth});
    return mixed.transpose(1, 2).reshape({batch, length, c.heads * c.depth});
  };
  return Layer(f, layer, block, x, positions, arrange, attend);
}

// The padding token's embedding is not learned, as in transformers; -1: there is none.
int64_t PaddingOf(const LlamaConfig& c) {
  const auto id = c.kept.find("pad_token_id");
  if (id == c.kept.end() || !id->is_number_integer()) return -1;
  const auto padding = id->get<int64_t>();
  const int64_t row = padding < 0 ? padding + c.vocab : padding;  // as torch.nn.Embedding counts
  return row >= 0 && row < c.vocab ? row : -1;
}

Tensor Embed(const DescribedModule& block, const Tensor& ids, int64_t padding) {
  const Tensor tokens = block.Get("embed_tokens.weight");
  // In fp32, so that the gradients of a token that occurs often are not summed in bf16.
  return torch::embedding(tokens.to(torch::kFloat32), ids, padding).to(tokens.scalar_type());
}

template <typename Block>
Tensor Logits(const LlamaConfig& c, Block& block, const Tensor& x) {
  const Tensor normal = Normalize(x, block.Get("norm.weight"), c.epsilon);
  Tensor logits = block.Linear(c.tied ? "embed_tokens" : "lm_head", normal);
  if (c.logits_scaling != 1) logits = logits / c.logits_scaling;
  return logits.to(torch::kFloat32);
}

class LlamaDecoder : public TensorDecoder {
 public:
  explicit LlamaDecoder(const LlamaConfig& config)
      : function_{config, config.rope.Frequencies(config.depth)} {}

  Tensor Embed(const Tensor& tokens, const Tensor& /*positions*/) const override { return tokens; }
  Tensor Layer(int64_t layer, BlockAccess& block, const Tensor& x, const Tensor& positions) const override {
    return models::Layer(
        function_, layer, block, x, positions, [](const Tensor& y) { return y; },
        [&](const Tensor& q, const Tensor& k, const Tensor& v) {
          return block.Attend(q, k, v, function_.config.AttentionScale(), /*wide=*/false);
        });
  }
  Tensor Logits(BlockAccess& block, const Tensor& x) const override {
    return models::Logits(function_.config, block, x);
  }

 private:
  const Function function_;
};

}  // namespace

zero::Model MakeLlama(const LlamaConfig& config, Head head) {
  zero::Model model;
  model.identity = config.ToJson();
  const auto f = std::make_shared<const Function>(Function{config, config.rope.Frequencies(config.depth)});
  for (const BlockDescription& block : BlocksOfLlama(config)) AddBlock(block, &model);
  const VocabularyCut cut(config.vocab, config.tile_rows);
  const LlamaBlocks blocks(config);
  const char* const embedding = "embed_tokens.weight";
  if (cut.tiles() > 1) {
    AddEmbeddingTiles(cut, embedding, PaddingOf(config), &model);
  } else {
    model.AddStage("embed", 0,
                   [padding = PaddingOf(config)](torch::nn::Module& module, const Tensor&,
                                                 const zero::TensorBatch& batch) {
                     return Embed(*module.as<DescribedModule>(), batch.inputs, padding);
                   });
  }
  for (int64_t i = 0; i < config.layers; ++i) {
    model.AddStage(absl::StrCat("layers.", i), blocks.layer + static_cast<int>(i),
                   [f, i](torch::nn::Module& module, const Tensor& x, const zero::TensorBatch&) {
                     return TrainedLayer(*f, i, *module.as<DescribedModule>(), x);
                   });
  }
  if (cut.tiles() > 1) {
    const auto norm = [f](const DescribedModule& block, const Tensor& x) {
      const Tensor normal = Normalize(x, block.Get("norm.weight"), f->config.epsilon);
      // A product with tiles is one with x: its logits are divided in advance.
      const double divisor = f->config.logits_scaling;
      return divisor == 1 ? normal : normal.to(torch::kFloat32) / divisor;
    };
    AddLastNorm(blocks.norm, norm, head, &model);
    AddHeadTiles(cut, config.tied ? embedding : "lm_head.weight", blocks.head, head, &model);
  } else if (head == Head::kLoss) {
    model.AddStage("loss", blocks.head,
                   [f](torch::nn::Module& module, const Tensor& x, const zero::TensorBatch& batch) {
                     const Tensor logits = Logits(f->config, *module.as<DescribedModule>(), x);
                     return torch::nll_loss(torch::log_softmax(logits.view({-1, logits.size(-1)}), -1),
                                            batch.targets.view({-1}));
                   });
  } else {
    model.AddStage(
        "logits", blocks.head, [f](torch::nn::Module& module, const Tensor& x, const zero::TensorBatch&) {
          return Logits(f->config, *module.as<DescribedModule>(), x.slice(1, x.size(1) - 1)).squeeze(1);
        });
  }
  return model;
}

std::unique_ptr<const TensorDecoder> MakeLlamaDecoder(const LlamaConfig& config) {
  return std::make_unique<LlamaDecoder>(config);
}

}  // namespace penstock::models
