#include "tools/machine/verb_estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

namespace penstock::tools::verb_estimate_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

Result Estimate(std::vector<const char*> arguments, const ModelSizer& sizer = nullptr) {
  arguments.insert(arguments.begin(), "estimate");
  std::ostringstream out;
  std::ostringstream err;
  Result result;
  result.code = RunEstimate(static_cast<int>(arguments.size()), arguments.data(), out, err, sizer);
  result.out = out.str();
  result.err = err.str();
  return result;
}

// Wrong arguments: exit 2, one line on stderr, nothing on stdout.
std::string Wrong(std::vector<const char*> arguments) {
  const Result result = Estimate(std::move(arguments));
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_THAT(result.err, StartsWith("penstock estimate: "));
  return result.err;
}

TEST(Estimate, DeepSpeedsTable) {
  const Result result =
      Estimate({"--params", "2851M", "--largest-layer", "32e6", "--gpus-per-node", "8", "--stage", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out,
              HasSubstr("   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n"));
  EXPECT_THAT(result.out,
              HasSubstr("    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1\n"));
  EXPECT_EQ(result.err, "");
}

TEST(Estimate, AllShowsEveryTable) {
  const Result result = Estimate({"--params=7B"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("ZeRO-2"));
  EXPECT_THAT(result.out, HasSubstr("ZeRO-3"));
  EXPECT_THAT(result.out, HasSubstr("offload=nvme, order=next_forward"));
}

TEST(Estimate, JsonInBytes) {
  const Result result =
      Estimate({"--layers", "24", "--width", "1024", "--json", "--dtype", "fp32", "--tbw", "1200"});
  EXPECT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["input"]["params"], 24 * (12 * 1024 * 1024 + 13 * 1024) + (256 + 1024) * 1024 + 2 * 1024);
  EXPECT_EQ(json["input"]["rated_bytes_written"], 1.2e15);
  EXPECT_EQ(json["penstock"][2]["nvme_bytes_per_param_per_step"], 28.0);
  EXPECT_EQ(json["zero3"].size(), 6u);
}

TEST(Estimate, ModelIsAskedOfTheSizer) {
  const ModelSizer sizer = [](const std::string& model,
                              const AdapterWish& wish) -> absl::StatusOr<ModelSize> {
    if (model != "gpt-x") return absl::InvalidArgumentError("no model \"" + model + "\"");
    if (wish.rank == 4 && wish.targets == "q_proj")
      return ModelSize{.params = 1'010'000, .largest_layer_params = 1000, .frozen_params = 1'000'000};
    return ModelSize{.params = 1'000'000, .largest_layer_params = 1000};
  };
  const Result result = Estimate({"--model", "gpt-x", "--json"}, sizer);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["input"]["largest_layer_params"], 1000);
  const Result wrong = Estimate({"--model", "gpt-y"}, sizer);
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(wrong.err, "penstock estimate: no model \"gpt-y\"\n");
  // Of what is frozen the weights are read, twice a step; nothing of it is written or copied.
  const Result adapted =
      Estimate({"--model", "gpt-x", "--json", "--lora-rank", "4", "--lora-targets", "q_proj"}, sizer);
  ASSERT_EQ(adapted.code, 0) << adapted.err;
  const auto rows = nlohmann::json::parse(adapted.out)["penstock"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[2]["write_bytes_per_step"], 12 * 10'000);
  EXPECT_EQ(rows[2]["read_bytes_per_step"], 14 * 10'000 + 2 * 2 * 1'000'000);
  EXPECT_EQ(rows[2]["nvme_bytes"], 2 * 12 * 10'000);
  EXPECT_EQ(rows[1]["host_bytes"], 14 * 10'000 + 2 * 1'000'000);
  for (const std::vector<const char*>& flags :
       {std::vector<const char*>{"--params", "7B", "--lora-rank", "4"},
        {"--model", "gpt-x", "--lora-rank", "0"},
        {"--model", "gpt-x", "--lora-targets", "q_proj"},
        {"--model", "gpt-x", "--lora-rank", "4", "--nodes", "2"}}) {
    const Result refused = Estimate(flags, sizer);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("--lora-rank"));
  }
}

TEST(Estimate, TilesOfTheVocabularyAreSaid) {
  const ModelSizer sizer = [](const std::string& model, const AdapterWish&) -> absl::StatusOr<ModelSize> {
    return ModelSize{
        .params = 1'000'000, .largest_layer_params = 1000, .vocabulary_tiles = model == "x" ? 5 : 1};
  };
  const auto told = [&](const char* model) {
    const Result result = Estimate({"--model", model, "--json"}, sizer);
    return nlohmann::json::parse(result.out)["input"]["vocabulary_tiles"];
  };
  EXPECT_EQ(told("x"), 5);
  EXPECT_EQ(told("y"), 1);
  EXPECT_THAT(Estimate({"--model", "x"}, sizer).out, HasSubstr("the vocabulary in 5 tiles"));
  EXPECT_THAT(Estimate({"--model", "y"}, sizer).out, testing::Not(HasSubstr("the vocabulary in")));
}

TEST(Estimate, GptSizesAreThePresets) {
  EXPECT_EQ(GptSize(24, 1024, 1024, 256).params, 303'622'144);  // "303 M with bytes"
  EXPECT_EQ(GptSize(4, 64, 128, 256).params, 4 * 49'984 + 384 * 64 + 128);
  EXPECT_EQ(GptSize(1, 64, 1000, 50257).largest_layer_params, 51257 * 64);  // the embedding
}

TEST(Estimate, Help) {
  const Result result = Estimate({"--help"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("--params"));
  EXPECT_EQ(result.out.find("--model"), std::string::npos);
}

TEST(Estimate, WrongFlags) {
  EXPECT_EQ(
      Wrong({"--parms", "7B"}),
      "penstock estimate: unknown flag --parms (did you mean \"--params\"?); see penstock estimate --help\n");
  EXPECT_EQ(
      Wrong({"--params", "7B", "--nods=2"}),
      "penstock estimate: unknown flag --nods (did you mean \"--nodes\"?); see penstock estimate --help\n");
  EXPECT_EQ(Wrong({"--params", "7B", "extra"}),
            "penstock estimate: unexpected word \"extra\"; see penstock estimate --help\n");
  EXPECT_THAT(Wrong({}), HasSubstr("give the model's size in one way"));
  EXPECT_THAT(Wrong({"--params", "7B", "--layers", "3", "--width", "4"}), HasSubstr("in one way"));
  EXPECT_THAT(Wrong({"--layers", "3"}), HasSubstr("--layers and --width go together"));
  EXPECT_THAT(Wrong({"--params", "many"}), HasSubstr("--params: \"many\" is not a count"));
  EXPECT_THAT(Wrong({"--params", "-5"}), HasSubstr("--params"));
  EXPECT_THAT(Wrong({"--params", "7B", "--largest-layer", "8B"}), HasSubstr("largest layer"));
  EXPECT_THAT(Wrong({"--params", "7B", "--gpus-per-node", "0"}), HasSubstr("GPUs per node"));
  EXPECT_THAT(Wrong({"--params", "7B", "--nodes", "two"}), HasSubstr("--nodes"));
  EXPECT_THAT(Wrong({"--params", "7B", "--dtype", "int8"}), HasSubstr("--dtype"));
  EXPECT_THAT(Wrong({"--params", "7B", "--read-bandwidth", "0"}), HasSubstr("--read-bandwidth"));
  EXPECT_THAT(Wrong({"--params", "7B", "--stage", "9"}), HasSubstr("--stage"));
  EXPECT_THAT(Wrong({"--params"}), HasSubstr("--params"));
  EXPECT_THAT(Wrong({"--params", "7B\nX"}), HasSubstr("7B?X"));
  EXPECT_THAT(Wrong({"--model", "gpt-x"}), HasSubstr("unknown flag --model"));
}

}  // namespace
}  // namespace penstock::tools::verb_estimate_test
