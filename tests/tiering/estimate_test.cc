#include "tiering/advice/estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace penstock::tiering::estimate_test {
namespace {

using testing::HasSubstr;

// t5-3b on eight GPUs, as in DeepSpeed's documentation with the cold form's round numbers.
constexpr EstimateInput kT5 = {
    .params = 2'851'000'000, .largest_layer_params = 32'000'000, .gpus_per_node = 8};

TEST(EstimateZero2, DeepSpeedsTable) {
  EXPECT_EQ(FormatZero2(kT5),
            "Estimated memory needed for params, optim states and gradients for a:\n"
            "HW: Setup with 1 node, 8 GPUs per node.\n"
            "SW: Model with 2851M total params.\n"
            "  per CPU  |  per GPU |   Options\n"
            "  127.45GB |   5.31GB | offload_optimizer=cpu \n"
            "  127.45GB |  15.93GB | offload_optimizer=none\n");
}

TEST(EstimateZero3, DeepSpeedsTable) {
  EXPECT_EQ(FormatZero3(kT5),
            "Estimated memory needed for params, optim states and gradients for a:\n"
            "HW: Setup with 1 node, 8 GPUs per node.\n"
            "SW: Model with 2851M total params, 32M largest layer params.\n"
            "  per CPU  |  per GPU |   Options\n"
            "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n"
            "  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0\n"
            "   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1\n"
            "  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0\n"
            "    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1\n"
            "  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0\n");
}

TEST(EstimateZero3, T5LargeInMebibytes) {
  // The documentation's second example: t5-large on 4 GPUs, in units of 2^20 cut to whole ones.
  const EstimateInput in = {.params = 737'670'000, .largest_layer_params = 32'900'000, .gpus_per_node = 4};
  const std::vector<MemoryRow> rows = EstimateZero3(in);
  EXPECT_EQ(rows[4].gpu_bytes >> 20, 3291);  // nothing offloaded
  EXPECT_EQ(rows[0].gpu_bytes >> 20, 125);   // all offloaded: the layer alone
  EXPECT_EQ(rows[2].gpu_bytes >> 20, 477);   // optimizer offloaded
}

TEST(EstimateZero3, SeveralNodesShareTheStates) {
  EstimateInput in = kT5;
  in.nodes = 4;
  const std::vector<MemoryRow> rows = EstimateZero3(in);
  EXPECT_EQ(rows[0].cpu_bytes, static_cast<int64_t>(2851e6 * 18 / 4 * 1.5));
  EXPECT_EQ(rows[1].cpu_bytes, static_cast<int64_t>(2851e6 * 32 * 1.5));  // 4 x 8 processes > 18 / 4
  EXPECT_EQ(rows[2].gpu_bytes, 4 * 32'000'000 + 2 * 2'851'000'000LL / 32);
  in.gpus_per_node = 1;
  EXPECT_EQ(EstimateZero3(in)[1].cpu_bytes, static_cast<int64_t>(2851e6 * 4.5 * 1.5));
  EXPECT_THAT(FormatZero3(in), HasSubstr("HW: Setup with 4 nodes, 1 GPU per node.\n"));
}

TEST(EstimateZero2, FewGpusNeedSixteenBytesAParameter) {
  EstimateInput in = kT5;
  in.gpus_per_node = 2;
  EXPECT_EQ(EstimateZero2(in)[0].cpu_bytes, static_cast<int64_t>(2851e6 * 16 * 1.5));
  EXPECT_EQ(EstimateZero2(in)[0].gpu_bytes, 2 * 2'851'000'000LL);
  in.nodes = 4;  // DeepSpeed counts the processes of all nodes here
  EXPECT_EQ(EstimateZero2(in)[0].cpu_bytes, static_cast<int64_t>(2851e6 * 32 * 1.5));
}

TEST(EstimateTiers, BytesAreExact) {
  const EstimateInput in = {.params = 1'000'000'000, .largest_layer_params = 50'000'000};
  const auto bytes = [&](const Precision& precision) {
    return EstimateTiers(in, {.precision = precision})[2].bytes_per_param_per_step;
  };
  EXPECT_EQ(bytes(Precision::Bf16()), 26);
  EXPECT_EQ(bytes(Precision::Fp32()), 28);
  EXPECT_EQ(bytes(Precision::Fp16()), 30);
  EXPECT_EQ(bytes(Precision::Bf16().WithMoments(2)), 18);
  EXPECT_NEAR(bytes(Precision::Bf16().WithMoments(1)), 14.0625, 1e-6);

  const std::vector<TierRow> rows = EstimateTiers(in, {});
  ASSERT_EQ(rows.size(), 5u);
  EXPECT_EQ(rows[0].device_bytes, 14'000'000'000);
  EXPECT_EQ(rows[0].nvme_bytes, 0);
  EXPECT_EQ(rows[1].host_bytes, 14'000'000'000);
  EXPECT_EQ(rows[2].nvme_bytes, 24'000'000'000);  // two versions of 12 bytes
  EXPECT_EQ(rows[2].read_bytes_per_step, 14'000'000'000);
  EXPECT_EQ(rows[2].write_bytes_per_step, 12'000'000'000);
  EXPECT_EQ(rows[2].host_bytes, 3'200'000'000);
  EXPECT_EQ(rows[3].host_bytes, 1'200'000'000);  // no gradients wait
  EXPECT_EQ(rows[2].device_bytes, 6 * 50'000'000);
  EXPECT_EQ(rows[4].bytes_per_param_per_step, 38);  // what DeepSpeed moves
}

TEST(EstimateTiers, ABlockMayBeSmallerThanTheLargestLayer) {
  const EstimateInput in = {
      .params = 1'000'000'000, .largest_layer_params = 50'000'000, .largest_block_params = 10'000'000};
  const std::vector<TierRow> rows = EstimateTiers(in, DriveInput());
  EXPECT_EQ(rows[3].device_bytes, 6 * 10'000'000);
  EXPECT_EQ(rows[3].host_bytes, 240'000'000);
  EXPECT_EQ(rows[4].device_bytes, 4 * 50'000'000);  // DeepSpeed's
}

TEST(EstimateTiers, TimeAndEndurance) {
  const EstimateInput in = {.params = 1'000'000'000, .largest_layer_params = 50'000'000};
  DriveInput drives = {
      .drives = 2, .read_bytes_per_s = 3.5e9, .write_bytes_per_s = 3e9, .rated_bytes_written = 600e12};
  TierRow row = EstimateTiers(in, drives)[2];
  EXPECT_DOUBLE_EQ(row.io_seconds_per_step, 14.0 / 7 + 12.0 / 6);
  EXPECT_DOUBLE_EQ(row.step_seconds, 4);
  // 1200 TB at 12 GB a step are 100,000 steps of 4 s.
  EXPECT_DOUBLE_EQ(row.steps_to_rated_writes, 100'000);
  EXPECT_DOUBLE_EQ(row.days_to_rated_writes, 100'000 * 4.0 / 86400);
  drives.step_seconds = 10;
  row = EstimateTiers(in, drives)[2];
  EXPECT_DOUBLE_EQ(row.step_seconds, 10);
  EXPECT_DOUBLE_EQ(row.days_to_rated_writes, 100'000 * 10.0 / 86400);
  EXPECT_TRUE(std::isinf(EstimateTiers(in, drives)[0].days_to_rated_writes));
}

TEST(EstimateTiers, RanksShareEverythingButTheirBlocks) {
  const EstimateInput in = {.params = 1001, .largest_layer_params = 100, .gpus_per_node = 4, .nodes = 2};
  const std::vector<TierRow> rows = EstimateTiers(in, {});
  EXPECT_EQ(rows[2].nvme_bytes, 2 * 12 * 126 * 4);  // 1001 / 8 rounded up, four ranks on a node
  EXPECT_EQ(rows[2].bytes_per_param_per_step, 26);
}

TEST(CheckEstimate, NamesWhatIsWrong) {
  EXPECT_TRUE(CheckEstimate(kT5).ok());
  const auto message = [](EstimateInput in) {
    const absl::Status status = CheckEstimate(in);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EstimateInput in = kT5;
  in.params = 0;
  EXPECT_THAT(message(in), HasSubstr("params: 0"));
  in = kT5;
  in.largest_layer_params = in.params + 1;
  EXPECT_THAT(message(in), HasSubstr("largest layer"));
  in = kT5;
  in.nodes = 0;
  EXPECT_THAT(message(in), HasSubstr("nodes"));
  in = kT5;
  in.buffer_factor = std::nan("");
  EXPECT_THAT(message(in), HasSubstr("buffer factor"));
  in = {.params = 1'000'000'000'000'000, .gpus_per_node = 1'000'000, .nodes = 1'000'000};
  EXPECT_THAT(message(in), HasSubstr("62 bits"));
}

TEST(EstimateJson, CarriesEveryRow) {
  const nlohmann::json json = EstimateJson(kT5, {});
  EXPECT_EQ(json["zero2"].size(), 2u);
  EXPECT_EQ(json["zero3"].size(), 6u);
  EXPECT_EQ(json["penstock"].size(), 5u);
  EXPECT_EQ(json["zero3"][0]["cpu_bytes"], EstimateZero3(kT5)[0].cpu_bytes);
  EXPECT_TRUE(json["penstock"][0]["days_to_rated_writes"].is_null());
  EXPECT_TRUE(json["penstock"][0]["steps_to_rated_writes"].is_null());
  EXPECT_EQ(json["penstock"][2]["nvme_bytes_per_param_per_step"], 26.0);
  EXPECT_EQ(nlohmann::json::parse(json.dump()), json);
}

TEST(FormatTiers, OneLineARow) {
  const std::string text = FormatTiers(kT5, {.precision = Precision::Fp32()});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 7);
  EXPECT_THAT(text, HasSubstr("Penstock, fp32, 12.0 bytes of state a parameter, per node: 1 drive of 3.00 "
                              "GB/s read, 2.00 GB/s write, rated 600 TB"));
  EXPECT_THAT(text, HasSubstr("order=in_backward\n"));
}

}  // namespace
}  // namespace penstock::tiering::estimate_test
