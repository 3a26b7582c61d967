#include "zero/compute/block.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/float16.h"

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

FlatLayout FlatLayout::Of(const torch::nn::Module& module) {
  FlatLayout layout;
  int64_t offset = 0;
  auto add_trained = [&](int64_t from, int64_t to) {
    if (!layout.trained.empty() && layout.trained.back().second == from) {
      layout.trained.back().second = to;
    } else {
      layout.trained.emplace_back(from, to);
    }
  };
  ForParameters(module, [&](const std::string& name, const torch::Tensor& tensor) {
    const bool flips =
        !layout.parameters.empty() && layout.parameters.back().trains != tensor.requires_grad();
    // Those that train and those that do not share no block of 8-bit states.
    if (flips) offset = tiering::AlignUp(offset, tiering::kScaleBlock);
    Parameter& parameter = layout.parameters.emplace_back();
    parameter.name = name;
    parameter.sizes = tensor.sizes().vec();
    parameter.offset = offset;
    parameter.elements = tensor.numel();
    parameter.trains = tensor.requires_grad();
    layout.parameter_elements += parameter.elements;
    const int64_t end = tiering::AlignUp(offset + parameter.elements, kParameterAlignment);
    if (parameter.trains) add_trained(offset, end);
    offset = end;
  });
  layout.elements = tiering::AlignUp(std::max<int64_t>(offset, 1), tiering::kElementAlignment);
  if (!layout.parameters.empty() && !layout.parameters.back().trains) {
    offset = tiering::AlignUp(offset, tiering::kScaleBlock);
  }
  if (layout.elements > offset) add_trained(offset, layout.elements);
  return layout;
}

bool FlatLayout::Trains() const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const Parameter& parameter) { return parameter.trains; });
}

bool FlatLayout::SameShapes(const FlatLayout& other) const {
  if (parameters.size() != other.parameters.size()) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sizes != other.parameters[i].sizes ||
        parameters[i].trains != other.parameters[i].trains) {
      return false;
    }
  }
  return true;
}

BlockModule::BlockModule(std::shared_ptr<torch::nn::Module> module)
    : module_(std::move(module)), layout_(FlatLayout::Of(*module_)) {
  parameters_ = UniqueParameters(*module_);
  buffers_ = module_->buffers();
  Detach();
}

torch::Dtype TorchDtype(kernels::DType type) {
  return type == kernels::DType::kBf16   ? torch::kBFloat16
         : type == kernels::DType::kFp16 ? torch::kHalf
                                         : torch::kFloat32;
}

void BlockModule::Attach(void* run, kernels::DType weights, Device& device) {
  const torch::Dtype computes = device.compute_dtype(weights);
  const auto options = torch::TensorOptions().dtype(computes).device(device.torch_device());
  for (torch::Tensor& buffer : buffers_) {
    if (buffer.device().type() != device.torch_device().type()) buffer.set_data(device.ToDevice(buffer));
  }
  if (computes != TorchDtype(weights)) {
    const torch::Tensor cast = torch::empty({layout_.elements}, options);
    device.Convert(weights, run, kernels::DType::kFp32, cast.data_ptr(),
                   static_cast<size_t>(layout_.elements));
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = layout_.parameters[i];
      parameters_[i].set_data(cast.narrow(0, parameter.offset, parameter.elements).view(parameter.sizes));
    }
    return;
  }
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(weights));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = layout_.parameters[i];
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
