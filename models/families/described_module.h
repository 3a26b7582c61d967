// A block's module, made from its description: parameters of those names and shapes, without values and
// without functions. A family's stages compute with what they find in it by name.
#ifndef PENSTOCK_MODELS_FAMILIES_DESCRIBED_MODULE_H_
#define PENSTOCK_MODELS_FAMILIES_DESCRIBED_MODULE_H_

#include <torch/nn/module.h>

#include <string_view>
#include <utility>
#include <vector>

#include "models/weights/layout.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::models {

class DescribedModule : public torch::nn::Module {
 public:
  // Dots in names are submodules. The order of named_parameters() is that of the description.
  explicit DescribedModule(const BlockDescription& block);

  // The parameter of this name, or an undefined tensor where the block has none.
  torch::Tensor Find(std::string_view name) const;
  // It must be there.
  torch::Tensor Get(std::string_view name) const;
  // x times NAME.weight, plus NAME.bias and what an adapter of that name adds, where there is one.
  torch::Tensor Linear(std::string_view name, const torch::Tensor& x) const;

 private:
  const AdapterFunction adapters_;
  std::vector<std::pair<std::string, torch::Tensor>> parameters_;
};

// The block with all that its description says.
zero::BlockSpec SpecOf(const BlockDescription& block);
// Adds it; returns its number.
int AddBlock(const BlockDescription& block, zero::Model* model);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_DESCRIBED_MODULE_H_
