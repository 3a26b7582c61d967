// A pass on a device with memory of its own, with LibTorch.
//
// All but tables of rows is there: vectors, units as a DeviceStream brings them, what a layer computes. Keys
// and values are there too, or are copied there and back for each layer. Where LibTorch's libraries multiply,
// a pass has a multiple of kDeviceRows rows, some of which are nobody's: how those libraries sum a row
// depends on how many there are.
#ifndef PENSTOCK_GENERATE_DEVICE_PASS_H_
#define PENSTOCK_GENERATE_DEVICE_PASS_H_

#include <memory>

#include "generate/pass.h"

namespace penstock::generate {

// From now on LibTorch's tensors in host memory are counted (zero/compute/libtorch/tensor_allocator.h).
std::shared_ptr<DeviceCompute> LibTorchCompute();

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_DEVICE_PASS_H_
