// Generation: the tokens of transformers (tests/golden/llama.json), and the same tokens whatever the budget,
// wherever keys and values live, and whoever else is generated beside.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "generate/generator.h"
#include "generate/prompt_lookup.h"
#include "generate/ring.h"
#include "models/families/stages.h"
#include "tests/tools/generating.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::generate::generate_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Asked;
using testing_support::FarConfigOf;
using testing_support::GptConfigOf;
using testing_support::kMiB;
using testing_support::LlamaConfigOf;
using testing_support::ManyPrompts;
using testing_support::WindowsConfigOf;
using tools::testing_support::Formula;
using tools::testing_support::GoldenLlamas;

class GenerateTest : public testing_support::GeneratingTest {};

TEST(RingTest, PlacesNeverOverlapAndComeBackInAnyOrder) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    const uint64_t size = 100 + random() % 100;
    Ring ring(size);
    struct Held {
      uint64_t number, begin, end;
    };
    std::vector<Held> held;
    uint64_t taken = 0, gone = 0;
    for (int step = 0; step < 400; ++step) {
      const uint64_t bytes = 1 + random() % 30;
      if (const std::optional<uint64_t> at = ring.Take(bytes); at.has_value()) {
        ASSERT_LE(*at + bytes, size);
        for (const Held& other : held) ASSERT_TRUE(*at + bytes <= other.begin || *at >= other.end);
        held.push_back({taken++, *at, *at + bytes});
      } else {
        ASSERT_FALSE(held.empty());
      }
      while (!held.empty() && random() % 3 == 0) {
        const size_t which = random() % std::min<size_t>(held.size(), 2);
        gone += ring.Give(held[which].number - gone);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
  }
}

// With one place held anywhere, three times the largest leaves room for the next.
TEST(RingTest, ThreeTimesTheLargestNeverBlocksBehindOne) {
  std::mt19937_64 random(3);
  Ring ring(90);
  uint64_t taken = 0, gone = 0;
  ASSERT_TRUE(ring.Take(30).has_value());
  ++taken;
  for (int step = 0; step < 10'000; ++step) {
    ASSERT_TRUE(ring.Take(1 + random() % 30).has_value()) << step;
    ++taken;
    gone += ring.Give(taken - 2 - gone);
  }
}

TEST_F(GenerateTest, GreedyTokensAreThoseOfTransformers) {
  const json golden = GoldenLlamas();
  int number = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    const std::string directory = dir_ + "/model" + std::to_string(number);
    tools::testing_support::WriteModel(directory, c["config"], number % 3 == 0 ? 3 : 1);
    const auto greedy = c["greedy"].get<std::vector<int64_t>>();
    const Asked asked{{greedy.begin(), greedy.begin() + 4}, static_cast<int64_t>(greedy.size()) - 4};
    const std::vector<int64_t> expected(greedy.begin() + 4, greedy.end());
    const CachePlace place = number % 2 == 0 ? CachePlace::kHost : CachePlace::kDrive;
    ++number;
    // Alone, and as one of several of other lengths.
    const auto alone = Make(directory, {asked}, {.cache = place});
    ASSERT_NE(alone, nullptr);
    EXPECT_EQ(Texts(alone.get(), {asked}).front(), expected);
    const std::vector<Asked> several = {{{1, 2}, 5}, asked, {{3}, 9}, asked, {{4, 5, 6, 7, 8, 9}, 2}};
    const auto together = Make(directory, several, {.batch = 3, .cache = place});
    ASSERT_NE(together, nullptr);
    const auto texts = Texts(together.get(), several);
    EXPECT_EQ(texts[1], expected);
    EXPECT_EQ(texts[3], expected);
    EXPECT_EQ(texts[4].size(), 2u);
  }
}

TEST_F(GenerateTest, TokensDependOnNeitherBudgetNorResidencyNorPlaceNorBatch) {
  const std::vector<Asked> asked = ManyPrompts();
  int number = 0;
  for (const json& config : {GptConfigOf(), LlamaConfigOf(), WindowsConfigOf(), FarConfigOf()}) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/same" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config);
    const models::SamplingOptions sampling{
        .repetition_penalty = 1.1, .temperature = 0.9, .top_k = 200, .top_p = 0.95};
    const auto first = Make(directory, asked, {.batch = 12, .cache = CachePlace::kHost}, sampling);
    ASSERT_NE(first, nullptr);
    ASSERT_EQ(first->plan().pass_bytes, 0u) << "all of it is resident";
    const auto expected = Texts(first.get(), asked);
    for (const int64_t batch : {1, 2, 5}) {
      for (const CachePlace place : {CachePlace::kHost, CachePlace::kDrive}) {
        const auto large = Make(directory, asked, {.batch = batch, .cache = place}, sampling);
        ASSERT_NE(large, nullptr);
        const uint64_t least = large->plan().least_bytes;
        EXPECT_EQ(Texts(large.get(), asked), expected);
        for (const uint64_t budget : {least, least + 2 * kMiB + kMiB / 4}) {
          const auto small = Make(directory, asked, {budget, batch, place}, sampling);
          ASSERT_NE(small, nullptr);
          EXPECT_LE(small->plan().total_bytes, budget);
          EXPECT_GT(small->plan().pass_bytes, 0u);
          EXPECT_EQ(Texts(small.get(), asked), expected)
              << "batch " << batch << ", budget " << budget << ", on drive " << (place == CachePlace::kDrive);
          const GenerationStats stats = small->stats();
          EXPECT_LE(stats.peak_tensor_bytes, static_cast<int64_t>(small->plan().tensor_bytes));
          EXPECT_EQ(stats.cache_read_bytes > 0, place == CachePlace::kDrive);
        }
      }
    }
  }
}

// Wide enough that rows take far more than the slack, which is for what an allocator holds beyond them.
TEST_F(GenerateTest, PassesOfManyRowsTakeNoMoreOfTensorsThanIsPlanned) {
  constexpr int64_t kSlack = 4 * kMiB;
  std::vector<Asked> asked(4);
  for (Asked& each : asked) {
    each.tokens = 3;
    for (int64_t i = 0; i < 400; ++i) each.prompt.push_back((i * 7) % 300);
  }
  json gpt = GptConfigOf(), llama = LlamaConfigOf(), qwen = LlamaConfigOf(), phi = LlamaConfigOf();
  gpt.update({{"n_embd", 768}, {"n_layer", 2}, {"activation_function", "quick_gelu"}});
  llama.update({{"hidden_size", 768}, {"intermediate_size", 2048}, {"num_hidden_layers", 2}});
  qwen.update({{"model_type", "qwen3"},
               {"hidden_size", 512},
               {"intermediate_size", 1024},
               {"num_hidden_layers", 2},
               {"num_attention_heads", 16},
               {"num_key_value_heads", 16},
               {"head_dim", 64}});
  phi.update({{"model_type", "phi3"},
              {"hidden_size", 512},
              {"intermediate_size", 2048},
              {"num_hidden_layers", 2},
              {"num_attention_heads", 8}});
  int number = 0;
  for (const json& config : {gpt, llama, qwen, phi}) {
    for (const swap::Dtype dtype : {swap::Dtype::kF32, swap::Dtype::kBf16}) {
      SCOPED_TRACE(config.dump());
      const std::string directory = dir_ + "/wide" + std::to_string(number++);
      tools::testing_support::WriteModel(directory, config, 1, dtype);
      std::vector<std::string> forms = {directory};
      if (config["model_type"] == "llama") forms.push_back(Packed(directory, 8));
      for (const std::string& form : forms) {
        const auto generator = Make(form, asked, {.batch = 4, .cache = CachePlace::kHost});
        ASSERT_NE(generator, nullptr);
        int64_t most = 0;  // of the generator's own, which is what its passes see
        Texts(generator.get(), asked, [&] { most = zero::TensorMemory::Stats().peak_live_bytes; });
        EXPECT_LE(most, static_cast<int64_t>(generator->plan().tensor_bytes) - kSlack) << form;
        EXPECT_GT(most, kSlack) << "the rows take too little to tell";
      }
    }
  }
}

TEST_F(GenerateTest, TextsOfOnePromptUnderWayTogetherComputeItOnce) {
  const std::string directory = dir_ + "/together";
  tools::testing_support::WriteModel(directory, LlamaConfigOf());
  std::vector<Asked> asked;
  std::vector<int64_t> prompt, other;
  for (int64_t i = 0; i < 300; ++i) prompt.push_back(i * 7 % 300);
  for (int64_t i = 0; i < 40; ++i) other.push_back(i * 11 % 300);
  // The third is shorter, so that the last ones join others that decode.
  for (const int64_t tokens : {9, 9, 2, 9, 9, 1}) asked.push_back({prompt, tokens});
  asked.push_back({other, 5});
  asked.push_back({other, 5});
  asked.push_back({{7}, 5});
  asked.push_back({{7}, 5});
  const models::SamplingOptions sampling{.temperature = 1.5};
  const auto alone = Make(directory, asked, {.batch = 1}, sampling);
  const auto expected = Texts(alone.get(), asked);
  EXPECT_EQ(alone->stats().prompt_tokens, 6 * 300 + 2 * 40 + 2);
  for (const int64_t batch : {4, 10}) {
    const auto together = Make(directory, asked, {.batch = batch}, sampling);
    EXPECT_EQ(Texts(together.get(), asked), expected) << batch;
    // Of four at once, some join when the first of their prompt is gone.
    EXPECT_LE(together->stats().prompt_tokens, batch == 10 ? 300 + 40 + 2 : 2 * 300 + 2 * 40 + 5) << batch;
  }
  const auto on_drive = Make(directory, asked, {.batch = 4, .cache = CachePlace::kDrive}, sampling);
  EXPECT_EQ(Texts(on_drive.get(), asked), expected);
}

// Where layers keep a window alone, and where a text that grows is turned by other frequencies.
TEST_F(GenerateTest, TextsOfOnePromptAreTheSameWhereKeysAreWindowsOrTurnedAnew) {
  json windows = WindowsConfigOf();
  windows["max_position_embeddings"] = 4096;
  int number = 0;
  for (const json& config : {windows, FarConfigOf()}) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/shared" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config);
    std::vector<Asked> asked;
    for (const int64_t length : number == 1 ? std::vector<int64_t>{700, 20} : std::vector<int64_t>{97, 300}) {
      std::vector<int64_t> prompt;
      for (int64_t i = 0; i < length; ++i) prompt.push_back((i * i + 3 * i) % 300);
      for (const int64_t tokens : {9, 9, 2, 9, 9, 1}) asked.push_back({prompt, tokens});
    }
    const models::SamplingOptions sampling{.temperature = 1.5};
    const auto alone = Make(directory, asked, {.batch = 1, .cache = CachePlace::kHost}, sampling);
    const auto expected = Texts(alone.get(), asked);
    for (const int64_t batch : {4, 12}) {
      const auto together = Make(directory, asked, {.batch = batch, .cache = CachePlace::kHost}, sampling);
      EXPECT_EQ(Texts(together.get(), asked), expected) << batch;
      const auto lean =
          Make(directory, asked, {together->plan().least_bytes, batch, CachePlace::kHost}, sampling);
      EXPECT_EQ(Texts(lean.get(), asked), expected) << batch;
    }
  }
}

TEST(PromptLookupTest, FindsWhatFollowedTheLongestMatchOfTheEnd) {
  std::mt19937_64 random(5);
  size_t found = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> tokens(random() % 40);
    for (int64_t& token : tokens) token = static_cast<int64_t>(random() % (2 + round % 5));
    const size_t most = random() % 6;
    // By trying all: every length of match, every place, the best by what is promised.
    std::vector<int64_t> expected;
    for (size_t length = std::min<size_t>(3, tokens.size()); length >= 1 && expected.empty(); --length) {
      for (size_t at = 0; at + length < tokens.size(); ++at) {
        const bool same = std::equal(tokens.end() - static_cast<std::ptrdiff_t>(length), tokens.end(),
                                     tokens.begin() + static_cast<std::ptrdiff_t>(at));
        const size_t follows = std::min(most, tokens.size() - at - length);
        if (!same || follows < expected.size() || (follows == expected.size() && follows < most)) continue;
        const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(at + length);
        expected.assign(from, from + static_cast<std::ptrdiff_t>(follows));
      }
    }
    ASSERT_EQ(LookUp(tokens, static_cast<int64_t>(most)), expected) << "round " << round;
    found += expected.size();
  }
  EXPECT_GT(found, 1000u);
}

TEST_F(GenerateTest, DraftedTokensMakeTheSameTextsInFewerPasses) {
  std::vector<Asked> asked = ManyPrompts();
  for (Asked& each : asked) each.tokens += 40;  // long enough to go in circles
  int number = 0;
  for (const json& config : {GptConfigOf(), LlamaConfigOf(), WindowsConfigOf()}) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/drafted" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config);
    for (const double temperature : {0.0, 0.2}) {
      const models::SamplingOptions sampling{.temperature = temperature};
      const auto plain = Make(directory, asked, {.batch = 4, .cache = CachePlace::kHost}, sampling);
      ASSERT_NE(plain, nullptr);
      const auto expected = Texts(plain.get(), asked);
      for (const int64_t batch : {1, 4}) {
        for (const int64_t drafted : {1, 20}) {
          const auto roomy = Make(directory, asked, {.batch = batch, .drafted = drafted}, sampling);
          ASSERT_NE(roomy, nullptr);
          const auto lean = Make(directory, asked,
                                 {roomy->plan().least_bytes, batch, CachePlace::kHost, drafted}, sampling);
          ASSERT_NE(lean, nullptr);
          EXPECT_EQ(Texts(lean.get(), asked), expected) << "batch " << batch << ", drafted " << drafted;
          const GenerationStats stats = lean->stats();
          EXPECT_LE(stats.peak_tensor_bytes, static_cast<int64_t>(lean->plan().tensor_bytes));
          EXPECT_GT(stats.accepted_tokens, 0);
          EXPECT_LE(stats.accepted_tokens, stats.drafted_tokens);
          EXPECT_TRUE(batch != 4 || stats.passes < plain->stats().passes);
        }
      }
    }
  }
  GenerationSizes sizes;
  sizes.units = {1 << 20};
  GenerationWish wish;
  wish.budget_bytes = 256 * kMiB;
  wish.cache = CachePlace::kDrive;
  wish.drafted = 4;
  EXPECT_THAT(PlanGeneration(sizes, wish).status().message(), HasSubstr("needs keys and values in memory"));
}

// The likeliest tokens behind a prompt, by the whole model in LibTorch, without a cache.
std::vector<int64_t> WholeModelsTokens(const json& config, const Asked& asked) {
  const auto model = models::ModelFromJson(config);
  EXPECT_TRUE(model.ok()) << model.status();
  const zero::Model whole = models::MakeModel(**model, models::Head::kLastLogits);
  const models::ModelLayout layout = (*model)->Layout();
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const torch::NoGradGuard no_grad;
  size_t next = 0;
  for (const zero::BlockSpec& block : whole.blocks) {
    modules.push_back(zero::BuildWhole(block));
    for (torch::Tensor parameter : zero::UniqueParameters(*modules.back())) {
      const models::PublishedTensor& tensor = layout.tensors[next++];
      std::vector<float> values = Formula(tensor.name, tensor.elements());
      torch::Tensor from = torch::from_blob(values.data(), {tensor.elements()});
      from = tensor.transposed ? from.view({tensor.columns, tensor.rows}).t() : from.view(parameter.sizes());
      parameter.copy_(from);
    }
    modules.back()->eval();
  }
  std::vector<int64_t> tokens = asked.prompt;
  while (tokens.size() < asked.prompt.size() + static_cast<size_t>(asked.tokens)) {
    zero::TensorBatch batch = tools::ExampleBatch(1, static_cast<int64_t>(tokens.size()));
    std::copy(tokens.begin(), tokens.end(), batch.inputs.data_ptr<int64_t>());
    torch::Tensor x = batch.inputs;
    for (const zero::StageSpec& stage : whole.stages)
      x = stage.forward(*modules[static_cast<size_t>(stage.block)], x, batch);
    tokens.push_back(x[0].argmax().item<int64_t>());
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(asked.prompt.size()), tokens.end()};
}

TEST_F(GenerateTest, GptMakesTheTokensOfTheWholeModel) {
  const json config = GptConfigOf();
  tools::testing_support::WriteModel(dir_ + "/gpt", config);
  const Asked asked{{5, 17, 250, 3, 99}, 20};
  const auto generator = Make(dir_ + "/gpt", {asked}, {.budget = 64 * kMiB});
  ASSERT_NE(generator, nullptr);
  EXPECT_EQ(Texts(generator.get(), {asked}).front(), WholeModelsTokens(config, asked));
}

// A prompt of many pieces, far longer than the windows, wherever its keys are; and another that was there
// before in the same places.
TEST_F(GenerateTest, LayersWithAWindowKeepAndReadNoMoreThanTheyLookAt) {
  json config = WindowsConfigOf();
  config["max_position_embeddings"] = 4096;
  const std::string directory = dir_ + "/windows";
  tools::testing_support::WriteModel(directory, config);
  std::vector<Asked> asked(3);
  for (size_t i = 0; i < asked.size(); ++i) {
    asked[i].tokens = 6;
    for (int64_t at = 0; at < static_cast<int64_t>(i == 1 ? 700 : 1700); ++at)
      asked[i].prompt.push_back((at * at + 7 * at + static_cast<int64_t>(i)) % 300);
  }
  std::vector<std::vector<int64_t>> expected;
  for (const Asked& each : asked) expected.push_back(WholeModelsTokens(config, each));
  constexpr uint64_t kRecord = 2 * 2 * 24 * 4, kPositions = 1706;
  for (const int64_t batch : {1, 3}) {
    for (const CachePlace place : {CachePlace::kHost, CachePlace::kDrive}) {
      const auto generator = Make(directory, asked, {.batch = batch, .cache = place});
      ASSERT_NE(generator, nullptr);
      EXPECT_EQ(Texts(generator.get(), asked), expected)
          << batch << " on drive " << (place == CachePlace::kDrive);
      const GenerationPlan& plan = generator->plan();
      const uint64_t one_layer = static_cast<uint64_t>(batch) * kPositions * kRecord;
      if (place == CachePlace::kHost) {  // two of three layers keep 560 positions
        EXPECT_LT(plan.cache_bytes, 2 * one_layer);
        EXPECT_GT(plan.cache_bytes, one_layer);
      } else {
        EXPECT_LT(plan.cache_pass_bytes, 2 * one_layer);
      }
    }
  }
}

// Drafted tokens, and texts that grow beyond what other frequencies turn: as the whole model has them.
TEST_F(GenerateTest, ATextThatGrowsFarIsTheWholeModels) {
  const json config = FarConfigOf();
  tools::testing_support::WriteModel(dir_ + "/far", config);
  std::vector<Asked> asked;
  for (const int64_t length : {1, 95, 99, 100, 101, 150}) {
    Asked each{{}, 12};
    for (int64_t i = 0; i < length; ++i) each.prompt.push_back((i * 5 + length) % 300);
    asked.push_back(each);
  }
  std::vector<std::vector<int64_t>> expected;
  for (const Asked& each : asked) expected.push_back(WholeModelsTokens(config, each));
  for (const int64_t drafted : {0, 5}) {
    const auto generator =
        Make(dir_ + "/far", asked, {.batch = 2, .cache = CachePlace::kHost, .drafted = drafted});
    ASSERT_NE(generator, nullptr);
    EXPECT_EQ(Texts(generator.get(), asked), expected) << drafted;
  }
  const auto lean = Make(dir_ + "/far", {{{1, 2}, 200}}, {.batch = 1, .cache = CachePlace::kHost});
  ASSERT_NE(lean, nullptr);
  const auto least = Make(dir_ + "/far", {{{1, 2}, 200}}, {lean->plan().least_bytes, 1, CachePlace::kHost});
  ASSERT_NE(least, nullptr);
  EXPECT_EQ(Texts(least.get(), {{{1, 2}, 200}}), Texts(lean.get(), {{{1, 2}, 200}}));
}

TEST(PlanTest, ABudgetThatIsTooSmallIsRefusedWithTheLeastThatWorks) {
  GenerationSizes sizes;
  sizes.decoder = testing_support::ShapeOf(24, 2048, 5504, 32000, 16, 128);
  sizes.cache = {.layers = 24, .record_bytes = 2 * 16 * 128 * 2};
  sizes.units.assign(300, 8 * kMiB);
  sizes.scratch_bytes = kMiB;
  sizes.largest_part_rows = 2048;
  GenerationWish wish;
  wish.positions = 640;
  wish.prompt = 512;
  wish.budget_bytes = 10 * kMiB;
  const absl::Status refused = PlanGeneration(sizes, wish).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the least that works here is"));
  // What is said to work does, and a byte less does not.
  wish.budget_bytes = uint64_t{1} << 40;
  const uint64_t host = (wish.cache = CachePlace::kHost, PlanGeneration(sizes, wish)->least_bytes);
  const uint64_t drive = (wish.cache = CachePlace::kDrive, PlanGeneration(sizes, wish)->least_bytes);
  wish.cache = CachePlace::kAuto;
  wish.budget_bytes = std::min(host, drive);
  EXPECT_TRUE(PlanGeneration(sizes, wish).ok());
  EXPECT_LE(PlanGeneration(sizes, wish)->total_bytes, wish.budget_bytes);
  --wish.budget_bytes;
  EXPECT_FALSE(PlanGeneration(sizes, wish).ok());
}

TEST(PlanTest, ResidentUnitsAreSpreadAndFillTheBudget) {
  GenerationSizes sizes;
  sizes.decoder = testing_support::ShapeOf(1, 64, 64, 64, 1, 64);
  sizes.cache = {.layers = 1, .record_bytes = 256};
  sizes.units.assign(100, kMiB);
  GenerationWish wish;
  wish.budget_bytes = 80 * kMiB;
  const auto plan = PlanGeneration(sizes, wish);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LE(plan->total_bytes, wish.budget_bytes);
  EXPECT_GT(plan->total_bytes, wish.budget_bytes - 8 * kMiB);
  EXPECT_EQ(plan->pass_bytes + plan->resident_bytes, 100 * kMiB);
  const auto share = static_cast<double>(plan->resident_bytes) / (100.0 * kMiB);
  for (size_t from = 0; from < 100; from += 25) {
    const auto some = std::count(plan->resident.begin() + static_cast<std::ptrdiff_t>(from),
                                 plan->resident.begin() + static_cast<std::ptrdiff_t>(from) + 25, true);
    EXPECT_NEAR(static_cast<double>(some), 25 * share, 2);
  }
}

}  // namespace
}  // namespace penstock::generate::generate_test
