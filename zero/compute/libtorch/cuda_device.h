// The CUDA device, over LibTorch's CUDA: its tensors are LibTorch's, and so is the stream that computes.
//
// Five streams: copies in, copies out, what several ranks exchange, checksums of what came past host memory,
// and compute, which is LibTorch's default stream, so that every thread's tensors and kernels are in one
// order. The others are non-blocking: nothing on them waits for the default stream unless it is asked to. The
// end of work is marked by events: for each stream a thread waits for the next one and calls its owner's
// callback, so that neither the executor nor the compute thread ever waits for the device. Host memory is the
// arena, registered as portable: NVMe to the arena to the device is two transfers by DMA.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_DEVICE_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "zero/compute/device.h"

namespace penstock::zero {

// Of the CUDA devices that this process sees (all, or those in CUDA_VISIBLE_DEVICES) the one numbered
// `local_rank` (LOCAL_RANK: a rank's number on its host) modulo how many there are: each rank of a host has
// one to itself as long as there are enough, whether its launcher shows it all of them or only its own.
// kFailedPrecondition says what is missing, a LibTorch with CUDA or a device, and the way out.
absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(int local_rank = 0);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_DEVICE_H_
