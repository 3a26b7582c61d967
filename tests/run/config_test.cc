#include "run/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "run/settings.h"

namespace penstock::run::config_test {

using zero::WarmupType;
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

ParsedConfig Parse(std::string_view text) {
  auto parsed = ParseConfig(text);
  EXPECT_TRUE(parsed.ok()) << text << "\n" << parsed.status();
  return parsed.ok() ? *std::move(parsed) : ParsedConfig{};
}

// The error of a configuration that must be refused, checked to be one line of the right kind.
std::string Refusal(std::string_view text) {
  const auto parsed = ParseConfig(text);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  std::string message(parsed.status().message());
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  return message;
}

constexpr std::string_view kInfinity = R"({
  // What a DeepSpeed user brings for ZeRO-Infinity.
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0, "steps_per_print": 10,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4,
                "warmup_num_steps": 100, "total_num_steps": 1e4, "warmup_type": "linear"}},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "contiguous_gradients": true, "overlap_comm": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1000000000,
    "stage3_max_reuse_distance": 1e9,
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5, "buffer_size": 1e8,
                      "max_in_cpu": 1e9, "pin_memory": true},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "pipeline_read": true,
                          "pipeline_write": true, "fast_init": false}
  },
  "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 2, "single_submit": false, "overlap_events": true},
  "activation_checkpointing": {"cpu_checkpointing": true, "partition_activations": false},
  "checkpoint": {"tag_validation": "Warn"},
  "penstock": {"host_memory": "4GiB", "device_memory": 2147483648, "durability": "checkpoint", "sync": "power",
               "versions": 2, "order": "next_forward", "tile_bytes": "16MiB", "io_threads": 2, "update_threads": 4}
})";

TEST(ParseConfig, EverythingServedArrives) {
  const ParsedConfig parsed = Parse(kInfinity);
  const Config& c = parsed.config;
  EXPECT_EQ(c.train_batch_size, 64);
  EXPECT_EQ(c.micro_batch_per_rank, 4);
  EXPECT_EQ(c.gradient_accumulation_steps, 2);
  EXPECT_EQ(ValueAt(c, "gradient_clipping"), 1.0);
  EXPECT_EQ(c.optimizer.type, OptimizerType::kAdamW);
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_EQ(c.optimizer.beta1, 0.9);
  EXPECT_EQ(c.optimizer.beta2, 0.95);
  EXPECT_EQ(c.optimizer.eps, 1e-8);
  EXPECT_EQ(c.optimizer.weight_decay, 0.1);
  EXPECT_TRUE(c.optimizer.DecoupledDecay());
  ASSERT_TRUE(c.scheduler.has_value());
  EXPECT_EQ(c.scheduler->type, SchedulerType::kWarmupDecayLr);
  EXPECT_EQ(c.scheduler->total_num_steps, 10000);
  EXPECT_EQ(c.scheduler->warmup_type, WarmupType::kLinear);
  EXPECT_EQ(c.bf16, true);
  EXPECT_FALSE(c.fp16.enabled.has_value());
  EXPECT_EQ(c.zero.stage, 3);
  EXPECT_EQ(c.zero.sub_group_size_elements, 1'000'000'000);
  EXPECT_EQ(c.zero.prefetch_bucket_size_elements, 50'000'000);
  EXPECT_EQ(c.zero.max_live_parameters_elements, 1'000'000'000);
  EXPECT_EQ(c.zero.offload_param.device, OffloadDevice::kNvme);
  EXPECT_EQ(c.zero.offload_param.nvme_path, "/local_nvme");
  EXPECT_EQ(c.zero.offload_param.buffer_count, 5);
  EXPECT_EQ(c.zero.offload_param.buffer_size_elements, 100'000'000);
  EXPECT_EQ(c.zero.offload_param.max_in_cpu_elements, 1'000'000'000);
  EXPECT_EQ(c.zero.offload_optimizer.device, OffloadDevice::kNvme);
  EXPECT_EQ(c.zero.offload_optimizer.buffer_count, 4);
  EXPECT_EQ(c.zero.offload_optimizer.pipeline_read, true);
  EXPECT_EQ(c.zero.offload_optimizer.pipeline_write, true);
  EXPECT_EQ(c.zero.max_reuse_distance_elements, 1'000'000'000);
  EXPECT_EQ(c.aio.block_size_bytes, 1 << 20);
  EXPECT_EQ(c.aio.queue_depth, 8);
  EXPECT_EQ(c.aio.intra_op_parallelism, 2);
  EXPECT_EQ(c.cpu_checkpointing, true);
  EXPECT_EQ(c.penstock.host_memory_budget_bytes, int64_t{4} << 30);
  EXPECT_EQ(c.penstock.device_memory_budget_bytes, int64_t{2} << 30);
  EXPECT_EQ(c.penstock.durability, Durability::kCheckpoint);
  EXPECT_EQ(ValueAt(c, "penstock.sync"), "power");
  EXPECT_EQ(c.penstock.versions, 2);
  EXPECT_EQ(c.penstock.order, UpdateOrder::kInNextForward);
  EXPECT_EQ(ValueAt(c, "penstock.tile_bytes"), 16 << 20);
  EXPECT_EQ(c.penstock.update_threads, 4);
  EXPECT_EQ(CombinedOffload(c.zero), OffloadDevice::kNvme);
  EXPECT_THAT(NvmePaths(c.zero), ElementsAre("/local_nvme"));
}

TEST(ParseConfig, DurabilityVersionsAndOrderMustAgree) {
  EXPECT_EQ(Parse(R"({"penstock": {"versions": 1}})").config.penstock.versions, 1);
  EXPECT_THAT(Refusal(R"({"penstock": {"versions": 4}})"), StartsWith("penstock.versions: "));
  EXPECT_THAT(Refusal(R"({"penstock": {"versions": 1, "durability": "step"}})"),
              StartsWith("penstock.versions: 1 beside penstock.durability \"step\""));
  EXPECT_THAT(Refusal(R"({"penstock": {"order": "in_backward", "durability": "checkpoint"}})"),
              StartsWith("penstock.order \"in_backward\""));
  EXPECT_THAT(Refusal(R"({"penstock": {"order": "in_backward", "versions": 1}})"),
              StartsWith("penstock.order \"in_backward\""));
}

TEST(ParseConfig, PreferringTimeIsServedWhereEveryStepIsDurable) {
  EXPECT_THAT(Parse(R"({"penstock": {"prefer": "time"}})").notes, testing::IsEmpty());
  const auto notes = Parse(R"({"penstock": {"prefer": "time", "durability": "checkpoint"}})").notes;
  EXPECT_THAT(notes, ElementsAre(StartsWith("penstock.prefer \"time\": accepted and ignored")));
}

TEST(ParseConfig, ElasticityNeedsItsTwoKeysAndNoOtherBatch) {
  const std::string good = R"("elasticity": {"enabled": true, "max_train_batch_size": 2000,
                              "micro_batch_sizes": [2, 4, 6])";
  const ElasticityConfig c =
      Parse("{" + good + R"(, "min_gpus": 2, "max_gpus": 8, "min_time": 20}})").config.elasticity;
  EXPECT_TRUE(c.on());
  EXPECT_THAT(c.micro_batch_sizes, ElementsAre(2, 4, 6));
  EXPECT_EQ(c.min_gpus, 2);
  EXPECT_THAT(Refusal("{" + good + R"(}, "train_batch_size": 8})"),
              HasSubstr("ignore_non_elastic_batch_info"));
  Parse("{" + good + R"(, "ignore_non_elastic_batch_info": true}, "train_batch_size": 8})");
  EXPECT_THAT(Refusal("{" + good + R"(, "min_gpus": 9, "max_gpus": 8}})"),
              StartsWith("elasticity.max_gpus: 8 is less than min_gpus, 9"));
  EXPECT_THAT(Refusal("{" + good + R"(, "num_gpus_per_node": 8}})"),
              StartsWith("elasticity.num_gpus_per_node: not served: "));
  EXPECT_THAT(Refusal(R"({"elasticity": {"enabled": true, "micro_batch_sizes": [2]}})"),
              StartsWith("elasticity.max_train_batch_size: missing"));
  EXPECT_THAT(Refusal(R"({"elasticity": {"enabled": true, "max_train_batch_size": 8}})"),
              StartsWith("elasticity.micro_batch_sizes: missing"));
  for (const char* wrong : {"[]", "4", "[0]", "[1.5]", "[\"a\"]"}) {
    EXPECT_THAT(Refusal(std::string(R"({"elasticity": {"enabled": true, "max_train_batch_size": 8,
                                     "micro_batch_sizes": )") +
                        wrong + "}}"),
                StartsWith("elasticity.micro_batch_sizes: must be "))
        << wrong;
  }
  EXPECT_FALSE(Parse(R"({"elasticity": {"enabled": false, "num_gpus_per_node": 8}})").config.elasticity.on());
}

TEST(ParseConfig, WhatAStepIsAskedToTellOfItself) {
  const Config c = Parse(R"({"flops_profiler": {"enabled": true, "profile_step": 3, "module_depth": -1,
                             "top_modules": 2, "detailed": false, "output_file": "f"},
                             "comms_logger": {"enabled": true}, "wall_clock_breakdown": true,
                             "penstock": {"wear_budget_tb": 1.5}})")
                       .config;
  EXPECT_TRUE(c.flops_profiler.on());
  EXPECT_EQ(c.flops_profiler.profile_step, 3);
  EXPECT_EQ(c.flops_profiler.module_depth, -1);
  EXPECT_EQ(c.flops_profiler.top_modules, 2);
  EXPECT_EQ(c.flops_profiler.detailed, false);
  EXPECT_EQ(c.flops_profiler.output_file, "f");
  EXPECT_EQ(c.comms_logger, true);
  EXPECT_EQ(c.wall_clock_breakdown, true);
  EXPECT_EQ(c.penstock.wear_budget_tb, 1.5);
  EXPECT_THAT(Refusal(R"({"penstock": {"wear_budget_tb": 0}})"), StartsWith("penstock.wear_budget_tb: "));
  EXPECT_THAT(Parse(R"({"autotuning": {"enabled": true}})").notes,
              ElementsAre(HasSubstr("penstock plan with the same flags shows what and why")));
  EXPECT_THAT(Refusal(R"({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}})"),
              HasSubstr("which changes the result"));
}

TEST(ParseConfig, WhatEndsARunIsNamedBefore) {
  const PenstockConfig c =
      Parse(R"({"penstock": {"watchdog_seconds": 0.5, "watchdog_abort_seconds": 30}})").config.penstock;
  EXPECT_EQ(c.watchdog_seconds, 0.5);
  EXPECT_EQ(c.watchdog_abort_seconds, 30);
  EXPECT_EQ(Parse(R"({"penstock": {"watchdog_seconds": 0}})").config.penstock.watchdog_seconds, 0);
  EXPECT_THAT(Refusal(R"({"penstock": {"watchdog_seconds": 60, "watchdog_abort_seconds": 30}})"),
              StartsWith("penstock.watchdog_abort_seconds: 30 beside penstock.watchdog_seconds 60"));
  EXPECT_THAT(Refusal(R"({"penstock": {"watchdog_abort_seconds": 0}})"),
              StartsWith("penstock.watchdog_abort_seconds: "));
}

TEST(ParseConfig, KeysThatChangeNoResultAreOneNoteTogether) {
  EXPECT_THAT(
      Parse(kInfinity).notes,
      testing::Contains(
          "accepted and ignored, the results are the same without: steps_per_print, "
          "zero_optimization.contiguous_gradients, zero_optimization.overlap_comm, "
          "zero_optimization.offload_param.pin_memory, zero_optimization.offload_optimizer.fast_init, "
          "aio.single_submit, aio.overlap_events, activation_checkpointing.partition_activations, "
          "checkpoint.tag_validation"));
  EXPECT_THAT(
      Parse(R"({"steps_per_print": 1, "prescale_gradients": true, "dump_state": false})").notes,
      ElementsAre(StartsWith("prescale_gradients: accepted and ignored: "),
                  "accepted and ignored, the results are the same without: steps_per_print, dump_state"));
}

// A config that went over to DeepSpeed comes back as it is.
TEST(ParseConfig, WhatIsSaidOfDeepSpeedsCheckpointsIsAnsweredInALine) {
  EXPECT_THAT(
      Parse(R"({"checkpoint": {"load_universal": true}})").notes,
      ElementsAre(AllOf(StartsWith("checkpoint.load_universal: accepted and ignored: "),
                        HasSubstr("penstock import-checkpoint"), HasSubstr("engine.load_checkpoint"))));
  EXPECT_TRUE(Parse(R"({"checkpoint": {"load_universal": false}})").notes.empty());
  EXPECT_THAT(Refusal(R"({"checkpoint": {"load_universal": 1}})"),
              StartsWith("checkpoint.load_universal: must be true or false"));
  EXPECT_THAT(
      Parse(R"({"checkpoint": {"writer": {"type": "FAST", "decoupled": true, "io_buffer_size": 1e6}}})")
          .notes,
      ElementsAre(StartsWith("checkpoint.writer: accepted and ignored: ")));
  EXPECT_EQ(Refusal(R"({"checkpoint": {"writer": {"decopled": true}}})"),
            "checkpoint.writer.decopled: no such key (did you mean \"decoupled\"?)");
  EXPECT_THAT(Refusal(R"({"checkpoint": {"writer": {"type": "quick"}}})"),
              StartsWith("checkpoint.writer.type: must be one of mock, python, fast"));
  EXPECT_THAT(Refusal(R"({"checkpoint": {"writer": true}})"),
              StartsWith("checkpoint.writer: must be an obj"));
  EXPECT_EQ(Refusal(R"({"checkpoint": {"parallel_write": {"pipline_stage": true}}})"),
            "checkpoint.parallel_write.pipline_stage: no such key (did you mean \"pipeline_stage\"?)");
}

TEST(ParseConfig, SuperOffloadIsAnsweredInALine) {
  const auto with = [](const std::string& value) {
    return absl::StrCat(R"({"zero_optimization": {"offload_optimizer": {"super_offload": )", value, "}}}");
  };
  EXPECT_THAT(
      Parse(with("true")).notes,
      ElementsAre(StartsWith("zero_optimization.offload_optimizer.super_offload: accepted and ignored: ")));
  EXPECT_TRUE(Parse(with("false")).notes.empty());
  EXPECT_THAT(Refusal(with("{}")),
              StartsWith("zero_optimization.offload_optimizer.super_offload: must be true or false"));
}

TEST(ParseConfig, AnEmptyObjectLeavesEverythingToThePlanner) {
  const ParsedConfig parsed = Parse("{}");
  EXPECT_FALSE(parsed.config.train_batch_size.has_value());
  EXPECT_FALSE(parsed.config.scheduler.has_value());
  EXPECT_FALSE(parsed.config.zero.stage.has_value());
  EXPECT_EQ(CombinedOffload(parsed.config.zero), std::nullopt);
  EXPECT_TRUE(parsed.notes.empty());
}

TEST(ParseConfig, AutoAndNullAreNotGiven) {
  const Config c =
      Parse(R"({"train_batch_size": "auto", "gradient_clipping": null, "bf16": {"enabled": "auto"},
                             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
                             "scheduler": null, "zero_optimization": {"offload_param": {"device": "auto"}},
                             "aio": {"thread_count": null, "num_threads": 3}, "penstock": {"host_memory": "auto"}})")
          .config;
  EXPECT_TRUE(ValueAt(c, "gradient_clipping").is_null());
  EXPECT_FALSE(c.train_batch_size || c.bf16 || c.optimizer.lr || c.optimizer.beta1 || c.scheduler ||
               c.zero.offload_param.device || c.penstock.host_memory_budget_bytes);
  EXPECT_EQ(c.aio.intra_op_parallelism, 3);
  EXPECT_FALSE(c.penstock.prefer.has_value());
  EXPECT_EQ(Parse(R"({"penstock": {"prefer": "time"}})").config.penstock.prefer, Prefer::kTime);
  EXPECT_EQ(Parse(R"({"penstock": {"prefer": "wear"}})").config.penstock.prefer, Prefer::kWear);
  EXPECT_THAT(Refusal(R"({"penstock": {"prefer": "speed"}})"), StartsWith("penstock.prefer: "));
  // For the order of updates "auto" is a word of its own.
  EXPECT_EQ(Parse(R"({"penstock": {"order": "auto"}})").config.penstock.order, UpdateOrder::kAuto);
}

TEST(ParseConfig, ThreeSpellingsOfTheThreads) {
  for (const char* name : {"thread_count", "num_threads", "intra_op_parallelism"}) {
    const Config c = Parse(absl::StrCat(R"({"aio": {")", name, R"(": 4}})")).config;
    EXPECT_EQ(c.aio.intra_op_parallelism, 4) << name;
  }
  EXPECT_EQ(Refusal(R"({"aio": {"thread_count": 4, "num_threads": 4}})"),
            "aio.num_threads: given beside aio.thread_count, another spelling of the same key; keep one");
}

TEST(ParseConfig, BothSpellingsOfStage3Keys) {
  EXPECT_EQ(Parse(R"({"zero_optimization": {"prefetch_bucket_size": 7}})")
                .config.zero.prefetch_bucket_size_elements,
            7);
  EXPECT_THAT(
      Refusal(R"({"zero_optimization": {"max_live_parameters": 7, "stage3_max_live_parameters": 7}})"),
      HasSubstr("another spelling"));
}

TEST(ParseConfig, OldNamesAreMappedWithANote) {
  ParsedConfig parsed = Parse(R"({"bfloat16": {"enabled": true}})");
  EXPECT_EQ(parsed.config.bf16, true);
  EXPECT_THAT(parsed.notes, ElementsAre("bfloat16: an old name of bf16"));
  EXPECT_THAT(Refusal(R"({"bfloat16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("bf16: given beside"));

  parsed = Parse(R"({"zero_optimization": {"cpu_offload": true, "cpu_offload_param": false}})");
  EXPECT_EQ(parsed.config.zero.offload_optimizer.device, OffloadDevice::kCpu);
  EXPECT_FALSE(parsed.config.zero.offload_param.device.has_value());
  EXPECT_EQ(parsed.notes.size(), 2u);
  EXPECT_THAT(
      Refusal(R"({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "nvme"}}})"),
      HasSubstr("which has replaced it"));
  parsed = Parse(R"({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": true}})");
  EXPECT_EQ(parsed.notes.size(), 2u);
}

TEST(ParseConfig, MisspeltKeysAreRefusedWithTheNearestName) {
  EXPECT_EQ(Refusal(R"({"zero_optimization": {"offload_param": {"devise": "nvme"}}})"),
            "zero_optimization.offload_param.devise: no such key (did you mean \"device\"?)");
  EXPECT_EQ(Refusal(R"({"train_batchsize": 4})"),
            "train_batchsize: no such key (did you mean \"train_batch_size\"?)");
  EXPECT_EQ(Refusal(R"({"penstock": {"host_memroy": 4}})"),
            "penstock.host_memroy: no such key (did you mean \"host_memory\"?)");
  EXPECT_EQ(Refusal(R"({"aio": {"Queue_Depth": 4}})"),
            "aio.Queue_Depth: no such key (did you mean \"queue_depth\"?)");
}

TEST(ParseConfig, MisplacedKeysAreToldTheirPlace) {
  EXPECT_THAT(Parse(R"({"offload_param": {"device": "cpu"}})").notes,
              ElementsAre("offload_param: no such key; it belongs in zero_optimization; passed over, as "
                          "DeepSpeed does"));
  EXPECT_EQ(Refusal(R"({"zero_optimization": {"train_batch_size": 1}})"),
            "zero_optimization.train_batch_size: no such key; it belongs at the top level");
  EXPECT_EQ(Refusal(R"({"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1}}})"),
            "scheduler.params.cycle_min_lr: no such key; it belongs in the scheduler.params of OneCycle");
  EXPECT_THAT(Refusal(R"({"optimizer": {"params": {"zebra": 1}, "type": "AdamW"}})"),
              StartsWith("optimizer.params.zebra"));
  EXPECT_THAT(Refusal(R"({"bf16": {"zebra": 1}})"), HasSubstr("known here: enabled, "));
}

TEST(ParseConfig, DuplicateKeysAreRefused) {
  EXPECT_EQ(Refusal(R"({"aio": {"queue_depth": 8, "block_size": 4096, "queue_depth": 16}})"),
            "aio.queue_depth: given twice in one object; keep one of them");
  EXPECT_EQ(Refusal(R"({"bf16": {}, "bf16": {}})"), "bf16: given twice in one object; keep one of them");
  Parse(
      R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})");  // the same name in two objects is fine
}

TEST(ParseConfig, WrongTypesNameWhatWasExpected) {
  EXPECT_EQ(Refusal(R"({"train_batch_size": "8"})"), "train_batch_size: must be a whole number, not \"8\"");
  EXPECT_EQ(Refusal(R"({"train_batch_size": 8.5})"),
            "train_batch_size: must be a whole number of 1 or more, not 8.5");
  EXPECT_EQ(Refusal(R"({"train_batch_size": true})"), "train_batch_size: must be a whole number, not true");
  EXPECT_EQ(Refusal(R"({"gradient_clipping": "1.0"})"), "gradient_clipping: must be a number, not \"1.0\"");
  EXPECT_EQ(Refusal(R"({"bf16": true})"), "bf16: must be an object, not true");
  EXPECT_EQ(Refusal(R"({"bf16": {"enabled": "true"}})"), "bf16.enabled: must be true or false, not \"true\"");
  EXPECT_EQ(Refusal(R"({"bf16": {"enabled": 1}})"), "bf16.enabled: must be true or false, not 1");
  EXPECT_EQ(Refusal(R"({"zero_optimization": {"offload_param": {"nvme_path": ["/a"]}}})"),
            "zero_optimization.offload_param.nvme_path: must be text, not an array");
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})"),
              HasSubstr("two numbers"));
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}})"),
              HasSubstr("below 1"));
  // What is ignored is checked all the same.
  EXPECT_EQ(Refusal(R"({"aio": {"single_submit": "false"}})"),
            "aio.single_submit: must be true or false, not \"false\"");
}

TEST(ParseConfig, RangesAreChecked) {
  EXPECT_EQ(Refusal(R"({"train_batch_size": 0})"),
            "train_batch_size: must be a whole number of 1 or more, not 0");
  EXPECT_EQ(Refusal(R"({"zero_optimization": {"stage": 4}})"),
            "zero_optimization.stage: must be a whole number from 0 to 3, not 4");
  EXPECT_EQ(Refusal(R"({"aio": {"queue_depth": 0}})"),
            "aio.queue_depth: must be a whole number from 1 to 65536, not 0");
  EXPECT_EQ(Refusal(R"({"gradient_clipping": -1})"),
            "gradient_clipping: must be a number of 0 or more, not -1");
  EXPECT_THAT(Refusal(R"({"train_batch_size": 18446744073709551615})"),
              HasSubstr("train_batch_size: must be"));
  EXPECT_THAT(Refusal(R"({"train_batch_size": 1e300})"), HasSubstr("train_batch_size: must be"));
  EXPECT_THAT(Refusal(R"({"gradient_clipping": 1e999})"), StartsWith("not JSON: "));
  EXPECT_THAT(Refusal(R"({"penstock": {"host_memory": "4 parsecs"}})"),
              StartsWith("penstock.host_memory: \"4 parsecs\""));
  EXPECT_EQ(Refusal(R"({"penstock": {"host_memory": 0}})"),
            "penstock.host_memory: must be a size such as \"4GiB\" of 1 or more, not 0");
  EXPECT_EQ(Refusal(R"({"penstock": {"host_memory": "0"}})"),
            "penstock.host_memory: must be a size such as \"4GiB\" of 1 or more, not \"0\"");
  EXPECT_THAT(Refusal(R"({"penstock": {"tile_bytes": "1KiB"}})"), StartsWith("penstock.tile_bytes: must be"));
}

TEST(ParseConfig, WordsOfAChoice) {
  EXPECT_EQ(Refusal(R"({"penstock": {"durability": "sometimes"}})"),
            "penstock.durability: must be one of step, checkpoint, not \"sometimes\"");
  EXPECT_EQ(Refusal(R"({"zero_optimization": {"offload_param": {"device": "nvm"}}})"),
            "zero_optimization.offload_param.device: must be one of none, cpu, nvme, not \"nvm\" (did you "
            "mean \"nvme\"?)");
  EXPECT_EQ(Parse(R"({"optimizer": {"type": "adamw"}})").config.optimizer.type, OptimizerType::kAdamW);
}

TEST(ParseConfig, OptimizersThatAreNotServed) {
  EXPECT_EQ(Refusal(R"({"optimizer": {"params": {"freeze_step": 1}, "type": "OneBitAdam"}})"),
            "optimizer.type: OneBitAdam is not served: it compresses what ranks exchange; gradients cross "
            "ranks unchanged; Penstock's optimizers are Adam, AdamW, Adagrad, Lion, SGD, Lamb");
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "muon"}})"), HasSubstr("needs its whole tensor at once"));
  EXPECT_THAT(Refusal(R"({"optimizer": {"params": {"lr": 1}}})"), StartsWith("optimizer.type: missing"));
  EXPECT_THAT(Refusal(R"({"scheduler": {"params": {"zebra": 1}}})"), StartsWith("scheduler.type: missing"));
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})"),
              HasSubstr("not served"));
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Adam", "params": {"bias_correction": false}}})"),
              HasSubstr("corrected"));
  Parse(
      R"({"optimizer": {"type": "Adam", "params": {"amsgrad": false, "bias_correction": true, "max_grad_norm": 0}}})");
}

TEST(ParseConfig, EveryOptimizerHasItsOwnParameters) {
  const OptimizerConfig sgd = Parse(R"({"optimizer": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9,
                                        "dampening": 0, "weight_decay": 1e-4, "nesterov": true}}})")
                                  .config.optimizer;
  EXPECT_EQ(sgd.type, OptimizerType::kSgd);
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_EQ(sgd.dampening, 0.0);
  EXPECT_EQ(sgd.nesterov, true);
  EXPECT_EQ(
      Parse(R"({"optimizer": {"type": "Adagrad", "params": {"lr_decay": 0.5}}})").config.optimizer.lr_decay,
      0.5);
  EXPECT_EQ(
      Parse(R"({"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.98]}}})").config.optimizer.beta2,
      0.98);
  const OptimizerConfig lamb = Parse(R"({"optimizer": {"type": "lamb", "params": {"lr": 0.1, "max_coeff": 5,
                                         "min_coeff": 0.1, "bias_correction": false, "corrects_rate": false}}})")
                                   .config.optimizer;
  EXPECT_EQ(lamb.type, OptimizerType::kLamb);
  EXPECT_EQ(lamb.max_coeff, 5.0);
  EXPECT_EQ(lamb.min_coeff, 0.1);
  EXPECT_EQ(lamb.bias_correction, false);
  EXPECT_EQ(lamb.corrects_rate, false);
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Lamb", "params": {"min_coeff": 20}}})"),
              StartsWith("optimizer.params.min_coeff: 20 is more than max_coeff, 10"));
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "Lamb"}, "penstock": {"optimizer_states": "8bit"}})"),
              StartsWith("penstock.optimizer_states: Lamb's are fp32 or bf16"));
  EXPECT_EQ(Refusal(R"({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}})"),
            "optimizer.params.momentum: no such key; it belongs in the optimizer.params of SGD");
  EXPECT_THAT(Refusal(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})"),
              StartsWith("optimizer.params.nesterov: needs a momentum"));
  EXPECT_EQ(Parse(R"({"penstock": {"optimizer_states": "8bit"}})").config.penstock.optimizer_states, "8bit");
  EXPECT_THAT(Refusal(R"({"penstock": {"optimizer_states": "4bit"}})"), HasSubstr("fp32, bf16, 8bit"));
}

TEST(ParseConfig, OneKeySaysTheTypeOfWeights) {
  const Config bf16 = Parse(R"({"penstock": {"dtype": "bf16"}})").config;
  EXPECT_EQ(bf16.bf16, true);
  EXPECT_EQ(bf16.fp16.enabled, false);
  const Config fp16 =
      Parse(R"({"penstock": {"dtype": "fp16"}, "fp16": {"enabled": "auto", "loss_scale": 8}})").config;
  EXPECT_EQ(fp16.bf16, false);
  EXPECT_EQ(fp16.fp16.enabled, true);
  EXPECT_EQ(fp16.fp16.loss_scale, 8);
  EXPECT_EQ(Parse(R"({"penstock": {"dtype": "bf16"}, "bf16": {"enabled": true}})").config.bf16, true);
  EXPECT_EQ(Refusal(R"({"penstock": {"dtype": "fp32"}, "bf16": {"enabled": true}})"),
            "penstock.dtype: fp32 beside bf16.enabled: true; leave one of them out");
  EXPECT_EQ(Refusal(R"({"penstock": {"dtype": "bf16"}, "fp16": {"enabled": true}})"),
            "penstock.dtype: bf16 beside fp16.enabled: true; leave one of them out");
}

TEST(ParseConfig, AdamMeansAdamWUnlessToldOtherwise) {
  EXPECT_TRUE(Parse(R"({"optimizer": {"type": "Adam"}})").config.optimizer.DecoupledDecay());
  EXPECT_FALSE(Parse(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})")
                   .config.optimizer.DecoupledDecay());
  const ParsedConfig parsed = Parse(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})");
  EXPECT_TRUE(parsed.config.optimizer.DecoupledDecay());
  EXPECT_EQ(parsed.notes.size(), 1u);
}

TEST(ParseConfig, WhatIsRefusedMayBeSwitchedOff) {
  EXPECT_EQ(Refusal(R"({"amp": {"enabled": true}})"),
            "amp: not served: Apex's mixed precision is not served; use bf16 or fp16");
  EXPECT_TRUE(
      Parse(
          R"({"amp": {"enabled": false}, "elasticity": {}, "comms_logger": {"enabled": false, "verbose": true},
                        "sequence_parallel_size": 1,
                        "zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1,
                                              "zero_quantized_weights": false}})")
          .notes.empty());
  EXPECT_THAT(Refusal(R"({"zero_optimization": {"mics_shard_size": 8}})"), HasSubstr("not over groups"));
  EXPECT_THAT(Refusal(R"({"sparse_attention": {"mode": "fixed"}})"), HasSubstr("not served"));
}

TEST(ParseConfig, KeysThatContradictEachOther) {
  EXPECT_THAT(Refusal(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"), HasSubstr("choose one"));
  Parse(R"({"fp16": {"enabled": true}, "bf16": {"enabled": false}})");
  EXPECT_THAT(Refusal(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})"),
              StartsWith("train_batch_size: 10"));
  EXPECT_THAT(Refusal(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})"),
              HasSubstr("cycle_max_lr"));
  EXPECT_THAT(
      Refusal(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 2, "cycle_max_lr": 1}}})"),
      StartsWith("scheduler.params: OneCycle: cycle_max_lr"));
  EXPECT_THAT(Refusal(R"({"fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 16}})"),
              StartsWith("fp16: smallest loss scale"));
}

TEST(ParseConfig, LowerStagesMeanThree) {
  const ParsedConfig parsed = Parse(R"({"zero_optimization": {"stage": 2}})");
  EXPECT_EQ(parsed.config.zero.stage, 2);
  ASSERT_EQ(parsed.notes.size(), 1u);
  EXPECT_THAT(parsed.notes[0], StartsWith("zero_optimization.stage: 2 is accepted"));
}

TEST(ParseConfig, LowerStagesDoNotOffloadWeights) {
  for (const char* stage : {"1", "2"}) {
    const ParsedConfig parsed =
        Parse(absl::StrCat(R"({"zero_optimization": {"stage": )", stage,
                           R"(, "offload_param": {"device": "nvme", "nvme_path": "/n"}}})"));
    EXPECT_THAT(parsed.notes, testing::Contains(StartsWith(absl::StrCat(
                                  "zero_optimization.offload_param: of no effect at stage ", stage))));
    EXPECT_EQ(CombinedOffload(parsed.config.zero), std::nullopt);
    EXPECT_TRUE(NvmePaths(parsed.config.zero).empty());
  }
  EXPECT_EQ(
      Parse(R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})").notes.size(),
      1u);
}

TEST(ParseConfig, SyntaxErrorsHaveLineAndColumn) {
  EXPECT_THAT(Refusal("{\n  \"aio\": {,}\n}"), HasSubstr("line 2, column 11"));
  EXPECT_THAT(Refusal(""), StartsWith("not JSON: "));
  EXPECT_THAT(Refusal("{\"a\xff\": 1}"), StartsWith("not JSON: "));
  EXPECT_EQ(Refusal("[1, 2]"), "a configuration is an object, not an array");
  EXPECT_EQ(Refusal("3"), "a configuration is an object, not 3");
  EXPECT_THAT(Refusal("{\"aio\": {\"x\\n\\u001b[2Jy\": 1}}"), StartsWith("aio.x??[2Jy: no such key"));
  EXPECT_THAT(Refusal("{\n\"aio\": {\n  \"queue_depth\": 8\n"), HasSubstr("line 4, column 1"));
}

TEST(ParseConfig, DepthIsBounded) {
  const std::string deep =
      absl::StrCat("{\"nebula\": ", std::string(200'000, '['), std::string(200'000, ']'), "}");
  EXPECT_THAT(Refusal(deep), HasSubstr("nested deeper than 64"));
  std::string objects = "{\"nebula\": {";
  for (int i = 0; i < 100'000; ++i) objects += "\"a\": {";
  objects += std::string(100'002, '}');
  EXPECT_THAT(Refusal(objects), HasSubstr("nested deeper than 64"));
}

TEST(ResolveBatch, DerivesWhatIsMissing) {
  const auto resolve = [](BatchRequest request, int64_t world, int64_t micro = 1) {
    const auto sizes = ResolveBatch(request, world, micro);
    EXPECT_TRUE(sizes.ok()) << sizes.status();
    return sizes.ok() ? std::array<int64_t, 3>{sizes->train_batch, sizes->micro_batch, sizes->accumulation}
                      : std::array<int64_t, 3>{};
  };
  using A = std::array<int64_t, 3>;
  EXPECT_EQ(resolve({}, 1, 8), (A{8, 8, 1}));
  EXPECT_EQ(resolve({.micro_batch = 4}, 2), (A{8, 4, 1}));
  EXPECT_EQ(resolve({.accumulation = 3}, 2, 5), (A{30, 5, 3}));
  EXPECT_EQ(resolve({.micro_batch = 4, .accumulation = 3}, 2), (A{24, 4, 3}));
  EXPECT_EQ(resolve({.train_batch = 24}, 2, 5), (A{24, 12, 1}));
  EXPECT_EQ(resolve({.train_batch = 24, .micro_batch = 4}, 2), (A{24, 4, 3}));
  EXPECT_EQ(resolve({.train_batch = 24, .accumulation = 3}, 2), (A{24, 4, 3}));
  EXPECT_EQ(resolve({.train_batch = 24, .micro_batch = 4, .accumulation = 3}, 2), (A{24, 4, 3}));
}

TEST(ResolveBatch, RefusesWhatDoesNotDivide) {
  const auto refused = [](BatchRequest request, int64_t world) {
    const auto sizes = ResolveBatch(request, world, 1);
    EXPECT_EQ(sizes.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(sizes.status().message());
  };
  EXPECT_EQ(refused({.train_batch = 10}, 4),
            "a train batch of 10 does not divide by 4 ranks; change one of them");
  EXPECT_THAT(refused({.train_batch = 10, .micro_batch = 4}, 1), HasSubstr("1 rank x a micro-batch of 4"));
  EXPECT_THAT(refused({.train_batch = 10, .accumulation = 4}, 1), HasSubstr("4 accumulation steps"));
  EXPECT_THAT(refused({.train_batch = 24, .micro_batch = 4, .accumulation = 2}, 2),
              HasSubstr("is not a micro-batch of 4"));
  refused({.micro_batch = 0}, 1);
  refused({.train_batch = -4}, 1);
  refused({}, 0);
  refused({.micro_batch = std::numeric_limits<int64_t>::max(), .accumulation = 2}, 1);
}

TEST(MakeSchedule, OneOfEachType) {
  const auto at = [](std::string_view scheduler, int64_t step) {
    const Config c = Parse(absl::StrCat(R"({"scheduler": )", std::string(scheduler), "}")).config;
    const auto schedule = MakeSchedule(*c.scheduler, 0.5, 20);
    EXPECT_TRUE(schedule.ok()) << schedule.status();
    EXPECT_EQ(schedule->name(), Name(c.scheduler->type));
    return schedule->At(step).lr;
  };
  EXPECT_DOUBLE_EQ(
      at(R"({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 10}})",
         11),
      0.2);
  EXPECT_DOUBLE_EQ(
      at(R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 8}})",
         9),
      0.9);
  // The optimizer's rate where no maximum is given.
  EXPECT_DOUBLE_EQ(at(R"({"type": "WarmupLR", "params": {"warmup_num_steps": 4}})", 100), 0.5);
  // The run's length where no total is given: with N = 4, T = 20, i = 12 half of it is left.
  EXPECT_DOUBLE_EQ(
      at(R"({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}})", 14), 0.25);
  EXPECT_DOUBLE_EQ(
      at(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "cos_min_ratio": 0}})", 13), 0.25);
}

TEST(MakeLossScaler, DeepSpeedsDefaults) {
  const auto dynamic = MakeLossScaler({});
  ASSERT_TRUE(dynamic.ok());
  EXPECT_TRUE(dynamic->dynamic());
  EXPECT_EQ(dynamic->scale(), 65536);
  EXPECT_EQ(dynamic->options().window, 1000);
  EXPECT_EQ(dynamic->options().hysteresis, 2);
  const Config c = Parse(R"({"fp16": {"enabled": true, "loss_scale": 128}})").config;
  const auto fixed = MakeLossScaler(c.fp16);
  ASSERT_TRUE(fixed.ok());
  EXPECT_FALSE(fixed->dynamic());
  EXPECT_EQ(fixed->scale(), 128);
}

TEST(NvmePaths, TheOptimizersFirstWithoutRepeats) {
  const Config c = Parse(R"({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/b"},
                                                   "offload_optimizer": {"device": "none", "nvme_path": "/a"}}})")
                       .config;
  EXPECT_THAT(NvmePaths(c.zero), ElementsAre("/a", "/b"));
  EXPECT_EQ(CombinedOffload(c.zero), OffloadDevice::kCpu);
}

TEST(LoadConfig, FilesAndWhatIsNotOne) {
  std::string name = (std::filesystem::current_path() / "config_test.XXXXXX").string();
  const std::string dir = ::mkdtemp(name.data());
  const std::string path = dir + "/c.json";
  std::ofstream(path) << R"({"train_batch_size": 3})";
  const auto parsed = LoadConfig(path);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.train_batch_size, 3);
  std::ofstream(path) << R"({"train_batch_sise": 3})";
  EXPECT_EQ(LoadConfig(path).status().message(),
            absl::StrCat("config file ", path,
                         ": train_batch_sise: no such key (did you mean \"train_batch_size\"?)"));
  ASSERT_EQ(::mkfifo((dir + "/fifo").c_str(), 0600), 0);
  for (const std::string& bad :
       {dir, dir + "/absent", dir + "/fifo", std::string("/dev/zero"), std::string()}) {
    const auto failed = LoadConfig(bad);
    EXPECT_EQ(failed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(failed.status().message()), StartsWith("config file " + bad + ": "));
  }
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace penstock::run::config_test
