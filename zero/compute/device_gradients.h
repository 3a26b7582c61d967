// Gradients that a driven model's owner has computed on a CUDA device, in host memory, where the engine sums
// them.
//
// The CUDA runtime is looked up when the first ones come, the one that the process has before any other
// (libcudart.so): nothing here links it.
#ifndef PENSTOCK_ZERO_COMPUTE_DEVICE_GRADIENTS_H_
#define PENSTOCK_ZERO_COMPUTE_DEVICE_GRADIENTS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "zero/compute/compute.h"

namespace penstock::zero {

// A queue of a CUDA device.
struct DeviceStream {
  int device = 0;          // its number in this process
  void* stream = nullptr;  // a cudaStream_t; null: the default one
};

// One use at a time, from any thread.
class DeviceGradients {
 public:
  DeviceGradients();
  ~DeviceGradients();  // after the last gradients that it gave were read
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  // Those that lie on the device (TensorView::on_device) are copied behind all that has been enqueued on
  // `from`, which it waits for; then their views are of host memory of this object's, until the next call;
  // after an error they are nothing. It has as much as the largest call wanted, from the counting allocator
  // (zero/memory/tensor_memory.h), pinned where the runtime can. kFailedPrecondition: no CUDA runtime, or one
  // without what is needed. kResourceExhausted: no memory. kUnavailable: the device's own error.
  absl::Status ToHost(const DeviceStream& from, std::vector<Gradient>* gradients);

 private:
  struct Runtime;
  absl::Status Load();
  absl::Status Reserve(int64_t bytes);
  // On the device that is current, `bytes` in all.
  absl::Status Copy(const DeviceStream& from, int64_t bytes, std::vector<Gradient>* gradients);
  absl::Status Check(int error, const char* call, int device, int64_t bytes) const;

  std::unique_ptr<Runtime> runtime_;  // null: not looked up yet
  HostBuffer memory_;
  bool pinned_ = false;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_DEVICE_GRADIENTS_H_
