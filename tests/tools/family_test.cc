// What a family says of its parameters, and the modules that follow from it.
#include "models/families/family.h"

#include <gtest/gtest.h>

#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "zero/compute/libtorch/block.h"

namespace penstock::models::family_test {
namespace {

// Where the numbers say that a tensor lies, the module has it.
void ExpectLikeModules(const GptConfig& config) {
  const ModelLayout layout = LayoutOfGpt(config);
  const zero::Model model = MakeGpt(config);
  ASSERT_EQ(layout.block_elements.size(), model.blocks.size());
  size_t next = 0;
  int64_t parameters = 0;
  for (size_t b = 0; b < model.blocks.size(); ++b) {
    const zero::FlatLayout run = zero::LayoutOf(*model.blocks[b].build());
    EXPECT_EQ(layout.block_elements[b], run.elements);
    for (const zero::Parameter& parameter : run.parameters) {
      ASSERT_LT(next, layout.tensors.size());
      const PublishedTensor& tensor = layout.tensors[next++];
      SCOPED_TRACE(tensor.name);
      EXPECT_NE(tensor.name.find(parameter.name), std::string::npos) << parameter.name;
      EXPECT_EQ(tensor.block, static_cast<int>(b));
      EXPECT_EQ(tensor.offset, parameter.offset);
      EXPECT_EQ(tensor.elements(), parameter.elements);
      EXPECT_EQ(tensor.columns == 0 ? std::vector<int64_t>{tensor.rows}
                                    : (std::vector<int64_t>{tensor.rows, tensor.columns}),
                parameter.sizes);
      parameters += tensor.elements();
    }
  }
  EXPECT_EQ(next, layout.tensors.size());
  EXPECT_EQ(parameters, config.Parameters());
}

// The products of a family are those of its matrices, by another way: all of a layer's, and the head's.
void ExpectProductsOfMatrices(const LanguageModel& model, const std::string& head) {
  const std::vector<StageProducts> products = model.Products();
  const zero::Model made = MakeModel(model);
  ASSERT_EQ(products.size(), made.stages.size());
  const ModelLayout layout = model.Layout();
  for (size_t s = 0; s < products.size(); ++s) {
    EXPECT_EQ(products[s].stage, made.stages[s].name);
    EXPECT_EQ(products[s].block, made.stages[s].block);
    int64_t matrices = 0;
    for (const PublishedTensor& tensor : layout.tensors) {
      const bool multiplied = s + 1 == products.size() ? tensor.name == head : s > 0;
      if (tensor.block == products[s].block && multiplied && tensor.columns > 0)
        matrices += tensor.elements();
    }
    EXPECT_EQ(products[s].parameters, matrices) << products[s].stage;
    EXPECT_EQ(products[s].attention_width > 0, s > 0 && s + 1 < products.size());
  }
}

TEST(ModelLayoutTest, ProductsAreThoseOfTheMatrices) {
  std::vector<std::string> notes;
  ExpectProductsOfMatrices(
      *DescribeGpt({.layers = 2, .width = 24, .heads = 2, .context = 32, .vocab = 96, .inner = 40}),
      "transformer.wte.weight");
  for (const bool tied : {false, true}) {
    const auto llama = ModelFromJson({{"model_type", "llama"},
                                      {"num_hidden_layers", 2},
                                      {"hidden_size", 32},
                                      {"num_attention_heads", 4},
                                      {"num_key_value_heads", 2},
                                      {"head_dim", 12},
                                      {"intermediate_size", 56},
                                      {"vocab_size", 80},
                                      {"tie_word_embeddings", tied}},
                                     &notes);
    ASSERT_TRUE(llama.ok()) << llama.status();
    ExpectProductsOfMatrices(**llama, tied ? "model.embed_tokens.weight" : "lm_head.weight");
  }
  // 3 sequences of 4: 12 tokens, and 10 pairs a sequence of a position with one that it may see.
  const StageProducts stage{.stage = "layer", .parameters = 100, .attention_width = 8};
  EXPECT_EQ(stage.ForwardFlops(3, 4), 2 * 100 * 12 + 4 * 8 * 3 * 10);
}

TEST(ModelLayoutTest, SaysWhatTheModulesAre) {
  ExpectLikeModules({4, 64, 4, 128, 256, 0});
  ExpectLikeModules({2, 36, 3, 7, 11, 0.1});  // nothing is a multiple of the alignment
  ExpectLikeModules({1, 1, 1, 1, 1, 0});
  ExpectLikeModules({.layers = 2, .width = 36, .heads = 3, .context = 7, .vocab = 11, .inner = 50});
}

TEST(ModelLayoutTest, NamesAndShapesAreThoseOfHuggingFace) {
  const ModelLayout layout = LayoutOfGpt({2, 8, 2, 16, 32, 0});
  ASSERT_EQ(layout.tensors.size(), 4u + 2 * 12);
  EXPECT_EQ(layout.tensors[0].name, "transformer.wte.weight");
  EXPECT_EQ(layout.tensors[0].published_shape(), (std::vector<uint64_t>{32, 8}));
  const PublishedTensor& qkv = layout.tensors[4 + 12 + 2];
  EXPECT_EQ(qkv.name, "transformer.h.1.attn.c_attn.weight");
  EXPECT_TRUE(qkv.transposed);
  EXPECT_EQ(qkv.published_shape(), (std::vector<uint64_t>{8, 24}));
}

}  // namespace
}  // namespace penstock::models::family_test
