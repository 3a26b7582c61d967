// A CUDA device for a Compute whose owner computes there with a library of its own (PyTorch): over the driver
// alone, without CUDA's runtime and without LibTorch (kernels/cuda/driver.h).
//
// Its memory is the engine's arena. Tensors are their library's, in the same primary context: the engine
// counts none of them, and plans for those that the model's owner has measured. The order of compute is the
// owner's streams (Device::ComputeOn).
#ifndef PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_DEVICE_H_
#define PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "zero/compute/device.h"

namespace penstock::zero {

// The device of this number, as CUDA_VISIBLE_DEVICES counts them. kFailedPrecondition: no driver, no such
// device, one that the kernels are not for, or a process forked from one that has called this.
// kResourceExhausted, kInternal: the driver's own errors.
absl::StatusOr<std::shared_ptr<Device>> OpenDriverDevice(int number);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_DEVICE_H_
