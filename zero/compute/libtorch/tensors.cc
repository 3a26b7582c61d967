#include "zero/compute/libtorch/tensors.h"

#include <ATen/Context.h>
#include <torch/version.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
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

TensorBatch::operator Batch() const {
  auto held = std::make_shared<std::array<torch::Tensor, 2>>();
  Batch batch;
  for (const auto& [name, tensor, i] : {std::tuple{kInputs, inputs, 0}, std::tuple{kTargets, targets, 1}}) {
    if (!tensor.defined()) continue;
    torch::Tensor& kept = (*held)[static_cast<size_t>(i)];
    kept = tensor.contiguous();
    batch.tensors.emplace_back(name, ViewOf(kept));
  }
  batch.owner = std::move(held);
  return batch;
}

TensorBatch TensorsOf(const Batch& batch) {
  TensorBatch tensors;
  for (const auto& [name, view] : batch.tensors) {
    TORCH_CHECK(name == kInputs || name == kTargets, "a batch of LibTorch's has ", kInputs, " and ", kTargets,
                ", not ", name);
    (name == kInputs ? tensors.inputs : tensors.targets) = TensorOf(view);
  }
  return tensors;
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
                   "--device cpu"));
}
#endif

}  // namespace penstock::zero
