#include "run/resolve.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/elasticity.h"
#include "run/given_values.h"
#include "run/settings.h"
#include "run/unused_keys.h"
#include "zero/compute/tile_format.h"

namespace penstock::run {
namespace {

using nlohmann::ordered_json;

// A script does not say how many steps it makes.
constexpr int64_t kUnknownSteps = std::numeric_limits<int32_t>::max();
constexpr int64_t kAutoWarmup = 100;  // the Trainer's tenth of all steps, at the most

bool IsGiven(const Keywords& keywords, const std::string& name) {
  const auto found = keywords.find(name);
  return found != keywords.end() && !found->second.is_null();
}

absl::Status SetDType(const ordered_json& value, Config* config) {
  const std::optional<kernels::DType> type =
      value.is_string() ? zero::ParseDType(value.get<std::string>()) : std::nullopt;
  if (!type.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", value.dump(), ": fp32, bf16 and fp16 are served"));
  }
  config->bf16 = type == kernels::DType::kBf16;
  config->fp16.enabled = type == kernels::DType::kFp16;
  return absl::OkStatus();
}

absl::Status TakeKeywords(Keywords keywords, Config* config) {
  if (IsGiven(keywords, "dtype")) {
    RETURN_IF_ERROR(SetDType(keywords["dtype"], config));
    keywords.erase("dtype");
  }
  RETURN_IF_ERROR(TakeGiven(keywords, config));
  if (IsGiven(keywords, "state_dir") && !IsGiven(keywords, "offload"))
    config->zero.offload_param.device = config->zero.offload_optimizer.device = OffloadDevice::kNvme;
  return absl::OkStatus();
}

// The batch sizes that elasticity chooses, in the place of the configuration's.
absl::Status ChooseElasticBatch(int world, ParsedConfig* parsed) {
  Config& config = parsed->config;
  ASSIGN_OR_RETURN(const ElasticBatch batch, ComputeElasticBatch(config.elasticity));
  ASSIGN_OR_RETURN(const int64_t micro, ElasticMicroBatch(config.elasticity, batch, world));
  config.train_batch_size = batch.train_batch;
  config.micro_batch_per_rank = micro;
  config.gradient_accumulation_steps = batch.train_batch / world / micro;
  parsed->notes.push_back(absl::StrCat("elasticity: ", batch.train_batch, " sequences a step, for ",
                                       batch.RanksText(), " ranks; the script gives each of ", world,
                                       " in a step ", *config.gradient_accumulation_steps,
                                       " micro-batches of ", micro));
  return absl::OkStatus();
}

absl::Status ChooseDirectories(const Keywords& keywords, bool configured, bool needs_place, Resolved* made) {
  const std::string named = IsGiven(keywords, "state_dir") ? "state_dir" : "penstock.state_dirs";
  ASSIGN_OR_RETURN(StateDirectories directories, StateDirectoriesOf(made->config, named));
  const std::optional<OffloadDevice> said = CombinedOffload(made->config.zero);
  // DeepSpeed's answer to a configuration without offload is none.
  made->offload =
      said.value_or(configured && directories.paths.empty() ? OffloadDevice::kNone : OffloadDevice::kNvme);
  if (made->offload != OffloadDevice::kNvme) return absl::OkStatus();
  if (directories.paths.empty() && needs_place) {
    return absl::InvalidArgumentError(
        "no directory for the states: give state_dir=, or offload_optimizer.nvme_path in the configuration "
        "(or offload='none' to keep all of it in memory)");
  }
  made->directories = std::move(directories);
  return absl::OkStatus();
}

absl::Status ChooseBatch(int world, Resolved* made) {
  const Config& config = made->config;
  ASSIGN_OR_RETURN(const BatchSizes sizes, ResolveBatch({.train_batch = config.train_batch_size,
                                                         .micro_batch = config.micro_batch_per_rank,
                                                         .accumulation = config.gradient_accumulation_steps},
                                                        world, /*default_micro_batch=*/1));
  made->micro_batches = sizes.accumulation;
  made->config.gradient_accumulation_steps = sizes.accumulation;
  made->forwards = std::max(config.penstock.forwards_per_step.value_or(1), made->micro_batches);
  if (config.train_batch_size.has_value() || config.micro_batch_per_rank.has_value())
    made->micro_batch_size = sizes.micro_batch;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Resolved> Resolve(const ordered_json* given, const Keywords& keywords, int world,
                                 bool needs_place) {
  ParsedConfig parsed;
  if (given != nullptr) {
    ASSIGN_OR_RETURN(parsed, ParseConfigJson(*given));
  }
  Config& config = parsed.config;
  if (config.elasticity.on()) {
    if (IsGiven(keywords, "gradient_accumulation_steps")) {
      return absl::InvalidArgumentError(
          "gradient_accumulation_steps: elasticity chooses it; leave it out, or set elasticity.enabled to "
          "false");
    }
    RETURN_IF_ERROR(ChooseElasticBatch(world, &parsed));
  }
  RETURN_IF_ERROR(TakeKeywords(keywords, &config));
  Resolved made;
  made.notes = std::move(parsed.notes);
  if (given != nullptr) {
    for (std::string& note : KeysUnusedFromPython(config)) made.notes.push_back(std::move(note));
  }
  // Of Penstock's own keys alone nothing follows for what is computed: a loop that does not clip stays one.
  if (given != nullptr && parsed.deepspeeds) {
    for (std::string& note : FillDefaults(parsed.autos, kUnknownSteps, kAutoWarmup, &config))
      made.notes.push_back(std::move(note));
  }
  made.config = std::move(config);
  made.dtype = made.config.bf16.value_or(false)           ? kernels::DType::kBf16
               : made.config.fp16.enabled.value_or(false) ? kernels::DType::kFp16
                                                          : kernels::DType::kFp32;
  RETURN_IF_ERROR(ChooseDirectories(keywords, given != nullptr, needs_place, &made));
  if (made.config.penstock.saved_activations == SavedActivations::kDrive &&
      made.offload != OffloadDevice::kNvme) {
    return absl::InvalidArgumentError(
        "saved_activations is \"drive\", and weights and states are in memory: give state_dir= (or offload "
        "to nvme), or leave it to \"memory\"");
  }
  for (std::string& note : UnusedPlaceKeys(made.config, world, made.offload))
    made.notes.push_back(std::move(note));
  SettleFromPython(&made.config);
  RETURN_IF_ERROR(ChooseBatch(world, &made));
  if (made.config.scheduler.has_value()) {
    ASSIGN_OR_RETURN(made.schedule, MakeSchedule(*made.config.scheduler,
                                                 made.config.optimizer.lr.value_or(1e-3), kUnknownSteps));
  }
  for (std::string& note : made.notes) note = Spelt(note, Door::kPython);
  return made;
}

}  // namespace penstock::run
