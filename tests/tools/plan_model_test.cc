// Plans of models that are too large to be run: what a narrower one takes, made wide.
#include "tools/penstock/plan_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/families/narrow_model.h"
#include "models/families/stages.h"
#include "tests/tools/penstock_program.h"
#include "zero/compute/libtorch/create_engine.h"

namespace penstock::tools::plan_model_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using namespace testing_support;

class PlanModelTest : public ProgramTest {
 protected:
  // Of `config`, planned as it is and by a narrower one.
  void Plan(const json& config, const std::string& dtype, const std::string& tiles, int64_t narrower) {
    std::filesystem::create_directory(dir_ + "/model");
    WriteFile(dir_ + "/model/config.json", config.dump());
    TrainOptions flags;
    flags.model = dir_ + "/model";
    flags.dtype = dtype;
    flags.seq = 128;
    flags.batch = 2;
    flags.threads = 1;
    flags.vocabulary_tiles = tiles;
    flags.state_dirs = {dir_ + "/state"};
    flags.others["--host-memory"] = "512MiB";
    auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
    ASSERT_TRUE(settings.ok()) << settings.status();
    const auto plan = PlanModel(*settings, settings->engine, /*most_seconds=*/0);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->narrower, narrower);
    EXPECT_THAT(plan->EstimateText(), HasSubstr("compute: estimated"));
    estimated_ = plan->plan;
    const auto measured = zero::PlanEngine(models::MakeModel(*settings->model), settings->engine);
    ASSERT_TRUE(measured.ok()) << measured.status();
    measured_ = *measured;
  }
  zero::EnginePlan estimated_, measured_;
};

const json kLlama = {{"model_type", "llama"},     {"hidden_size", 512},
                     {"intermediate_size", 1024}, {"num_hidden_layers", 2},
                     {"num_attention_heads", 8},  {"num_key_value_heads", 2},
                     {"vocab_size", 4096},        {"max_position_embeddings", 256}};

TEST_F(PlanModelTest, ShapesAreTheModelsAndMemoryIsABoundOfWhatItTakes) {
  for (const std::string dtype : {"fp32", "fp16"}) {
    for (const std::string tiles : {"1", "4"}) {
      SCOPED_TRACE(dtype + " " + tiles);
      Plan(kLlama, dtype, tiles, 2);
      EXPECT_EQ(estimated_.parameters, measured_.parameters);
      const tiering::ModelGraph &wide = estimated_.graph, &real = measured_.graph;
      ASSERT_EQ(wide.blocks.size(), real.blocks.size());
      for (size_t b = 0; b < wide.blocks.size(); ++b) {
        const tiering::BlockIndex block(static_cast<int>(b));
        EXPECT_EQ(wide.blocks[block].elements, real.blocks[block].elements);
        EXPECT_EQ(wide.blocks[block].name, real.blocks[block].name);
      }
      ASSERT_EQ(wide.stages.size(), real.stages.size());
      for (size_t s = 0; s < wide.stages.size(); ++s) {
        const tiering::StageIndex stage(static_cast<int>(s));
        SCOPED_TRACE(real.stages[stage].name);
        // The allocator rounds each tensor up by some KiB: a page or two for each, halved and doubled.
        constexpr double kRounding = 200'000;
        const auto bounds = [&](int64_t estimate, int64_t real_bytes, double most) {
          EXPECT_GE(static_cast<double>(estimate), 0.99 * static_cast<double>(real_bytes) - kRounding);
          EXPECT_LE(static_cast<double>(estimate), most * static_cast<double>(real_bytes) + kRounding);
        };
        bounds(wide.stages[stage].input_bytes, real.stages[stage].input_bytes, 1.01);
        bounds(wide.stages[stage].forward_peak_bytes, real.stages[stage].forward_peak_bytes, 1.3);
        bounds(wide.stages[stage].backward_peak_bytes, real.stages[stage].backward_peak_bytes, 2.0);
        EXPECT_GT(wide.stages[stage].backward_seconds, 0);
      }
      EXPECT_GE(estimated_.plan.least_host_memory_bytes, measured_.plan.least_host_memory_bytes * 9 / 10);
      EXPECT_LE(estimated_.plan.least_host_memory_bytes, measured_.plan.least_host_memory_bytes * 2);
    }
  }
}

TEST_F(PlanModelTest, ANarrowerModelHasTheSameBlocksAndStages) {
  for (const json& config : {kLlama, json{{"model_type", "gpt2"},
                                          {"n_embd", 768},
                                          {"n_layer", 3},
                                          {"n_head", 12},
                                          {"n_positions", 64},
                                          {"vocab_size", 50257}}}) {
    const auto model = *models::ModelFromJson(config);
    const std::vector<int64_t> all = models::Narrowings(*model);
    ASSERT_FALSE(all.empty());
    for (const int64_t by : all) {
      const auto narrow = models::Narrower(*model, by);
      ASSERT_NE(narrow, nullptr) << by;
      EXPECT_EQ(narrow->Products().size(), model->Products().size());
      EXPECT_EQ(narrow->Blocks().size(), model->Blocks().size());
      const auto layer = [](const models::LanguageModel& of) { return of.Products()[1].parameters; };
      EXPECT_EQ(layer(*narrow) * by * by, layer(*model)) << by;
    }
  }
}

TEST_F(PlanModelTest, AModelThatRunsInNoTimeIsMeasured) {
  TrainOptions flags;
  flags.model = "gpt-tiny";
  flags.seq = 16;
  flags.state_dirs = {dir_ + "/state"};
  auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
  ASSERT_TRUE(settings.ok()) << settings.status();
  const auto plan = PlanModel(*settings, settings->engine);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->narrower, 1);
  EXPECT_EQ(plan->EstimateText(), "");
}

// Layers of a model of 70 G parameters, though few of them: nothing of their size is made.
TEST_F(PlanModelTest, ALargeLayerIsPlannedFromItsConfigAlone) {
  std::filesystem::create_directory(dir_ + "/large");
  WriteFile(
      dir_ + "/large/config.json",
      R"({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2,
                "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 1024,
                "max_position_embeddings": 8192})");
  const Ran ran = Run({"plan", "--model", dir_ + "/large", "--no-probe", "--json", "--seq", "128", "--batch",
                       "1", "--dtype", "fp32", "--host-memory", "64GiB", "--state-dir", dir_ + "/state"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json plan = json::parse(ran.out);
  EXPECT_EQ(plan["compute_estimated"], true);
  EXPECT_GE(plan["compute_measured_narrower"], 2);
  EXPECT_EQ(plan["params"], 2 * 855654400 + 2 * 1024 * 8192 + 8192);
  EXPECT_GT(plan["predicted_step_seconds"], 0);
}

}  // namespace
}  // namespace penstock::tools::plan_model_test
