// Generation on a device with memory of its own, by a device on the processor (zero/compute/test_device.h):
// the same texts whatever the budgets, and wherever keys and values live. And the products that LibTorch
// makes on a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <random>

#include "generate/memory_plan.h"
#include "generate/tensor_product.h"
#include "kernels/float16.h"
#include "kernels/weight_code.h"
#include "tests/tools/generating.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/compute/test_device.h"

namespace penstock::generate::generate_device_test {
namespace {

using kernels::DType;
using testing::HasSubstr;
using testing_support::Asked;
using testing_support::GptConfigOf;
using testing_support::kMiB;
using testing_support::LlamaConfigOf;
using testing_support::ManyPrompts;
using testing_support::Setting;

// A matrix as it is stored, and its values.
struct Stored {
  StoredMatrix matrix;
  std::vector<std::byte> bytes;
  std::vector<float> values;  // [rows, columns]
};

Stored Plain(int64_t rows, int64_t columns, DType type, bool turned, std::mt19937_64& random) {
  Stored stored{{.rows = rows, .columns = columns, .type = type, .turned = turned}, {}, {}};
  std::vector<float> values(static_cast<size_t>(rows * columns));
  // Halves of small numbers: the same in every type.
  for (float& value : values) value = static_cast<float>(static_cast<int64_t>(random() % 255) - 127) / 2;
  const torch::Tensor all = torch::from_blob(values.data(), {rows, columns});
  const torch::Tensor as_stored = (turned ? all.t() : all).contiguous().to(zero::TorchDtype(type));
  const auto* data = static_cast<const std::byte*>(as_stored.data_ptr());
  stored.bytes.assign(data, data + as_stored.nbytes());
  stored.values = std::move(values);
  return stored;
}

Stored Coded(int64_t rows, int64_t columns, const kernels::WeightCode& code, std::mt19937_64& random) {
  Stored stored{{.rows = rows, .columns = columns, .code = code}, {}, {}};
  const auto width = static_cast<size_t>(columns);
  std::normal_distribution<float> normal;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> row(width), decoded(width);
    for (float& value : row) value = normal(random);
    std::vector<uint8_t> coded(code.row_bytes(width));
    EXPECT_TRUE(kernels::EncodeWeights(code, row.data(), width, coded.data()));
    kernels::DecodeWeights(code, coded.data(), width, DType::kFp32, decoded.data());
    const auto* bytes = reinterpret_cast<const std::byte*>(coded.data());
    stored.bytes.insert(stored.bytes.end(), bytes, bytes + coded.size());
    stored.values.insert(stored.values.end(), decoded.begin(), decoded.end());
  }
  return stored;
}

// Random numbers with scales in blocks, as the host decodes them.
Stored Scaled(int64_t rows, int64_t columns, models::ScaledMatrix matrix, DType type,
              std::mt19937_64& random) {
  Stored stored{{.rows = rows, .columns = columns, .type = type}, {}, {}};
  stored.matrix.scaled = std::make_shared<const models::ScaledMatrix>(std::move(matrix));
  const models::ScaledMatrix& scaled = *stored.matrix.scaled;
  for (size_t i = 0; i < static_cast<size_t>(rows) * scaled.row_bytes(); ++i) {
    auto number = static_cast<uint8_t>(random());
    if (scaled.code() == models::ScaledCode::kFp8 && (number & 127) == 127) number = 0;  // no number
    stored.bytes.push_back(static_cast<std::byte>(number));
  }
  stored.values.resize(static_cast<size_t>(rows * columns));
  for (int64_t row = 0; row < rows; ++row) {
    scaled.Decode(row, stored.bytes.data() + static_cast<size_t>(row) * scaled.row_bytes(), DType::kFp32,
                  stored.values.data() + row * columns);
  }
  return stored;
}

// Rows that pick a column each: the product has the weights themselves, to the bit.
void ExpectPicksTheWeights(const Stored& stored, DType type, std::mt19937_64& random) {
  const int64_t columns = stored.matrix.columns, rows = stored.matrix.rows;
  const ProductRows shape = {.single = 2 * kDeviceRows,
                             .chunks = {{2 * kDeviceRows, 5}, {2 * kDeviceRows + 6, 70}}};
  const int64_t all = 4 * kDeviceRows;
  const torch::Dtype dtype = zero::TorchDtype(type);
  torch::Tensor x = torch::zeros({all, columns}, dtype);
  std::vector<int64_t> picked;
  for (int64_t row = 0; row < all; ++row) {
    picked.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(columns)));
    x[row][picked.back()] = 1;
  }
  TensorProduct product(x, shape, stored.matrix, zero::HostDevice().get());
  const models::ScaledMatrix* const scaled = stored.matrix.scaled.get();
  const bool whole_rows = stored.matrix.code.has_value() || scaled != nullptr;
  const size_t row_bytes = scaled != nullptr ? scaled->row_bytes()
                           : whole_rows      ? stored.matrix.code->row_bytes(static_cast<size_t>(columns))
                                             : 0;
  for (int64_t done = 0; done < rows * columns;) {
    int64_t elements = rows * columns - done;
    if (!stored.matrix.turned) elements = std::min(elements, 1 + static_cast<int64_t>(random() % 700));
    if (whole_rows) elements = std::max(columns, elements / columns * columns);
    const uint64_t at = whole_rows
                            ? static_cast<uint64_t>(done / columns) * row_bytes
                            : static_cast<uint64_t>(done) * kernels::BytesPerElement(stored.matrix.type);
    product.Add(stored.bytes.data() + at, done, elements);
    done += elements;
  }
  const torch::Tensor y = product.Result();
  ASSERT_EQ(y.sizes(), torch::IntArrayRef({all, rows}));
  const torch::Tensor weights =
      torch::from_blob(const_cast<float*>(stored.values.data()), {rows, columns}).to(dtype);
  const auto expect = [&](int64_t row) {
    EXPECT_TRUE(torch::equal(y[row], weights.select(1, picked[static_cast<size_t>(row)]))) << "row " << row;
  };
  for (int64_t row = 0; row < shape.single; ++row) expect(row);
  for (const auto& [first, count] : shape.chunks) {
    for (int64_t row = first; row < first + count; ++row) expect(row);
  }
  EXPECT_EQ(y[2 * kDeviceRows + 5].abs().sum().item<float>(), 0) << "a row that is nobody's is a number";
}

TEST(TensorProductTest, HasTheWeightsOfEveryKindHoweverTheyAreCut) {
  std::mt19937_64 random(17);
  for (const DType type : {DType::kFp32, DType::kBf16}) {
    for (const DType as_stored : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const bool turned : {false, true}) {
        SCOPED_TRACE(testing::Message() << "stored " << static_cast<int>(as_stored) << " turned " << turned);
        ExpectPicksTheWeights(Plain(37, 96, as_stored, turned, random), type, random);
      }
    }
    for (const auto& [block_rows, block_columns] : {std::pair(37, 130), {1, 130}, {16, 32}, {128, 128}}) {
      std::vector<float> scales(static_cast<size_t>((36 / block_rows + 1) * (129 / block_columns + 1)));
      for (float& scale : scales) scale = 0.001f * static_cast<float>(random() % 1000);
      ExpectPicksTheWeights(
          Scaled(37, 130, models::ScaledMatrix(130, block_rows, block_columns, scales), type, random), type,
          random);
    }
    std::vector<uint8_t> exponents(37 * 3);
    for (uint8_t& exponent : exponents) exponent = static_cast<uint8_t>(110 + random() % 30);
    ExpectPicksTheWeights(Scaled(37, 96, models::ScaledMatrix(96, exponents), type, random), type, random);
    for (const int bits : {8, 4}) {
      for (const int64_t columns : {1, 31, 64, 96, 130}) {
        for (const size_t group : {32, 64, 128}) {
          SCOPED_TRACE(testing::Message()
                       << bits << " bit, " << columns << " columns in groups of " << group);
          ExpectPicksTheWeights(Coded(9, columns, {.bits = bits, .group = group}, random), type, random);
        }
      }
    }
  }
}

class GenerateOnDeviceTest : public testing_support::GeneratingTest {
 protected:
  static std::shared_ptr<zero::Device> Device(zero::TestDeviceOptions options = {}) {
    return std::make_shared<zero::TestDevice>(options);
  }
};

TEST_F(GenerateOnDeviceTest, TokensAreThoseOfTheHostForEveryBudgetAndPlace) {
  const std::vector<Asked> asked = ManyPrompts();
  int number = 0;
  for (const auto& config : {GptConfigOf(), LlamaConfigOf(), testing_support::WindowsConfigOf()}) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/same" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config);
    const models::SamplingOptions sampling{
        .repetition_penalty = 1.1, .temperature = 0.9, .top_k = 200, .top_p = 0.95};
    const auto host = Make(directory, asked, {.batch = 12, .cache = CachePlace::kHost}, sampling);
    ASSERT_NE(host, nullptr);
    const auto expected = Texts(host.get(), asked);
    const uint64_t weights = host->plan().resident_bytes;
    {
      const int64_t batch = number % 2 == 1 ? 5 : 1;
      for (const CachePlace place : {CachePlace::kDevice, CachePlace::kHost, CachePlace::kDrive}) {
        Setting setting{.batch = batch, .cache = place, .device = Device()};
        const auto large = Make(directory, asked, setting, sampling);
        ASSERT_NE(large, nullptr);
        EXPECT_EQ(large->plan().pass_bytes, 0u);
        EXPECT_EQ(large->plan().device->resident_bytes, weights) << "all of it lives there";
        EXPECT_EQ(Texts(large.get(), asked), expected);
        if (place == CachePlace::kDevice) {
          EXPECT_LT(large->stats().h2d_bytes, static_cast<int64_t>(2 * weights)) << "and is copied once";
          EXPECT_GE(large->stats().h2d_bytes, static_cast<int64_t>(weights));
        }
        const uint64_t least = large->plan().least_bytes, least_there = large->plan().device->least_bytes;
        struct Budgets {
          uint64_t host, device;
        };
        for (const auto& [on_host, there] : {Budgets{least, least_there},
                                             {least, least_there + weights / 3},
                                             {least + 2 * kMiB + weights / 3, least_there + weights / 3},
                                             {256 * kMiB, least_there}}) {
          SCOPED_TRACE(testing::Message() << "batch " << batch << ", place " << static_cast<int>(place)
                                          << ", host " << on_host << ", device " << there);
          setting.budget = on_host;
          setting.device = Device();
          setting.device_budget = there;
          const auto small = Make(directory, asked, setting, sampling);
          ASSERT_NE(small, nullptr);
          const GenerationPlan& plan = small->plan();
          EXPECT_LE(plan.total_bytes, on_host);
          EXPECT_LE(plan.device->total_bytes, there);
          EXPECT_GT(plan.device->pass_bytes, 0u);
          EXPECT_EQ(plan.pass_bytes + plan.resident_bytes + plan.device->resident_bytes, weights);
          EXPECT_EQ(Texts(small.get(), asked), expected);
          const GenerationStats stats = small->stats();
          EXPECT_LE(stats.peak_tensor_bytes,
                    static_cast<int64_t>(plan.tensor_bytes + plan.device->tensor_bytes));
          const auto each_pass = static_cast<int64_t>(weights - plan.device->resident_bytes);
          EXPECT_GE(stats.h2d_bytes, each_pass * stats.passes);
          EXPECT_EQ(stats.cache_read_bytes > 0, place == CachePlace::kDrive);
        }
      }
    }
  }
}

TEST_F(GenerateOnDeviceTest, PackedWeightsMakeTheTextsOfTheHost) {
  const std::vector<Asked> asked = ManyPrompts();
  const std::string directory = dir_ + "/plain";
  tools::testing_support::WriteModel(directory, LlamaConfigOf());
  for (const int bits : {8, 4}) {
    const std::string packed = Packed(directory, bits);
    const auto host = Make(packed, asked, {.batch = 5});
    ASSERT_NE(host, nullptr);
    const auto expected = Texts(host.get(), asked);
    Setting setting{.batch = 5, .device = Device()};
    const auto large = Make(packed, asked, setting);
    ASSERT_NE(large, nullptr);
    EXPECT_EQ(Texts(large.get(), asked), expected);
    setting.device = Device();
    setting.budget = large->plan().least_bytes;
    setting.device_budget = large->plan().device->least_bytes;
    const auto small = Make(packed, asked, setting);
    ASSERT_NE(small, nullptr);
    EXPECT_EQ(Texts(small.get(), asked), expected);
  }
}

TEST_F(GenerateOnDeviceTest, ASlowDeviceMakesTheSameTexts) {
  const std::vector<Asked> asked = ManyPrompts();
  const std::string directory = dir_ + "/slow";
  tools::testing_support::WriteModel(directory, LlamaConfigOf());
  const auto expected = Texts(Make(directory, asked, {.batch = 3}).get(), asked);
  for (const CachePlace place : {CachePlace::kDevice, CachePlace::kDrive}) {
    Setting setting{
        .batch = 3, .cache = place, .device = Device({.bytes_per_s = 1e9, .latency_seconds = 2e-4})};
    const auto large = Make(directory, asked, setting);
    ASSERT_NE(large, nullptr);
    EXPECT_LT(large->wish().device->copy_bytes_per_second, 1.1e9) << "as measured";
    setting.device = Device({.bytes_per_s = 1e9, .latency_seconds = 2e-4});
    setting.device_budget = large->plan().device->least_bytes;
    const auto slow = Make(directory, asked, setting);
    ASSERT_NE(slow, nullptr);
    EXPECT_EQ(Texts(slow.get(), asked), expected);
    EXPECT_GT(slow->stats().copy_wait_seconds, 0);
  }
}

TEST_F(GenerateOnDeviceTest, ACopyThatFailsEndsTheRunWithItsError) {
  const std::vector<Asked> asked = ManyPrompts();
  const std::string directory = dir_ + "/fails";
  tools::testing_support::WriteModel(directory, LlamaConfigOf());
  int created = 0, failed = 0;
  for (const int64_t copy : {1, 2, 4, 5, 9, 30, 100}) {
    GeneratorOptions options;
    const auto model = models::OpenModel(directory);
    ASSERT_TRUE(model.ok()) << model.status();
    const models::ModelLayout layout = (*model)->Layout();
    options.wish.budget_bytes = 64 * kMiB;
    options.wish.device = {.budget_bytes = 256 * kMiB};
    options.wish.positions = 64;
    options.wish.prompt = 8;
    options.cache_directory = dir_;
    options.device = Device({.fail_copy = copy});
    const auto open = [&](aio::Engine* engine, const WeightUses& uses) {
      return OpenSafetensors(engine, directory, layout, uses, "weights");
    };
    auto generator = Generator::Create(*model, open, std::move(options));
    absl::Status status = generator.status();
    if (generator.ok()) {
      ++created;
      bool given = false;
      GenerationCallbacks callbacks;
      callbacks.next = [&]() -> absl::StatusOr<std::optional<GenerationRequest>> {
        if (std::exchange(given, true)) return std::nullopt;
        return GenerationRequest{0, {1, 2, 3}, 20, 1};
      };
      callbacks.token = [](int64_t, int64_t) { return false; };
      callbacks.finished = [](int64_t, Finish) { return absl::OkStatus(); };
      status = (*generator)->Run(callbacks);
    }
    if (!status.ok()) ++failed;
    EXPECT_TRUE(status.ok() || status.message().find("copy") != std::string::npos) << status;
  }
  EXPECT_GE(created, 3) << "those in passes";
  EXPECT_GE(failed, 4);
}

TEST(DevicePlanTest, WhatIsTooSmallIsNamedWithTheLeastThatWorks) {
  GenerationSizes sizes;
  sizes.decoder = testing_support::ShapeOf(2, 64, 128, 300, 2, 32);
  sizes.cache = {.layers = 2, .record_bytes = 256};
  sizes.units.assign(20, kMiB);
  GenerationWish wish;
  wish.budget_bytes = uint64_t{1} << 40;
  wish.cache = CachePlace::kDevice;
  EXPECT_THAT(std::string(PlanGeneration(sizes, wish).status().message()), HasSubstr("`device cuda`"));
  wish.device = {.budget_bytes = uint64_t{1} << 40};
  const auto roomy = PlanGeneration(sizes, wish);
  ASSERT_TRUE(roomy.ok()) << roomy.status();
  wish.device->budget_bytes = roomy->device->least_bytes - 1;
  const absl::Status small = PlanGeneration(sizes, wish).status();
  EXPECT_EQ(small.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(small.message()), HasSubstr("`device_memory`"));
  EXPECT_THAT(std::string(small.message()), HasSubstr(std::to_string(roomy->device->least_bytes) + " bytes"));
  ++wish.device->budget_bytes;
  wish.budget_bytes = roomy->least_bytes;
  const auto least = PlanGeneration(sizes, wish);
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_LE(least->total_bytes, wish.budget_bytes);
  --wish.budget_bytes;
  EXPECT_THAT(std::string(PlanGeneration(sizes, wish).status().message()), HasSubstr("`host_memory`"));
  // Keys and values fit nowhere: what is said to be enough is, with the other budget as it is.
  wish.drafted = 2;
  wish.positions = 1 << 18;
  wish.budget_bytes = wish.device->budget_bytes = uint64_t{1} << 40;
  wish.cache = CachePlace::kHost;
  wish.device->budget_bytes = PlanGeneration(sizes, wish)->device->least_bytes;
  wish.cache = CachePlace::kAuto;
  const uint64_t cache = sizes.cache.host_bytes(wish.positions);
  wish.budget_bytes = roomy->least_bytes + 4 * kMiB;
  const std::string said(PlanGeneration(sizes, wish).status().message());
  ASSERT_THAT(said, HasSubstr("`host_memory`"));
  const size_t bytes = said.rfind('(') + 1;
  wish.budget_bytes = std::stoull(said.substr(bytes));
  EXPECT_GT(wish.budget_bytes, cache) << said;
  const auto enough = PlanGeneration(sizes, wish);
  ASSERT_TRUE(enough.ok()) << enough.status();
  EXPECT_EQ(enough->cache, CachePlace::kHost);
}

// Many short prompts in one pass, and rows that are multiplied in blocks.
TEST(DevicePlanTest, PromptsOfAPassTakeNoMoreRowsThanArePlanned) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    const int64_t planned = 1 + static_cast<int64_t>(random() % 600);
    int64_t room = planned, rows = 0;
    while (room > 0) {  // as Generator takes them
      const int64_t count = std::min<int64_t>(room, 1 + static_cast<int64_t>(random() % 40));
      rows = RoundUp(rows, kShareRows) + count;
      room -= RoundUp(count, kShareRows);
    }
    ASSERT_LE(RoundUp(rows, kDeviceRows), RoundUp(planned, kDeviceRows)) << planned;
  }
}

// A table that is kept in another form than it is stored in is in memory twice while it is loaded.
TEST_F(GenerateOnDeviceTest, TablesThatAreDecodedOrConvertedAreLoadedWithinTheBound) {
  auto config = LlamaConfigOf();
  config["vocab_size"] = 60000;
  const std::string directory = dir_ + "/tables";
  tools::testing_support::WriteModel(directory, config, 1, swap::Dtype::kF16);
  const std::string packed = dir_ + "/packed";
  const auto ran = ProgramTest::Run({"pack", directory, packed, "--weights", "8"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<Asked> asked = {{{1, 2, 3}, 4}, {{7}, 3}};
  for (const std::string& model : {directory, packed}) {
    const auto host = Make(model, asked, {.budget = 3000 * kMiB, .batch = 2});
    ASSERT_NE(host, nullptr);
    EXPECT_TRUE(host->plan().keeps_tables);
    const auto expected = Texts(host.get(), asked);
    const auto device = Make(model, asked, {.budget = 3000 * kMiB, .batch = 2, .device = Device()});
    ASSERT_NE(device, nullptr);
    EXPECT_TRUE(device->plan().keeps_tables);
    EXPECT_EQ(Texts(device.get(), asked), expected);
  }
}

}  // namespace
}  // namespace penstock::generate::generate_device_test
