// GPUDirect Storage for a run: whether weights may come from the drive to the device past host memory.
#ifndef PENSTOCK_ZERO_ENGINE_DIRECT_STORAGE_H_
#define PENSTOCK_ZERO_ENGINE_DIRECT_STORAGE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "aio/device_transfers.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

struct DirectStorage {
  std::shared_ptr<aio::DeviceTransfers> transfers;  // null: by way of host memory
  std::string how;                                  // a line about it; empty where no device is apart
};

// `opened`: what the device has (Device::OpenStorage), or why it is not used. Where it has it, a file without
// a name is written beside each state directory, read to the device and checked there: what fails is no error
// but the reason for the other way, which is always there. Before the device's arena is made. Over several
// ranks all go the same way, and all call this. `gathers_by_host`: weights are needed in host memory, where
// those of several ranks come together. Errors: another rank was lost.
absl::StatusOr<DirectStorage> OpenDirectStorage(const EngineOptions& options,
                                                absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> opened,
                                                bool gathers_by_host);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_DIRECT_STORAGE_H_
