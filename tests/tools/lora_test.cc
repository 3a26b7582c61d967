// Adapters of low rank against PEFT: tests/golden/lora.json has, for adapters with weights by formula, losses
// and gradient norms of 20 steps, and what the merged model answers then. tests/golden/make lora asks for
// them.
#include "models/families/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "models/families/family.h"
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

namespace penstock::tools::lora_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Formula;
using testing_support::Golden;
using testing_support::Lines;
using testing_support::Program;
using testing_support::Ran;
using testing_support::ReadFile;
using testing_support::WriteFile;
using testing_support::WriteModel;
using testing_support::operator+;

// As PEFT saves one, with weights by formula.
void WriteAdapter(const std::string& directory, const json& adapter_config, const json& model_config) {
  std::filesystem::create_directory(directory);
  WriteFile(directory + "/adapter_config.json", adapter_config.dump());
  const auto adapter = models::ReadAdapterConfig(directory);
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  const auto model = models::WithLora(*models::ModelFromJson(model_config), adapter->options);
  ASSERT_TRUE(model.ok()) << model.status();
  const models::ModelLayout layout = models::AdaptersOf((*model)->Layout());
  std::vector<swap::TensorInfo> infos;
  for (const models::PublishedTensor& t : layout.tensors)
    infos.push_back({t.name, swap::Dtype::kF32, t.published_shape(), 0});
  auto writer = swap::SafetensorsWriter::Create(directory + "/adapter_model.safetensors", infos, {}, true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const models::PublishedTensor& t : layout.tensors) {
    std::vector<float> values = Formula(t.name, t.elements());
    for (float& value : values) value /= 8;
    ASSERT_TRUE((*writer)->Append(std::as_bytes(std::span(values))).ok());
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

// Logits of the last position, by a model whole in memory.
std::vector<double> LogitsOf(const std::string& directory, const std::vector<int64_t>& tokens) {
  const auto description = models::OpenModel(directory);
  EXPECT_TRUE(description.ok()) << description.status();
  const zero::Model model = models::MakeModel(**description, models::Head::kLastLogits);
  auto weights = models::WeightImport::Open(directory, (*description)->Layout());
  EXPECT_TRUE(weights.ok()) << weights.status();
  torch::NoGradGuard no_grad;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (size_t b = 0; b < model.blocks.size(); ++b) {
    modules.push_back(zero::BuildWhole(model.blocks[b]));
    const zero::FlatLayout layout = zero::LayoutOf(*modules.back());
    size_t i = 0;
    for (torch::Tensor parameter : zero::UniqueParameters(*modules.back())) {
      const zero::Parameter& place = layout.parameters[i++];
      EXPECT_TRUE((*weights)
                      ->Read(static_cast<int>(b), place.offset, place.elements, parameter.data_ptr<float>())
                      .ok());
    }
    modules.back()->eval();
  }
  zero::TensorBatch batch = ExampleBatch(1, static_cast<int64_t>(tokens.size()));
  std::copy(tokens.begin(), tokens.end(), batch.inputs.data_ptr<int64_t>());
  torch::Tensor x = batch.inputs;
  for (const zero::StageSpec& stage : model.stages)
    x = stage.forward(*modules[static_cast<size_t>(stage.block)], x, batch);
  const torch::Tensor logits = x[0].contiguous();
  return {logits.data_ptr<float>(), logits.data_ptr<float>() + logits.numel()};
}

class LoraGoldenTest : public testing_support::ProgramTest {
 protected:
  TrainOptions FlagsFor(const json& c, const std::string& model, const std::string& adapter) const {
    TrainOptions flags = testing_support::GoldenFlags(c, model);
    flags.init_from = adapter;
    flags.others["--offload"] = "nvme";
    flags.state_dirs = {dir_ + "/state"};
    flags.overwrite = true;
    return flags;
  }
  // Trains as the script did; returns the evaluation after it.
  static double Train(const json& c, const TrainOptions& flags) {
    const std::unique_ptr<zero::Engine> engine = testing_support::GoldenEngine(flags);
    if (engine == nullptr) return 0;
    testing_support::ExpectTrainsAs(c, *engine);
    if (testing::Test::HasFatalFailure()) return 0;
    EXPECT_TRUE(engine->Keep().ok());
    return *engine->Evaluate(
        {testing_support::GoldenTokens(c["batch"], c["length"], c["config"]["vocab_size"])});
  }
};

// The whole way of a user: PEFT's adapter in, training, adapter and merged model out.
TEST_F(LoraGoldenTest, TrainsMergesAndWritesAsPeft) {
  const json golden = Golden("lora.json");
  size_t number = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["config"]["model_type"].dump() + c["lora"].dump());
    const std::string place = dir_ + "/" + std::to_string(number++);
    const std::string model = place + "-model", adapter = place + "-adapter";
    WriteModel(model, c["config"], /*files=*/number % 3 == 0 ? 3 : 1);
    WriteAdapter(adapter, c["adapter"], c["config"]);
    const double after = Train(c, FlagsFor(c, model, adapter));

    const std::string out = place + "-out", merged = place + "-merged";
    std::filesystem::create_directory(merged);
    const Ran written = Run({"export", dir_ + "/state", out}),
              whole = Run({"export", dir_ + "/state", merged, "--merge"});
    ASSERT_EQ(written.code, 0) << written.err;
    ASSERT_EQ(whole.code, 0) << whole.err;
    const json config = json::parse(ReadFile(out + "/adapter_config.json"));
    for (const auto& [key, value] : config.items()) {
      if (key == "base_model_name_or_path") {
        EXPECT_EQ(value, model);
      } else if (key == "target_modules" && c["lora"].value("target_modules", json()) == "all-linear") {
        // PEFT writes out every matrix of every layer; here it is a name for all layers.
        EXPECT_EQ(value.size() * 2, c["adapter"][key].size());
      } else {
        EXPECT_EQ(value, c["adapter"][key]) << key;
      }
    }
    const auto file = swap::SafetensorsReader::Open(out + "/adapter_model.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    std::set<std::string> names;
    for (const swap::TensorInfo& info : (*file)->tensors()) names.insert(info.name);
    EXPECT_EQ(names, c["names"].get<std::set<std::string>>());

    // What was written is what was trained, to the bit; its base is where it says.
    TrainOptions again = FlagsFor(c, model, out);
    again.model.reset();
    const auto engine = testing_support::GoldenEngine(again);
    ASSERT_NE(engine, nullptr);
    const zero::TensorBatch batch =
        testing_support::GoldenTokens(c["batch"], c["length"], c["config"]["vocab_size"]);
    EXPECT_EQ(*engine->Evaluate({batch}), after);

    const auto greedy = c["greedy"].get<std::vector<int64_t>>();
    const std::vector<int64_t> row(batch.inputs.data_ptr<int64_t>(),
                                   batch.inputs.data_ptr<int64_t>() + c["length"].get<int64_t>());
    const std::vector<double> logits = LogitsOf(merged, row);
    ASSERT_EQ(logits.size(), c["logits"].size());
    for (size_t i = 0; i < logits.size(); ++i)
      EXPECT_NEAR(logits[i], c["logits"][i].get<double>(), 2e-5) << i;
    std::vector<int64_t> chosen(greedy.begin(), greedy.begin() + 4);
    while (chosen.size() < greedy.size()) {
      const std::vector<double> next = LogitsOf(merged, chosen);
      chosen.push_back(std::max_element(next.begin(), next.end()) - next.begin());
    }
    EXPECT_EQ(chosen, greedy);
  }
  EXPECT_GE(number, 10U);
}

TEST(Lora, EveryBlockLiesWhereItsModuleHasIt) {
  for (const json& c : Golden("lora.json")["cases"]) {
    const auto base = models::ModelFromJson(c["config"]);
    ASSERT_TRUE(base.ok()) << base.status();
    const json lora = c["lora"];
    models::LoraOptions options{.rank = lora.value("r", int64_t{8}), .targets = {models::kAllLinear}};
    const auto model = models::WithLora(*base, options);
    ASSERT_TRUE(model.ok()) << model.status();
    const models::ModelLayout layout = (*model)->Layout(), of_base = (*base)->Layout();
    const zero::Model made = models::MakeModel(**model);
    size_t next = 0;
    for (size_t b = 0; b < made.blocks.size(); ++b) {
      const zero::FlatLayout run = zero::LayoutOf(*made.blocks[b].build());
      EXPECT_EQ(layout.block_elements[b], run.elements);
      for (const zero::Parameter& parameter : run.parameters) {
        const models::PublishedTensor& tensor = layout.tensors.at(next++);
        EXPECT_EQ(tensor.offset, parameter.offset) << tensor.name;
        EXPECT_EQ(tensor.elements(), parameter.elements);
        EXPECT_EQ(parameter.trains, parameter.name.starts_with("lora."));
      }
    }
    EXPECT_EQ(next, layout.tensors.size());
    // What is frozen lies where it does without adapters.
    const models::ModelLayout frozen = models::WithoutAdapters(layout);
    ASSERT_EQ(frozen.tensors.size(), of_base.tensors.size());
    for (size_t t = 0; t < frozen.tensors.size(); ++t) {
      EXPECT_EQ(frozen.tensors[t].name, of_base.tensors[t].name);
      EXPECT_EQ(frozen.tensors[t].offset, of_base.tensors[t].offset);
    }
    EXPECT_EQ(frozen.tensors.size() + models::AdaptersOf(layout).tensors.size(), layout.tensors.size());
    const auto again = models::ModelFromJson((*model)->ToJson());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(**again == **model);
    EXPECT_FALSE(**model == **base);
  }
}

// ---- The program.

const json kSmall = {{"model_type", "llama"},    {"hidden_size", 64},
                     {"intermediate_size", 96},  {"num_hidden_layers", 3},
                     {"num_attention_heads", 4}, {"num_key_value_heads", 2},
                     {"vocab_size", 256},        {"max_position_embeddings", 64}};

class LoraCliTest : public testing_support::ProgramTest {
 protected:
  LoraCliTest() { WriteModel(dir_ + "/model", kSmall); }

  Arguments Tune(const std::string& state, const Arguments& more = {}) const {
    return Arguments{"train",
                     "--data",
                     text_,
                     "--model",
                     dir_ + "/model",
                     "--state-dir",
                     dir_ + state,
                     "--log",
                     dir_ + state + ".jsonl",
                     "--batch",
                     "2",
                     "--seq",
                     "32",
                     "--steps",
                     "5",
                     "--threads",
                     "1",
                     "--lr",
                     "1e-2"} +
           more;
  }
  static std::string LossesIn(const std::string& path) {
    std::string losses;
    for (const std::string& line : Lines(ReadFile(path)))
      losses += json::parse(line)["loss"].dump() + "," + json::parse(line)["grad_norm"].dump() + "\n";
    return losses;
  }
  void ExpectRefused(const Arguments& arguments, const std::vector<std::string>& words, int code = 2) {
    const Ran ran = Run(arguments);
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1U) << ran.err;
    for (const std::string& word : words) EXPECT_THAT(ran.err, HasSubstr(word));
  }
  std::string Edited(const json& changes, const std::string& name) {
    json config = {{"peft_type", "LORA"}, {"r", 4}, {"target_modules", {"q_proj", "v_proj"}}};
    for (const auto& [key, value] : changes.items()) config[key] = value;
    std::filesystem::create_directory(dir_ + name);
    WriteFile(dir_ + name + "/adapter_config.json", config.dump());
    return dir_ + name;
  }
};

TEST_F(LoraCliTest, TheBitsAreThoseOfEveryPlaceAndBudgetAndOfARunThatWasKilled) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const Arguments lora = {"--lora-rank", "4",   "--lora-dropout", "0.25", "--lora-targets", "all-linear",
                            "--dtype",     dtype, "--quiet"};
    const std::string at = "/" + dtype;
    ASSERT_EQ(Run(Tune(at + "none", lora + Arguments{"--offload", "none"})).code, 0);
    const std::string expected = LossesIn(dir_ + at + "none.jsonl");
    EXPECT_EQ(Lines(expected).size(), 5U);
    ASSERT_EQ(Run(Tune(at + "nvme", lora)).code, 0);
    EXPECT_EQ(LossesIn(dir_ + at + "nvme.jsonl"), expected);
    ASSERT_EQ(Run(Tune(at + "cpu", lora + Arguments{"--offload", "cpu"})).code, 0);
    EXPECT_EQ(LossesIn(dir_ + at + "cpu.jsonl"), expected);
    // Killed somewhere, and gone on with.
    Program killed(dir_, Tune(at + "killed", lora));
    for (int i = 0; i < 3000 && Lines(ReadFile(dir_ + at + "killed.jsonl")).size() < 2; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    killed.Signal(SIGKILL);
    killed.Wait();
    const Ran resumed = Run(Tune(at + "killed", {"--resume", "--quiet"}));
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(LossesIn(dir_ + at + "killed.jsonl"), expected);
  }
}

TEST_F(LoraCliTest, WhatIsFrozenIsNotWrittenAndStaysAsItIs) {
  const Ran ran = Run(Tune("/state", {"--lora-rank", "2", "--dtype", "fp32", "--report",
                                      dir_ + "/report.json", "--eval-data", text_}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("lora: rank 2, alpha 8, on q_proj, v_proj: 1344 of "));
  const json report = json::parse(ReadFile(dir_ + "/report.json"));
  // A block of adapters takes whole tiles of 2048 elements; 28 bytes are an element's that trains.
  for (const json& step : report["steps"]) EXPECT_LE(step["nvme_write_bytes"].get<int64_t>(), 3 * 4096 * 28);
  EXPECT_EQ(report["evaluations"].size(), 1U);
  ASSERT_EQ(Run({"export", dir_ + "/state", dir_ + "/out"}).code, 0);
  ASSERT_EQ(
      Run({"export", dir_ + "/state", dir_ + "/merged.safetensors", "--merge", "--host-memory", "8MiB"}).code,
      0);
  // The matrices that no adapter goes to are the published ones, to the bit.
  const auto model = *models::ModelFromJson(kSmall);
  const models::ModelLayout layout = model->Layout();
  auto before = models::WeightImport::Open(dir_ + "/model", layout),
       after = models::WeightImport::Open(dir_ + "/merged.safetensors", layout);
  ASSERT_TRUE(after.ok()) << after.status();
  for (const models::PublishedTensor& t : layout.tensors) {
    std::vector<float> was(static_cast<size_t>(t.elements())), is(was);
    ASSERT_TRUE((*before)->Read(t.block, t.offset, t.elements(), was.data()).ok());
    ASSERT_TRUE((*after)->Read(t.block, t.offset, t.elements(), is.data()).ok());
    const bool adapted =
        t.name.find("q_proj") != std::string::npos || t.name.find("v_proj") != std::string::npos;
    EXPECT_EQ(was == is, !adapted) << t.name;
  }
}

// From the state as it is, and from the model that is made of it.
TEST_F(LoraCliTest, TextIsThatOfTheAdaptedModel) {
  ASSERT_EQ(Run(Tune("/state", {"--lora-rank", "4", "--dtype", "fp32", "--quiet", "--lora-targets",
                                "all-linear", "--lr", "0.1", "--steps", "20"}))
                .code,
            0);
  std::filesystem::create_directory(dir_ + "/merged");
  ASSERT_EQ(Run({"export", dir_ + "/state", dir_ + "/merged", "--merge"}).code, 0);
  const Ran sampled =
      Run({"sample", dir_ + "/state", "--prompt", "water ", "--tokens", "20", "--temperature", "0"});
  ASSERT_EQ(sampled.code, 0) << sampled.err;
  const Ran merged =
      Run({"generate", dir_ + "/merged", "--prompt", "water ", "--tokens", "20", "--temperature", "0"});
  const Ran base =
      Run({"generate", dir_ + "/model", "--prompt", "water ", "--tokens", "20", "--temperature", "0"});
  ASSERT_EQ(merged.code, 0) << merged.err;
  EXPECT_THAT(sampled.out, HasSubstr(merged.out.substr(0, merged.out.find_last_not_of('\n') + 1)));
  EXPECT_NE(merged.out, base.out);
  const Ran generated =
      Run({"generate", dir_ + "/state", "--prompt", "water ", "--tokens", "20", "--temperature", "0"});
  EXPECT_EQ(generated.code, 0) << generated.err;
  EXPECT_EQ(generated.out, merged.out);
  ExpectRefused({"export-checkpoint", dir_ + "/state", dir_ + "/universal"}, {"adapters", "--merge"});
}

TEST_F(LoraCliTest, WrongWordsAreRefusedByName) {
  const Arguments none = {"train", "--data", text_, "--model", dir_ + "/model", "--check"};
  ExpectRefused(none + Arguments{"--lora-rank", "0"}, {"--lora-rank 0: must be between 1"});
  ExpectRefused(none + Arguments{"--lora-rank", "-3"}, {"--lora-rank -3"});
  ExpectRefused(none + Arguments{"--lora-rank", "65"},
                {"--lora-rank 65: model.layers.0.self_attn.q_proj is 64 x 64"});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-alpha", "0"},
                {"--lora-alpha 0: must be above 0"});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-dropout", "1"}, {"--lora-dropout 1: must be"});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-dropout", "nan"}, {"--lora-dropout"});
  ExpectRefused(
      none + Arguments{"--lora-rank", "4", "--lora-targets", "q_proj,c_attn"},
      {"--lora-targets", "\"c_attn\"", "self_attn.q_proj", "mlp.down_proj", "lm_head", "all-linear"});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-targets", "proj"}, {"\"proj\""});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-targets", "embed_tokens"}, {"\"embed_tokens\""});
  ExpectRefused(none + Arguments{"--lora-rank", "4", "--lora-targets", "q_proj,"}, {"names with commas"});
  ExpectRefused(none + Arguments{"--lora-alpha", "16"}, {"--lora-alpha goes with --lora-rank N"});
  ExpectRefused({"train", "--data", text_, "--lora-rank", "4"}, {"give --model DIR with safetensors"});
  json tied = kSmall;
  tied["tie_word_embeddings"] = true;
  WriteModel(dir_ + "/tied", tied);
  ExpectRefused(
      {"train", "--model", dir_ + "/tied", "--check", "--lora-rank", "4", "--lora-targets", "lm_head"},
      {"no matrix of this model is called \"lm_head\""});
}

TEST_F(LoraCliTest, AnAdapterOfAnotherKindOrModelIsRefusedByName) {
  const Arguments from = {"train", "--data", text_, "--model", dir_ + "/model", "--check", "--init-from"};
  const std::vector<std::pair<json, std::string>> wrong = {
      {{{"peft_type", "IA3"}}, "peft_type is \"IA3\""},
      {{{"use_dora", true}}, "use_dora is true"},
      {{{"use_rslora", true}}, "use_rslora is true"},
      {{{"bias", "all"}}, "bias is \"all\""},
      {{{"modules_to_save", {"lm_head"}}}, "modules_to_save is"},
      {{{"rank_pattern", {{"q_proj", 2}}}}, "rank_pattern is"},
      {{{"init_lora_weights", "pissa"}}, "init_lora_weights is \"pissa\""},
      {{{"something_new", 1}}, "something_new is 1"},
      {{{"target_modules", ".*_proj"}}, "target_modules is \".*_proj\""},
      {{{"target_modules", {"c_attn"}}}, "\"c_attn\""},
      {{{"target_modules", {"q_proj", "model.layers.1.self_attn.k_proj"}}},
       "self_attn.k_proj of 1 of 3 layers"},
      {{{"r", "four"}}, "r is \"four\""},
      {{{"r", 0}}, "rank 0"}};
  for (size_t i = 0; i < wrong.size(); ++i)
    ExpectRefused(from + Arguments{Edited(wrong[i].first, "/wrong" + std::to_string(i))}, {wrong[i].second});
  const std::string good = Edited({}, "/good");
  ExpectRefused(from + Arguments{good}, {"adapter_model.safetensors"});  // there is none
  WriteAdapter(dir_ + "/of-other", json::parse(ReadFile(good + "/adapter_config.json")), [] {
    json other = kSmall;
    other["hidden_size"] = 32;
    return other;
  }());
  ExpectRefused(from + Arguments{dir_ + "/of-other"}, {"lora_A.weight is [4, 32] there and [4, 64]"});
  ExpectRefused(from + Arguments{good, "--lora-rank", "8"}, {"--lora-rank 8: it has 4 by"});
  ExpectRefused(from + Arguments{good, "--lora-targets", "q_proj"},
                {"--lora-targets q_proj: it has q_proj,v_proj"});
  ExpectRefused({"train", "--data", text_, "--check", "--init-from", good},
                {"is an adapter", "give --model DIR"});
}

TEST_F(LoraCliTest, ARunGoesOnWithTheAdaptersThatItHas) {
  ASSERT_EQ(Run(Tune("/state", {"--lora-rank", "4", "--quiet"})).code, 0);
  const Arguments again = Tune("/state", {"--resume", "--quiet", "--steps", "6"});
  ExpectRefused(again + Arguments{"--lora-rank", "8"}, {"--lora-rank 8: it has 4 since it was created"});
  ExpectRefused(again + Arguments{"--lora-alpha", "9"}, {"--lora-alpha 9: it has 8"});
  ExpectRefused(again + Arguments{"--lora-dropout", "0.5"}, {"--lora-dropout 0.5: it has 0"});
  ExpectRefused(again + Arguments{"--lora-targets", "k_proj"},
                {"--lora-targets k_proj: it has q_proj,v_proj"});
  const Ran same = Run(again + Arguments{"--lora-rank", "4", "--lora-targets", "v_proj,q_proj"});
  EXPECT_EQ(same.code, 0) << same.err;
  ASSERT_EQ(Run(Tune("/whole", {"--quiet"})).code, 0);
  ExpectRefused(Tune("/whole", {"--resume", "--quiet", "--lora-rank", "8"}),
                {"--lora-rank 8: this run has no adapters"});
  ExpectRefused({"export", dir_ + "/whole", dir_ + "/x.safetensors", "--merge"},
                {"--merge", "has no adapters"});
  ExpectRefused({"export", dir_ + "/state", dir_ + "/x.safetensors"}, {"give a directory, or --merge"});
  const Ran checked = Run(again + Arguments{"--check"});
  EXPECT_EQ(checked.code, 0) << checked.err;
}

}  // namespace
}  // namespace penstock::tools::lora_test
