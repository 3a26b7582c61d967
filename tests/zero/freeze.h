// Parameters that do not train.
#ifndef PENSTOCK_TESTS_ZERO_FREEZE_H_
#define PENSTOCK_TESTS_ZERO_FREEZE_H_

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero::testing_support {

// Every `every`-th parameter of the block.
inline void Freeze(BlockSpec* block, size_t every = 1) {
  absl::StrAppend(&block->kind, ", frozen ", every);
  block->build = [build = block->build, every] {
    std::shared_ptr<torch::nn::Module> module = build();
    std::vector<torch::Tensor> parameters = module->parameters();
    for (size_t p = 0; p < parameters.size(); p += every) parameters[p].set_requires_grad(false);
    return module;
  };
}

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_FREEZE_H_
