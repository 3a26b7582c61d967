#include "zero/compute/libtorch/block.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/float16.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::zero {

namespace {

// Visits each parameter once, by its first name.
template <typename Visit>
void ForParameters(const torch::nn::Module& module, Visit&& visit) {
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) visit(item.key(), item.value());
  }
}

}  // namespace

std::vector<torch::Tensor> UniqueParameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> parameters;
  ForParameters(module,
                [&](const std::string&, const torch::Tensor& tensor) { parameters.push_back(tensor); });
  return parameters;
}

FlatLayout LayoutOf(const torch::nn::Module& module) {
  std::vector<ParameterSpec> parameters;
  ForParameters(module, [&](const std::string& name, const torch::Tensor& tensor) {
    parameters.push_back({name, tensor.sizes().vec(), tensor.requires_grad()});
  });
  return FlatLayout::Of(parameters);
}

BlockModule::BlockModule(std::shared_ptr<torch::nn::Module> module)
    : module_(std::move(module)), layout_(std::make_shared<const FlatLayout>(LayoutOf(*module_))) {
  parameters_ = UniqueParameters(*module_);
  for (const auto& item : module_->named_buffers()) {
    buffers_.push_back(item.value());
    buffer_names_.push_back(item.key());
  }
  Detach();
}

void BlockModule::Attach(void* run, kernels::DType weights, Device& device) {
  const torch::Dtype computes = TorchDtype(device.compute_type(weights));
  const torch::Device there = TorchDeviceOf(device);
  const auto options = torch::TensorOptions().dtype(computes).device(there);
  for (torch::Tensor& buffer : buffers_) {
    if (buffer.device().type() != there.type()) buffer.set_data(ToDevice(device, buffer));
  }
  if (computes != TorchDtype(weights)) {
    const torch::Tensor cast = torch::empty({layout().elements}, options);
    device.Convert(weights, run, kernels::DType::kFp32, cast.data_ptr(),
                   static_cast<size_t>(layout().elements));
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = layout().parameters[i];
      parameters_[i].set_data(cast.narrow(0, parameter.offset, parameter.elements).view(parameter.sizes));
    }
    return;
  }
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(weights));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = layout().parameters[i];
    char* place = static_cast<char*>(run) + parameter.offset * width;
    parameters_[i].set_data(torch::from_blob(place, parameter.sizes, options));
  }
}

void BlockModule::Detach() {
  for (torch::Tensor& parameter : parameters_) {
    parameter.mutable_grad() = torch::Tensor();
    parameter.set_data(torch::empty({0}, parameter.options()));
  }
}

torch::Tensor BlockModule::Gradient(size_t i) const {
  const torch::Tensor& gradient = parameters_[i].grad();
  return gradient.defined() ? gradient.contiguous() : gradient;
}

void CopyParameters(const torch::nn::Module& module, const FlatLayout& layout, int64_t offset,
                    int64_t elements, float* to) {
  std::memset(to, 0, static_cast<size_t>(elements) * sizeof(float));
  size_t i = 0;
  for (const torch::Tensor& tensor : UniqueParameters(module)) {
    const Parameter& parameter = layout.parameters[i++];
    const int64_t from = std::max(parameter.offset, offset);
    const int64_t end = std::min(parameter.offset + parameter.elements, offset + elements);
    if (from >= end) continue;
    const torch::Tensor flat = tensor.detach().to(torch::kFloat32).contiguous();
    kernels::Convert(kernels::DType::kFp32, flat.data_ptr<float>() + (from - parameter.offset),
                     kernels::DType::kFp32, to + (from - offset), static_cast<size_t>(end - from));
  }
}

}  // namespace penstock::zero
