// The engine's values as LibTorch's tensors, and back; and where tensors are on a device of the engine's.
//
// Functions that make or move tensors throw as LibTorch does.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSORS_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSORS_H_

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "zero/compute/device.h"
#include "zero/memory/values.h"

namespace penstock::zero {

// The same types by the other's names. ElementTypeOf throws where the engine has no such type.
torch::Dtype TorchDtype(kernels::DType type);
torch::Dtype TorchDtype(ElementType type);
ElementType ElementTypeOf(torch::Dtype type);

// One micro-batch in LibTorch's tensors. Every stage sees all of it; `inputs` is what the first one takes. As
// the engine's Batch it has them by these names, and holds them.
struct TensorBatch {
  torch::Tensor inputs = {};
  torch::Tensor targets = {};
  std::vector<std::pair<std::string, torch::Tensor>> named = {};  // whatever else: input_ids, attention_mask

  // The tensor of this name, "inputs" and "targets" among them; throws where the batch has none.
  const torch::Tensor& operator[](std::string_view name) const;
  // Of all that are there, by name.
  std::vector<std::pair<std::string, torch::Tensor>> All() const;
  operator Batch() const;  // NOLINT(google-explicit-constructor): it is one
};
// Views of the batch's tensors, in host memory: they live as long as the batch's owner.
TensorBatch TensorsOf(const Batch& batch);
// Copies in the device's memory; where the host is the device, the same tensors.
TensorBatch ToDevice(Device& device, const TensorBatch& host);

// Of a contiguous tensor, which outlives it.
TensorView ViewOf(const torch::Tensor& tensor);
// Of memory on the host; lives as long as that.
torch::Tensor TensorOf(const TensorView& view);
absl::StatusOr<HostTensor> HostTensorOf(const torch::Tensor& tensor);

// Where LibTorch's tensors of a device are.
torch::Device TorchDeviceOf(const Device& device);
// Waits until the device has computed what it was given.
void Finish(Device& device);
// A tensor there, and back in host memory; waits. Counted as the device's traffic. Undefined ones stay so.
torch::Tensor ToDevice(Device& device, const torch::Tensor& host);
torch::Tensor ToHost(Device& device, const torch::Tensor& tensor);
// LibTorch's generators, of the device and of the host: a module may draw on either.
void SeedGenerators(const Device& device, uint64_t seed);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSORS_H_
