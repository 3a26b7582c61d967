// Generation on a CUDA device, where there is one (`ctest -L gpu`): transformers' tokens, and the same tokens
// whatever the budgets, the place of keys and values, and who else is in a pass.
#include <gtest/gtest.h>

#include "tests/tools/generating.h"
#include "zero/compute/libtorch/cuda_device.h"

namespace penstock::generate::generate_gpu_test {
namespace {

using nlohmann::json;
using testing_support::Asked;
using testing_support::GptConfigOf;
using testing_support::kMiB;
using testing_support::LlamaConfigOf;
using testing_support::ManyPrompts;
using testing_support::Setting;
using tools::testing_support::GoldenLlamas;

class GenerateGpuTest : public testing_support::GeneratingTest {
 protected:
  void SetUp() override {
    absl::StatusOr<std::shared_ptr<zero::Device>> device = zero::OpenCudaDevice();
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *std::move(device);
    GeneratingTest::SetUp();
  }
  std::shared_ptr<zero::Device> device_;
};

TEST_F(GenerateGpuTest, GreedyTokensAreThoseOfTransformers) {
  const json golden = GoldenLlamas();
  int number = 0;
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["old"].dump());
    const std::string directory = dir_ + "/model" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, c["config"]);
    const auto greedy = c["greedy"].get<std::vector<int64_t>>();
    const Asked asked{{greedy.begin(), greedy.begin() + 4}, static_cast<int64_t>(greedy.size()) - 4};
    const auto made = Make(directory, {asked}, {.device = device_, .device_budget = 1024 * kMiB});
    ASSERT_NE(made, nullptr);
    EXPECT_EQ(Texts(made.get(), {asked}).front(), std::vector<int64_t>(greedy.begin() + 4, greedy.end()));
  }
}

// In fp32, where sums that are rounded otherwise change no token of these models.
TEST_F(GenerateGpuTest, PackedWeightsMakeTheTextsOfTheProcessor) {
  std::vector<Asked> asked = ManyPrompts();
  for (Asked& each : asked) each.tokens = std::min<int64_t>(each.tokens, 6);
  int number = 0;
  for (const auto& config : {GptConfigOf(), LlamaConfigOf()}) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/plain" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config);
    for (const int bits : {8, 4}) {
      const std::string packed = Packed(directory, bits);
      const auto host = Make(packed, asked, {.batch = 4});
      ASSERT_NE(host, nullptr);
      const auto made =
          Make(packed, asked,
               {.budget = 1024 * kMiB, .batch = 4, .device = device_, .device_budget = 2048 * kMiB});
      ASSERT_NE(made, nullptr);
      EXPECT_EQ(Texts(made.get(), asked), Texts(host.get(), asked)) << bits << " bit";
    }
  }
}

TEST_F(GenerateGpuTest, TokensDependOnNeitherBudgetNorPlaceNorBatch) {
  int number = 0;
  json wide = LlamaConfigOf();  // sums long enough to be made in parts
  wide["hidden_size"] = 2048;
  wide["intermediate_size"] = 5632;
  wide["num_attention_heads"] = 16;
  for (const auto& [config, type] : {std::pair(GptConfigOf(), swap::Dtype::kF32),
                                     {LlamaConfigOf(), swap::Dtype::kF32},
                                     {LlamaConfigOf(), swap::Dtype::kBf16},
                                     {wide, swap::Dtype::kBf16}}) {
    SCOPED_TRACE(config.dump());
    std::vector<Asked> asked = ManyPrompts();
    for (Asked& each : asked) each.tokens = std::min<int64_t>(each.tokens, 6);
    if (config == wide) asked = {asked[2], asked[7], asked[8]};  // each pass reads 300 MB
    const std::string directory = dir_ + "/same" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config, 1, type);
    const models::SamplingOptions sampling{.temperature = 0.9, .top_k = 200, .top_p = 0.95};
    Setting setting{.budget = 1024 * kMiB,
                    .batch = static_cast<int64_t>(asked.size()),
                    .cache = CachePlace::kDevice,
                    .device = device_,
                    .device_budget = 2048 * kMiB};
    auto first = Make(directory, asked, setting, sampling);
    ASSERT_NE(first, nullptr);
    const auto expected = Texts(first.get(), asked);
    EXPECT_LE(first->stats().peak_device_bytes, static_cast<int64_t>(setting.device_budget));
    first.reset();  // the device has one at a time
    for (const int64_t batch : {int64_t{1}, static_cast<int64_t>(asked.size())}) {
      for (const CachePlace place : {CachePlace::kDevice, CachePlace::kHost, CachePlace::kDrive}) {
        setting = {.budget = 1024 * kMiB,
                   .batch = batch,
                   .cache = place,
                   .device = device_,
                   .device_budget = 2048 * kMiB};
        auto large = Make(directory, asked, setting, sampling);
        ASSERT_NE(large, nullptr);
        setting.budget = large->plan().least_bytes;
        setting.device_budget = large->plan().device->least_bytes;
        large.reset();
        const auto small = Make(directory, asked, setting, sampling);
        ASSERT_NE(small, nullptr);
        EXPECT_EQ(Texts(small.get(), asked), expected)
            << "batch " << batch << ", place " << static_cast<int>(place);
        const GenerationStats stats = small->stats();
        EXPECT_LE(stats.peak_device_bytes, static_cast<int64_t>(setting.device_budget));
        EXPECT_LE(stats.peak_tensor_bytes, static_cast<int64_t>(small->plan().tensor_bytes));
      }
    }
  }
}

}  // namespace
}  // namespace penstock::generate::generate_gpu_test
