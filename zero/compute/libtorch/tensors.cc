#include "zero/compute/libtorch/tensors.h"

#include <ATen/Context.h>
#include <torch/version.h>

#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/compute/libtorch/cuda_device.h"

namespace penstock::zero {
namespace {

constexpr const char* kInputs = "inputs";
constexpr const char* kTargets = "targets";

constexpr std::pair<ElementType, torch::Dtype> kTypes[] = {
    {ElementType::kFp32, torch::kFloat32}, {ElementType::kBf16, torch::kBFloat16},
    {ElementType::kFp16, torch::kHalf},    {ElementType::kFp64, torch::kFloat64},
    {ElementType::kInt64, torch::kInt64},  {ElementType::kInt32, torch::kInt32},
    {ElementType::kInt16, torch::kInt16},  {ElementType::kInt8, torch::kInt8},
    {ElementType::kUInt8, torch::kUInt8},  {ElementType::kBool, torch::kBool}};

int64_t Bytes(const torch::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

void SeedGenerator(const torch::Device& device, uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace

torch::Dtype TorchDtype(kernels::DType type) {
  return type == kernels::DType::kBf16   ? torch::kBFloat16
         : type == kernels::DType::kFp16 ? torch::kHalf
                                         : torch::kFloat32;
}

torch::Dtype TorchDtype(ElementType type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (ours == type) return torchs;
  }
  return torch::kFloat32;
}

ElementType ElementTypeOf(torch::Dtype type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (torchs == type) return ours;
  }
  TORCH_CHECK(false, "tensors of type ", type, " are not served");
}

const torch::Tensor& TensorBatch::operator[](std::string_view name) const {
  if (name == kInputs && inputs.defined()) return inputs;
  if (name == kTargets && targets.defined()) return targets;
  for (const auto& [known, tensor] : named) {
    if (known == name) return tensor;
  }
  std::string there;
  for (const auto& [known, tensor] : All()) absl::StrAppend(&there, there.empty() ? "" : ", ", known);
  TORCH_CHECK(false, "the batch has no ", std::string(name), "; it has ", there.empty() ? "nothing" : there);
}

std::vector<std::pair<std::string, torch::Tensor>> TensorBatch::All() const {
  std::vector<std::pair<std::string, torch::Tensor>> all;
  if (inputs.defined()) all.emplace_back(kInputs, inputs);
  if (targets.defined()) all.emplace_back(kTargets, targets);
  for (const auto& [name, tensor] : named) {
    TORCH_CHECK(tensor.defined(), "the batch's ", name, " is undefined");
    all.emplace_back(name, tensor);
  }
  return all;
}

TensorBatch::operator Batch() const {
  auto held = std::make_shared<std::vector<torch::Tensor>>();
  Batch batch;
  for (const auto& [name, tensor] : All()) {
    held->push_back(tensor.contiguous());
    batch.tensors.emplace_back(name, ViewOf(held->back()));
  }
  batch.owner = std::move(held);
  return batch;
}

TensorBatch TensorsOf(const Batch& batch) {
  TensorBatch tensors;
  std::set<std::string_view> seen;
  for (const auto& [name, view] : batch.tensors) {
    TORCH_CHECK(seen.insert(name).second, "the batch has two tensors of the name ", name);
    if (name == kInputs || name == kTargets) {
      (name == kInputs ? tensors.inputs : tensors.targets) = TensorOf(view);
    } else {
      tensors.named.emplace_back(name, TensorOf(view));
    }
  }
  return tensors;
}

TensorBatch ToDevice(Device& device, const TensorBatch& host) {
  TensorBatch there = {ToDevice(device, host.inputs), ToDevice(device, host.targets)};
  for (const auto& [name, tensor] : host.named) there.named.emplace_back(name, ToDevice(device, tensor));
  return there;
}

TensorView ViewOf(const torch::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "a view of a tensor that is not contiguous");
  return {tensor.data_ptr(), ElementTypeOf(tensor.scalar_type()), tensor.sizes().vec(),
          !tensor.device().is_cpu()};
}

torch::Tensor TensorOf(const TensorView& view) {
  TORCH_CHECK(!view.on_device, "a view of host memory is wanted");
  return torch::from_blob(view.data, view.sizes, torch::TensorOptions().dtype(TorchDtype(view.type)));
}

absl::StatusOr<HostTensor> HostTensorOf(const torch::Tensor& tensor) {
  HostTensor value;
  const torch::Tensor contiguous = tensor.contiguous();
  ASSIGN_OR_RETURN(value.memory, HostBuffer::Of(Bytes(contiguous), "memory for an output"));
  value.view = ViewOf(contiguous);
  value.view.data = value.memory.data();
  if (Bytes(contiguous) > 0) std::memcpy(value.memory.data(), contiguous.data_ptr(), contiguous.nbytes());
  return value;
}

torch::Device TorchDeviceOf(const Device& device) {
  if (device.ordinal() < 0) return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(device.ordinal())};
}

void Finish(Device& device) {
  std::promise<absl::Status> done;
  device.AfterCompute([&](absl::Status status) { done.set_value(std::move(status)); });
  const absl::Status status = done.get_future().get();
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

torch::Tensor ToDevice(Device& device, const torch::Tensor& host) {
  if (!host.defined() || !device.has_own_memory()) return host;
  device.CountCopied({Bytes(host), 0});
  return device.ordinal() < 0 ? host.clone() : host.to(TorchDeviceOf(device));
}

torch::Tensor ToHost(Device& device, const torch::Tensor& tensor) {
  if (!tensor.defined() || !device.has_own_memory()) return tensor;
  device.CountCopied({0, Bytes(tensor)});
  return device.ordinal() < 0 ? tensor.clone() : tensor.cpu();
}

void SeedGenerators(const Device& device, uint64_t seed) {
  if (const torch::Device where = TorchDeviceOf(device); !where.is_cpu()) SeedGenerator(where, seed);
  SeedGenerator(torch::kCPU, seed);
}

#ifndef PENSTOCK_TORCH_CUDA
absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(int) {
  return absl::FailedPreconditionError(
      absl::StrCat("this Penstock was built with LibTorch ", TORCH_VERSION,
                   ", which has no CUDA; build it with one that has (docs/internals/device.md), or use "
                   "`device cpu`"));
}
#endif

}  // namespace penstock::zero
