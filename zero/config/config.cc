#include "zero/config/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "zero/config/config_json.h"
#include "zero/config/config_keys.h"
#include "zero/config/elasticity.h"

namespace penstock::zero {
namespace {

constexpr uint64_t kLargestConfig = uint64_t{1} << 20;

template <typename Enum>
struct Named {
  Enum value;
  std::string_view name;
};

constexpr auto kOffloadDevices = std::to_array<Named<OffloadDevice>>(
    {{OffloadDevice::kNone, "none"}, {OffloadDevice::kCpu, "cpu"}, {OffloadDevice::kNvme, "nvme"}});
constexpr auto kOptimizerTypes = std::to_array<Named<OptimizerType>>({{OptimizerType::kAdam, "Adam"},
                                                                      {OptimizerType::kAdamW, "AdamW"},
                                                                      {OptimizerType::kAdagrad, "Adagrad"},
                                                                      {OptimizerType::kLion, "Lion"},
                                                                      {OptimizerType::kSgd, "SGD"}});
constexpr auto kSchedulerTypes =
    std::to_array<Named<SchedulerType>>({{SchedulerType::kLrRangeTest, "LRRangeTest"},
                                         {SchedulerType::kOneCycle, "OneCycle"},
                                         {SchedulerType::kWarmupLr, "WarmupLR"},
                                         {SchedulerType::kWarmupDecayLr, "WarmupDecayLR"},
                                         {SchedulerType::kWarmupCosineLr, "WarmupCosineLR"}});
constexpr auto kDurabilities =
    std::to_array<Named<Durability>>({{Durability::kStep, "step"}, {Durability::kCheckpoint, "checkpoint"}});
constexpr auto kSyncModes =
    std::to_array<Named<SyncMode>>({{SyncMode::kProcess, "process"}, {SyncMode::kPower, "power"}});
constexpr auto kUpdateOrders =
    std::to_array<Named<UpdateOrder>>({{UpdateOrder::kAuto, "auto"},
                                       {UpdateOrder::kInNextForward, "next_forward"},
                                       {UpdateOrder::kInBackward, "in_backward"}});
constexpr auto kPrefers = std::to_array<Named<Prefer>>({{Prefer::kWear, "wear"}, {Prefer::kTime, "time"}});
constexpr auto kPlacements = std::to_array<Named<ConfigPlacement>>({{ConfigPlacement::kAuto, "auto"},
                                                                    {ConfigPlacement::kCpu, "cpu"},
                                                                    {ConfigPlacement::kCuda, "cuda"},
                                                                    {ConfigPlacement::kConst, "const"}});
constexpr auto kWarmupTypes =
    std::to_array<Named<WarmupType>>({{WarmupType::kLog, "log"}, {WarmupType::kLinear, "linear"}});

template <typename Table, typename Enum>
std::string_view NameIn(const Table& table, Enum value) {
  for (const auto& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

// Reads checked values into optionals: types and ranges are the table's business and right by now.
class Filler {
 public:
  explicit Filler(const std::map<std::string, nlohmann::json>& served) : served_(served) {}

  template <typename T>
  void Get(const char* path, std::optional<T>& to) const {
    if (const auto it = served_.find(path); it != served_.end()) to = it->second.get<T>();
  }
  template <typename Table, typename Enum>
  void Get(const char* path, const Table& table, std::optional<Enum>& to) const {
    const auto it = served_.find(path);
    if (it == served_.end()) return;
    const auto& name = it->second.get_ref<const std::string&>();
    for (const auto& entry : table) {
      if (entry.name == name) to = entry.value;
    }
  }
  void GetBetas(const char* path, OptimizerConfig& to) const {
    const auto it = served_.find(path);
    if (it == served_.end()) return;
    to.beta1 = it->second[0].get<double>();
    to.beta2 = it->second[1].get<double>();
  }

 private:
  const std::map<std::string, nlohmann::json>& served_;
};

void FillScheduler(const Filler& f, std::optional<SchedulerConfig>& to) {
  std::optional<SchedulerType> type;
  f.Get("scheduler.type", kSchedulerTypes, type);
  if (!type) return;
  SchedulerConfig s;
  s.type = *type;
  f.Get("scheduler.params.lr_range_test_min_lr", s.lr_range_test_min_lr);
  f.Get("scheduler.params.lr_range_test_step_size", s.lr_range_test_step_size);
  f.Get("scheduler.params.lr_range_test_step_rate", s.lr_range_test_step_rate);
  f.Get("scheduler.params.lr_range_test_staircase", s.lr_range_test_staircase);
  f.Get("scheduler.params.cycle_min_lr", s.cycle_min_lr);
  f.Get("scheduler.params.cycle_max_lr", s.cycle_max_lr);
  f.Get("scheduler.params.decay_lr_rate", s.decay_lr_rate);
  f.Get("scheduler.params.cycle_first_step_size", s.cycle_first_step_size);
  f.Get("scheduler.params.cycle_second_step_size", s.cycle_second_step_size);
  f.Get("scheduler.params.cycle_first_stair_count", s.cycle_first_stair_count);
  f.Get("scheduler.params.cycle_second_stair_count", s.cycle_second_stair_count);
  f.Get("scheduler.params.decay_step_size", s.decay_step_size);
  f.Get("scheduler.params.cycle_momentum", s.cycle_momentum);
  f.Get("scheduler.params.cycle_min_mom", s.cycle_min_mom);
  f.Get("scheduler.params.cycle_max_mom", s.cycle_max_mom);
  f.Get("scheduler.params.decay_mom_rate", s.decay_mom_rate);
  f.Get("scheduler.params.warmup_min_lr", s.warmup_min_lr);
  f.Get("scheduler.params.warmup_max_lr", s.warmup_max_lr);
  f.Get("scheduler.params.warmup_num_steps", s.warmup_num_steps);
  f.Get("scheduler.params.warmup_type", kWarmupTypes, s.warmup_type);
  f.Get("scheduler.params.total_num_steps", s.total_num_steps);
  f.Get("scheduler.params.warmup_min_ratio", s.warmup_min_ratio);
  f.Get("scheduler.params.cos_min_ratio", s.cos_min_ratio);
  to = s;
}

void FillMonitor(const Filler& f, const std::string& section, MonitorConfig& to) {
  f.Get((section + ".enabled").c_str(), to.enabled);
  f.Get((section + ".output_path").c_str(), to.output_path);
  f.Get((section + ".job_name").c_str(), to.job_name);
}

void FillFlopsProfiler(const Filler& f, FlopsProfilerConfig& to) {
  f.Get("flops_profiler.enabled", to.enabled);
  f.Get("flops_profiler.profile_step", to.profile_step);
  f.Get("flops_profiler.module_depth", to.module_depth);
  f.Get("flops_profiler.top_modules", to.top_modules);
  f.Get("flops_profiler.detailed", to.detailed);
  f.Get("flops_profiler.output_file", to.output_file);
}

void FillElasticity(const Filler& f, ElasticityConfig& to) {
  f.Get("elasticity.enabled", to.enabled);
  f.Get("elasticity.max_train_batch_size", to.max_train_batch_size);
  std::optional<std::vector<int64_t>> micro_batches;
  f.Get("elasticity.micro_batch_sizes", micro_batches);
  to.micro_batch_sizes = micro_batches.value_or(std::vector<int64_t>());
  f.Get("elasticity.min_gpus", to.min_gpus);
  f.Get("elasticity.max_gpus", to.max_gpus);
  f.Get("elasticity.prefer_larger_batch", to.prefer_larger_batch);
  f.Get("elasticity.ignore_non_elastic_batch_info", to.ignore_non_elastic_batch_info);
}

void FillZero(const Filler& f, ZeroConfig& z) {
  f.Get("zero_optimization.stage", z.stage);
  f.Get("zero_optimization.sub_group_size", z.sub_group_size_elements);
  f.Get("zero_optimization.reduce_bucket_size", z.reduce_bucket_size_elements);
  f.Get("zero_optimization.allgather_bucket_size", z.allgather_bucket_size_elements);
  f.Get("zero_optimization.stage3_prefetch_bucket_size", z.prefetch_bucket_size_elements);
  f.Get("zero_optimization.stage3_max_live_parameters", z.max_live_parameters_elements);
  f.Get("zero_optimization.stage3_max_reuse_distance", z.max_reuse_distance_elements);
  f.Get("zero_optimization.stage3_param_persistence_threshold", z.param_persistence_elements);
  f.Get("zero_optimization.stage3_model_persistence_threshold", z.model_persistence_elements);
  f.Get("zero_optimization.offload_optimizer.pipeline_read", z.offload_optimizer.pipeline_read);
  f.Get("zero_optimization.offload_optimizer.pipeline_write", z.offload_optimizer.pipeline_write);
  f.Get("zero_optimization.offload_optimizer.ratio", z.offload_optimizer.ratio);
  f.Get("zero_optimization.offload_param.device", kOffloadDevices, z.offload_param.device);
  f.Get("zero_optimization.offload_param.nvme_path", z.offload_param.nvme_path);
  f.Get("zero_optimization.offload_param.buffer_count", z.offload_param.buffer_count);
  f.Get("zero_optimization.offload_param.buffer_size", z.offload_param.buffer_size_elements);
  f.Get("zero_optimization.offload_param.max_in_cpu", z.offload_param.max_in_cpu_elements);
  f.Get("zero_optimization.offload_optimizer.device", kOffloadDevices, z.offload_optimizer.device);
  f.Get("zero_optimization.offload_optimizer.nvme_path", z.offload_optimizer.nvme_path);
  f.Get("zero_optimization.offload_optimizer.buffer_count", z.offload_optimizer.buffer_count);
}

Config Fill(const Filler& f) {
  Config c;
  f.Get("train_batch_size", c.train_batch_size);
  f.Get("train_micro_batch_size_per_gpu", c.micro_batch_per_rank);
  f.Get("gradient_accumulation_steps", c.gradient_accumulation_steps);
  f.Get("gradient_clipping", c.gradient_clipping);

  f.Get("optimizer.type", kOptimizerTypes, c.optimizer.type);
  f.Get("optimizer.params.lr", c.optimizer.lr);
  f.GetBetas("optimizer.params.betas", c.optimizer);
  f.Get("optimizer.params.eps", c.optimizer.eps);
  f.Get("optimizer.params.weight_decay", c.optimizer.weight_decay);
  f.Get("optimizer.params.adam_w_mode", c.optimizer.adam_w_mode);
  f.Get("optimizer.params.torch_adam", c.optimizer.torch_adam);
  f.Get("optimizer.params.lr_decay", c.optimizer.lr_decay);
  f.Get("optimizer.params.momentum", c.optimizer.momentum);
  f.Get("optimizer.params.dampening", c.optimizer.dampening);
  f.Get("optimizer.params.nesterov", c.optimizer.nesterov);
  FillScheduler(f, c.scheduler);

  f.Get("fp16.enabled", c.fp16.enabled);
  f.Get("fp16.loss_scale", c.fp16.loss_scale);
  f.Get("fp16.initial_scale_power", c.fp16.initial_scale_power);
  f.Get("fp16.loss_scale_window", c.fp16.loss_scale_window);
  f.Get("fp16.hysteresis", c.fp16.hysteresis);
  f.Get("fp16.consecutive_hysteresis", c.fp16.consecutive_hysteresis);
  f.Get("fp16.min_loss_scale", c.fp16.min_loss_scale);
  f.Get("bf16.enabled", c.bf16);

  FillZero(f, c.zero);
  f.Get("aio.block_size", c.aio.block_size_bytes);
  f.Get("aio.queue_depth", c.aio.queue_depth);
  f.Get("aio.intra_op_parallelism", c.aio.intra_op_parallelism);
  f.Get("aio.use_gds", c.aio.use_gds);

  f.Get("wall_clock_breakdown", c.wall_clock_breakdown);
  f.Get("comms_logger.enabled", c.comms_logger);
  FillFlopsProfiler(f, c.flops_profiler);
  FillElasticity(f, c.elasticity);
  FillMonitor(f, "csv_monitor", c.csv_monitor);
  FillMonitor(f, "tensorboard", c.tensorboard);

  f.Get("penstock.host_memory", c.penstock.host_memory_budget_bytes);
  f.Get("penstock.device_memory", c.penstock.device_memory_budget_bytes);
  f.Get("penstock.state_dirs", c.penstock.state_dirs);
  f.Get("penstock.durability", kDurabilities, c.penstock.durability);
  f.Get("penstock.sync", kSyncModes, c.penstock.sync);
  f.Get("penstock.versions", c.penstock.versions);
  f.Get("penstock.order", kUpdateOrders, c.penstock.order);
  f.Get("penstock.prefer", kPrefers, c.penstock.prefer);
  f.Get("penstock.optimizer_states", c.penstock.optimizer_states);
  f.Get("penstock.tile_bytes", c.penstock.tile_bytes);
  f.Get("penstock.io_threads", c.penstock.io_threads);
  f.Get("penstock.update_threads", c.penstock.update_threads);
  f.Get("penstock.placement", kPlacements, c.penstock.placement);
  f.Get("penstock.placement_const_bytes", c.penstock.placement_const_bytes);
  f.Get("penstock.gpu_margin_mem_ratio", c.penstock.state_fraction);
  f.Get("penstock.wear_budget_tb", c.penstock.wear_budget_tb);
  f.Get("penstock.watchdog_seconds", c.penstock.watchdog_seconds);
  f.Get("penstock.watchdog_abort_seconds", c.penstock.watchdog_abort_seconds);
  return c;
}

// Stages 1 and 2, where DeepSpeed does not look at offload_param.
bool KeepsWeightsWhole(const ZeroConfig& zero) { return zero.stage == 1 || zero.stage == 2; }

// What no single key can be blamed for.
absl::Status CheckTogether(const Config& c, std::vector<std::string>& notes) {
  if (c.fp16.enabled.value_or(false) && c.bf16.value_or(false)) {
    return absl::InvalidArgumentError("bf16.enabled: true beside fp16.enabled: true; choose one");
  }
  if (c.fp16.enabled.value_or(false)) {
    const absl::StatusOr<LossScaler> scaler = MakeLossScaler(c.fp16);
    if (!scaler.ok()) return absl::InvalidArgumentError(absl::StrCat("fp16: ", scaler.status().message()));
  }
  if (c.train_batch_size) {
    const int64_t parts = c.micro_batch_per_rank.value_or(1);
    int64_t product = 0;
    if (__builtin_mul_overflow(parts, c.gradient_accumulation_steps.value_or(1), &product) ||
        *c.train_batch_size % product != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("train_batch_size: %d is not train_micro_batch_size_per_gpu (%d) x "
                          "gradient_accumulation_steps (%d) x a whole "
                          "number of ranks",
                          *c.train_batch_size, parts, c.gradient_accumulation_steps.value_or(1)));
    }
  }
  if (c.penstock.versions == 1 && c.penstock.durability == Durability::kStep) {
    return absl::InvalidArgumentError(
        "penstock.versions: 1 beside penstock.durability \"step\": a step cannot be durable while the next "
        "is "
        "written over it; choose durability \"checkpoint\", or 2 versions");
  }
  if (c.penstock.order == UpdateOrder::kInBackward &&
      (c.penstock.versions == 1 || c.penstock.durability == Durability::kCheckpoint)) {
    return absl::InvalidArgumentError(
        "penstock.order \"in_backward\" beside durability \"checkpoint\": an update that has to be made "
        "again "
        "starts from the version before, which is not there; leave the order to the planner");
  }
  if (c.elasticity.on()) {
    RETURN_IF_ERROR(ComputeElasticBatch(c.elasticity).status());
    const bool given = c.train_batch_size || c.micro_batch_per_rank || c.gradient_accumulation_steps;
    if (given && !c.elasticity.ignore_non_elastic_batch_info.value_or(false)) {
      return absl::InvalidArgumentError(
          "elasticity: beside a batch size of the file's own; leave train_batch_size, "
          "train_micro_batch_size_per_gpu and gradient_accumulation_steps out, or set "
          "elasticity.ignore_non_elastic_batch_info");
    }
  }
  if (c.penstock.watchdog_abort_seconds &&
      *c.penstock.watchdog_abort_seconds < c.penstock.watchdog_seconds.value_or(0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("penstock.watchdog_abort_seconds: %g beside penstock.watchdog_seconds %g: what ends "
                        "the run is named before; give a larger one",
                        *c.penstock.watchdog_abort_seconds, *c.penstock.watchdog_seconds));
  }
  if (c.penstock.prefer == Prefer::kTime &&
      (c.penstock.versions == 1 || c.penstock.durability == Durability::kCheckpoint)) {
    notes.push_back(
        "penstock.prefer \"time\": accepted and ignored: beside durability \"checkpoint\" no step reads more "
        "to be shorter");
  }
  if (c.penstock.placement_const_bytes && c.penstock.placement != ConfigPlacement::kConst) {
    notes.push_back(
        "penstock.placement_const_bytes: accepted and ignored: it is the bound of placement \"const\"");
  }
  if (c.optimizer.type == OptimizerType::kAdamW && c.optimizer.adam_w_mode == false) {
    notes.push_back(
        "optimizer.params.adam_w_mode: accepted and ignored: AdamW always decays apart from the gradient; "
        "use Adam");
  }
  if (c.optimizer.nesterov.value_or(false) &&
      (c.optimizer.momentum.value_or(0) == 0 || c.optimizer.dampening.value_or(0) != 0)) {
    return absl::InvalidArgumentError("optimizer.params.nesterov: needs a momentum above 0 and no dampening");
  }
  if (KeepsWeightsWhole(c.zero) &&
      c.zero.offload_param.device.value_or(OffloadDevice::kNone) != OffloadDevice::kNone) {
    notes.push_back(absl::StrFormat(
        "zero_optimization.offload_param: of no effect at stage %d, as in DeepSpeed: weights stay whole on "
        "every rank; it needs stage 3",
        *c.zero.stage));
  }
  if (c.zero.stage && *c.zero.stage < 3) {
    notes.push_back(
        absl::StrCat("zero_optimization.stage: ", *c.zero.stage, " is accepted",
                     *c.zero.stage == 0
                         ? " and means 3: all state is cut over the ranks; results are the same"
                         : ": over several ranks weights stay whole on each, the optimizer's states and the "
                           "gradients are cut; results are those of 3"));
  }
  if (c.scheduler) {
    // With stand-ins for what the run decides, so that only what is written here can be wrong.
    const absl::StatusOr<LrSchedule> schedule = MakeSchedule(*c.scheduler, c.optimizer.lr.value_or(1e-3), 1);
    if (!schedule.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("scheduler.params: ", schedule.status().message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view Name(OffloadDevice value) { return NameIn(kOffloadDevices, value); }
std::string_view Name(OptimizerType value) { return NameIn(kOptimizerTypes, value); }
std::string_view Name(SchedulerType value) { return NameIn(kSchedulerTypes, value); }
std::string_view Name(Durability value) { return NameIn(kDurabilities, value); }
std::string_view Name(SyncMode value) { return NameIn(kSyncModes, value); }
std::string_view Name(UpdateOrder value) { return NameIn(kUpdateOrders, value); }

std::string MonitorConfig::directory() const {
  const std::string path = output_path.value_or("");
  const std::string job = job_name.value_or("DeepSpeedJobName");
  return path.empty() ? job : (std::filesystem::path(path) / job).string();
}

absl::StatusOr<ParsedConfig> ParseConfig(std::string_view json_text) {
  ASSIGN_OR_RETURN(nlohmann::ordered_json json, ParseHjson(json_text));
  ASSIGN_OR_RETURN(CheckedKeys keys, CheckKeys(json));
  ParsedConfig parsed{.config = Fill(Filler(keys.served)),
                      .notes = std::move(keys.notes),
                      .autos = std::move(keys.autos),
                      .deepspeeds = json.size() != 1 || !json.contains("penstock")};
  RETURN_IF_ERROR(CheckTogether(parsed.config, parsed.notes));
  return parsed;
}

absl::StatusOr<ParsedConfig> LoadConfig(const std::string& path) {
  const auto named = [&path](const absl::Status& status) {
    return absl::InvalidArgumentError(
        absl::StrCat("config file ", Printable(path, 4096), ": ", status.message()));
  };
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kLargestConfig);
  if (!text.ok()) return named(text.status());
  absl::StatusOr<ParsedConfig> parsed = ParseConfig(*text);
  if (!parsed.ok()) return named(parsed.status());
  return parsed;
}

absl::StatusOr<BatchSizes> ResolveBatch(const BatchRequest& request, int64_t world,
                                        int64_t default_micro_batch) {
  const auto positive = [](std::optional<int64_t> n) { return !n || *n >= 1; };
  if (world < 1 || default_micro_batch < 1 || !positive(request.train_batch) ||
      !positive(request.micro_batch) || !positive(request.accumulation)) {
    return absl::InvalidArgumentError("batch sizes, accumulation and ranks must be 1 or more");
  }
  BatchSizes sizes;
  if (!request.train_batch) {
    sizes.micro_batch = request.micro_batch.value_or(default_micro_batch);
    sizes.accumulation = request.accumulation.value_or(1);
    int64_t rows = 0;
    if (__builtin_mul_overflow(sizes.micro_batch, sizes.accumulation, &rows) ||
        __builtin_mul_overflow(rows, world, &sizes.train_batch)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a batch of %d x %d accumulation steps x %d ranks is too large", sizes.micro_batch,
                          sizes.accumulation, world));
    }
    return sizes;
  }
  sizes.train_batch = *request.train_batch;
  const auto uneven = [&](const std::string& by) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a train batch of %d does not divide by %s; change one of them", sizes.train_batch, by));
  };
  const std::string ranks = absl::StrFormat("%d rank%s", world, world == 1 ? "" : "s");
  if (sizes.train_batch % world != 0) return uneven(ranks);
  const int64_t per_rank = sizes.train_batch / world;
  if (request.micro_batch) {
    sizes.micro_batch = *request.micro_batch;
    if (per_rank % sizes.micro_batch != 0)
      return uneven(absl::StrFormat("%s x a micro-batch of %d", ranks, sizes.micro_batch));
    sizes.accumulation = per_rank / sizes.micro_batch;
    if (request.accumulation && *request.accumulation != sizes.accumulation) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a train batch of %d is not a micro-batch of %d x %d accumulation steps x %s",
                          sizes.train_batch, sizes.micro_batch, *request.accumulation, ranks));
    }
    return sizes;
  }
  sizes.accumulation = request.accumulation.value_or(1);
  if (per_rank % sizes.accumulation != 0)
    return uneven(absl::StrFormat("%s x %d accumulation steps", ranks, sizes.accumulation));
  sizes.micro_batch = per_rank / sizes.accumulation;
  return sizes;
}

absl::StatusOr<LrSchedule> MakeSchedule(const SchedulerConfig& c, double lr, int64_t total_steps) {
  const WarmupType warmup_type = c.warmup_type.value_or(WarmupType::kLog);
  WarmupLr warmup;
  warmup.warmup_min_lr = c.warmup_min_lr.value_or(0);
  warmup.warmup_max_lr =
      c.warmup_max_lr.value_or(c.type == SchedulerType::kWarmupDecayLr ? warmup.warmup_max_lr : lr);
  warmup.warmup_num_steps = c.warmup_num_steps.value_or(1000);
  warmup.warmup_type = warmup_type;
  switch (c.type) {
    case SchedulerType::kLrRangeTest: {
      LrRangeTest s;
      s.min_lr = c.lr_range_test_min_lr.value_or(s.min_lr);
      s.step_size = c.lr_range_test_step_size.value_or(s.step_size);
      s.step_rate = c.lr_range_test_step_rate.value_or(s.step_rate);
      s.staircase = c.lr_range_test_staircase.value_or(s.staircase);
      return LrSchedule::Create(s);
    }
    case SchedulerType::kOneCycle: {
      if (!c.cycle_min_lr || !c.cycle_max_lr) {
        return absl::InvalidArgumentError("OneCycle: cycle_min_lr and cycle_max_lr must be given");
      }
      OneCycle s;
      s.cycle_min_lr = *c.cycle_min_lr;
      s.cycle_max_lr = *c.cycle_max_lr;
      s.decay_lr_rate = c.decay_lr_rate.value_or(s.decay_lr_rate);
      s.first_step_size = c.cycle_first_step_size.value_or(s.first_step_size);
      s.second_step_size = c.cycle_second_step_size;
      s.first_stair_count = c.cycle_first_stair_count.value_or(s.first_stair_count);
      s.second_stair_count = c.cycle_second_stair_count;
      s.decay_step_size = c.decay_step_size.value_or(s.decay_step_size);
      s.cycle_momentum = c.cycle_momentum.value_or(s.cycle_momentum);
      s.cycle_min_mom = c.cycle_min_mom.value_or(s.cycle_min_mom);
      s.cycle_max_mom = c.cycle_max_mom.value_or(s.cycle_max_mom);
      s.decay_mom_rate = c.decay_mom_rate.value_or(s.decay_mom_rate);
      return LrSchedule::Create(s);
    }
    case SchedulerType::kWarmupLr:
      return LrSchedule::Create(warmup);
    case SchedulerType::kWarmupDecayLr:
      return LrSchedule::Create(
          WarmupDecayLr{.warmup = warmup, .total_num_steps = c.total_num_steps.value_or(total_steps)});
    case SchedulerType::kWarmupCosineLr: {
      WarmupCosineLr s;
      s.lr = lr;
      s.total_num_steps = c.total_num_steps.value_or(total_steps);
      s.warmup_min_ratio = c.warmup_min_ratio.value_or(s.warmup_min_ratio);
      s.warmup_num_steps = c.warmup_num_steps.value_or(s.warmup_num_steps);
      s.cos_min_ratio = c.cos_min_ratio.value_or(s.cos_min_ratio);
      s.warmup_type = warmup_type;
      return LrSchedule::Create(s);
    }
  }
  return absl::InternalError("scheduler: a type without a schedule");
}

absl::StatusOr<LossScaler> MakeLossScaler(const Fp16Config& config) {
  LossScaleOptions options;
  const double fixed = config.loss_scale.value_or(0);
  options.dynamic = fixed == 0;
  options.initial_scale =
      options.dynamic ? std::ldexp(1.0, static_cast<int>(config.initial_scale_power.value_or(16))) : fixed;
  options.window = config.loss_scale_window.value_or(1000);
  options.hysteresis = config.hysteresis.value_or(2);
  options.consecutive_hysteresis = config.consecutive_hysteresis.value_or(false);
  // DeepSpeed starts below the minimum without a word when the power is small; the minimum then is the start.
  options.min_scale = config.min_loss_scale.value_or(std::min(1.0, options.initial_scale));
  return LossScaler::Create(options);
}

std::optional<OffloadDevice> CombinedOffload(const ZeroConfig& config) {
  const std::optional<OffloadDevice> a =
      KeepsWeightsWhole(config) ? std::nullopt : config.offload_param.device;
  const std::optional<OffloadDevice> b = config.offload_optimizer.device;
  if (!a || !b) return a ? a : b;
  return std::max(*a, *b);  // in the order none, cpu, nvme
}

std::vector<std::string> NvmePaths(const ZeroConfig& config) {
  std::vector<std::string> paths;
  if (config.offload_optimizer.nvme_path) paths.push_back(*config.offload_optimizer.nvme_path);
  const std::optional<std::string>& other = config.offload_param.nvme_path;
  if (other && !KeepsWeightsWhole(config) && (paths.empty() || paths.front() != *other))
    paths.push_back(*other);
  return paths;
}

absl::StatusOr<StateDirectories> StateDirectoriesOf(const Config& config) {
  absl::StatusOr<StateDirectories> parsed =
      ParseStateDirectories(config.penstock.state_dirs.value_or(NvmePaths(config.zero)));
  if (parsed.ok() || !config.penstock.state_dirs.has_value()) return parsed;
  return absl::Status(parsed.status().code(),
                      absl::StrCat("penstock.state_dirs: ", parsed.status().message()));
}

}  // namespace penstock::zero
