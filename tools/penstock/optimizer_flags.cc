#include "tools/penstock/optimizer_flags.h"

#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/optimizer_options.h"
#include "zero/compute/tile_format.h"

namespace penstock::tools {
namespace {

// Collects values into the record as they are decided, and the first error.
class Resolver {
 public:
  Resolver(const RecordedOptions& recorded, nlohmann::json* record) : recorded_(recorded), record_(*record) {}

  template <typename T>
  void Take(const char* name, const std::optional<T>& given, T* value) {
    absl::StatusOr<T> taken = recorded_.Of(name, given, *value);
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

}  // namespace

void NoteOptimizer(const run::OptimizerConfig& config, const RecordedOptions& recorded) {
  nlohmann::json described = run::DescribeOptimizer(config);
  if (described.is_null()) return;
  recorded.NoteConfig("optimizer", std::optional(described["type"]));
  described.erase("type");
  for (const auto& [name, value] : described.items()) recorded.NoteConfig(name.c_str(), std::optional(value));
}

absl::StatusOr<zero::OptimizerOptions> ResolveOptimizerOptions(const OptimizerFlags& flags,
                                                               const run::OptimizerConfig& config,
                                                               const RecordedOptions& recorded,
                                                               nlohmann::json* record) {
  Resolver resolver(recorded, record);
  std::optional<std::string> configured;
  if (const auto meant = run::MeantOptimizer(config); meant.has_value()) configured = run::Name(*meant);
  std::string name(run::Name(run::OptimizerType::kAdamW));
  resolver.Take("optimizer", configured, &name);
  RETURN_IF_ERROR(resolver.status());
  const std::optional<run::OptimizerType> type = run::ParseOptimizerType(name);
  if (!type.has_value())
    return absl::DataLossError(absl::StrCat("the run's record is damaged: its optimizer is ", name));
  zero::OptimizerOptions options = run::MakeOptimizer(
      *type, {.lr = 3e-4, .weight_decay = 0.01}, [&]<typename T>(const std::string_view what, T* value) {
        const nlohmann::json says = run::ConfiguredHyperparameter(config, what);
        std::optional<T> given;
        if (!says.is_null()) given = says.get<T>();
        const bool is_lr = what == "lr";
        if constexpr (std::is_same_v<T, double>) {
          const std::optional<double>& flag = is_lr ? flags.lr : flags.weight_decay;
          if ((is_lr || what == "weight_decay") && flag.has_value()) given = flag;
        }
        resolver.Take(what.data(), given, value);
        if (is_lr || what == "weight_decay")
          resolver.mutable_status()->Update(CheckRate(is_lr ? "--lr" : "--weight-decay", *value));
      });
  RETURN_IF_ERROR(resolver.status());
  return options;
}

absl::StatusOr<kernels::StateType> ResolveOptimizerStates(const OptimizerFlags& flags,
                                                          const RecordedOptions& recorded,
                                                          nlohmann::json* record) {
  Resolver resolver(recorded, record);
  std::string name(zero::StateTypeName(kernels::StateType::kFp32));
  resolver.Take("optimizer_states", flags.states, &name);
  RETURN_IF_ERROR(resolver.status());
  const std::optional<kernels::StateType> type = zero::ParseStateType(name);
  if (type.has_value()) return *type;
  return absl::InvalidArgumentError(
      absl::StrCat("--optimizer-states ", name, ": must be fp32, bf16 or 8bit"));
}

}  // namespace penstock::tools
