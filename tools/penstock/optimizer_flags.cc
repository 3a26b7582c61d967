#include "tools/penstock/optimizer_flags.h"

#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/optimizer_options.h"

namespace penstock::tools {
namespace {

// Collects values into the record as they are decided, and the first error.
class Resolver {
 public:
  Resolver(const run::RecordedOptions& recorded, nlohmann::json* record)
      : recorded_(recorded), record_(*record) {}

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

 private:
  const run::RecordedOptions& recorded_;
  nlohmann::json& record_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<zero::OptimizerOptions> ResolveOptimizerOptions(const run::OptimizerConfig& config,
                                                               const run::RecordedOptions& recorded,
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
        resolver.Take(what.data(), given, value);
      });
  RETURN_IF_ERROR(resolver.status());
  return options;
}

}  // namespace penstock::tools
