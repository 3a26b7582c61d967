#include "run/config.h"

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
#include "run/config_names.h"
#include "run/elasticity.h"
#include "run/settings.h"
#include "zero/config/config_json.h"

namespace penstock::run {

using zero::LossScaleOptions;
using zero::LossScaler;
using zero::LrRangeTest;
using zero::LrSchedule;
using zero::NameIn;
using zero::OneCycle;
using zero::ParseHjson;
using zero::Printable;
using zero::WarmupCosineLr;
using zero::WarmupDecayLr;
using zero::WarmupLr;
using zero::WarmupType;
namespace {

constexpr uint64_t kLargestConfig = uint64_t{1} << 20;

// Stages 1 and 2, where DeepSpeed does not look at offload_param.
bool KeepsWeightsWhole(const ZeroConfig& zero) { return zero.stage == 1 || zero.stage == 2; }

// penstock.dtype is what bf16.enabled and fp16.enabled say, in one key.
absl::Status TakeDtype(Config* config) {
  if (!config->penstock.dtype.has_value()) return absl::OkStatus();
  const std::string& dtype = *config->penstock.dtype;
  const bool is_bf16 = dtype == "bf16", is_fp16 = dtype == "fp16";
  const auto contradicts = [&](const char* key, std::optional<bool> said, bool meant) {
    return !said.has_value() || *said == meant ? absl::OkStatus()
                                               : absl::InvalidArgumentError(absl::StrCat(
                                                     "penstock.dtype: ", dtype, " beside ", key, ": ",
                                                     *said ? "true" : "false", "; leave one of them out"));
  };
  RETURN_IF_ERROR(contradicts("bf16.enabled", config->bf16, is_bf16));
  RETURN_IF_ERROR(contradicts("fp16.enabled", config->fp16.enabled, is_fp16));
  config->bf16 = is_bf16;
  config->fp16.enabled = is_fp16;
  return absl::OkStatus();
}

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
  const OffloadOptimizerConfig& optimizer = c.zero.offload_optimizer;
  const bool no_ahead = optimizer.pipeline_read == false, no_behind = optimizer.pipeline_write == false;
  if (no_ahead != no_behind) {
    notes.push_back(absl::StrCat(
        "zero_optimization.offload_optimizer.pipeline_", no_ahead ? "read" : "write",
        " false: at most two tiles of optimizer state are in flight at once, one of which may still be read ",
        "ahead or written behind; with pipeline_read and pipeline_write false it is one at a time"));
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
  if (c.optimizer.min_coeff.value_or(0.01) > c.optimizer.max_coeff.value_or(10)) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer.params.min_coeff: ", c.optimizer.min_coeff.value_or(0.01),
                     " is more than max_coeff, ", c.optimizer.max_coeff.value_or(10)));
  }
  if (c.optimizer.type == OptimizerType::kLamb && c.penstock.optimizer_states == "8bit") {
    return absl::InvalidArgumentError(
        "penstock.optimizer_states: Lamb's are fp32 or bf16: 8-bit ones of neighbouring parameters share a "
        "scale, and Lamb updates each parameter by itself");
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

std::string_view Name(OptimizerType value) { return NameIn(NamesOf(value), value); }
std::string_view Name(SchedulerType value) { return NameIn(NamesOf(value), value); }

std::string MonitorConfig::directory() const {
  const std::string path = output_path.value_or("");
  const std::string job = job_name.value_or("DeepSpeedJobName");
  return path.empty() ? job : (std::filesystem::path(path) / job).string();
}

absl::StatusOr<ParsedConfig> ParseConfig(std::string_view json_text) {
  ASSIGN_OR_RETURN(const nlohmann::ordered_json json, ParseHjson(json_text));
  return ParseConfigJson(json);
}

absl::StatusOr<ParsedConfig> ParseConfigJson(const nlohmann::ordered_json& json) {
  ASSIGN_OR_RETURN(CheckedKeys keys, CheckKeys(json));
  ParsedConfig parsed{.config = {},
                      .notes = std::move(keys.notes),
                      .autos = std::move(keys.autos),
                      .deepspeeds = json.size() != 1 || !json.contains("penstock")};
  Fill(keys.served, &parsed.config);
  RETURN_IF_ERROR(TakeDtype(&parsed.config));
  RETURN_IF_ERROR(CheckTogether(parsed.config, parsed.notes));
  if (parsed.config.penstock.versions == 1) parsed.config.penstock.durability = Durability::kCheckpoint;
  return parsed;
}

absl::StatusOr<nlohmann::ordered_json> ConfigObject(std::string_view json_text) {
  ASSIGN_OR_RETURN(nlohmann::ordered_json config, ParseHjson(json_text));
  if (!config.is_object()) return absl::InvalidArgumentError("not a configuration: it is no JSON object");
  return config;
}

namespace {

absl::Status InConfigFile(const std::string& path, const absl::Status& status) {
  return absl::InvalidArgumentError(
      absl::StrCat("config file ", Printable(path, 4096), ": ", status.message()));
}

}  // namespace

absl::StatusOr<nlohmann::ordered_json> ReadConfig(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kLargestConfig);
  if (!text.ok()) return InConfigFile(path, text.status());
  absl::StatusOr<nlohmann::ordered_json> config = ConfigObject(*text);
  if (!config.ok()) return InConfigFile(path, config.status());
  return config;
}

absl::StatusOr<ParsedConfig> LoadConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const nlohmann::ordered_json config, ReadConfig(path));
  absl::StatusOr<ParsedConfig> parsed = ParseConfigJson(config);
  if (!parsed.ok()) return InConfigFile(path, parsed.status());
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

absl::StatusOr<StateDirectories> StateDirectoriesOf(const Config& config, std::string_view named) {
  absl::StatusOr<StateDirectories> parsed =
      ParseStateDirectories(config.penstock.state_dirs.value_or(NvmePaths(config.zero)));
  if (parsed.ok() || !config.penstock.state_dirs.has_value()) return parsed;
  return absl::Status(parsed.status().code(),
                      absl::StrCat(std::string(named), ": ", parsed.status().message()));
}

}  // namespace penstock::run
