// Transfers between files and the memory of a device that do not pass through host memory (GPUDirect
// Storage).
//
//   EngineOptions options;
//   options.device_transfers = transfers;   // from then on a read's memory may be the device's
//
// The engine treats such a transfer as any other: the same queue, caps, priorities, retries and statistics.
// What it cannot do for it is to bring ragged offsets, lengths and addresses, or many short segments, into
// shape: those are refused (EINVAL).
//
// Threads: everything from any, at once. Ownership: shared with the engine that uses it, which outlives its
// use of any file.
#ifndef PENSTOCK_AIO_DEVICE_TRANSFERS_H_
#define PENSTOCK_AIO_DEVICE_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "aio/file.h"
#include "aio/request.h"

namespace penstock::aio {

class DeviceTransfers {
 public:
  DeviceTransfers() = default;
  virtual ~DeviceTransfers() = default;
  DeviceTransfers(const DeviceTransfers&) = delete;
  DeviceTransfers& operator=(const DeviceTransfers&) = delete;

  virtual std::string_view name() const = 0;  // "cuFile"
  // The device's memory that transfers may have, in the place of the former; null: none. While nothing is in
  // flight.
  virtual void Cover(std::byte* base, uint64_t bytes) {
    base_ = base;
    bytes_ = bytes;
  }
  // All of it is that memory.
  bool Has(const void* data, uint64_t bytes) const {
    const auto at = reinterpret_cast<uintptr_t>(data);
    const auto base = reinterpret_cast<uintptr_t>(base_);
    return base_ != nullptr && at >= base && bytes <= bytes_ && at - base <= bytes_ - bytes;
  }
  // A read or a write; waits for it. Bytes moved, or -errno; `why` gets what an errno does not tell.
  virtual int64_t Transfer(Op op, const File& file, uint64_t offset, void* data, uint64_t bytes,
                           std::string* why) = 0;
  // What is kept about an open file is let go: before it is closed.
  virtual void Forget(int /*fd*/) {}

 protected:
  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_DEVICE_TRANSFERS_H_
