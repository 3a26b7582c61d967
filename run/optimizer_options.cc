#include "run/optimizer_options.h"

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "run/config_names.h"

namespace penstock::run {

std::optional<OptimizerType> ParseOptimizerType(std::string_view name) {
  for (const auto& [type, known] : NamesOf(OptimizerType())) {
    if (absl::EqualsIgnoreCase(absl::string_view(known.data(), known.size()),
                               absl::string_view(name.data(), name.size())))
      return type;
  }
  return std::nullopt;
}

std::optional<OptimizerType> MeantOptimizer(const OptimizerConfig& config) {
  const bool adam = config.type == OptimizerType::kAdam || config.type == OptimizerType::kAdamW;
  if (!adam) return config.type;
  return config.DecoupledDecay() ? OptimizerType::kAdamW : OptimizerType::kAdam;
}

nlohmann::json ConfiguredHyperparameter(const OptimizerConfig& config, std::string_view name) {
  nlohmann::json says;
  const auto look = [&](const auto& named) {
    for (const auto& [known, configured] : named) {
      if (name == known && (config.*configured).has_value()) says = *(config.*configured);
    }
  };
  look(kOptimizerNumbers);
  look(kOptimizerSwitches);
  return says;
}

nlohmann::json DescribeOptimizer(const OptimizerConfig& config) {
  const std::optional<OptimizerType> type = MeantOptimizer(config);
  if (!type.has_value()) return nullptr;
  nlohmann::json described = {{"type", std::string(Name(*type))}};
  (void)MakeOptimizer(*type, {}, [&](const char* name, auto*) {
    nlohmann::json value = ConfiguredHyperparameter(config, name);
    if (!value.is_null()) described[name] = std::move(value);
  });
  return described;
}

}  // namespace penstock::run
