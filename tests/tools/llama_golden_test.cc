// The family of Llama against transformers: tests/golden/llama*.json have configs in both spellings, logits,
// greedy tokens, losses and gradient norms of some steps. tests/golden/make llama asks for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <tuple>

#include "models/families/family.h"
#include "models/families/llama.h"
#include "models/families/stages.h"
#include "models/weights/weight_import.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/engine/engine.h"

namespace penstock::tools::llama_golden_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::GoldenLlamas;

// A model whole in memory, with the formula's weights, without an engine.
class WholeModel {
 public:
  WholeModel(const models::LanguageModel& description, models::Head head)
      : model_(models::MakeModel(description, head)), layout_(description.Layout()) {
    size_t next = 0;
    for (const zero::BlockSpec& block : model_.blocks) {
      modules_.push_back(zero::BuildWhole(block));
      torch::NoGradGuard no_grad;
      for (torch::Tensor parameter : zero::UniqueParameters(*modules_.back())) {
        const models::PublishedTensor& tensor = layout_.tensors[next++];
        const std::vector<float> values = testing_support::Formula(tensor.name, tensor.elements());
        std::memcpy(parameter.data_ptr<float>(), values.data(), values.size() * sizeof(float));
      }
      modules_.back()->eval();
    }
  }
  torch::Tensor Run(const zero::TensorBatch& batch) const {
    torch::NoGradGuard no_grad;
    torch::Tensor x = batch.inputs;
    for (const zero::StageSpec& stage : model_.stages)
      x = stage.forward(*modules_[static_cast<size_t>(stage.block)], x, batch);
    return x;
  }

 private:
  const zero::Model model_;
  const models::ModelLayout layout_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

zero::TensorBatch BatchOf(const std::vector<int64_t>& tokens) {
  zero::TensorBatch batch = ExampleBatch(1, static_cast<int64_t>(tokens.size()));
  std::copy(tokens.begin(), tokens.end(), batch.inputs.data_ptr<int64_t>());
  return batch;
}

class LlamaGoldenTest : public testing_support::ProgramTest {};

TEST_F(LlamaGoldenTest, LogitsAndGreedyTokensAreThoseOfTransformers) {
  const json golden = GoldenLlamas();
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    const auto description = models::ModelFromJson(c["config"]);
    ASSERT_TRUE(description.ok()) << description.status();
    const WholeModel model(**description, models::Head::kLastLogits);
    const zero::TensorBatch batch = testing_support::GoldenTokens(1, 18, c["config"]["vocab_size"]);
    const std::vector<int64_t> row(batch.inputs.data_ptr<int64_t>(), batch.inputs.data_ptr<int64_t>() + 18);
    const int64_t near = (*description)->decoder()->function.NearPositions();
    for (size_t i = 0; i < c["positions"].size(); ++i) {
      const auto position = c["positions"][i].get<int64_t>();
      // transformers was given all of the row at once, and turned it by its length.
      if (position < near && near < 18) continue;
      const torch::Tensor logits = model.Run(BatchOf({row.begin(), row.begin() + position + 1}));
      for (size_t token = 0; token < c["logits"][i].size(); ++token) {
        EXPECT_NEAR(logits[0][static_cast<int64_t>(token)].item<double>(),
                    c["logits"][i][token].get<double>(), 1e-5)
            << "position " << position << ", token " << token;
      }
    }
    const auto greedy = c["greedy"].get<std::vector<int64_t>>();
    std::vector<int64_t> chosen(greedy.begin(), greedy.begin() + 4);
    while (chosen.size() < greedy.size())
      chosen.push_back(model.Run(BatchOf(chosen))[0].argmax().item<int64_t>());
    EXPECT_EQ(chosen, greedy);
  }
}

// The whole way of a user: a directory by --model, then the engine.
TEST_F(LlamaGoldenTest, TrainsAsTransformers) {
  int number = 0;
  const json golden = GoldenLlamas();
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    const std::string directory = dir_ + "/model" + std::to_string(number);
    testing_support::WriteModel(directory, number % 2 == 0 ? c["config"] : c["old"],
                                /*files=*/number % 3 == 0 ? 3 : 1);
    ++number;
    TrainOptions flags = testing_support::GoldenFlags(c, directory);
    flags.others["--offload"] = "none";
    const std::unique_ptr<zero::Engine> engine = testing_support::GoldenEngine(flags);
    ASSERT_NE(engine, nullptr);
    testing_support::ExpectTrainsAs(c, *engine);
  }
  EXPECT_GT(number, 8);
}

TEST(LlamaConfigGolden, BothSpellingsAreOneModelAndItIsWrittenForOthers) {
  const json golden = GoldenLlamas();
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    std::vector<std::string> notes;
    const auto old = models::LlamaConfigFromJson(c["old"], &notes);
    const auto now = models::LlamaConfigFromJson(c["config"], &notes);
    ASSERT_TRUE(old.ok()) << old.status();
    ASSERT_TRUE(now.ok()) << now.status();
    EXPECT_THAT(notes, testing::IsEmpty());
    EXPECT_EQ(now->Context(), old->Context());
    // What is kept as it was given is spelt as it was.
    models::LlamaConfig same = *now;
    same.kept = old->kept;
    EXPECT_EQ(same.ToJson(), old->ToJson());
    const auto description = models::DescribeLlama(*now);
    std::set<std::string> names;
    for (const models::PublishedTensor& tensor : description->Layout().tensors) names.insert(tensor.name);
    EXPECT_EQ(names, c["names"].get<std::set<std::string>>());
    EXPECT_EQ(description->Layout().parameters(), c["parameters"]);
    // Where the numbers say that a tensor lies, the module has it.
    const models::ModelLayout layout = description->Layout();
    const zero::Model model = models::MakeModel(*description);
    size_t next = 0;
    for (size_t b = 0; b < model.blocks.size(); ++b) {
      const zero::FlatLayout run = zero::LayoutOf(*model.blocks[b].build());
      EXPECT_EQ(layout.block_elements[b], run.elements);
      for (const zero::Parameter& parameter : run.parameters) {
        const models::PublishedTensor& tensor = layout.tensors.at(next++);
        EXPECT_THAT(tensor.name, testing::EndsWith(parameter.name));
        EXPECT_EQ(tensor.block, static_cast<int>(b));
        EXPECT_EQ(tensor.offset, parameter.offset);
        EXPECT_EQ(tensor.elements(), parameter.elements);
      }
    }
    EXPECT_EQ(next, layout.tensors.size());
    for (const json& written : {json(now->ToPublished()), now->ToJson()}) {
      const auto again = models::ModelFromJson(written);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ((*again)->ToJson(), now->ToJson());
    }
  }
}

// A key that transformers' classes get in a later release must be looked at here: it may change the function.
TEST(LlamaConfigGolden, EveryKeyOfTheClassesIsKnown) {
  const json golden = GoldenLlamas();
  for (const auto& [type, keys] : golden["keys"].items()) {
    json config = golden["cases"][0]["old"];
    config["model_type"] = type;
    for (const json& key : keys) {
      // Of no effect here, whatever it says.
      const json value = key == "use_cache"        ? json(true)
                         : key == "pretraining_tp" ? json(1)
                         : key == "sliding_window" ? json(8)
                                                   : json();
      if (!config.contains(key)) config[key.get<std::string>()] = value;
    }
    std::vector<std::string> notes;
    const auto parsed = models::LlamaConfigFromJson(config, &notes);
    EXPECT_TRUE(parsed.ok()) << type << " " << parsed.status();
    EXPECT_THAT(notes, testing::IsEmpty());
  }
}

TEST(LlamaConfig, WhatIsNotComputedIsRefusedByName) {
  const json base = {{"model_type", "llama"},    {"hidden_size", 16},
                     {"intermediate_size", 24},  {"num_hidden_layers", 2},
                     {"num_attention_heads", 4}, {"num_key_value_heads", 2},
                     {"vocab_size", 31},         {"max_position_embeddings", 64}};
  ASSERT_TRUE(models::ModelFromJson(base).ok());
  for (const auto& [key, value, says] : std::vector<std::tuple<std::string, json, std::string>>{
           {"model_type", "gemma", "none of gpt2, llama"},
           {"rope_scaling", {{"rope_type", "proportional"}, {"factor", 4.0}}, "yarn, longrope and llama3"},
           {"rope_scaling", {{"type", "dynamic"}}, "without a factor"},
           {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 0.5}}, "a factor below 1"},
           {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_slow", 64}}, "beta_slow"},
           {"rope_scaling", {{"rope_type", "longrope"}, {"short_factor", {1, 1}}}, "long_factor"},
           {"rope_scaling",
            {{"rope_type", "longrope"}, {"short_factor", {1, 1, 1}}, {"long_factor", {1, 1}}},
            "lists of 2 numbers"},
           {"rope_scaling", {{"type", "linear"}}, "without a factor"},
           {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "without low_freq_factor"},
           {"rope_parameters", {{"rope_type", "default"}, {"mrope_section", {1, 2}}}, "mrope_section"},
           {"rope_parameters", 3, "not a JSON object"},
           {"rope_interleaved", true, "not computed"},
           {"partial_rotary_factor", 0.5, "a part of a head"},
           {"layer_types", {"full_attention", "linear_attention"}, "sliding_attention alone"},
           {"layer_types", {"full_attention", "sliding_attention"}, "no llama has a window"},
           {"final_logit_softcapping", 30.0, "no llama has"},
           {"query_pre_attn_scalar", 256, "no llama has"},
           {"layer_types", {"full_attention"}, "for each layer"},
           {"hidden_act", "gelu", "silu alone"},
           {"num_key_value_heads", 3, "not a multiple"},
           {"num_attention_heads", 0, "not 1 or more"},
           {"head_dim", 5, "odd"},
           {"attention_dropout", 1.5, "not in [0, 1)"},
           {"quantization_config", {{"bits", 4}}, "not read"},
           {"hidden_size", nullptr, "is missing"},
           {"rope_theta", 0, "not above 0"},
           {"rms_norm_epz", 1e-5, "did you mean \"rms_norm_eps\""},
           {"use_sliding_window", true, "no llama has"}}) {
    json config = base;
    config[key] = value;
    const auto parsed = models::ModelFromJson(config);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << key << " " << value;
    EXPECT_THAT(std::string(parsed.status().message()), testing::AllOf(HasSubstr(key), HasSubstr(says)));
  }
  for (const auto& [type, key] : {std::pair{"mistral", "attention_bias"}, {"qwen2", "mlp_bias"}}) {
    json config = base;
    config["model_type"] = type;
    config[key] = true;
    EXPECT_THAT(std::string(models::ModelFromJson(config).status().message()),
                HasSubstr(std::string("which no ") + type));
  }
}

TEST(LlamaConfig, WhatAFamilyWithWindowsDoesNotComputeIsRefusedByName) {
  const json base = {{"hidden_size", 16},
                     {"intermediate_size", 24},
                     {"num_hidden_layers", 2},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"vocab_size", 31},
                     {"head_dim", 4}};
  for (const auto& [type, key, value, says] :
       std::vector<std::tuple<std::string, std::string, json, std::string>>{
           {"mistral", "layer_types", {"full_attention", "sliding_attention"}, "every layer of a mistral"},
           {"mistral", "sliding_window", 0, "not 1 or more"},
           {"qwen2", "layer_types", {"full_attention", "sliding_attention"}, "without use_sliding_window"},
           {"phi3", "resid_pdrop", 0.1, "dropout of probabilities alone"},
           {"phi3", "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "default and longrope alone"},
           {"gemma2", "sliding_window", nullptr, "no layer with a window"},
           {"gemma2", "use_bidirectional_attention", true, "look back alone"},
           {"gemma2", "hidden_activation", "silu", "gelu_pytorch_tanh alone"},
           {"gemma2", "partial_rotary_factor", 0.5, "a part of a head"},
           {"gemma3_text", "attn_logit_softcapping", 50.0, "no gemma3"},
           {"gemma3_text", "rope_parameters", {{"rope_type", "default"}}, "full_attention"},
           {"gemma3_text", "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}, "dynamic"}}) {
    json config = base;
    config["model_type"] = type;
    ASSERT_TRUE(models::ModelFromJson(config).ok()) << models::ModelFromJson(config).status();
    config[key] = value;
    const auto parsed = models::ModelFromJson(config);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << type << " " << key;
    EXPECT_THAT(std::string(parsed.status().message()), testing::AllOf(HasSubstr(key), HasSubstr(says)));
  }
}

TEST(LlamaConfig, LayersHaveTheWindowsOfTheirFamily) {
  const json base = {{"hidden_size", 16},        {"intermediate_size", 24},  {"num_hidden_layers", 4},
                     {"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"vocab_size", 31}};
  const auto windows = [&](json more) {
    json config = base;
    config.update(more);
    const auto model = models::ModelFromJson(config);
    EXPECT_TRUE(model.ok()) << model.status();
    return (*model)->decoder()->function.windows;
  };
  using Windows = std::vector<int64_t>;
  EXPECT_EQ(windows({{"model_type", "mistral"}}), Windows(4, 4096));  // transformers' default
  EXPECT_EQ(windows({{"model_type", "mistral"}, {"sliding_window", 100}}), Windows(4, 100));
  EXPECT_EQ(windows({{"model_type", "mistral"}, {"sliding_window", nullptr}}), Windows(4, 0));
  EXPECT_EQ(windows({{"model_type", "phi3"}}), Windows(4, 0));
  EXPECT_EQ(windows({{"model_type", "qwen2"}, {"sliding_window", 100}}), Windows(4, 0));  // not used
  json qwen = {{"model_type", "qwen2"}, {"sliding_window", 100}, {"use_sliding_window", true}};
  EXPECT_EQ(windows(qwen), Windows(4, 0));  // by layers from 28 on
  qwen["max_window_layers"] = 2;
  EXPECT_EQ(windows(qwen), Windows({0, 0, 100, 100}));
  EXPECT_EQ(windows({{"model_type", "gemma2"}}), Windows({4096, 0, 4096, 0}));
  EXPECT_EQ(windows({{"model_type", "gemma3_text"}, {"sliding_window_pattern", 3}}),
            Windows({4096, 4096, 0, 4096}));
  // A window bounds no sequence.
  json mistral = base;
  mistral.update({{"model_type", "mistral"}, {"max_position_embeddings", 32768}});
  EXPECT_EQ((*models::ModelFromJson(mistral))->context(), 32768);
}

// A model that looks at images, too: the text part of it, of which much is what transformers has by default.
TEST(LlamaConfig, TheTextOfGemma3IsRead) {
  json config = {{"model_type", "gemma3"},
                 {"eos_token_id", {1, 106}},
                 {"text_config",
                  {{"model_type", "gemma3_text"},
                   {"hidden_size", 2560},
                   {"intermediate_size", 10240},
                   {"num_hidden_layers", 34},
                   {"sliding_window", 1024},
                   {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}}},
                 {"vision_config", {{"hidden_size", 1152}}}};
  std::vector<std::string> notes;
  const auto model = models::ModelFromJson(config, &notes);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(notes, testing::ElementsAre(HasSubstr("images are not")));
  EXPECT_EQ((*model)->Layout().parameters(), 3'880'263'168);  // those of Gemma 3 4B that read text
  EXPECT_EQ((*model)->llama()->kept["eos_token_id"], json({1, 106}));
  config["text_config"]["model_type"] = "llama";
  EXPECT_FALSE(models::ModelFromJson(config).ok());
}

// Published contexts: yarn's is longer by its factor.
TEST(LlamaConfig, YarnTakesLongerSequences) {
  json config = {{"model_type", "qwen2"},    {"hidden_size", 16},
                 {"intermediate_size", 24},  {"num_hidden_layers", 1},
                 {"num_attention_heads", 4}, {"num_key_value_heads", 2},
                 {"vocab_size", 31},         {"max_position_embeddings", 32768}};
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  EXPECT_EQ((*models::ModelFromJson(config))->context(), 131072);
}

// Described without a block of it: within the time of a test.
TEST(LlamaConfig, SeventyBillionParametersAreDescribed) {
  const auto model = models::ModelFromJson({{"model_type", "llama"},
                                            {"hidden_size", 8192},
                                            {"intermediate_size", 28672},
                                            {"num_hidden_layers", 80},
                                            {"num_attention_heads", 64},
                                            {"num_key_value_heads", 8},
                                            {"vocab_size", 128256},
                                            {"max_position_embeddings", 131072}});
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->Layout().parameters(), 70'553'706'496);  // as Llama 3.1's model card has them
  EXPECT_EQ(models::MakeModel(**model).blocks.size(), 82u);
}

// train, then export: what nobody changed comes back to the bit, and beside it what others need.
TEST_F(LlamaGoldenTest, WeightsComeBackToTheBitThroughTheProgram) {
  std::string tokens;
  for (int i = 0; i < 4000; ++i) tokens += {static_cast<char>((i * 7 + i / 5) % 31), '\0'};
  testing_support::WriteFile(dir_ + "/tokens.bin", tokens);
  int number = 0;
  const json golden = GoldenLlamas();
  for (const json& c : golden["cases"]) {
    if (c["length"] != 18) continue;
    SCOPED_TRACE(c["old"].dump());
    const std::string name = std::to_string(number++);
    testing_support::WriteModel(dir_ + "/model" + name, c["config"], 2);
    testing_support::WriteFile(dir_ + "/model" + name + "/tokenizer_config.json", "{}");
    const auto trained = Run({"train",
                              "--model",
                              "model" + name,
                              "--data",
                              "tokens.bin",
                              "--state-dir",
                              "state" + name,
                              "--steps",
                              "1",
                              "--lr",
                              "0",
                              "--weight-decay",
                              "0",
                              "--seq",
                              "16",
                              "--batch",
                              "1",
                              "--dtype",
                              number % 2 == 0 ? "fp32" : "bf16",
                              "--host-memory",
                              "200MiB",
                              "--quiet"});
    ASSERT_EQ(trained.code, 0) << trained.err;
    const std::string out = dir_ + "/out" + name;
    std::filesystem::create_directory(out);
    const auto exported = Run({"export", "state" + name, out, "--max-shard", "4000"});
    ASSERT_EQ(exported.code, 0) << exported.err;
    EXPECT_TRUE(std::filesystem::exists(out + "/tokenizer_config.json"));
    const json config = json::parse(testing_support::ReadFile(out + "/config.json"));
    const auto again = models::ModelFromJson(config);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(**again == **models::ModelFromJson(c["config"]));
    const json index = json::parse(testing_support::ReadFile(out + "/model.safetensors.index.json"));
    EXPECT_EQ(index["weight_map"].size(), c["names"].size());
    for (const auto& [tensor, file] : index["weight_map"].items()) {
      const auto reader = swap::SafetensorsReader::Open(out + "/" + file.get<std::string>());
      ASSERT_TRUE(reader.ok()) << reader.status();
      const swap::TensorInfo* info = (*reader)->Find(tensor);
      ASSERT_NE(info, nullptr);
      int64_t elements = 1;
      for (const uint64_t size : info->shape) elements *= static_cast<int64_t>(size);
      std::vector<float> values(static_cast<size_t>(elements));
      ASSERT_TRUE((*reader)->Read(*info, 0, std::as_writable_bytes(std::span(values))).ok());
      EXPECT_EQ(values, testing_support::Formula(tensor, elements)) << tensor;
    }
    if (number > 1) continue;
    const auto sampled =
        Run({"sample", "state" + name, "--prompt", "1 2 3", "--tokens", "5", "--temperature", "0"});
    EXPECT_EQ(sampled.code, 0) << sampled.err;
    const auto planned = Run({"plan", "--model", "model" + name, "--no-probe", "--seq", "16"});
    EXPECT_EQ(planned.code, 0) << planned.err;
    const auto estimated = Run({"estimate", "--model", "model" + name, "--json"});
    EXPECT_EQ(estimated.code, 0) << estimated.err;
  }
}

}  // namespace
}  // namespace penstock::tools::llama_golden_test
