// NVIDIA's cuFile (GPUDirect Storage), loaded when it is asked for: nothing links it, and where it is missing
// Load says so.
//
// cuFile transfers past host memory where driver, file system and drive allow it, and otherwise, unless it is
// told not to, through buffers of its own in host memory (its compatibility mode), without saying which.
#ifndef PENSTOCK_AIO_CUFILE_H_
#define PENSTOCK_AIO_CUFILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device_transfers.h"

namespace penstock::aio {

class CuFile final : public DeviceTransfers {
 public:
  // `use_device` is called before every transfer, on its thread: CUDA's device is chosen thread by thread.
  // kFailedPrecondition: no libcufile here, one that lacks a function, or a driver that does not open.
  // `only_past_host`: what would go through host memory fails (CUFILE_ALLOW_COMPAT_MODE=false, where the
  // environment does not say otherwise; cuFile reads it when its driver opens, so the first to load it
  // decides).
  static absl::StatusOr<std::shared_ptr<CuFile>> Load(std::function<absl::Status()> use_device,
                                                      bool only_past_host);
  ~CuFile() override;

  // Whether there is a library to load.
  static bool IsInstalled();

  std::string_view name() const override { return "cuFile"; }
  void Cover(std::byte* base, uint64_t bytes) override;  // registered with cuFile
  int64_t Transfer(Op op, const File& file, uint64_t offset, void* data, uint64_t bytes,
                   std::string* why) override;
  void Forget(int fd) override;

 private:
  struct Functions;
  CuFile();
  void* HandleOf(const File& file, std::string* why);

  const std::unique_ptr<Functions> call_;
  std::function<absl::Status()> use_device_;
  bool open_ = false;
  bool registered_ = false;
  std::mutex mutex_;
  std::map<int, void*> handles_;  // by descriptor
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_CUFILE_H_
