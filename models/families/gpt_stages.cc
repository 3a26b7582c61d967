// GPT-2's stages and decoder in LibTorch.
#include <torch/nn/module.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/families/causal_attention.h"
#include "models/families/described_module.h"
#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "models/families/tensor_decoder.h"
#include "models/families/vocabulary_tiles.h"

namespace penstock::models {
namespace {

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

// One layer, in training and in generation. `block` has the weights, in the order of their description;
// `attend` makes [..., width] of the queries, keys and values in [..., 3 * width]; `dropped` is dropout.
template <typename Block, typename Attend, typename Dropped>
torch::Tensor Layer(const GptConfig& config, Block& block, const torch::Tensor& x, Attend attend,
                    Dropped dropped) {
  const torch::Tensor mixed = attend(block.Linear("attn.c_attn", Norm(block, "ln_1", x, config.epsilon)));
  const torch::Tensor y = x + dropped(block.Linear("attn.c_proj", mixed));
  const torch::Tensor inner =
      Activate(config.activation, block.Linear("mlp.c_fc", Norm(block, "ln_2", y, config.epsilon)));
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
    const torch::Tensor mixed = CausalAttention(head(0), head(1), head(2),
                                                {.scale = config.AttentionScale(index), .dropout = dropout})
                                    .view({batch, heads, length, depth});
    return mixed.to(x.scalar_type()).transpose(1, 2).reshape({batch, length, width});
  };
  return Layer(config, block, x, attend, [&](const torch::Tensor& t) {
    return config.dropout > 0 ? torch::dropout(t, config.dropout, block.is_training()) : t;
  });
}

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
  AddHeadTiles(cut, "wte", /*block=*/0, head, /*cap=*/0, model);
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
class GptDecoder : public TensorDecoder {
 public:
  explicit GptDecoder(const GptConfig& config) : config_(config) {}

  torch::Tensor Embed(const torch::Tensor& tokens, const torch::Tensor& positions) const override {
    return AtPositions(tokens, positions, tokens.scalar_type());
  }
  torch::Tensor Layer(int64_t layer, BlockAccess& block, const torch::Tensor& x,
                      const RowPlaces& /*places*/) const override {
    const auto attend = [&](const torch::Tensor& joined) {
      const torch::Tensor qkv = joined.view({x.size(0), 3, config_.heads, config_.width / config_.heads});
      return block.Attend(qkv.select(1, 0), qkv.select(1, 1), qkv.select(1, 2),
                          {.scale = config_.AttentionScale(layer)}, config_.attention_in_fp32);
    };
    return models::Layer(config_, block, x, attend, [](const torch::Tensor& t) { return t; });
  }
  torch::Tensor Logits(BlockAccess& block, const torch::Tensor& x) const override {
    return block.Linear("wte", Norm(block, "ln_f", x, config_.epsilon)).to(torch::kFloat32);
  }

 private:
  const GptConfig config_;
};

}  // namespace

zero::Model MakeGpt(const GptConfig& config, Head head) {
  zero::Model model;
  model.identity = config.ToJson();
  for (const BlockDescription& block : BlocksOfGpt(config)) AddBlock(block, &model);
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
    model.AddStage(absl::StrCat("h.", i), FirstLayerOfGpt(config) + static_cast<int>(i),
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

std::unique_ptr<const TensorDecoder> MakeGptDecoder(const GptConfig& config) {
  return std::make_unique<GptDecoder>(config);
}

}  // namespace penstock::models
