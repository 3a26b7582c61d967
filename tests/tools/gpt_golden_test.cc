// The example model against transformers' GPT-2, key by key of its config.json. tests/golden/gpt2.json has
// its losses and gradient norms; tests/golden/make asks for them. And updates against LibTorch's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "kernels/optimizer.h"
#include "models/families/family.h"
#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/optimizer_flags.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/compute/optimizer.h"
#include "zero/engine/engine.h"

namespace penstock::tools::gpt_golden_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Golden;

class GptGoldenTest : public testing_support::ProgramTest {};

// The whole way of a user: config.json and weights by --init-from, then the engine.
TEST_F(GptGoldenTest, EvaluatesAndTrainsAsTransformers) {
  const json golden = Golden("gpt2.json");
  int number = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["config"].dump());
    const std::string directory = dir_ + "/model" + std::to_string(number++);
    testing_support::WriteModel(directory, c["config"]);
    TrainOptions flags;
    flags.init_from = directory;
    flags.others["--offload"] = "none";
    flags.dtype = "fp32";
    flags.threads = 1;
    flags.batch = c["batch"].get<int64_t>();
    flags.seq = c["length"].get<int64_t>();
    flags.lr = 0.01;
    flags.others["--weight-decay"] = 0.1;
    flags.warmup = 0;
    auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
    ASSERT_TRUE(settings.ok()) << settings.status();
    settings->engine.optimizer.schedule = *zero::LrSchedule::Create(zero::Constant{.lr = 0.01});
    auto engine = zero::CreateEngine(models::MakeModel(*settings->model), settings->engine);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const zero::TensorBatch batch =
        testing_support::GoldenTokens(c["batch"], c["length"], c["config"]["vocab_size"]);
    const auto evaluation = (*engine)->Evaluate({batch});
    ASSERT_TRUE(evaluation.ok()) << evaluation.status();
    EXPECT_NEAR(*evaluation, c["evaluation"].get<double>(), 3e-6);
    for (size_t step = 0; step < c["losses"].size(); ++step) {
      const auto result = (*engine)->Step({batch});
      ASSERT_TRUE(result.ok()) << result.status();
      const double norm = c["norms"][step];
      EXPECT_NEAR(result->loss, c["losses"][step].get<double>(), 2e-5) << "step " << step;
      EXPECT_NEAR(result->grad_norm, norm, 1e-4 * norm) << "step " << step;
    }
    if (c["config"].contains("reorder_and_upcast_attn")) {
      engine->reset();  // one at a time
      // In fp32 it changes nothing. Elsewhere scores and probabilities are fp32's: nothing like them without.
      const auto in_bf16 = [&](bool upcast) {
        zero::EngineOptions options = settings->engine;
        options.dtype = kernels::DType::kBf16;
        options.storage.checkpoints = {};
        models::GptConfig config = *models::GptConfigFromJson(c["config"]);
        config.attention_in_fp32 = upcast;
        auto rounded = zero::CreateEngine(models::MakeGpt(config), options);
        EXPECT_TRUE(rounded.ok()) << rounded.status();
        return rounded.ok() ? *(*rounded)->Evaluate({batch}) : 0.0;
      };
      const double with = in_bf16(true), without = in_bf16(false);
      EXPECT_NE(with, without);
      EXPECT_NEAR(with, c["evaluation"].get<double>(), 0.03);
    }
    // What is written for others asks for the same function.
    const auto again = models::GptConfigFromJson(json(settings->model->ToPublished()));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->ToJson(), settings->model->ToJson());
    const auto recorded = models::GptConfigFromJson(settings->model->ToJson());
    ASSERT_TRUE(recorded.ok()) << recorded.status();
    EXPECT_EQ(recorded->ToPublished(), settings->model->ToPublished());
  }
  EXPECT_GT(number, 15);
}

TEST(GptConfigGolden, WhatIsAbsentIsAsInTransformers) {
  const json golden = Golden("gpt2.json");
  const auto config = models::GptConfigFromJson(golden["given"]);
  ASSERT_TRUE(config.ok()) << config.status();
  const json published = config->ToPublished();
  for (const auto& [key, value] : golden["defaults"].items()) EXPECT_EQ(published[key], value) << key;
  // Without a model_type it is Penstock's own shape, and its own defaults.
  json own = golden["given"];
  own.erase("model_type");
  EXPECT_EQ(models::GptConfigFromJson(own)->activation, models::GptActivation::kGelu);
  EXPECT_EQ(models::GptConfigFromJson(own)->dropout, 0);
}

// A key that transformers' class gets in a later release must be looked at here: it may change the function.
TEST(GptConfigGolden, EveryKeyIsServedRefusedOrNoneOfTheModelsBusiness) {
  const std::set<std::string> other = {
      "bos_token_id",       "eos_token_id",          "pad_token_id",
      "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
      "summary_type",       "summary_use_proj",      "use_cache",
      "add_cross_attention"};
  const json golden = Golden("gpt2.json");
  const json published = models::GptConfig().ToPublished();
  ASSERT_GE(golden["keys"].size(), 26u);
  json all = golden["given"];
  for (const json& key : golden["keys"]) {
    EXPECT_TRUE(published.contains(key) || other.contains(key)) << key;
    if (!all.contains(key)) all[key.get<std::string>()] = nullptr;
  }
  std::vector<std::string> notes;
  EXPECT_TRUE(models::GptConfigFromJson(all, &notes).ok());
  EXPECT_TRUE(notes.empty()) << notes.front();
  ASSERT_GE(golden["activations"].size(), 24u);
  int served = 0;
  for (const json& name : golden["activations"]) {
    json config = golden["given"];
    config["activation_function"] = name;
    const auto parsed = models::GptConfigFromJson(config);
    served += parsed.ok() ? 1 : 0;
    if (parsed.ok()) continue;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("activation_function is " + name.dump()));
  }
  EXPECT_EQ(served, 12);
}

TEST(GptConfigGolden, AMisspeltKeyIsRefusedWithTheOneThatWasMeantAndOthersAreANote) {
  const json given = Golden("gpt2.json")["given"];
  for (const auto& [key, meant] : std::vector<std::pair<std::string, std::string>>{
           {"atn_pdrop", "attn_pdrop"},
           {"resid_dropout", "resid_pdrop"},
           {"activation", "activation_function"},
           {"layer_norm_eps", "layer_norm_epsilon"},
           {"scale_attn_by_inverse_layer_index", "scale_attn_by_inverse_layer_idx"},
           {"tie_words_embeddings", "tie_word_embeddings"},
           {"N_Inner", "n_inner"}}) {
    json config = given;
    config[key] = 0.5;
    const auto parsed = models::GptConfigFromJson(config);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << key;
    EXPECT_THAT(std::string(parsed.status().message()),
                HasSubstr("unknown key \"" + key + "\" (did you mean \"" + meant + "\"?)"));
  }
  json config = given;
  config.update({{"_commit_hash", "abc"}, {"torch_dtype", "float32"}, {"hidden_size", given["n_embd"]}});
  std::vector<std::string> notes;
  ASSERT_TRUE(models::GptConfigFromJson(config, &notes).ok());
  EXPECT_TRUE(notes.empty());
  config.update({{"mood", "good"}, {"license", "MIT"}});
  ASSERT_TRUE(models::GptConfigFromJson(config, &notes).ok());
  EXPECT_THAT(notes, testing::ElementsAre("model: unknown keys, of no effect: \"license\", \"mood\""));
  config["hidden_size"] = 24;
  EXPECT_THAT(std::string(models::GptConfigFromJson(config).status().message()),
              HasSubstr("hidden_size is 24, and n_embd is 12"));
}

// As GPT2Config's attribute_map has them.
TEST(GptConfigGolden, NamesThatOtherModelsHaveForTheShapeAreTaken) {
  const json given = Golden("gpt2.json")["given"];
  json config = given;
  const std::vector<std::pair<std::string, std::string>> names = {{"hidden_size", "n_embd"},
                                                                  {"max_position_embeddings", "n_positions"},
                                                                  {"num_attention_heads", "n_head"},
                                                                  {"num_hidden_layers", "n_layer"}};
  for (const auto& [name, of] : names) {
    config.erase(of);
    config[name] = given[of];
  }
  std::vector<std::string> notes;
  const auto parsed = models::GptConfigFromJson(config, &notes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(notes.empty());
  EXPECT_EQ(parsed->ToPublished(), models::GptConfigFromJson(given)->ToPublished());
  for (const auto& [name, of] : names) {
    json wrong = config;
    wrong[name] = 2.5;
    EXPECT_EQ(models::GptConfigFromJson(wrong).status().message(),
              "model: " + name + " is 2.5, not a whole number");
    wrong = config;
    wrong.erase(name);
    EXPECT_EQ(models::GptConfigFromJson(wrong).status().message(), "model: " + of + " is missing");
    wrong = config;
    wrong[of] = given[of].get<int64_t>() + 1;
    EXPECT_THAT(
        std::string(models::GptConfigFromJson(wrong).status().message()),
        testing::AllOf(HasSubstr(name + " is "), HasSubstr(of + " is "), HasSubstr("the same thing")));
  }
}

TEST(GptConfigGolden, WhatIsNotServedIsRefusedByName) {
  const json given = Golden("gpt2.json")["given"];
  for (const auto& [key, value, says] : std::vector<std::tuple<std::string, json, std::string>>{
           {"model_type", "llama", "this model is GPT-2"},
           {"model_type", 3, "this model is GPT-2"},
           {"tie_word_embeddings", false, "tie them"},
           {"add_cross_attention", true, "no encoder"},
           {"activation_function", "mish", "gelu_new"},
           {"activation_function", 1, "gelu_new"},
           {"layer_norm_epsilon", "1e-5", "not a number"},
           {"layer_norm_epsilon", -1, "not in"},
           {"attn_pdrop", 1, "not in"},
           {"n_inner", 0, "not 1 or more"},
           {"n_inner", "big", "not a whole number"},
           {"scale_attn_weights", 1, "neither true nor false"},
           {"n_layer", 2.5, "not a whole number"},
           {"n_layer", ~uint64_t{0}, "not a whole number"},
           {"n_layer", nullptr, "is missing"},
           {"pruned_heads", {{"0", {1}}}, "not served"},
           {"vocab_size", json::array(), "not a whole number"}}) {
    json config = given;
    config[key] = value;
    const auto parsed = models::GptConfigFromJson(config);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << key << " " << value;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(key));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(says));
  }
}

// As a config's optimizer is taken: defaults, decay and arithmetic.
TEST(OptimizersGolden, UpdateAsLibTorchAndDeepSpeed) {
  const json golden = Golden("optimizers.json");
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["config"].dump());
    auto parsed = run::ParseConfig(c["config"].dump());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    run::FillDefaults(parsed->autos, 100, 10, &parsed->config);
    json record = json::object();
    const json no_run;
    run::Changes changes;
    const auto options = ResolveOptimizerOptions(parsed->config.optimizer,
                                                 run::RecordedOptions(no_run, {}, &changes), &record);
    ASSERT_TRUE(options.ok()) << options.status();
    auto weights = golden["start"].get<std::vector<float>>();
    std::vector<float> m(weights.size()), v(weights.size());
    for (size_t step = 0; step < golden["gradients"].size(); ++step) {
      auto gradients = golden["gradients"][step].get<std::vector<float>>();
      kernels::UpdateArrays arrays;
      arrays.n = weights.size();
      arrays.param = weights.data();
      arrays.grad = gradients.data();
      arrays.m = m.data();
      arrays.v = v.data();
      std::visit(
          [&](const auto& s) {
            if constexpr (requires { kernels::ApplyUpdate(s, arrays); }) {
              kernels::ApplyUpdate(s, arrays);
            } else {
              FAIL() << "no golden file has LAMB, which takes whole parameters";
            }
          },
          zero::MakeOptimizerStep(*options, {{.lr = zero::LearningRate(*options)}},
                                  static_cast<int64_t>(step) + 1, 1.0));
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_NEAR(weights[i], c["weights"][step][i].get<double>(), 1e-6) << "step " << step << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace penstock::tools::gpt_golden_test
