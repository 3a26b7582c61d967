// An optimizer's hyperparameters as Python hands them over: its name, and numbers in a fixed order.
#ifndef PENSTOCK_PYTHON_HYPERPARAMETERS_H_
#define PENSTOCK_PYTHON_HYPERPARAMETERS_H_

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kernels/float16.h"
#include "kernels/optimizer.h"

namespace penstock::python {

using Hyperparameters = std::variant<kernels::AdamOptions, kernels::AdagradOptions, kernels::LionOptions,
                                     kernels::SgdOptions, kernels::LambOptions>;

//   adam     lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction
//   adagrad  lr, lr_decay, eps, weight_decay
//   lion     lr, beta1, beta2, weight_decay
//   sgd      lr, momentum, dampening, weight_decay, nesterov
//   lamb     lr, beta1, beta2, eps, weight_decay, bias_correction, least_trust, most_trust
inline Hyperparameters MakeHyperparameters(std::string_view name, const std::vector<double>& x) {
  const auto want = [&](size_t count) {
    if (x.size() != count) throw nanobind::value_error("wrong number of hyperparameters");
  };
  if (name == "adam") {
    want(7);
    return kernels::AdamOptions{.lr = x[0],
                                .beta1 = x[1],
                                .beta2 = x[2],
                                .eps = x[3],
                                .weight_decay = x[4],
                                .mode = x[5] != 0 ? kernels::AdamMode::kAdamW : kernels::AdamMode::kAdam,
                                .bias_correction = x[6] != 0};
  }
  if (name == "adagrad") {
    want(4);
    return kernels::AdagradOptions{.lr = x[0], .lr_decay = x[1], .eps = x[2], .weight_decay = x[3]};
  }
  if (name == "lion") {
    want(4);
    return kernels::LionOptions{.lr = x[0], .beta1 = x[1], .beta2 = x[2], .weight_decay = x[3]};
  }
  if (name == "sgd") {
    want(5);
    return kernels::SgdOptions{
        .lr = x[0], .momentum = x[1], .dampening = x[2], .weight_decay = x[3], .nesterov = x[4] != 0};
  }
  if (name == "lamb") {
    want(8);
    kernels::LambOptions options;
    options.adam = {.lr = x[0],
                    .beta1 = x[1],
                    .beta2 = x[2],
                    .eps = x[3],
                    .weight_decay = x[4],
                    .mode = kernels::AdamMode::kAdamW,
                    .bias_correction = x[5] != 0};
    options.least_trust = x[6];
    options.most_trust = x[7];
    return options;
  }
  throw nanobind::value_error("no such optimizer");
}

// "float32", "bfloat16", "float16": torch's names.
inline kernels::DType DTypeOf(std::string_view name) {
  if (name == "float32") return kernels::DType::kFp32;
  if (name == "bfloat16") return kernels::DType::kBf16;
  if (name == "float16") return kernels::DType::kFp16;
  throw nanobind::value_error("the element type must be float32, bfloat16 or float16");
}

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_HYPERPARAMETERS_H_
