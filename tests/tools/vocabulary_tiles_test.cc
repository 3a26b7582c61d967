// A vocabulary in blocks of rows against one in one block: what they compute, where their elements lie, and
// runs of the program on both.
#include "models/families/vocabulary_tiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "models/families/family.h"
#include "models/families/gpt.h"
#include "models/families/lora.h"
#include "models/families/stages.h"
#include "models/weights/weight_import.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/libtorch/stage_values.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/engine/engine.h"

namespace penstock::tools::vocabulary_tiles_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Formula;
using testing_support::Lines;
using testing_support::Program;
using testing_support::Ran;
using testing_support::ReadFile;
using testing_support::WriteFile;
using testing_support::WriteModel;
using testing_support::operator+;
using torch::Tensor;

constexpr int64_t kVocabulary = 31;

json ConfigOf(const std::string& type, bool tied) {
  if (type == "gpt2") {
    return {{"model_type", "gpt2"}, {"n_layer", 2},      {"n_embd", 16},
            {"n_head", 2},          {"n_positions", 64}, {"vocab_size", kVocabulary},
            {"resid_pdrop", 0},     {"embd_pdrop", 0},   {"attn_pdrop", 0}};
  }
  return {{"model_type", type},     {"hidden_size", 16},          {"intermediate_size", 24},
          {"num_hidden_layers", 2}, {"num_attention_heads", 4},   {"num_key_value_heads", 2},
          {"head_dim", 4},          {"vocab_size", kVocabulary},  {"max_position_embeddings", 64},
          {"pad_token_id", 7},      {"tie_word_embeddings", tied}};
}

std::vector<json> Configs() {
  return {ConfigOf("llama", true), ConfigOf("llama", false), ConfigOf("qwen2", true), ConfigOf("gpt2", true)};
}

std::shared_ptr<const models::LanguageModel> InTilesOf(const json& config, int64_t tiles) {
  const auto model = models::ModelFromJson(config);
  EXPECT_TRUE(model.ok()) << model.status();
  const auto tiled = models::WithVocabularyTiles(*model, models::RowsOfTiles((*model)->vocabulary(), tiles));
  EXPECT_TRUE(tiled.ok()) << tiled.status();
  return *tiled;
}

// Whole in memory, with the formula's weights by published names; without an engine.
class WholeModel {
 public:
  WholeModel(const models::LanguageModel& description, torch::Dtype type,
             models::Head head = models::Head::kLoss)
      : model_(MakeModel(description, head)), layout_(description.Layout()) {
    torch::NoGradGuard no_grad;
    for (size_t b = 0; b < model_.blocks.size(); ++b) {
      modules_.push_back(zero::BuildWhole(model_.blocks[b]));
      ForParameters(b, [&](size_t t, const models::TensorPiece& piece, Tensor parameter) {
        const models::PublishedTensor& tensor = layout_.tensors[t];
        const std::vector<float> values = Formula(tensor.name, tensor.elements());
        std::copy(values.begin() + piece.from, values.begin() + piece.to,
                  parameter.data_ptr<float>() + piece.at);
      });
      modules_.back()->to(type);
      modules_.back()->eval();
    }
  }

  // What the last stage gives, with a graph back to all parameters.
  Tensor Run(const zero::TensorBatch& batch) const {
    zero::Values values = zero::InputsOf(batch);
    for (const zero::StageSpec& stage : model_.stages) {
      zero::StageCall call({modules_[static_cast<size_t>(stage.block)].get()}, batch);
      values = zero::ComputeStage(stage, call, values);
    }
    return values.front();
  }
  // Of all tensors, by name.
  std::map<std::string, std::vector<float>> Gradients() {
    std::map<std::string, std::vector<float>> gradients;
    for (size_t b = 0; b < modules_.size(); ++b) {
      ForParameters(b, [&](size_t t, const models::TensorPiece& piece, const Tensor& parameter) {
        const models::PublishedTensor& tensor = layout_.tensors[t];
        std::vector<float>& all = gradients[tensor.name];
        all.resize(static_cast<size_t>(tensor.elements()));
        ASSERT_TRUE(parameter.grad().defined()) << tensor.name;
        const Tensor values = parameter.grad().to(torch::kFloat32).contiguous();
        const float* const from = values.data_ptr<float>() + piece.at;
        std::copy(from, from + (piece.to - piece.from), all.begin() + piece.from);
      });
    }
    return gradients;
  }

 private:
  // Calls use(tensor, what the parameter has of it, the parameter).
  template <typename Use>
  void ForParameters(size_t block, Use use) {
    const zero::FlatLayout run = zero::LayoutOf(*modules_[block]);
    size_t i = 0;
    for (Tensor parameter : zero::UniqueParameters(*modules_[block])) {
      const zero::Parameter& place = run.parameters[i++];
      int found = 0;
      ASSERT_TRUE(models::ForTensorsIn(layout_, static_cast<int>(block), place.offset, place.elements,
                                       [&](size_t t, const models::TensorPiece& piece) {
                                         EXPECT_EQ(piece.to - piece.from, place.elements);
                                         use(t, piece, parameter);
                                         ++found;
                                         return absl::OkStatus();
                                       })
                      .ok());
      ASSERT_EQ(found, 1) << place.name;
    }
  }

  const zero::Model model_;
  const models::ModelLayout layout_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

// Every id as an input and as a target, some targets of no token, and the padding.
zero::TensorBatch EveryToken() {
  zero::TensorBatch batch = ExampleBatch(2, 24);
  for (int64_t i = 0; i < 48; ++i) {
    batch.inputs.view({-1})[i] = (i * 7 + i / 31) % kVocabulary;
    batch.targets.view({-1})[i] = i % 9 == 5 && i > 31 ? -100 : (i * 11 + 3) % kVocabulary;
  }
  return batch;
}

double LargestOf(const std::vector<float>& values) {
  double largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

// The largest difference of any gradient from `exact`, in units of the largest value of its tensor.
double ErrorOf(const std::map<std::string, std::vector<float>>& gradients,
               const std::map<std::string, std::vector<float>>& exact) {
  EXPECT_EQ(gradients.size(), exact.size());
  double worst = 0;
  for (const auto& [name, values] : exact) {
    const double largest = LargestOf(values);
    EXPECT_GT(largest, 0) << name;
    const auto found = gradients.find(name);
    if (found == gradients.end() || found->second.size() != values.size()) {
      ADD_FAILURE() << name << " has another size, or no gradient";
      continue;
    }
    for (size_t i = 0; i < values.size(); ++i)
      worst = std::max(worst, std::abs(double{found->second[i]} - double{values[i]}) / largest);
  }
  return worst;
}

TEST(VocabularyTiles, ComputeTheLossAndTheGradientsOfOneMatrix) {
  const zero::TensorBatch batch = EveryToken();
  for (const json& config : Configs()) {
    WholeModel whole(*InTilesOf(config, 1), torch::kFloat32);
    const Tensor exact_loss = whole.Run(batch);
    exact_loss.backward();
    const auto exact = whole.Gradients();
    for (const torch::Dtype type : {torch::kFloat32, torch::kBFloat16}) {
      WholeModel one(*InTilesOf(config, 1), type);
      const Tensor expected = one.Run(batch);
      expected.backward();
      // In fp32 another order of sums; in bf16 the tiles round as the one matrix does, whichever way this
      // processor multiplies bf16: what they are off by is of the size of what it is off by.
      const double rounding = ErrorOf(one.Gradients(), exact);
      const bool fp32 = type == torch::kFloat32;
      for (const int64_t tiles : {2, 3, 7, 31}) {
        SCOPED_TRACE(absl::StrCat(config.dump(), " in ", tiles, fp32 ? " fp32" : " bf16"));
        WholeModel many(*InTilesOf(config, tiles), type);
        const Tensor loss = many.Run(batch);
        loss.backward();
        EXPECT_NEAR(loss.item<double>(), expected.item<double>(), fp32 ? 1e-5 : 0.03);
        EXPECT_LE(ErrorOf(many.Gradients(), exact), fp32 ? 1e-5 : 1.5 * rounding);
      }
    }
  }
}

TEST(VocabularyTiles, GiveTheLogitsOfOneMatrix) {
  torch::NoGradGuard no_grad;
  const zero::TensorBatch batch = EveryToken();
  for (const json& config : Configs()) {
    const Tensor expected =
        WholeModel(*InTilesOf(config, 1), torch::kFloat32, models::Head::kLastLogits).Run(batch);
    const Tensor logits =
        WholeModel(*InTilesOf(config, 4), torch::kFloat32, models::Head::kLastLogits).Run(batch);
    EXPECT_EQ(logits.sizes(), expected.sizes());
    EXPECT_TRUE(torch::allclose(logits, expected, 1e-5, 1e-6)) << config;
  }
}

TEST(VocabularyTiles, AnEmbeddingInTilesIsOneLookUpToTheBit) {
  torch::manual_seed(3);
  for (const torch::Dtype type : {torch::kFloat32, torch::kBFloat16}) {
    const Tensor matrix = torch::randn({kVocabulary, 8}).to(type).requires_grad_();
    const Tensor ids = torch::randint(0, kVocabulary, {3, 40}, torch::kInt64);
    const Tensor upstream = torch::randn({3, 40, 8}).to(type);
    for (const int64_t padding : {int64_t{-1}, int64_t{0}, int64_t{17}, kVocabulary - 1}) {
      const Tensor expected = torch::embedding(matrix.to(torch::kFloat32), ids, padding).to(type);
      expected.backward(upstream);
      const Tensor gradient = matrix.grad();
      matrix.mutable_grad() = Tensor();
      for (const int64_t rows : {1, 8, 10, 30}) {
        const models::VocabularyCut cut(kVocabulary, rows);
        std::vector<Tensor> tiles;
        Tensor x;
        for (int tile = 0; tile < cut.tiles(); ++tile) {
          tiles.push_back(
              matrix.detach().narrow(0, cut.first(tile), cut.rows(tile)).clone().requires_grad_());
          x = models::EmbedTile(tiles.back(), cut.first(tile), ids, padding, x);
        }
        EXPECT_TRUE(torch::equal(x, expected)) << rows;
        x.backward(upstream);
        std::vector<Tensor> gradients;
        for (const Tensor& tile : tiles) gradients.push_back(tile.grad());
        EXPECT_TRUE(torch::equal(torch::cat(gradients), gradient)) << rows << ", padding " << padding;
      }
    }
  }
}

// The largest logit may be in any tile, and larger than exp can be of.
TEST(VocabularyTiles, TheLossIsSoundForLogitsOfAnySize) {
  torch::manual_seed(5);
  for (const double size : {1e-3, 1.0, 300.0, 1e4}) {
    for (const double slope : {-1.0, 0.0, 1.0}) {
      Tensor matrix = torch::randn({kVocabulary, 8});
      matrix = (matrix + slope * torch::linspace(-1, 1, kVocabulary).unsqueeze(1)) * size;
      matrix.requires_grad_();
      const Tensor x = torch::randn({kVocabulary, 8}).abs().requires_grad_();
      const Tensor targets = torch::arange(kVocabulary);
      const Tensor expected = torch::nll_loss(torch::log_softmax(torch::linear(x, matrix), -1), targets);
      expected.backward();
      const Tensor of_matrix = matrix.grad(), of_x = x.grad();
      matrix.mutable_grad() = Tensor();
      x.mutable_grad() = Tensor();
      const models::VocabularyCut cut(kVocabulary, 5);
      zero::Values values = {x};
      for (int tile = 0; tile < cut.tiles(); ++tile) {
        values = models::LogitsOfTile(matrix.narrow(0, cut.first(tile), cut.rows(tile)), cut.first(tile),
                                      targets, values);
      }
      const Tensor loss = models::MeanLoss(values, targets);
      loss.backward();
      EXPECT_TRUE(torch::allclose(loss, expected, 1e-6, 1e-6)) << size << " " << slope;
      EXPECT_TRUE(torch::allclose(matrix.grad(), of_matrix, 1e-5, 1e-6)) << size << " " << slope;
      EXPECT_TRUE(torch::allclose(x.grad(), of_x, 1e-5, 1e-6 * size)) << size << " " << slope;
    }
  }
}

TEST(VocabularyTiles, EveryElementHasOnePlaceAndTheNamesAreThePublishedOnes) {
  for (const json& config : Configs()) {
    const models::ModelLayout one = InTilesOf(config, 1)->Layout();
    for (const int64_t tiles : {2, 3, 16, 31}) {
      SCOPED_TRACE(absl::StrCat(config.dump(), " in ", tiles));
      const auto model = InTilesOf(config, tiles);
      const models::ModelLayout layout = model->Layout();
      ASSERT_EQ(layout.tensors.size(), one.tensors.size());
      EXPECT_EQ(layout.parameters(), one.parameters());
      std::vector<int64_t> seen(layout.tensors.size());
      for (size_t b = 0; b < layout.block_elements.size(); ++b) {
        // In pieces of an odd length, so that they begin and end within rows.
        for (int64_t first = 0; first < layout.block_elements[b]; first += 37) {
          ASSERT_TRUE(models::ForTensorsIn(layout, static_cast<int>(b), first,
                                           std::min<int64_t>(37, layout.block_elements[b] - first),
                                           [&](size_t t, const models::TensorPiece& piece) {
                                             EXPECT_EQ(seen[t], piece.from);  // in their order
                                             seen[t] = piece.to;
                                             const auto place =
                                                 models::PlaceOf(layout.tensors[t], piece.from);
                                             EXPECT_EQ(place.block, static_cast<int>(b));
                                             EXPECT_EQ(place.first, first + piece.at);
                                             EXPECT_GE(place.elements, piece.to - piece.from);
                                             return absl::OkStatus();
                                           })
                          .ok());
        }
      }
      for (size_t t = 0; t < seen.size(); ++t) {
        EXPECT_EQ(layout.tensors[t].name, one.tensors[t].name);
        EXPECT_EQ(layout.tensors[t].published_shape(), one.tensors[t].published_shape());
        EXPECT_EQ(seen[t], one.tensors[t].elements()) << one.tensors[t].name;
      }
      // What a stage multiplies is what its block has.
      const zero::Model made = MakeModel(*model);
      const auto products = model->Products();
      ASSERT_EQ(products.size(), made.stages.size());
      int64_t in_one = 0, in_all = 0;
      for (const models::StageProducts& stage : InTilesOf(config, 1)->Products()) in_one += stage.parameters;
      for (size_t s = 0; s < products.size(); ++s) {
        EXPECT_EQ(products[s].stage, made.stages[s].name);
        EXPECT_EQ(products[s].block, made.stages[s].block);
        in_all += products[s].parameters;
      }
      EXPECT_EQ(in_all, in_one);
    }
  }
}

json LlamaOfSize(int64_t width, int64_t inner, int64_t layers, int64_t vocabulary) {
  return {{"model_type", "llama"},      {"hidden_size", width},
          {"intermediate_size", inner}, {"num_hidden_layers", layers},
          {"num_attention_heads", 32},  {"num_key_value_heads", 8},
          {"vocab_size", vocabulary},   {"max_position_embeddings", 2048},
          {"tie_word_embeddings", true}};
}

TEST(VocabularyTiles, AreUsualWhereTheVocabularyIsFarLargerThanALayer) {
  // Llama 3.2 1B: a tile is no larger than a layer.
  const auto large = models::ModelFromJson(LlamaOfSize(2048, 8192, 16, 128256));
  ASSERT_TRUE(large.ok());
  EXPECT_EQ(models::UsualVocabularyTiles(**large), 5);
  const auto tiled = models::WithVocabularyTiles(*large, models::RowsOfTiles(128256, 5));
  EXPECT_EQ((*tiled)->Layout().largest_block_parameters(), 60'821'504);
  EXPECT_EQ((*tiled)->Layout().parameters(), (*large)->Layout().parameters());
  // TinyLlama, Llama 2 7B.
  EXPECT_EQ(models::UsualVocabularyTiles(**models::ModelFromJson(LlamaOfSize(2048, 5632, 22, 32000))), 1);
  EXPECT_EQ(models::UsualVocabularyTiles(**models::ModelFromJson(LlamaOfSize(4096, 11008, 32, 32000))), 1);
  for (const char* preset : {"gpt-tiny", "gpt-125m", "gpt-13b"})
    EXPECT_EQ(models::UsualVocabularyTiles(**models::OpenModel(preset)), 1) << preset;
  EXPECT_EQ(models::UsualVocabularyTiles(*models::DescribeGpt({12, 768, 12, 1024, 50257})), 1);
}

TEST(VocabularyTiles, AreSaidByTheRecordAndNotByWhatIsPublished) {
  for (const json& config : Configs()) {
    const auto one = InTilesOf(config, 1), tiled = InTilesOf(config, 4);
    EXPECT_FALSE(one->ToJson().contains(models::kTileRowsKey));  // as records have always been
    EXPECT_EQ(tiled->ToJson()[models::kTileRowsKey], 8);
    EXPECT_EQ(tiled->ToPublished(), one->ToPublished());
    const auto again = models::ModelFromJson(tiled->ToJson());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(**again == *tiled);
    EXPECT_FALSE(**again == *one);
    json wrong = tiled->ToJson();
    for (const json& rows : {json(0), json(31), json("x")}) {
      wrong[models::kTileRowsKey] = rows;
      EXPECT_THAT(std::string(models::ModelFromJson(wrong).status().message()),
                  HasSubstr(models::kTileRowsKey));
    }
  }
}

class VocabularyTilesTest : public testing_support::ProgramTest {
 protected:
  void WriteTokens(int64_t vocabulary) {
    std::string tokens;
    for (int64_t i = 0; i < 6000; ++i) {
      const int64_t token = (i * 7 + i / 5 + i * i % 11) % vocabulary;
      tokens += {static_cast<char>(token & 255), static_cast<char>(token >> 8)};
    }
    WriteFile(dir_ + "/tokens.bin", tokens);
  }
  Arguments TrainModel(const std::string& state, const Arguments& more) const {
    return Arguments{"train",     "--model", "model",       "--data",    "tokens.bin", "--seq",
                     "16",        "--batch", "2",           "--threads", "1",          "--quiet",
                     "--offload", "nvme",    "--state-dir", state} +
           more;
  }
  std::vector<double> Losses(const std::string& log) const {
    std::vector<double> losses;
    for (const std::string& line : Lines(ReadFile(dir_ + "/" + log))) {
      const json step = json::parse(line);
      if (step.contains("grad_norm")) losses.push_back(step["loss"].get<double>());
    }
    return losses;
  }
};

// The whole way of a user, with the state on a drive: a directory by --model, then the engine.
TEST_F(VocabularyTilesTest, TrainAsTransformers) {
  const json golden = testing_support::GoldenLlamas();
  int tied = 0, number = 0;
  for (const size_t i : {0, 1, 4, 8, 9, 14, 15}) {  // 14 and 15: granite, with multipliers
    const json& c = golden["cases"][i];
    SCOPED_TRACE(c["config"].dump());
    tied += c["config"].value("tie_word_embeddings", false) ? 1 : 0;
    const std::string model = absl::StrCat(dir_, "/golden", number++);
    WriteModel(model, c["config"]);
    TrainOptions flags = testing_support::GoldenFlags(c, model);
    flags.vocabulary_tiles = absl::StrCat(2 + number);
    flags.others["--offload"] = "nvme";
    flags.state_dirs = {dir_ + "/state"};
    flags.overwrite = true;
    const std::unique_ptr<zero::Engine> engine = testing_support::GoldenEngine(flags);
    ASSERT_NE(engine, nullptr);
    testing_support::ExpectTrainsAs(c, *engine);
  }
  EXPECT_GE(tied, 2);
  EXPECT_LE(tied, number - 2);
}

std::map<std::string, std::vector<float>> WeightsIn(const std::string& path, const json& config) {
  const auto model = models::ModelFromJson(config);
  const models::ModelLayout layout = (*model)->Layout();
  std::map<std::string, std::vector<float>> weights;
  auto import = models::WeightImport::Open(path, layout);
  EXPECT_TRUE(import.ok()) << import.status();
  if (!import.ok()) return weights;
  for (size_t t = 0; t < layout.tensors.size(); ++t) {
    std::vector<float>& values = weights[layout.tensors[t].name];
    values.resize(static_cast<size_t>(layout.tensors[t].elements()));
    EXPECT_TRUE((*import)->ReadTensor(t, 0, layout.tensors[t].elements(), values.data()).ok());
  }
  return weights;
}

// What reads a state reads one in tiles.
TEST_F(VocabularyTilesTest, WeightsComeBackToTheBitAndGenerateTheSameTokens) {
  WriteTokens(kVocabulary);
  const Arguments made = {"--prompt", "1 2 3", "--tokens", "12", "--temperature", "0", "--threads", "1"};
  int number = 0;
  for (const json& config : {ConfigOf("llama", true), ConfigOf("llama", false), ConfigOf("gpt2", true)}) {
    SCOPED_TRACE(config.dump());
    const std::string state = absl::StrCat("state", number), out = absl::StrCat("out", number++);
    WriteModel(dir_ + "/model", config, 2);
    const Ran trained = Run(TrainModel(state, {"--steps", "1", "--lr", "0", "--weight-decay", "0", "--dtype",
                                               "fp32", "--vocabulary-tiles", "4"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
    const auto ran = RunAll({{"export", state, out, "--quiet"},
                             {"inspect", state, "--json"},
                             Arguments{"generate", state, "--quiet"} + made,
                             Arguments{"generate", "model", "--quiet"} + made});
    for (const Ran& each : ran) ASSERT_EQ(each.code, 0) << each.err;
    // Tiles, the norm or the positions with it, layers; the head's tiles.
    EXPECT_EQ(json::parse(ran[1].out)["block_elements"].size(),
              config.value("tie_word_embeddings", true) ? 7u : 11u);
    EXPECT_EQ(ran[2].out, ran[3].out);
    EXPECT_EQ(WeightsIn(dir_ + "/" + out, config), WeightsIn(dir_ + "/model", config));
    std::filesystem::remove_all(dir_ + "/model");
  }
  // The first once more: sampled, and by way of DeepSpeed's files into other tiles.
  const json config = ConfigOf("llama", true);
  WriteModel(dir_ + "/model", config, 2);
  const auto ran = RunAll({Arguments{"sample", "state0"} + made,
                           Arguments{"generate", "model", "--quiet"} + made,
                           {"verify", "state0"},
                           {"export-checkpoint", "state0", "universal", "--quiet"}});
  for (const Ran& each : ran) ASSERT_EQ(each.code, 0) << each.err;
  EXPECT_EQ(ran[0].out, "1 2 3 " + ran[1].out);
  std::string tag;
  for (const auto& entry : std::filesystem::directory_iterator(dir_ + "/universal"))
    if (entry.is_directory()) tag = entry.path().string();
  const Ran imported = Run({"import-checkpoint", tag, "--model", "model", "--state-dir", "imported",
                            "--dtype", "fp32", "--vocabulary-tiles", "3", "--quiet"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  const Ran exported = Run({"export", "imported", "again", "--quiet"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_EQ(WeightsIn(dir_ + "/again", config), WeightsIn(dir_ + "/model", config));
}

// With as little memory as it says, killed, and without a drive: the same bits.
TEST_F(VocabularyTilesTest, ARunOnThemHasTheSameLossesWhereverItsStateIs) {
  WriteTokens(1000);
  json config = ConfigOf("llama", true);
  config["hidden_size"] = 64;
  config["vocab_size"] = 1000;
  WriteModel(dir_ + "/model", config);
  const Arguments flags = {"--steps", "12",   "--accumulate",       "2", "--lr", "0.01",
                           "--dtype", "bf16", "--vocabulary-tiles", "3"};
  const Ran planned = Run(Arguments{"plan", "--model", "model", "--data", "tokens.bin", "--seq", "16",
                                    "--batch", "2", "--threads", "1", "--json", "--state-dir", "planned"} +
                          flags);
  ASSERT_EQ(planned.code, 0) << planned.err;
  const std::string least =
      std::to_string(json::parse(planned.out)["least_host_memory_bytes"].get<int64_t>());
  const Ran whole = Run(TrainModel("whole", flags + Arguments{"--offload", "none", "--log", "whole.jsonl"}));
  ASSERT_EQ(whole.code, 0) << whole.err;
  ASSERT_EQ(Losses("whole.jsonl").size(), 12u);
  const Arguments tight =
      TrainModel("tight", flags + Arguments{"--host-memory", least, "--log", "tight.jsonl"});
  {
    Program program(dir_, tight);
    EXPECT_TRUE(WaitForLines(dir_ + "/tight.jsonl", 4));
    program.Signal(SIGKILL);
    program.Wait();
  }
  const Ran resumed = Run(tight + Arguments{"--resume", "--report", "report.json"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(Losses("tight.jsonl"), Losses("whole.jsonl"));
  const json report = json::parse(ReadFile(dir_ + "/report.json"));
  EXPECT_LE(report["peak_managed_bytes"].get<int64_t>(), report["host_memory_budget_bytes"].get<int64_t>());
  // And beside one matrix, within what bf16 rounds.
  const Ran one = Run(TrainModel("one", flags + Arguments{"--vocabulary-tiles", "1", "--log", "one.jsonl"}));
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_NEAR(Losses("one.jsonl").front(), Losses("whole.jsonl").front(), 0.01);
  EXPECT_NEAR(Losses("one.jsonl").back(), Losses("whole.jsonl").back(), 0.1);  // after 12 updates
  // A run stays as it was made, and says what it is.
  const Ran other = Run(TrainModel("tight", {"--resume", "--steps", "13", "--vocabulary-tiles", "5"}));
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("--vocabulary-tiles 5: this run's vocabulary is in 3"));
  EXPECT_EQ(Run(TrainModel("one", {"--resume", "--steps", "13"})).code, 0);
  for (const char* wrong : {"0", "1001", "few"}) {
    const Ran refused = Run(TrainModel("wrong", {"--vocabulary-tiles", wrong}));
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr(absl::StrCat("--vocabulary-tiles ", wrong)));
  }
}

// A number of tiles that does not fit names one that would.
TEST_F(VocabularyTilesTest, ARefusalNamesANumberThatFits) {
  WriteFile(dir_ + "/config.json",
            R"({"n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 20000})");
  const Arguments flags = {"--model",   "config.json", "--seq",   "64",   "--batch",     "2",
                           "--threads", "1",           "--dtype", "fp32", "--state-dir", "state"};
  const auto plan = [&](const Arguments& more) {
    return Run(Arguments{"plan", "--no-probe", "--json"} + flags + more);
  };
  std::vector<int64_t> least;
  for (const char* tiles : {"1", "2", "4", "8"}) {
    const Ran ran = plan({"--vocabulary-tiles", tiles});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(json::parse(ran.out)["vocabulary_tiles"], std::stoi(tiles));
    // What is measured differs by some bytes with how tensors are rounded.
    least.push_back(json::parse(ran.out)["least_host_memory_bytes"].get<int64_t>() * 101 / 100);
  }
  EXPECT_GT(least.front(), 2 * *std::min_element(least.begin(), least.end()));
  // No budget changes what auto takes: it would change the losses.
  for (const char* budget : {"4GiB", "700MiB"})
    EXPECT_EQ(json::parse(plan({"--host-memory", budget}).out)["vocabulary_tiles"], 1) << budget;

  std::sort(least.begin(), least.end());
  const std::string tight = std::to_string(least.front());
  const Arguments check =
      Arguments{"train", "--check"} + flags + Arguments{"--host-memory", tight, "--vocabulary-tiles"};
  const Ran refused = Run(check + Arguments{"1"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("too small: the least that works is "));
  const std::string named = "; --vocabulary-tiles ";
  const size_t at = refused.err.find(named);
  ASSERT_NE(at, std::string::npos) << refused.err;
  const std::string tiles = std::to_string(std::stoi(refused.err.substr(at + named.size())));
  EXPECT_EQ(Run(check + Arguments{tiles}).code, 0) << refused.err;
  EXPECT_THAT(plan({"--host-memory", tight, "--vocabulary-tiles", "1"}).err, HasSubstr(named));
  // Where no number helps, none is named.
  EXPECT_THAT(plan({"--host-memory", "2MiB"}).err,
              testing::AllOf(HasSubstr("too small"), testing::Not(HasSubstr(named))));
}

// What adapters leave frozen is read where it lies, in tiles or not.
TEST_F(VocabularyTilesTest, AdaptersTrainBesideThem) {
  WriteTokens(kVocabulary);
  WriteModel(dir_ + "/model", ConfigOf("llama", false), 2);
  const Arguments lora = {"--steps", "6", "--lr", "0.02", "--dtype", "fp32", "--lora-rank", "2"};
  const auto ran =
      RunAll({TrainModel("one", lora + Arguments{"--log", "one.jsonl"}),
              TrainModel("tiled", lora + Arguments{"--log", "tiled.jsonl", "--vocabulary-tiles", "4"}),
              TrainModel("head", lora + Arguments{"--lora-targets", "lm_head", "--vocabulary-tiles", "4"}),
              TrainModel("whole", lora + Arguments{"--lora-targets", "lm_head"})});
  ASSERT_EQ(ran[0].code, 0) << ran[0].err;
  ASSERT_EQ(ran[1].code, 0) << ran[1].err;
  const std::vector<double> one = Losses("one.jsonl"), tiled = Losses("tiled.jsonl");
  ASSERT_EQ(one.size(), 6u);
  ASSERT_EQ(tiled.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(tiled[i], one[i], 1e-5) << "step " << i;
  EXPECT_NE(tiled.front(), tiled.back());
  EXPECT_EQ(ran[2].code, 2);
  EXPECT_THAT(ran[2].err, HasSubstr("--vocabulary-tiles 1"));
  EXPECT_EQ(ran[3].code, 0) << ran[3].err;
  // A merged model has the base's vocabulary, and another's names nothing of tiles.
  const auto exported = RunAll(
      {{"export", "tiled", "merged", "--merge", "--quiet"}, {"export", "tiled", "adapter", "--quiet"}});
  for (const Ran& each : exported) ASSERT_EQ(each.code, 0) << each.err;
  const auto base = WeightsIn(dir_ + "/model", ConfigOf("llama", false)),
             merged = WeightsIn(dir_ + "/merged", ConfigOf("llama", false));
  for (const char* same : {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"})
    EXPECT_EQ(merged.at(same), base.at(same)) << same;
  EXPECT_NE(merged, base);
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/adapter/adapter_model.safetensors"));
}

}  // namespace
}  // namespace penstock::tools::vocabulary_tiles_test
