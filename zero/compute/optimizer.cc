#include "zero/compute/optimizer.h"

#include <type_traits>

namespace penstock::zero {

Moments MomentsOf(const OptimizerOptions& options) {
  if (std::holds_alternative<kernels::AdagradOptions>(options)) return {.m = false, .v = true};
  if (std::holds_alternative<kernels::LionOptions>(options)) return {.m = true, .v = false};
  if (const auto* sgd = std::get_if<kernels::SgdOptions>(&options)) {
    return {.m = sgd->momentum != 0, .v = false};
  }
  return {};
}

bool NeedsTensorNorms(const OptimizerOptions& options) {
  return std::holds_alternative<kernels::LambOptions>(options);
}

std::string OptimizerName(const OptimizerOptions& options) {
  if (std::holds_alternative<kernels::AdagradOptions>(options)) return "adagrad";
  if (std::holds_alternative<kernels::LionOptions>(options)) return "lion";
  if (NeedsTensorNorms(options)) return "lamb";
  if (std::holds_alternative<kernels::SgdOptions>(options)) {
    return MomentsOf(options).m ? "sgd with momentum" : "sgd";
  }
  return "adam";
}

std::optional<Moments> MomentsByName(std::string_view name) {
  if (name == "adam" || name == "lamb") return Moments{.m = true, .v = true};
  if (name == "adagrad") return Moments{.m = false, .v = true};
  if (name == "lion" || name == "sgd with momentum") return Moments{.m = true, .v = false};
  if (name == "sgd") return Moments{.m = false, .v = false};
  return std::nullopt;
}

double LearningRate(const OptimizerOptions& options) {
  return std::visit(
      [](const auto& of) {
        if constexpr (std::is_same_v<std::decay_t<decltype(of)>, kernels::LambOptions>) {
          return of.adam.lr;
        } else {
          return of.lr;
        }
      },
      options);
}

namespace {

template <typename Options>
void SetRates(const GroupRates& group, Options* of) {
  of->lr = group.rates.lr;
  of->weight_decay = group.weight_decay.value_or(of->weight_decay);
  if constexpr (std::is_same_v<Options, kernels::AdamOptions> ||
                std::is_same_v<Options, kernels::LionOptions>) {
    of->beta1 = group.rates.beta1.value_or(of->beta1);
    of->beta2 = group.rates.beta2.value_or(of->beta2);
  }
}

}  // namespace

OptimizerStep MakeOptimizerStep(const OptimizerOptions& options, const GroupRates& group, int64_t update,
                                double grad_scale) {
  return std::visit(
      [&](auto of) -> OptimizerStep {
        using Options = decltype(of);
        if constexpr (std::is_same_v<Options, kernels::LambOptions>) {
          SetRates(group, &of.adam);
          return kernels::MakeLambStep(of, update, grad_scale);
        } else {
          SetRates(group, &of);
          if constexpr (std::is_same_v<Options, kernels::AdamOptions>) {
            return kernels::MakeAdamStep(of, update, grad_scale);
          } else if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) {
            return kernels::MakeAdagradStep(of, update, grad_scale);
          } else if constexpr (std::is_same_v<Options, kernels::LionOptions>) {
            return kernels::MakeLionStep(of, grad_scale);
          } else {
            return kernels::MakeSgdStep(of, update, grad_scale);
          }
        }
      },
      options);
}

}  // namespace penstock::zero
