// The six optimizers and their hyperparameters by name: one list for configurations, records of runs, the
// command line and Python.
#ifndef PENSTOCK_RUN_OPTIMIZER_OPTIONS_H_
#define PENSTOCK_RUN_OPTIMIZER_OPTIONS_H_

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "run/config.h"
#include "zero/compute/optimizer.h"

namespace penstock::run {

// The hyperparameters that are numbers, by the names of the options and of records.
struct OptimizerNumber {
  const char* name;
  std::optional<double> OptimizerConfig::*configured;
};
inline constexpr auto kOptimizerNumbers =
    std::to_array<OptimizerNumber>({{"lr", &OptimizerConfig::lr},
                                    {"weight_decay", &OptimizerConfig::weight_decay},
                                    {"beta1", &OptimizerConfig::beta1},
                                    {"beta2", &OptimizerConfig::beta2},
                                    {"eps", &OptimizerConfig::eps},
                                    {"momentum", &OptimizerConfig::momentum},
                                    {"dampening", &OptimizerConfig::dampening},
                                    {"lr_decay", &OptimizerConfig::lr_decay},
                                    {"min_coeff", &OptimizerConfig::min_coeff},
                                    {"max_coeff", &OptimizerConfig::max_coeff}});
// And those that are true or false.
struct OptimizerSwitch {
  const char* name;
  std::optional<bool> OptimizerConfig::*configured;
};
inline constexpr auto kOptimizerSwitches =
    std::to_array<OptimizerSwitch>({{"nesterov", &OptimizerConfig::nesterov},
                                    {"bias_correction", &OptimizerConfig::bias_correction},
                                    {"corrects_rate", &OptimizerConfig::corrects_rate}});

// "AdamW", in letters of either case; nullopt for a name that none has.
std::optional<OptimizerType> ParseOptimizerType(std::string_view name);

// What a configuration means by its type: its "Adam" is AdamW unless it says otherwise. Empty: it has none.
std::optional<OptimizerType> MeantOptimizer(const OptimizerConfig& config);

// What a configuration says of the hyperparameter `name`; null: nothing.
nlohmann::json ConfiguredHyperparameter(const OptimizerConfig& config, std::string_view name);

// {"type": "AdamW", "lr": ..., ...}: the optimizer that is meant and those of its hyperparameters that the
// configuration gives; null: it has none.
nlohmann::json DescribeOptimizer(const OptimizerConfig& config);

// The engine's options of an optimizer: take(name, &value) is called for each of its hyperparameters, whose
// value then is the default: that of `adam` for Adam and AdamW, and of the options' own type for the others.
template <typename Take>
zero::OptimizerOptions MakeOptimizer(OptimizerType type, kernels::AdamOptions adam, const Take& take) {
  const auto rates = [&take](auto* options) {
    take("lr", &options->lr);
    take("weight_decay", &options->weight_decay);
  };
  const auto betas = [&take](auto* options) {
    take("beta1", &options->beta1);
    take("beta2", &options->beta2);
  };
  switch (type) {
    case OptimizerType::kAdagrad: {
      kernels::AdagradOptions options;
      rates(&options);
      take("lr_decay", &options.lr_decay);
      take("eps", &options.eps);
      return options;
    }
    case OptimizerType::kLion: {
      kernels::LionOptions options;
      rates(&options);
      betas(&options);
      return options;
    }
    case OptimizerType::kSgd: {
      kernels::SgdOptions options;
      rates(&options);
      take("momentum", &options.momentum);
      take("dampening", &options.dampening);
      take("nesterov", &options.nesterov);
      return options;
    }
    case OptimizerType::kLamb: {
      kernels::LambOptions options;
      options.corrects_rate = true;  // as DeepSpeed's FusedLamb
      rates(&options.adam);
      betas(&options.adam);
      take("eps", &options.adam.eps);
      take("min_coeff", &options.least_trust);
      take("max_coeff", &options.most_trust);
      take("bias_correction", &options.adam.bias_correction);
      take("corrects_rate", &options.corrects_rate);
      return options;
    }
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      break;
  }
  adam.mode = type == OptimizerType::kAdam ? kernels::AdamMode::kAdam : kernels::AdamMode::kAdamW;
  rates(&adam);
  betas(&adam);
  take("eps", &adam.eps);
  return adam;
}

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_OPTIMIZER_OPTIONS_H_
