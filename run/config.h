// DeepSpeed's JSON configuration as typed values.
//
// Pure: text in, a Config or a one-line error out; ReadConfig and LoadConfig are the only functions here that
// touch a file. What the file does not give, or gives as "auto", is an empty optional: the planner or a flag
// chooses. What it gives is an upper bound inside the budgets. Units are DeepSpeed's: *_elements count
// parameters, not bytes.
//
// Every key that DeepSpeed knows has one of three fates (the table is run/settings.cc):
//   served   its value is in Config
//   ignored  accepted; ParsedConfig::notes has one line that says so and why
//   refused  kInvalidArgument, saying why; unless its value switches the feature off ({"enabled": false},
//   false, null)
// A key that nobody knows is refused with its full path and the nearest name that is right; at the top level,
// where programs keep keys of their own and DeepSpeed does not look, it is a note. Also refused: a key twice
// in one object, two spellings of one key, a wrong type, a value out of range, fp16 and bf16 together.
//
// What the file leaves open and decides what is computed gets DeepSpeed's value by FillDefaults.
//
// The text is read as DeepSpeed reads it (zero/config/config_json.h). Whole numbers may be written as 5e8, as
// its users do.
#ifndef PENSTOCK_RUN_CONFIG_H_
#define PENSTOCK_RUN_CONFIG_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/state_directories.h"
#include "zero/config/loss_scale.h"
#include "zero/config/lr_schedule.h"
#include "zero/config/modes.h"

namespace penstock::run {

enum class OptimizerType { kAdam, kAdamW, kAdagrad, kLion, kSgd, kLamb };
enum class SchedulerType { kLrRangeTest, kOneCycle, kWarmupLr, kWarmupDecayLr, kWarmupCosineLr };
enum class ConfigPlacement { kAuto, kCpu, kCuda, kConst };  // ColossalAI's; see tiering::Placement

using zero::Durability;
using zero::MissingGradients;
using zero::OffloadDevice;
using zero::Prefer;
using zero::SavedActivations;
using zero::UpdateOrder;

// The names that the JSON uses: "AdamW", "WarmupLR".
std::string_view Name(OptimizerType value);
std::string_view Name(SchedulerType value);

struct OptimizerConfig {
  std::optional<OptimizerType> type;
  std::optional<double> lr;
  std::optional<double> beta1;
  std::optional<double> beta2;
  std::optional<double> eps;
  std::optional<double> weight_decay;
  std::optional<bool> adam_w_mode;
  std::optional<bool> torch_adam;  // LibTorch's Adam, whose weight decay has another default
  std::optional<double> lr_decay;  // Adagrad
  std::optional<double> momentum;  // SGD, and the two below
  std::optional<double> dampening;
  std::optional<bool> nesterov;
  std::optional<double> min_coeff;  // Lamb, and the three below
  std::optional<double> max_coeff;
  std::optional<bool> bias_correction;
  std::optional<bool> corrects_rate;

  // Whether weight decay is apart from the gradient (AdamW) rather than added to it (L2):
  // DeepSpeed's rule, where "Adam" means AdamW unless adam_w_mode is false, and "AdamW" always does.
  bool DecoupledDecay() const { return type == OptimizerType::kAdamW || adam_w_mode.value_or(true); }
  bool operator==(const OptimizerConfig&) const = default;
};

// The parameters of any of the five; only those of `type` can be set.
struct SchedulerConfig {
  SchedulerType type = SchedulerType::kWarmupLr;
  // LRRangeTest
  std::optional<double> lr_range_test_min_lr;
  std::optional<int64_t> lr_range_test_step_size;
  std::optional<double> lr_range_test_step_rate;
  std::optional<bool> lr_range_test_staircase;
  // OneCycle
  std::optional<double> cycle_min_lr;
  std::optional<double> cycle_max_lr;
  std::optional<double> decay_lr_rate;
  std::optional<int64_t> cycle_first_step_size;
  std::optional<int64_t> cycle_second_step_size;
  std::optional<int64_t> cycle_first_stair_count;
  std::optional<int64_t> cycle_second_stair_count;
  std::optional<int64_t> decay_step_size;
  std::optional<bool> cycle_momentum;
  std::optional<double> cycle_min_mom;
  std::optional<double> cycle_max_mom;
  std::optional<double> decay_mom_rate;
  // WarmupLR, WarmupDecayLR, WarmupCosineLR
  std::optional<double> warmup_min_lr;
  std::optional<double> warmup_max_lr;
  std::optional<int64_t> warmup_num_steps;
  std::optional<zero::WarmupType> warmup_type;
  std::optional<int64_t> total_num_steps;
  std::optional<double> warmup_min_ratio;
  std::optional<double> cos_min_ratio;

  bool operator==(const SchedulerConfig&) const = default;
};

struct Fp16Config {
  std::optional<bool> enabled;
  std::optional<double> loss_scale;  // 0: dynamic
  std::optional<int64_t> initial_scale_power;
  std::optional<int64_t> loss_scale_window;
  std::optional<int64_t> hysteresis;
  std::optional<bool> consecutive_hysteresis;
  std::optional<double> min_loss_scale;

  bool operator==(const Fp16Config&) const = default;
};

struct OffloadParamConfig {
  std::optional<OffloadDevice> device;
  std::optional<std::string> nvme_path;
  std::optional<int64_t> buffer_count;
  std::optional<int64_t> buffer_size_elements;
  std::optional<int64_t> max_in_cpu_elements;

  bool operator==(const OffloadParamConfig&) const = default;
};

struct OffloadOptimizerConfig {
  std::optional<OffloadDevice> device;
  std::optional<std::string> nvme_path;
  std::optional<int64_t> buffer_count;  // each of sub_group_size elements of 4 bytes
  // Whether the next tile is read, and the last one written, while one is updated.
  std::optional<bool> pipeline_read;
  std::optional<bool> pipeline_write;
  std::optional<double> ratio;  // of the state that the processor updates; a device updates the rest

  bool operator==(const OffloadOptimizerConfig&) const = default;
};

struct ZeroConfig {
  std::optional<int64_t> stage;  // 0..3; 1 and 2 keep weights whole on each of several ranks
  OffloadParamConfig offload_param;
  OffloadOptimizerConfig offload_optimizer;
  std::optional<int64_t> sub_group_size_elements;        // bounds a tile
  std::optional<int64_t> prefetch_bucket_size_elements;  // bounds what is read ahead for compute
  std::optional<int64_t> max_live_parameters_elements;   // bounds what is gathered at once
  std::optional<int64_t> max_reuse_distance_elements;    // bounds between which uses weights stay
  std::optional<int64_t> param_persistence_elements;     // blocks up to this size stay ...
  std::optional<int64_t> model_persistence_elements;     // ... up to so much in all

  bool operator==(const ZeroConfig&) const = default;
};

struct AioConfig {
  std::optional<int64_t> block_size_bytes;  // bounds one request
  std::optional<int64_t> queue_depth;       // requests in flight per I/O thread
  std::optional<int64_t>
      intra_op_parallelism;  // I/O threads, as in DeepSpeed; also thread_count, num_threads

  bool operator==(const AioConfig&) const = default;
};

// csv_monitor and tensorboard: scalars of every step, in DeepSpeed's files and under its names.
struct MonitorConfig {
  std::optional<bool> enabled;
  std::optional<std::string> output_path;  // may be empty: the working directory
  std::optional<std::string> job_name;     // a directory below it

  bool on() const { return enabled.value_or(false); }
  // output_path/job_name, with DeepSpeed's defaults.
  std::string directory() const;
  bool operator==(const MonitorConfig&) const = default;
};

// Of Python alone: the arguments of wandb.init.
struct WandbConfig {
  std::optional<bool> enabled;
  std::optional<std::string> project, group, team;

  bool on() const { return enabled.value_or(false); }
  bool operator==(const WandbConfig&) const = default;
};

// What a step computes, told once: at the end of one step (tools/penstock/flops_profile.h).
struct FlopsProfilerConfig {
  std::optional<bool> enabled;
  std::optional<int64_t> profile_step;  // 1
  std::optional<int64_t> module_depth;  // 0: the model alone; else its blocks, which are the deepest there is
  std::optional<int64_t> top_modules;   // 1: blocks that take most time
  std::optional<bool> detailed;         // true: a line for each block
  std::optional<std::string> output_file;  // empty: stderr

  bool on() const { return enabled.value_or(false); }
  bool operator==(const FlopsProfilerConfig&) const = default;
};

// See run/elasticity.h.
struct ElasticityConfig {
  std::optional<bool> enabled;
  std::optional<int64_t> max_train_batch_size;
  std::vector<int64_t> micro_batch_sizes;
  std::optional<int64_t> min_gpus, max_gpus;  // 1, 10,000: ranks
  std::optional<bool> prefer_larger_batch;    // true
  std::optional<bool> ignore_non_elastic_batch_info;

  bool on() const { return enabled.value_or(false); }
  bool operator==(const ElasticityConfig&) const = default;
};

// "penstock": {}.
struct PenstockConfig {
  std::optional<int64_t> host_memory_budget_bytes;     // "host_memory": bytes or "4GiB"
  std::optional<int64_t> device_memory_budget_bytes;   // "device_memory"
  std::optional<std::vector<std::string>> state_dirs;  // in place of nvme_path: "DIR" or "DIR=WEIGHT" each
  std::optional<Durability> durability;
  std::optional<int64_t> versions;  // of everything on the drive: 1, 2 or 3
  std::optional<UpdateOrder> order;
  std::optional<Prefer> prefer;
  std::optional<std::string> replan;            // "auto" or "off"
  std::optional<std::string> optimizer_states;  // "fp32", "bf16" or "8bit"
  std::optional<MissingGradients> missing_gradients;
  std::optional<SavedActivations> saved_activations;  // where inputs that are kept for backward wait for it
  std::optional<int64_t> update_threads;
  std::optional<ConfigPlacement> placement;
  std::optional<int64_t> placement_const_bytes;  // of "const": what may stay; ColossalAI's default is 512 MiB
  std::optional<double> state_fraction;          // "gpu_margin_mem_ratio": of the margin, for resident state
  std::optional<double> watchdog_seconds;        // 0: off
  std::optional<double> watchdog_abort_seconds;  // not below the other
  std::optional<double> wear_budget_tb;          // terabytes that the run is to write to drives at the most
  std::optional<std::vector<std::string>> blocks;  // modules that are fetched as one; Python's
  std::optional<int64_t> forwards_per_step;        // likewise
  std::optional<std::string> dtype;                // "fp32", "bf16" or "fp16": bf16 and fp16 say it too
  std::optional<int64_t> seed;                     // of what the engine draws; Python's, as all that follow
  std::optional<std::string> device;               // "cpu", "cuda" or "cuda:1"
  std::optional<bool> progress;
  std::optional<double> rank_timeout;        // seconds
  std::optional<int64_t> logits_chunk_size;  // tokens; 0: logits are whole; Python's, as those below
  std::optional<std::vector<std::string>> chunked_modules;
  std::optional<int64_t> chunk_size;  // tokens
  std::optional<std::string> base_weights;
  std::optional<std::string> resume_ranks;  // "same" or "any"

  bool operator==(const PenstockConfig&) const = default;
};

struct Config {
  std::optional<int64_t> train_batch_size;
  std::optional<int64_t> micro_batch_per_rank;  // train_micro_batch_size_per_gpu
  std::optional<int64_t> gradient_accumulation_steps;
  OptimizerConfig optimizer;
  std::optional<SchedulerConfig> scheduler;
  Fp16Config fp16;
  std::optional<bool> bf16;
  ZeroConfig zero;
  AioConfig aio;
  std::optional<bool> cpu_checkpointing;  // of activation_checkpointing
  std::optional<bool> wall_clock_breakdown;
  std::optional<bool> comms_logger;  // "enabled"
  FlopsProfilerConfig flops_profiler;
  ElasticityConfig elasticity;
  MonitorConfig csv_monitor;
  MonitorConfig tensorboard;
  WandbConfig wandb;
  std::optional<bool> managed_gradient_accumulation;  // Python's
  PenstockConfig penstock;
  // Values of the settings that are an option of the engine and nothing else (Setting::option), by name.
  std::map<std::string, nlohmann::json, std::less<>> plain;

  bool operator==(const Config&) const = default;
};

struct ParsedConfig {
  Config config;
  // One line for each key that was accepted without effect though it could change the result, was unknown, or
  // came under an old name, in the file's order: "prescale_gradients: accepted and ignored: ..."; then one
  // line for all those that change no result together.
  std::vector<std::string> notes;
  std::set<std::string> autos;  // canonical paths of keys that are "auto"
  bool deepspeeds = true;       // false: there is nothing in the file but "penstock"
};

// kInvalidArgument, one line, for whatever is wrong with the text.
absl::StatusOr<ParsedConfig> ParseConfig(std::string_view json_text);
absl::StatusOr<ParsedConfig> ParseConfigJson(const nlohmann::ordered_json& config);

// The object in a regular file of at most 1 MiB, of whatever keys; errors begin with the path. A file that
// cannot be read is kInvalidArgument too: to the user it is a wrong word on the command line.
absl::StatusOr<nlohmann::ordered_json> ReadConfig(const std::string& path);
// The same object in a text.
absl::StatusOr<nlohmann::ordered_json> ConfigObject(std::string_view json_text);
// ReadConfig and ParseConfigJson.
absl::StatusOr<ParsedConfig> LoadConfig(const std::string& path);

// DeepSpeed's batch algebra: train = micro * accumulation * world, any missing one derived. Where it divides
// with a remainder DeepSpeed rounds and then asserts; here it is refused with the numbers.
struct BatchSizes {
  int64_t train_batch = 1;
  int64_t micro_batch = 1;
  int64_t accumulation = 1;
};
struct BatchRequest {
  std::optional<int64_t> train_batch = std::nullopt;
  std::optional<int64_t> micro_batch = std::nullopt;
  std::optional<int64_t> accumulation = std::nullopt;
};
// What is given neither directly nor by the others: micro `default_micro_batch`, accumulation 1. `world`
// >= 1.
absl::StatusOr<BatchSizes> ResolveBatch(const BatchRequest& request, int64_t world,
                                        int64_t default_micro_batch);

// Gives the keys that decide what is computed (batch, optimizer, scheduler, clipping, precision) and that the
// file leaves open a value: an absent one DeepSpeed's (0.19), one that is "auto" what Hugging Face's Trainer
// puts there with its arguments' defaults (transformers 5). What was decided elsewhere, as by flags, goes
// into `config` before. Returns what was filled, "optimizer.params.lr: 0.001", in the order of the table.
//
// Without "optimizer" there is none in DeepSpeed either, and the program's own stays; without "scheduler" the
// rate is constant, which is the caller's to do. A warm-up of "auto" steps is `auto_warmup`; the total of
// WarmupDecayLR and WarmupCosineLR is `total_steps`.
std::vector<std::string> FillDefaults(const std::set<std::string>& autos, int64_t total_steps,
                                      int64_t auto_warmup, Config* config);

// The schedule that the config asks for, with DeepSpeed's defaults. `lr`: the optimizer's rate (WarmupLR's
// warmup_max_lr where that is not given, and what WarmupCosineLR scales); `total_steps`: the run's horizon,
// used where total_num_steps is not given.
absl::StatusOr<zero::LrSchedule> MakeSchedule(const SchedulerConfig& config, double lr, int64_t total_steps);

// DeepSpeed's defaults where the keys are absent: dynamic from 2^16, window 1000, hysteresis 2, minimum 1.
absl::StatusOr<zero::LossScaler> MakeLossScaler(const Fp16Config& config);

// Where state goes by the two offload blocks together: nvme if either says so, else cpu if either says so,
// else none if either says so, else empty. At stages 1 and 2 only the optimizer's counts, as in DeepSpeed.
std::optional<OffloadDevice> CombinedOffload(const ZeroConfig& config);

// The directories that offload_param and offload_optimizer name for NVMe, without repeats: the optimizer's
// first.
std::vector<std::string> NvmePaths(const ZeroConfig& config);

// penstock.state_dirs or, without it, NvmePaths. Errors: ParseStateDirectories', after `named` where it is
// the former.
absl::StatusOr<StateDirectories> StateDirectoriesOf(const Config& config,
                                                    std::string_view named = "penstock.state_dirs");

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_CONFIG_H_
