// Generation with mixtures of experts: transformers' tokens (tests/golden/mixtures.json), the same tokens
// whatever is in memory and in whatever order experts come, reads of what routers chose alone, and files that
// have not what they should.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <set>

#include "aio/arena.h"
#include "generate/expert_cache.h"
#include "generate/generator.h"
#include "models/weights/weight_import.h"
#include "tests/tools/generating.h"
#include "tests/tools/mixtures.h"

namespace penstock::generate::generate_experts_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Asked;
using testing_support::kMiB;
using testing_support::ManyPrompts;
using tools::testing_support::Formula;
using tools::testing_support::Golden;
using tools::testing_support::MixtureConfigs;
using tools::testing_support::WriteFused;
using tools::testing_support::WriteModel;

class GenerateExpertsTest : public testing_support::GeneratingTest {
 protected:
  // A model's directory opened, with all experts of its mixtures.
  struct Opened {
    models::Decoder decoder;
    models::ModelLayout layout;
    MatrixOrder order;
    std::unique_ptr<aio::Arena> arena;
    std::unique_ptr<aio::Engine> engine;
    std::unique_ptr<WeightSource> source;
  };
  absl::StatusOr<Opened> Open(const std::string& directory) {
    Opened made;
    ASSIGN_OR_RETURN(const auto model, models::OpenModel(directory));
    made.decoder = *model->decoder();
    made.layout = model->Layout();
    made.order = OrderOf(made.decoder, made.layout);
    aio::ArenaOptions memory;
    memory.bytes = 32 * kMiB;
    ASSIGN_OR_RETURN(made.arena, aio::Arena::Create(memory));
    aio::EngineOptions options;
    options.arenas = {made.arena.get()};
    ASSIGN_OR_RETURN(made.engine, aio::Engine::Create(std::move(options)));
    ASSIGN_OR_RETURN(made.source, OpenSafetensors(made.engine.get(), directory, made.layout,
                                                  made.order.uses(), "weights"));
    return made;
  }
};

TEST_F(GenerateExpertsTest, GreedyTokensAreThoseOfTransformers) {
  const json golden = Golden("mixtures.json");
  int number = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    const auto greedy = c["greedy"].get<std::vector<int64_t>>();
    const Asked asked{{greedy.begin(), greedy.begin() + 4}, static_cast<int64_t>(greedy.size()) - 4};
    const std::vector<int64_t> expected(greedy.begin() + 4, greedy.end());
    for (const char* form : {"config", "old"}) {
      const std::string directory = dir_ + "/model" + std::to_string(number++);
      WriteModel(directory, c[form], number % 3 == 0 ? 3 : 1);
      const auto model = models::OpenModel(directory);
      ASSERT_TRUE(model.ok()) << model.status();
      EXPECT_EQ((*model)->Layout().parameters(), c["parameters"].get<int64_t>());
      const auto again = models::ModelFromJson((*model)->ToPublished());
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_TRUE(**again == **model);
      const auto made = Make(directory, {asked}, {});
      ASSERT_NE(made, nullptr);
      EXPECT_EQ(Texts(made.get(), {asked}).front(), expected);
    }
    for (const size_t other : {size_t{0}, size_t{1}}) {
      if (other == 1 && c["old"]["model_type"] != "granitemoe") continue;
      const std::string directory = dir_ + "/fused" + std::to_string(number++);
      WriteFused(directory, c["config"], other);
      const auto made = Make(directory, {{{1, 2}, 5}, asked}, {.batch = 2});
      ASSERT_NE(made, nullptr);
      EXPECT_EQ(Texts(made.get(), {{{1, 2}, 5}, asked})[1], expected);
    }
  }
}

TEST_F(GenerateExpertsTest, TokensDependOnNeitherBudgetNorCompany) {
  const std::vector<Asked> asked = ManyPrompts();
  const models::SamplingOptions sampling{.temperature = 0.9, .top_k = 200, .top_p = 0.95};
  int number = 0;
  for (const json& config : MixtureConfigs()) {
    for (const swap::Dtype dtype : {swap::Dtype::kF32, swap::Dtype::kBf16}) {
      SCOPED_TRACE(config.dump());
      const std::string directory = dir_ + "/same" + std::to_string(number++);
      WriteModel(directory, config, 1, dtype);
      const auto first = Make(directory, asked, {.batch = 12, .cache = CachePlace::kHost}, sampling);
      ASSERT_NE(first, nullptr);
      ASSERT_EQ(first->plan().experts.places, first->plan().experts.all) << "all of them are in memory";
      const auto expected = Texts(first.get(), asked);
      const ExpertStats all = first->stats().experts;
      EXPECT_EQ(all.hits + all.misses, all.used);
      EXPECT_LE(all.read_bytes, first->plan().experts.memory_bytes) << "each is read once";
      for (const int64_t batch : {1, 5}) {
        for (const CachePlace place : {CachePlace::kHost, CachePlace::kDrive}) {
          const auto roomy = Make(directory, asked, {.batch = batch, .cache = place}, sampling);
          ASSERT_NE(roomy, nullptr);
          const auto least =
              Make(directory, asked, {.budget = roomy->plan().least_bytes, .batch = batch, .cache = place},
                   sampling);
          ASSERT_NE(least, nullptr);
          EXPECT_LE(least->plan().total_bytes, roomy->plan().least_bytes);
          EXPECT_LT(least->plan().experts.places, least->plan().experts.all);
          EXPECT_EQ(Texts(least.get(), asked), expected);
          EXPECT_LE(static_cast<uint64_t>(least->stats().peak_tensor_bytes), least->plan().tensor_bytes);
          const ExpertStats stats = least->stats().experts;
          EXPECT_GT(stats.misses, 0u);
          EXPECT_LE(stats.right_guesses, stats.guesses);
        }
      }
      const auto drafted =
          Make(directory, asked, {.batch = 3, .cache = CachePlace::kHost, .drafted = 4}, sampling);
      ASSERT_NE(drafted, nullptr);
      EXPECT_EQ(Texts(drafted.get(), asked), expected);
    }
  }
}

TEST_F(GenerateExpertsTest, PackedExpertsLieSideBySideAndGiveTheSameTokensForEveryBudget) {
  int number = 0;
  const std::vector<Asked> asked = {{{1, 2, 3}, 12}, {{200, 7}, 9}, {std::vector<int64_t>(150, 9), 6}};
  for (const json& config : MixtureConfigs()) {
    const std::string directory = dir_ + "/whole" + std::to_string(number++);
    WriteFused(directory, config);
    for (const int bits : {8, 4}) {
      const std::string packed = Packed(directory, bits);
      const auto opened = Open(packed);
      ASSERT_TRUE(opened.ok()) << opened.status();
      for (const ExpertMatrices& expert : opened->order.experts) {
        if (!expert.there()) continue;
        const size_t i = static_cast<size_t>(&expert - opened->order.experts.data());
        const WeightUnit& unit = opened->source->experts()[i];
        ASSERT_EQ(unit.parts.size(), expert.gate < 0 ? 2u : 3u);
        uint64_t bytes = 0;
        for (const WeightPart& part : unit.parts) {
          const auto& tensor = opened->layout.tensors[static_cast<size_t>(part.tensor)];
          bytes += static_cast<uint64_t>(tensor.rows) *
                   opened->source->code(part.tensor)->row_bytes(static_cast<size_t>(tensor.columns));
        }
        EXPECT_LE(unit.bytes, bytes + 2 * 4096) << "one read brings all of it";
      }
      const auto roomy = Make(packed, asked, {.batch = 3});
      ASSERT_NE(roomy, nullptr);
      const auto expected = Texts(roomy.get(), asked);
      const auto least = Make(packed, asked, {.budget = roomy->plan().least_bytes, .batch = 3});
      ASSERT_NE(least, nullptr);
      EXPECT_EQ(Texts(least.get(), asked), expected);
    }
  }
}

// Random layers of random unions, some of more experts than there are places, and guesses that are right,
// wrong and both: each expert is given once, with its own bytes.
TEST_F(GenerateExpertsTest, TheCacheGivesEachExpertOnceWithItsOwnBytes) {
  const json config = MixtureConfigs()[2];
  WriteModel(dir_ + "/model", config);
  auto opened = Open(dir_ + "/model");
  ASSERT_TRUE(opened.ok()) << opened.status();
  const int64_t layers = opened->decoder.shape.layers, each = opened->decoder.shape.mixture.experts;
  const uint64_t bytes = opened->source->largest_expert_bytes();
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  for (const uint64_t places : {2, 3, 4, 7, 16, 47, 48}) {
    auto memory = opened->arena->Allocate(places * bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    ExpertCache cache(opened->source.get(), opened->engine.get(), {memory->data(), places * bytes}, layers,
                      each);
    ASSERT_EQ(cache.places(), places);
    const auto some = [&](size_t most) {
      std::set<int64_t> chosen;
      for (size_t n = 1 + random() % most; n > 0; --n)
        chosen.insert(static_cast<int64_t>(random()) & (each - 1));
      return std::vector<int64_t>(chosen.begin(), chosen.end());
    };
    std::vector<int64_t> wanted = some(4);
    for (int64_t turn = 0; turn < 120; ++turn) {
      const int64_t layer = turn % layers;
      ASSERT_TRUE(cache.Begin(layer, wanted).ok());
      const std::vector<int64_t> next = some(turn % 5 == 0 ? 40 : 4);
      if (turn % 3 != 0) {
        const std::vector<int64_t> guess = turn % 2 == 0 ? next : some(6);
        ASSERT_TRUE(cache.Guess((layer + 1) % layers, guess).ok());
      }
      std::set<int64_t> given;
      while (cache.left() > 0) {
        const auto held = cache.Next();
        ASSERT_TRUE(held.ok()) << held.status();
        EXPECT_TRUE(given.insert(held->expert).second);
        const WeightUnit& unit = opened->source->experts()[static_cast<size_t>(layer * each + held->expert)];
        for (const WeightPart& part : unit.parts) {
          const auto& tensor = opened->layout.tensors[static_cast<size_t>(part.tensor)];
          const std::vector<float> values = Formula(tensor.name, tensor.elements());
          EXPECT_EQ(std::memcmp(held->memory + part.at, values.data(), values.size() * sizeof(float)), 0);
        }
        ASSERT_TRUE(cache.Release(*held).ok());
      }
      EXPECT_EQ(given, std::set<int64_t>(wanted.begin(), wanted.end()));
      wanted = next;
    }
    const ExpertStats& stats = cache.stats();
    EXPECT_EQ(stats.hits + stats.misses, stats.used);
    EXPECT_LE(stats.guessed_hits, stats.right_guesses);
    EXPECT_LE(stats.right_guesses, stats.guesses);
    EXPECT_LE(stats.read_bytes, (stats.misses + stats.guesses) * bytes);
    if (places == 48) {
      EXPECT_LE(stats.read_bytes, 48 * bytes) << "each is read once";
    }
  }
}

// One text: what is read is what its routers chose and memory had not; a wrong guess is a small part of it.
TEST_F(GenerateExpertsTest, ReadsWhatRoutersChoseAlone) {
  json config = MixtureConfigs()[2];
  config["moe_intermediate_size"] = 128;
  WriteModel(dir_ + "/model", config);
  const Asked asked{{5}, 200};
  const auto whole = Make(dir_ + "/model", {asked}, {.batch = 1, .cache = CachePlace::kHost});
  ASSERT_NE(whole, nullptr);
  const auto made =
      Make(dir_ + "/model", {asked},
           {.budget = whole->plan().least_bytes + 3 * kMiB, .batch = 1, .cache = CachePlace::kHost});
  ASSERT_NE(made, nullptr);
  ASSERT_LT(made->plan().experts.places, made->plan().experts.all);
  EXPECT_EQ(Texts(made.get(), {asked}), Texts(whole.get(), {asked}));
  const ExpertStats stats = made->stats().experts;
  const auto opened = Open(dir_ + "/model");
  ASSERT_TRUE(opened.ok());
  const uint64_t bytes = opened->source->largest_expert_bytes();
  // Misses that no guess was on its way for, and guesses that were right, are needed.
  const uint64_t needed = (stats.misses + stats.guessed_hits) * bytes;
  EXPECT_LE(static_cast<double>(stats.read_bytes), 1.1 * static_cast<double>(needed));
  EXPECT_EQ(stats.used, 3u * 4u * 200u) << "layers, experts of a token, tokens";
}

TEST_F(GenerateExpertsTest, WhatFilesHaveNotIsNamedInOneLine) {
  const json config = MixtureConfigs()[2];
  const auto refusal = [&](const std::string& directory) {
    const auto opened = Open(directory);
    EXPECT_FALSE(opened.ok());
    const std::string said(opened.status().message());
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
    return said;
  };
  // The router knows more experts than the files have.
  json fewer = config;
  fewer["num_experts"] = 15;
  WriteModel(dir_ + "/fewer", fewer);
  tools::testing_support::WriteFile(dir_ + "/fewer/config.json", config.dump());
  EXPECT_THAT(refusal(dir_ + "/fewer"),
              HasSubstr("model.layers.0.mlp.gate.weight is [15, 64] there and [16, 64]"));
  // The files lack one matrix of an expert that the router may choose.
  WriteModel(dir_ + "/lacking", config);
  {
    const std::string gone = "model.layers.1.mlp.experts.7.down_proj.weight";
    std::fstream file(dir_ + "/lacking/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    std::string header(1 << 20, 0);
    file.read(header.data(), static_cast<std::streamsize>(header.size()));
    file.clear();
    const size_t at = header.find(gone);
    ASSERT_NE(at, std::string::npos);
    file.seekp(static_cast<std::streamoff>(at + gone.find("down")));
    file.write("gone", 4);
  }
  EXPECT_THAT(refusal(dir_ + "/lacking"),
              HasSubstr("no tensor model.layers.1.mlp.experts.7.down_proj.weight"));
  // Fused tensors in another order.
  WriteFused(dir_ + "/fused", config);
  json other = config;
  other["moe_intermediate_size"] = 32;
  tools::testing_support::WriteFile(dir_ + "/fused/config.json", other.dump());
  EXPECT_THAT(refusal(dir_ + "/fused"),
              HasSubstr("model.layers.0.mlp.experts.gate_up_proj is [16, 48, 64] there "
                        "and [16, 64, 64] in this model, which has "
                        "model.layers.0.mlp.experts.0.gate_proj.weight in it"));
  // A shard is gone.
  WriteModel(dir_ + "/shards", config, 3);
  std::filesystem::remove(dir_ + "/shards/model-1.safetensors");
  EXPECT_THAT(refusal(dir_ + "/shards"), HasSubstr("model-1.safetensors is missing"));
  // More for a token than there are.
  json many = config;
  many["num_experts_per_tok"] = 17;
  const auto model = models::ModelFromJson(many);
  EXPECT_THAT(std::string(model.status().message()),
              HasSubstr("num_experts_per_tok is 17, and a layer has 16 experts"));
}

// What is DeepSeek's: latents' matrices, corrections, and keys that another function would need.
TEST_F(GenerateExpertsTest, WhatIsWrongWithADeepSeekIsNamedInOneLine) {
  const json v2 = MixtureConfigs()[6], v3 = MixtureConfigs()[7];
  ASSERT_EQ(v3["model_type"], "deepseek_v3");
  for (const auto& [of, key, value, words] : std::vector<std::tuple<json, std::string, json, std::string>>{
           {v3, "scoring_func", "softmax", "scoring_func is \"softmax\", and sigmoid alone is computed"},
           {v3, "topk_method", "greedy", "topk_method is \"greedy\", and noaux_tc alone is computed"},
           {v3, "n_group", 3, "n_group is 3, and 8 experts are not in as many groups of 2 or more"},
           {v3, "n_group", 8, "n_group is 8, and 8 experts are not in as many groups of 2 or more"},
           {v3, "topk_group", 3, "topk_group is 3, not so many of 2 groups of 4"},
           {v3, "num_experts_per_tok", 5, "topk_group is 1, not so many of 2 groups of 4"},
           {v3, "n_shared_experts", 0, "n_shared_experts is 0, not from 1"},
           {v3, "moe_layer_freq", 2, "moe_layer_freq is 2, and transformers takes 1"},
           {v3, "routed_scaling_factor", 0, "routed_scaling_factor is 0, not above 0"},
           {v3, "num_experts", 9, "num_experts is 9, and n_routed_experts is 8"},
           {v3, "num_key_value_heads", 2, "num_key_value_heads is 2, and a deepseek_v3 has as many"},
           {v3, "kv_lora_rank", 0, "kv_lora_rank is 0, not between 1"},
           {v3, "q_lora_rank", 0, "q_lora_rank is 0, neither null nor 1 or more"},
           {v3, "qk_rope_head_dim", 7, "rotary positions turn 7 elements"},
           {v3, "mlp_bias", true, "mlp_bias is true, which is not computed"},
           {v2, "rope_interleave", false, "rope_interleave is false, and positions turn neighbours"},
           {v2, "topk_method", "noaux_tc", "topk_method is \"noaux_tc\", neither greedy nor group_limited"},
           {v2, "n_group", nullptr,
            "topk_method is \"group_limited_greedy\", without n_group and topk_group"},
           {v2, "norm_topk_prob", true,
            "norm_topk_prob is true, which transformers computes in no deepseek_v2"},
           {v2, "num_experts_per_tok", nullptr, "num_experts_per_tok is missing"},
           {MixtureConfigs()[0], "kv_lora_rank", 8, "kv_lora_rank is 8, which no mixtral has"},
           {MixtureConfigs()[0], "n_routed_experts", 8, "n_routed_experts is 8, which no mixtral has"}}) {
    json config = of;
    config[key] = value;
    EXPECT_THAT(std::string(models::ModelFromJson(config).status().message()), HasSubstr(words)) << key;
  }
  // Files whose sizes are others', and whose layers have no corrections: of a V3 whose config says V2.
  WriteModel(dir_ + "/v3", v3);
  for (const auto& [key, value, words] : std::vector<std::tuple<std::string, json, std::string>>{
           {"kv_lora_rank", 40, "self_attn.kv_a_proj_with_mqa.weight is [56, 64] there and [48, 64]"},
           {"v_head_dim", 16, "self_attn.kv_b_proj.weight is [160, 48] there and [128, 48]"},
           {"q_lora_rank", nullptr, "no tensor model.layers.0.self_attn.q_proj.weight"},
           {"first_k_dense_replace", 0, "no tensor model.layers.0.mlp.gate.weight"},
           {"n_routed_experts", 10, "model.layers.1.mlp.gate.weight is [8, 64] there and [10, 64]"},
           {"n_shared_experts", 2, "shared_experts.gate_proj.weight is [24, 64] there and [48, 64]"}}) {
    json config = v3;
    config[key] = value;
    tools::testing_support::WriteFile(dir_ + "/v3/config.json", config.dump());
    EXPECT_THAT(std::string(Open(dir_ + "/v3").status().message()), HasSubstr(words));
  }
  json as_v2 = v2;
  as_v2["first_k_dense_replace"] = 1;
  WriteModel(dir_ + "/v2", as_v2);
  as_v2["model_type"] = "deepseek_v3";
  as_v2["topk_method"] = "noaux_tc";
  as_v2["n_shared_experts"] = 2;
  tools::testing_support::WriteFile(dir_ + "/v2/config.json", as_v2.dump());
  EXPECT_THAT(std::string(Open(dir_ + "/v2").status().message()),
              HasSubstr("no tensor model.layers.1.mlp.gate.e_score_correction_bias"));
}

// A cache of latents: rank and what positions turn, whatever the heads.
TEST_F(GenerateExpertsTest, LatentsAreWhatTheCacheKeeps) {
  json config = MixtureConfigs()[7];
  for (const int heads : {4, 16}) {
    config["num_attention_heads"] = config["num_key_value_heads"] = heads;
    const std::string directory = dir_ + "/heads" + std::to_string(heads);
    WriteModel(directory, config);
    const Asked asked{{1, 2, 3}, 125};
    const auto made = Make(directory, {asked}, {.batch = 1, .cache = CachePlace::kHost});
    ASSERT_NE(made, nullptr);
    EXPECT_EQ(made->plan().cache_bytes, 3u * 128u * (48 + 8) * 4) << "3 layers, 128 positions, fp32";
  }
}

TEST_F(GenerateExpertsTest, MoreLayersOrExpertsThanAreServedAreRefusedBeforeMemoryIsTaken) {
  for (const auto& [layers, experts, told] :
       {std::tuple<int64_t, int64_t, std::string>{1'000'000'000'000, 8, "num_hidden_layers"},
        {10'000, 65'536, "more than 1048576 experts"}}) {
    json config = tools::testing_support::MixtureConfigs().front();
    config["num_hidden_layers"] = layers;
    config["num_local_experts"] = experts;
    EXPECT_THAT(std::string(models::ModelFromJson(config).status().message()), HasSubstr(told));
  }
}

TEST_F(GenerateExpertsTest, ScoresThatAreNoNumbersEndTheRunWithTheTensorsName) {
  const std::string router = "model.layers.1.mlp.gate.weight";
  const std::string corrections = "model.layers.1.mlp.gate.e_score_correction_bias";
  int number = 0;
  for (const auto& [config, tensor, words] : std::vector<std::tuple<json, std::string, std::string>>{
           {MixtureConfigs()[3], router, ": the router's scores are not finite numbers"},
           {MixtureConfigs()[7], router, ": the router's scores are not finite numbers"},
           {MixtureConfigs()[7], corrections,
            ": corrections of the router's scores are not finite numbers"}}) {
    const std::string directory = dir_ + "/model" + std::to_string(number++);
    WriteModel(directory, config);
    const auto opened = Open(directory);
    ASSERT_TRUE(opened.ok());
    auto import = models::WeightImport::Open(directory, opened->layout, "weights");
    ASSERT_TRUE(import.ok());
    size_t damaged = 0;
    for (size_t i = 0; i < opened->layout.tensors.size(); ++i) {
      if (opened->layout.tensors[i].name != tensor) continue;
      std::fstream file(directory + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>((*import)->PlaceOf(i).offset));
      const float nan = std::numeric_limits<float>::quiet_NaN();
      file.write(reinterpret_cast<const char*>(&nan), sizeof nan);
      ++damaged;
    }
    ASSERT_EQ(damaged, 1u);
    const Asked asked{{5, 6}, 4};
    const auto made = Make(directory, {asked}, {});
    ASSERT_NE(made, nullptr);
    GenerationCallbacks callbacks;
    bool given = false;
    callbacks.next = [&]() -> absl::StatusOr<std::optional<GenerationRequest>> {
      if (std::exchange(given, true)) return std::nullopt;
      return GenerationRequest{0, asked.prompt, asked.tokens, 1};
    };
    callbacks.token = [](int64_t, int64_t) { return false; };
    callbacks.finished = [](int64_t, Finish) { return absl::OkStatus(); };
    const absl::Status status = made->Run(callbacks);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(tensor + words));
  }
}

TEST_F(GenerateExpertsTest, PlanReportAndInspectKnowExperts) {
  WriteModel(dir_ + "/model", MixtureConfigs()[2]);
  const auto inspected = Run({"inspect", dir_ + "/model", "--json"});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  const json experts = json::parse(inspected.out)["experts"];
  EXPECT_EQ(experts["layers"], 3);
  EXPECT_EQ(experts["experts_per_layer"], 16);
  EXPECT_EQ(experts["experts_per_token"], 4);
  EXPECT_EQ(experts["parameters_per_expert"], 3 * 24 * 64);
  const auto planned = Run({"plan", "--generate", dir_ + "/model", "--host-memory", "64MiB", "--json"});
  ASSERT_EQ(planned.code, 0) << planned.err;
  const json plan = json::parse(planned.out);
  EXPECT_EQ(plan["experts"]["all"], 48);
  EXPECT_EQ(plan["experts"]["in_memory"], 48);
  EXPECT_EQ(plan["experts"]["pass_used"], 12) << "of one text";
  EXPECT_EQ(plan["experts"]["pass_bytes"], 0);
  const auto least = plan["least_host_memory_bytes"].get<int64_t>();
  const auto lean = Run({"plan", "--generate", dir_ + "/model", "--host-memory", std::to_string(least)});
  ASSERT_EQ(lean.code, 0) << lean.err;
  EXPECT_THAT(lean.out, HasSubstr("experts: 2 of 48 in memory"));
  tools::testing_support::WriteFile(dir_ + "/prompts.jsonl", "{\"tokens\": [1, 2, 3]}\n");
  const auto ran = Run({"generate", dir_ + "/model", "--prompts", dir_ + "/prompts.jsonl", "--tokens", "5",
                        "--report", dir_ + "/report.json", "--host-memory", std::to_string(least)});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("experts: "));
  std::ifstream file(dir_ + "/report.json");
  const json report = json::parse(file);
  EXPECT_EQ(report["experts"]["hits"].get<int64_t>() + report["experts"]["misses"].get<int64_t>(),
            report["experts"]["used"].get<int64_t>());
  EXPECT_GE(report["weight_read_bytes"], report["experts"]["read_bytes"]);
}

TEST_F(GenerateExpertsTest, AMixtureIsNotTrainedFromTheCommandLine) {
  WriteModel(dir_ + "/model", MixtureConfigs()[0]);
  tools::testing_support::WriteFile(dir_ + "/text.txt", std::string(4000, 'a'));
  for (const std::string verb : {"train", "plan"}) {
    const auto ran = Run({verb, "--model", dir_ + "/model", "--data", dir_ + "/text.txt"});
    EXPECT_NE(ran.code, 0);
    EXPECT_THAT(ran.err,
                HasSubstr("mixtral is a mixture of experts, which is not trained from the command line yet"));
  }
}

}  // namespace
}  // namespace penstock::generate::generate_experts_test
