#include "models/families/described_module.h"

#include <memory>
#include <string>

#include "base/check.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/initial_values.h"

namespace penstock::models {

static_assert(kParameterAlignment == zero::kParameterAlignment);

DescribedModule::DescribedModule(const BlockDescription& block) : adapters_(block.adapters) {
  for (const ParameterDescription& p : block.parameters) {
    torch::nn::Module* module = this;
    std::string_view name = p.name;
    for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      const std::string part(name.substr(0, dot));
      const auto children = module->named_children();
      std::shared_ptr<torch::nn::Module> child =
          children.contains(part) ? children[part]
                                  : module->register_module(part, std::make_shared<torch::nn::Module>());
      module = child.get();
      name.remove_prefix(dot + 1);
    }
    const std::vector<int64_t> sizes =
        p.columns == 0 ? std::vector<int64_t>{p.rows} : std::vector<int64_t>{p.rows, p.columns};
    parameters_.emplace_back(p.name, module->register_parameter(std::string(name), zero::WithoutMemory(sizes),
                                                                /*requires_grad=*/!p.frozen));
  }
  const auto named = named_parameters();
  for (size_t i = 0; i < parameters_.size(); ++i)
    PENSTOCK_CHECK(named[i].key() == parameters_[i].first, "a block is described in the order of its module");
}

torch::Tensor DescribedModule::Find(std::string_view name) const {
  for (const auto& [of, parameter] : parameters_) {
    if (of == name) return parameter;
  }
  return {};
}

torch::Tensor DescribedModule::Get(std::string_view name) const {
  torch::Tensor parameter = Find(name);
  TORCH_CHECK(parameter.defined(), "the block has no parameter ", std::string(name));
  return parameter;
}

torch::Tensor DescribedModule::Linear(std::string_view name, const torch::Tensor& x) const {
  const std::string of(name);
  torch::Tensor y = torch::linear(x, Get(of + ".weight"), Find(of + ".bias"));
  const torch::Tensor down = Find(AdapterDown(of));
  if (!down.defined()) return y;
  const torch::Tensor in = adapters_.dropout > 0 ? torch::dropout(x, adapters_.dropout, is_training()) : x;
  return y + torch::linear(torch::linear(in, down), Get(AdapterUp(of))) * adapters_.scaling;
}

zero::BlockSpec SpecOf(const BlockDescription& block) {
  std::vector<zero::InitialValues> initial;
  initial.reserve(block.parameters.size());
  for (const ParameterDescription& p : block.parameters)
    initial.push_back({.mean = p.mean, .deviation = p.deviation, .bound = p.bound});
  return {block.name, block.kind, [block] { return std::make_shared<DescribedModule>(block); },
          std::move(initial), /*own_module=*/false};
}

int AddBlock(const BlockDescription& block, zero::Model* model) {
  model->blocks.push_back(SpecOf(block));
  return static_cast<int>(model->blocks.size()) - 1;
}

}  // namespace penstock::models
