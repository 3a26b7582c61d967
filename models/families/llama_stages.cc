// Llama's stages and decoder in LibTorch.
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/families/causal_attention.h"
#include "models/families/described_module.h"
#include "models/families/llama.h"
#include "models/families/stages.h"
#include "models/families/tensor_decoder.h"
#include "models/families/vocabulary_tiles.h"

namespace penstock::models {
namespace {

using torch::Tensor;

struct Function {
  explicit Function(const LlamaConfig& of) : config(of), rotations(of.Rotations()) {}
  LlamaConfig config;
  std::vector<Rotation> rotations;
};

// In fp32, whatever the type of x; the weight is applied to the rounded result, or where it counts from 1
// before that is rounded, as in transformers.
Tensor Normalize(const LlamaConfig& c, const Tensor& x, const Tensor& weight) {
  const Tensor wide = x.to(torch::kFloat32);
  const Tensor scale = torch::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + c.epsilon);
  if (c.norms_from_one) return (wide * scale * (1 + weight.to(torch::kFloat32))).to(x.scalar_type());
  return weight * (wide * scale).to(x.scalar_type());
}

// [1, pairs], where x is.
Tensor Frequencies(const std::vector<float>& frequencies, const Tensor& x) {
  Tensor each = torch::empty({1, static_cast<int64_t>(frequencies.size())}, torch::kFloat32);
  std::copy(frequencies.begin(), frequencies.end(), each.data_ptr<float>());
  // A few bytes, which CUDA takes at once: nothing waits for what a device computes.
  return each.to(x.device(), torch::kFloat32, /*non_blocking=*/true);
}

// Cosine and sine of the angles of each position [n]: [n, 1, pairs], of x's type.
std::pair<Tensor, Tensor> Angles(const Rotation& rotation, const RowPlaces& places, const Tensor& x) {
  Tensor each = Frequencies(rotation.frequencies, x);
  if (places.far.defined() && !rotation.far_frequencies.empty())
    each = torch::where(places.far, Frequencies(rotation.far_frequencies, x), each);
  const Tensor angles = places.positions.to(torch::kFloat32).unsqueeze(1) * each;
  const auto made = [&](const Tensor& of) {
    return (rotation.scale == 1 ? of : of * rotation.scale).unsqueeze(1).to(x.scalar_type());
  };
  return {made(angles.cos()), made(angles.sin())};
}

// x: [..., n, heads, depth]. The halves of what turns of a head are the pairs' first and second elements.
Tensor Turn(const Tensor& x, const std::pair<Tensor, Tensor>& angles) {
  const auto& [cosine, sine] = angles;
  const int64_t half = cosine.size(-1), left = x.size(-1) - 2 * half;
  const Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  const Tensor first = a * cosine - b * sine, second = b * cosine + a * sine;
  if (left == 0) return torch::cat({first, second}, -1);
  return torch::cat({first, second, x.narrow(-1, 2 * half, left)}, -1);
}

// One layer, in training and in generation. `block` has the weights, in the order of their description.
// `arrange` is applied to queries, keys and values [..., heads, depth]; `attend` makes [..., heads * depth]
// of the three.
template <typename Block, typename Arrange, typename Attend>
Tensor Attention(const Function& f, int64_t layer, Block& block, const Tensor& x, const RowPlaces& places,
                 Arrange arrange, Attend attend) {
  const LlamaConfig& c = f.config;
  using QkNorm = LlamaConfig::QkNorm;
  std::pair<Tensor, Tensor> angles;
  if (c.Turns(layer)) angles = Angles(f.rotations[static_cast<size_t>(c.RotationOf(layer))], places, x);
  // Matrices may come one by one: each is asked for in a statement of its own.
  Tensor joined;
  if (c.joined) joined = block.Linear("self_attn.qkv_proj", x);
  int64_t taken = 0;
  const auto heads = [&](const char* projection, int64_t count, const char* norm) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = count;
    sizes.push_back(c.depth);
    Tensor y = c.joined ? joined.narrow(-1, taken, count * c.depth) : block.Linear(projection, x);
    taken += count * c.depth;
    if (norm != nullptr && c.qk_norm == QkNorm::kOfAll) y = Normalize(c, y, block.Get(norm));
    y = c.joined ? y.reshape(sizes) : y.view(sizes);
    if (norm != nullptr && c.qk_norm == QkNorm::kOfHeads) y = Normalize(c, y, block.Get(norm));
    if (norm != nullptr && c.Turns(layer)) y = Turn(y, angles);
    return arrange(y);
  };
  const Tensor q = heads("self_attn.q_proj", c.heads, "self_attn.q_norm.weight");
  const Tensor k = heads("self_attn.k_proj", c.key_heads, "self_attn.k_norm.weight");
  const Tensor v = heads("self_attn.v_proj", c.key_heads, nullptr);
  return block.Linear("self_attn.o_proj", attend(q, k, v));
}

// Activation of the gate, times what is beside it.
template <typename Block>
Tensor Gated(const LlamaConfig& c, Block& block, const Tensor& z) {
  const auto activate = [&](const Tensor& gate) {
    return c.tangent_gelu ? torch::gelu(gate, "tanh") : torch::silu(gate);
  };
  if (c.joined) {
    const Tensor both = block.Linear("mlp.gate_up_proj", z);
    return activate(both.narrow(-1, 0, c.inner)) * both.narrow(-1, c.inner, c.inner);
  }
  const Tensor gate = activate(block.Linear("mlp.gate_proj", z));
  return gate * block.Linear("mlp.up_proj", z);
}

// What comes from the embedding, scaled.
Tensor Scaled(const LlamaConfig& c, const Tensor& embedded) {
  if (c.scales_embedding) {
    // The factor is of the compute type, too.
    const auto factor = torch::tensor(c.EmbeddingScale(), torch::kFloat32).to(embedded.scalar_type());
    return embedded * factor.item<double>();
  }
  return c.embedding_multiplier == 1 ? embedded : embedded * c.embedding_multiplier;
}

template <typename Block, typename Arrange, typename Attend>
Tensor Layer(const Function& f, int64_t layer, Block& block, const Tensor& before, const RowPlaces& places,
             Arrange arrange, Attend attend) {
  const LlamaConfig& c = f.config;
  const auto normal = [&](const char* name, const Tensor& of) { return Normalize(c, of, block.Get(name)); };
  const auto scaled = [](const Tensor& of, double factor) { return factor == 1 ? of : of * factor; };
  const Tensor x = layer == 0 ? Scaled(c, before) : before;
  const Tensor input = c.norms_inputs ? normal("input_layernorm.weight", x) : x;
  Tensor mixed = Attention(f, layer, block, input, places, arrange, attend);
  if (c.norms_results) mixed = normal("post_attention_layernorm.weight", mixed);
  const Tensor y = x + scaled(mixed, c.residual_multiplier);
  const char* const inner =
      c.norms_results ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
  const Tensor z = c.norms_inputs ? normal(inner, y) : y;
  Tensor result = block.Linear("mlp.down_proj", Gated(c, block, z));
  if (c.norms_results) result = normal("post_feedforward_layernorm.weight", result);
  return y + scaled(result, c.residual_multiplier);
}

// Of whole sequences: x is [batch, length, width].
Tensor TrainedLayer(const Function& f, int64_t layer, const DescribedModule& block, const Tensor& x) {
  const LlamaConfig& c = f.config;
  const int64_t batch = x.size(0), length = x.size(1);
  RowPlaces places{torch::arange(length, x.options().dtype(torch::kFloat32)), {}};
  if (const int64_t near = f.rotations.front().near_positions; near > 0 && length > near)
    places.far = torch::ones({length, 1}, x.options().dtype(torch::kBool));
  const auto arrange = [&](const Tensor& y) {
    return y.transpose(1, 2).reshape({batch * y.size(2), length, c.depth});
  };
  const auto attend = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    const double dropout = block.is_training() ? c.attention_dropout : 0;
    const AttentionForm form = {
        .scale = c.AttentionScale(), .dropout = dropout, .window = c.Window(layer), .cap = c.score_cap};
    const Tensor mixed = CausalAttention(q, k, v, form).view({batch, c.heads, length, c.depth});
    return mixed.transpose(1, 2).reshape({batch, length, c.heads * c.depth});
  };
  return Layer(f, layer, block, x, places, arrange, attend);
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
  const Tensor normal = Normalize(c, x, block.Get("norm.weight"));
  Tensor logits = block.Linear(c.tied ? "embed_tokens" : "lm_head", normal);
  if (c.logits_scaling != 1) logits = logits / c.logits_scaling;
  if (c.logit_cap > 0) logits = torch::tanh(logits / c.logit_cap) * c.logit_cap;
  return logits.to(torch::kFloat32);
}

class LlamaDecoder : public TensorDecoder {
 public:
  explicit LlamaDecoder(const LlamaConfig& config) : function_(config) {}

  Tensor Embed(const Tensor& tokens, const Tensor& /*positions*/) const override { return tokens; }
  Tensor Layer(int64_t layer, BlockAccess& block, const Tensor& x, const RowPlaces& places) const override {
    const LlamaConfig& c = function_.config;
    const AttentionForm form = {.scale = c.AttentionScale(), .window = c.Window(layer), .cap = c.score_cap};
    return models::Layer(
        function_, layer, block, x, places, [](const Tensor& y) { return y; },
        [&](const Tensor& q, const Tensor& k, const Tensor& v) {
          return block.Attend(q, k, v, form, /*wide=*/false);
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
  const auto f = std::make_shared<const Function>(config);
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
      const Tensor normal = Normalize(f->config, x, block.Get("norm.weight"));
      // A product with tiles is one with x: its logits are divided in advance.
      const double divisor = f->config.logits_scaling;
      return divisor == 1 ? normal : normal.to(torch::kFloat32) / divisor;
    };
    AddLastNorm(blocks.norm, norm, head, &model);
    AddHeadTiles(cut, config.tied ? embedding : "lm_head.weight", blocks.head, head, config.logit_cap,
                 &model);
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
