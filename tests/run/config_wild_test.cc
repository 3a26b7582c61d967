// Configurations of the shapes that users bring, each with the answer that it gets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "run/config.h"
#include "run/settings.h"

namespace penstock::run::config_wild_test {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::StartsWith;

struct Answer {
  Config config;
  std::vector<std::string> notes, filled;
};

// As a run of 200 steps takes it.
Answer Ask(std::string_view text) {
  const auto parsed = ParseConfig(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status() << "\n" << text;
  if (!parsed.ok()) return {};
  Answer answer{parsed->config, parsed->notes, {}};
  answer.filled = FillDefaults(parsed->autos, 200, 20, &answer.config);
  return answer;
}

double RateAt(const Answer& answer, int64_t update) {
  const auto schedule =
      MakeSchedule(*answer.config.scheduler, answer.config.optimizer.lr.value_or(3e-4), 200);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return schedule.ok() ? schedule->At(update).lr : -1;
}

constexpr std::string_view kAllAuto = R"(
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
           "hysteresis": 2, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                "warmup_num_steps": "auto"}},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false,)";

void ExpectTrainersDefaults(const Answer& answer) {
  const Config& c = answer.config;
  EXPECT_EQ(c.optimizer.type, OptimizerType::kAdamW);
  EXPECT_EQ(c.optimizer.lr, 5e-5);
  EXPECT_EQ(c.optimizer.weight_decay, 0.0);
  EXPECT_EQ(ValueAt(c, "gradient_clipping"), 1.0);
  EXPECT_EQ(c.micro_batch_per_rank, 8);
  EXPECT_EQ(c.bf16, false);
  EXPECT_FALSE(c.fp16.enabled.value_or(false));
  EXPECT_EQ(RateAt(answer, 1), 0);
  EXPECT_LT(RateAt(answer, 12), 5e-5);
  EXPECT_EQ(RateAt(answer, 22), 5e-5) << "the warm-up is over";
  EXPECT_EQ(RateAt(answer, 200), 5e-5);
  EXPECT_THAT(
      answer.filled,
      IsSupersetOf({"optimizer.params.lr \"auto\": 5e-05", "optimizer.params.weight_decay \"auto\": 0",
                    ("scheduler.params.warmup_num_steps \"auto\": 20 (a tenth of `steps` 200, 100 at the "
                     "most)"),
                    "scheduler.params.warmup_max_lr \"auto\": 5e-05",
                    "train_micro_batch_size_per_gpu \"auto\": 8"}));
}

TEST(WildConfigs, HuggingFacesZero2AllAuto) {
  const Answer answer = Ask(std::string("{") + std::string(kAllAuto) + R"(
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
      "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true,
      "reduce_bucket_size": 2e8, "contiguous_gradients": true}})");
  ExpectTrainersDefaults(answer);
  EXPECT_EQ(CombinedOffload(answer.config.zero), OffloadDevice::kCpu);
  EXPECT_THAT(
      answer.notes,
      ElementsAre("zero_optimization.allgather_bucket_size: accepted and ignored: a block is gathered as one",
                  "zero_optimization.reduce_bucket_size: accepted and ignored: a block is reduced as one, in "
                  "small pieces",
                  StartsWith("accepted and ignored, the results are the same without: steps_per_print, "
                             "zero_optimization.offload_optimizer.pin_memory, "
                             "zero_optimization.allgather_partitions, "),
                  StartsWith("zero_optimization.stage: 2 is accepted")));
}

TEST(WildConfigs, HuggingFacesZero3AllAuto) {
  const Answer answer = Ask(std::string("{") + std::string(kAllAuto) + R"(
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
      "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
      "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
      "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true}})");
  ExpectTrainersDefaults(answer);
  EXPECT_EQ(CombinedOffload(answer.config.zero), OffloadDevice::kCpu);
  EXPECT_EQ(answer.notes.size(), 1u);
}

TEST(WildConfigs, HuggingFacesZero3InNumbers) {
  const Answer answer = Ask(R"({
    "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
      "sub_group_size": 1e9, "reduce_bucket_size": 1e6, "stage3_prefetch_bucket_size": 0.94e6,
      "stage3_param_persistence_threshold": 1e4},
    "steps_per_print": 2000, "wall_clock_breakdown": false})");
  EXPECT_EQ(answer.config.optimizer.beta1, 0.8);
  EXPECT_EQ(answer.config.optimizer.weight_decay, 3e-7);
  EXPECT_EQ(answer.config.bf16, true);
  EXPECT_EQ(answer.config.scheduler->warmup_num_steps, 500)
      << "what is written stands, longer than the run or not";
  EXPECT_THAT(answer.filled, ElementsAre("gradient_clipping: 1", "scheduler.params.warmup_type: log"));
}

TEST(WildConfigs, InfinityOnADrive) {
  const Answer answer = Ask(R"({
    "train_batch_size": 256, "steps_per_print": 1, "gradient_clipping": 1.0,
    "fp16": {"enabled": true, "initial_scale_power": 15},
    "zero_optimization": {"stage": 3, "contiguous_gradients": true, "overlap_comm": true,
      "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9, "reduce_bucket_size": 1e7,
      "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
                        "buffer_size": 1e8, "max_in_cpu": 1e9},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4,
                            "fast_init": false, "pipeline_read": true, "pipeline_write": true}},
    "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": false, "overlap_events": true,
            "thread_count": 2}})");
  EXPECT_EQ(CombinedOffload(answer.config.zero), OffloadDevice::kNvme);
  EXPECT_THAT(NvmePaths(answer.config.zero), ElementsAre("/local_nvme"));
  EXPECT_EQ(answer.config.fp16.enabled, true);
  EXPECT_THAT(answer.filled, ElementsAre("optimizer: the program's own, AdamW",
                                         "scheduler: none, a constant rate", "fp16.loss_scale: 0 (dynamic)",
                                         "fp16.loss_scale_window: 1000", "fp16.hysteresis: 2"));
}

TEST(WildConfigs, LlamaFactorysZero3WithOffload) {
  const Answer answer = Ask(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": true,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"}, "comms_config": {"verbose": false},
    "zero_optimization": {"stage": 3, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9,
      "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu", "pin_memory": true},
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
      "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
      "stage3_gather_16bit_weights_on_model_save": true}})");
  EXPECT_FALSE(answer.config.optimizer.type.has_value());
  EXPECT_FALSE(answer.config.scheduler.has_value());
  EXPECT_EQ(answer.config.bf16, false);
  EXPECT_THAT(answer.filled, Contains("bf16.enabled \"auto\": false (fp32)"));
  EXPECT_THAT(answer.notes, ElementsAre(HasSubstr("comms_config")));
}

TEST(WildConfigs, TrlxStage2WithOffloadParam) {
  const Answer answer = Ask(R"({
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
    "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}})");
  EXPECT_EQ(CombinedOffload(answer.config.zero), OffloadDevice::kNone);
  EXPECT_THAT(answer.notes,
              Contains(StartsWith("zero_optimization.offload_param: of no effect at stage 2, as in "
                                  "DeepSpeed")));
}

TEST(WildConfigs, LightningsLastBatchIteration) {
  const Answer answer = Ask(R"({
    "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": true,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_min_lr": 0,
                                                  "warmup_max_lr": 3e-5, "warmup_num_steps": 100}},
    "zero_optimization": {"stage": 1}})");
  EXPECT_EQ(answer.config.optimizer.weight_decay, 0.0);
  EXPECT_EQ(RateAt(answer, 150), 3e-5);
  EXPECT_THAT(answer.notes, testing::Not(Contains(HasSubstr("last_batch"))));
  EXPECT_EQ(ParseConfig(R"({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 50}}})")
                .status()
                .message(),
            "scheduler.params.last_batch_iteration: not served: the schedule begins with the first step, and "
            "`resume` continues it");
}

TEST(WildConfigs, WarmupCosine) {
  const Answer answer = Ask(R"({
    "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}})");
  EXPECT_EQ(answer.config.scheduler->total_num_steps, 200);
  EXPECT_EQ(answer.config.scheduler->cos_min_ratio, 1e-4);
  EXPECT_EQ(RateAt(answer, 1), 0);
  EXPECT_NEAR(RateAt(answer, 21), 0.01, 2e-4);
  EXPECT_NEAR(RateAt(answer, 201), 1e-6, 1e-12);
}

TEST(WildConfigs, CommOverlapForOverlapComm) {
  EXPECT_EQ(ParseConfig(R"({"zero_optimization": {"stage": 3, "comm_overlap": true}})").status().message(),
            "zero_optimization.comm_overlap: no such key (did you mean \"overlap_comm\"?)");
}

TEST(WildConfigs, CommentsAndTrailingCommas) {
  const Answer answer = Ask(R"({
    # The batch of all ranks
    "train_batch_size": 16,   // 4 x 4
    /* AdamW as in
       the paper */
    "optimizer": {
      "type": "AdamW",
      "params": {"lr": 1e-4, "betas": [0.9, 0.95,],},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},},
  })");
  EXPECT_EQ(answer.config.train_batch_size, 16);
  EXPECT_EQ(answer.config.optimizer.beta2, 0.95);
  EXPECT_EQ(CombinedOffload(answer.config.zero), OffloadDevice::kNvme);
}

// Keys of the program that the file is for stand beside DeepSpeed's, which does not look at them.
TEST(WildConfigs, KeysOfAClient) {
  const Answer answer =
      Ask(R"({"train_batch_size": 8, "model_name": "mine", "data_folder": {"train": "/x"}, "lr": 0.1})");
  EXPECT_THAT(answer.notes, ElementsAre("model_name: no such key; passed over, as DeepSpeed does",
                                        "data_folder: no such key; passed over, as DeepSpeed does",
                                        StartsWith("lr: no such key; it belongs in ")));
  EXPECT_FALSE(answer.config.optimizer.lr.has_value());
  for (const char* slip : {"train_batchsize", "optimzer", "fp_16", "gradient_cliping", "zero_optimisation"}) {
    const auto refused = ParseConfig(std::string("{\"") + slip + "\": 1}");
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << slip;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("did you mean")) << slip;
  }
}

}  // namespace
}  // namespace penstock::run::config_wild_test
