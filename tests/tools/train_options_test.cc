// Flags over the config over DeepSpeed's defaults: what `penstock train` makes of a file's open keys.
#include "tools/penstock/train_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/tools/penstock_program.h"

namespace penstock::tools {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

class TrainOptionsTest : public testing_support::ProgramTest {
 protected:
  // A run of 100 steps on a new directory.
  TrainSettings Resolve(const std::string& config, TrainOptions flags = {}) {
    flags.model = "gpt-tiny";
    flags.steps = flags.steps.value_or(100);
    flags.config = dir_ + "/config.json";
    testing_support::WriteFile(*flags.config, config);
    auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings.ok() ? *std::move(settings) : TrainSettings{};
  }
  static double RateAt(const TrainSettings& settings, int64_t update) {
    return settings.engine.schedule->At(update).lr;
  }
  static kernels::AdamOptions AdamOf(const TrainSettings& settings) {
    return std::get<kernels::AdamOptions>(settings.engine.optimizer);
  }
  // The one line of what the file leaves open.
  static std::string Open(const TrainSettings& settings) {
    std::string line;
    for (const std::string& note : settings.notes) {
      if (note.find("leaves open") == std::string::npos) continue;
      EXPECT_EQ(line, "") << "one line, not two";
      line = note;
    }
    return line;
  }
};

TEST_F(TrainOptionsTest, AWarmUpOfAutoStepsFitsTheRun) {
  const std::string config = R"({"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                  "warmup_num_steps": "auto"}}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(RateAt(settings, 1), 0);
  EXPECT_LT(RateAt(settings, 10), 5e-5);
  EXPECT_EQ(RateAt(settings, 12), 5e-5);
  EXPECT_EQ(RateAt(settings, 100), 5e-5);
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.0);
  EXPECT_EQ(settings.batch, 8);
  EXPECT_EQ(settings.engine.clip, 1.0);
  EXPECT_EQ(settings.engine.dtype, torch::kFloat32);
  EXPECT_THAT(Open(settings), AllOf(HasSubstr("optimizer.params.lr \"auto\": 5e-05"),
                                    HasSubstr("warmup_num_steps \"auto\": 10 (a tenth of --steps 100"),
                                    HasSubstr("bf16.enabled: false (fp32)")));
  // Flags win, into the places that are open.
  TrainOptions flags;
  flags.lr = 0.25;
  flags.warmup = 40;
  flags.weight_decay = 0.5;
  flags.batch = 3;
  flags.clip = 0;
  flags.dtype = "fp16";
  const TrainSettings flagged = Resolve(config, flags);
  EXPECT_EQ(flagged.engine.schedule->name(), "WarmupLR");
  EXPECT_LT(RateAt(flagged, 40), 0.25);
  EXPECT_EQ(RateAt(flagged, 42), 0.25);
  EXPECT_EQ(AdamOf(flagged).weight_decay, 0.5);
  EXPECT_EQ(flagged.batch, 3);
  EXPECT_EQ(flagged.engine.clip, 0);
  EXPECT_EQ(flagged.engine.dtype, torch::kFloat16);
  EXPECT_THAT(Open(flagged), AllOf(Not(HasSubstr("params.lr")), Not(HasSubstr("warmup_num_steps")),
                                   Not(HasSubstr("weight_decay")), Not(HasSubstr("gradient_clipping")),
                                   Not(HasSubstr("bf16")), Not(HasSubstr("micro_batch"))));
}

TEST_F(TrainOptionsTest, WithoutASchedulerTheRateIsConstant) {
  const std::string config =
      R"({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.002}}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(settings.engine.schedule->name(), "Constant");
  EXPECT_EQ(RateAt(settings, 1), 0.002);
  EXPECT_EQ(RateAt(settings, 100), 0.002);
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.0);
  EXPECT_EQ(AdamOf(settings).mode, kernels::AdamMode::kAdamW);
  EXPECT_THAT(Open(settings), HasSubstr("scheduler: none, a constant rate"));
  TrainOptions flags;
  flags.lr = 0.004;
  EXPECT_EQ(RateAt(Resolve(config, flags), 50), 0.004);
  flags.warmup = 10;
  EXPECT_EQ(Resolve(config, flags).engine.schedule->name(), "WarmupThenCosine");
  EXPECT_THAT(Open(Resolve(config, flags)), Not(HasSubstr("scheduler")));
}

TEST_F(TrainOptionsTest, AnAbsentWarmUpIsDeepSpeedsThousandSteps) {
  const TrainSettings settings = Resolve(
      R"({"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})");
  EXPECT_LT(RateAt(settings, 100), 1e-3);
  EXPECT_THAT(Open(settings), AllOf(HasSubstr("warmup_num_steps: 1000 (longer than --steps 100"),
                                    HasSubstr("optimizer.params.lr: 0.001")));
}

TEST_F(TrainOptionsTest, WithoutOffloadThereIsNoneButForAStateDir) {
  const std::string config = R"({"train_batch_size": 4, "fp16": {"enabled": false}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(settings.engine.offload, zero::OffloadDevice::kNone);
  EXPECT_EQ(settings.engine.dtype, torch::kFloat32);
  EXPECT_THAT(Open(settings), HasSubstr("zero_optimization.offload_optimizer: none (--offload nvme"));
  TrainOptions flags;
  flags.state_dirs = {dir_ + "/state"};
  EXPECT_EQ(Resolve(config, flags).engine.offload, zero::OffloadDevice::kNvme);
  flags.state_dirs.clear();
  flags.offload = "cpu";
  EXPECT_EQ(Resolve(config, flags).engine.offload, zero::OffloadDevice::kCpu);
  EXPECT_THAT(Open(Resolve(config, flags)), Not(HasSubstr("offload")));
}

// Penstock's own keys say nothing of DeepSpeed's: the program's defaults hold, as without a file.
TEST_F(TrainOptionsTest, AFileOfPenstocksKeysAloneChangesNothingElse) {
  const TrainSettings settings = Resolve(R"({"penstock": {"host_memory": "64M"}})");
  EXPECT_EQ(settings.engine.offload, zero::OffloadDevice::kNvme);
  EXPECT_EQ(settings.engine.schedule->name(), "WarmupThenCosine");
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.01);
  EXPECT_EQ(Open(settings), "");
}

TEST_F(TrainOptionsTest, TheRatioOnAProcessorIsAnsweredForTheDeviceThatComputes) {
  const TrainSettings settings =
      Resolve(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ")" +
              dir_ + R"(", "ratio": 0.5}}})");
  EXPECT_THAT(settings.notes,
              Contains("zero_optimization.offload_optimizer.ratio: accepted and ignored: with "
                       "--device cpu the processor updates everything"));
}

}  // namespace
}  // namespace penstock::tools
