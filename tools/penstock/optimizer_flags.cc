#include "tools/penstock/optimizer_flags.h"

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "zero/compute/tile_format.h"

namespace penstock::tools {
namespace {

constexpr const char* kConfig = "config";

// Collects values into the record as they are decided, and the first error.
class Resolver {
 public:
  Resolver(const RecordedOptions& recorded, nlohmann::json* record) : recorded_(recorded), record_(*record) {}

  template <typename T>
  void Take(const char* name, const char* flag, const std::optional<T>& given, T* value) {
    absl::StatusOr<T> taken = recorded_.Of(name, flag, given, *value);
    if (!taken.ok()) {
      status_.Update(taken.status());
      return;
    }
    *value = *std::move(taken);
    record_[name] = *value;
  }
  const absl::Status& status() const { return status_; }
  absl::Status* mutable_status() { return &status_; }

 private:
  const RecordedOptions& recorded_;
  nlohmann::json& record_;
  absl::Status status_;
};

// Flags are checked here; what a config says has been checked against its table.
absl::Status CheckRate(const char* flag, double value) {
  if (value >= 0 && value <= 1e6) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " ", value, ": must be between 0 and 1e+06"));
}

// "Adam" of a config is AdamW unless it says otherwise; recorded is what it means.
std::optional<std::string> TypeOf(const run::OptimizerConfig& config) {
  using run::OptimizerType;
  if (!config.type.has_value()) return std::nullopt;
  const bool adam = config.type == OptimizerType::kAdam || config.type == OptimizerType::kAdamW;
  return std::string(run::Name(!adam                     ? *config.type
                               : config.DecoupledDecay() ? OptimizerType::kAdamW
                                                         : OptimizerType::kAdam));
}

}  // namespace

void NoteOptimizer(const run::OptimizerConfig& config, const RecordedOptions& recorded) {
  recorded.NoteConfig("optimizer", TypeOf(config));
  recorded.NoteConfig("lr", config.lr);
  recorded.NoteConfig("weight_decay", config.weight_decay);
  recorded.NoteConfig("beta1", config.beta1);
  recorded.NoteConfig("beta2", config.beta2);
  recorded.NoteConfig("eps", config.eps);
  recorded.NoteConfig("momentum", config.momentum);
  recorded.NoteConfig("dampening", config.dampening);
  recorded.NoteConfig("nesterov", config.nesterov);
  recorded.NoteConfig("lr_decay", config.lr_decay);
}

absl::StatusOr<zero::OptimizerOptions> ResolveOptimizerOptions(const OptimizerFlags& flags,
                                                               const run::OptimizerConfig& config,
                                                               const RecordedOptions& recorded,
                                                               nlohmann::json* record) {
  Resolver resolver(recorded, record);
  std::string type(run::Name(run::OptimizerType::kAdamW));
  resolver.Take("optimizer", kConfig, TypeOf(config), &type);
  const std::optional<double> lr = flags.lr.has_value() ? flags.lr : config.lr;
  const std::optional<double> weight_decay =
      flags.weight_decay.has_value() ? flags.weight_decay : config.weight_decay;
  const auto common = [&](auto* options) {
    resolver.Take("lr", "lr", lr, &options->lr);
    resolver.Take("weight_decay", "weight-decay", weight_decay, &options->weight_decay);
    resolver.mutable_status()->Update(CheckRate("--lr", options->lr));
    resolver.mutable_status()->Update(CheckRate("--weight-decay", options->weight_decay));
  };
  const auto betas = [&](auto* options) {
    resolver.Take("beta1", kConfig, config.beta1, &options->beta1);
    resolver.Take("beta2", kConfig, config.beta2, &options->beta2);
  };
  zero::OptimizerOptions result;
  if (type == "Adagrad") {
    kernels::AdagradOptions options;
    common(&options);
    resolver.Take("lr_decay", kConfig, config.lr_decay, &options.lr_decay);
    resolver.Take("eps", kConfig, config.eps, &options.eps);
    result = options;
  } else if (type == "Lion") {
    kernels::LionOptions options;
    common(&options);
    betas(&options);
    result = options;
  } else if (type == "SGD") {
    kernels::SgdOptions options;
    common(&options);
    resolver.Take("momentum", kConfig, config.momentum, &options.momentum);
    resolver.Take("dampening", kConfig, config.dampening, &options.dampening);
    resolver.Take("nesterov", kConfig, config.nesterov, &options.nesterov);
    result = options;
  } else {
    kernels::AdamOptions options = {.lr = 3e-4, .weight_decay = 0.01};
    options.mode = type == "Adam" ? kernels::AdamMode::kAdam : kernels::AdamMode::kAdamW;
    common(&options);
    betas(&options);
    resolver.Take("eps", kConfig, config.eps, &options.eps);
    result = options;
  }
  RETURN_IF_ERROR(resolver.status());
  return result;
}

absl::StatusOr<kernels::StateType> ResolveOptimizerStates(const OptimizerFlags& flags,
                                                          const RecordedOptions& recorded,
                                                          nlohmann::json* record) {
  Resolver resolver(recorded, record);
  std::string name(zero::StateTypeName(kernels::StateType::kFp32));
  resolver.Take("optimizer_states", "optimizer-states", flags.states, &name);
  RETURN_IF_ERROR(resolver.status());
  const std::optional<kernels::StateType> type = zero::ParseStateType(name);
  if (type.has_value()) return *type;
  return absl::InvalidArgumentError(
      absl::StrCat("--optimizer-states ", name, ": must be fp32, bf16 or 8bit"));
}

}  // namespace penstock::tools
