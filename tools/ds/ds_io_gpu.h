// Memory on a CUDA device as the other end of a transfer, for `ds_io --gpu` and `ds_nvme_tune --gpu`: what
// DeepSpeed's tools measure under these flags.
//
//   bounce       read: file -> pinned host memory, all of it, then host -> device; write: the other way round
//   slow bounce  the same, with the host memory pinned and let go again within each operation
//   gds          cuFileRead and cuFileWrite between file and device, in blocks, from as many threads as asked
//
// CUDA's runtime and cuFile are loaded when this is used (dlopen), so that nothing links them: where a
// library or a device is missing, Make says which in one line. CUDA does not survive a fork: make it in the
// process that uses it.
#ifndef PENSTOCK_TOOLS_DS_DS_IO_GPU_H_
#define PENSTOCK_TOOLS_DS_DS_IO_GPU_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/cufile.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "tools/ds/ds_io_transfer.h"

namespace penstock::tools {

enum class GpuPath : uint8_t { kBounce, kSlowBounce, kGds };

class GpuBuffer {
 public:
  // As many bytes of memory on device number `device` as `host` has; `host` is pinned for copies (gds: used
  // by CopyToHost and CopyToDevice only) and outlives this. kFailedPrecondition: no such library, device or
  // function here. kResourceExhausted: no memory there.
  static absl::StatusOr<std::unique_ptr<GpuBuffer>> Make(int device, GpuPath path, std::span<std::byte> host);
  ~GpuBuffer();
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;

  // One operation: the whole file of `shape` into device memory, or from there. `transfer` is of that shape
  // and on `host`.
  absl::Status Run(Transfer& transfer, const TransferShape& shape, uint64_t threads, aio::Engine& engine,
                   aio::File& file, bool read);
  // The first `bytes`, waited for.
  absl::Status CopyToHost(uint64_t bytes);
  absl::Status CopyToDevice(uint64_t bytes);

 private:
  struct Cuda;  // the runtime's functions
  GpuBuffer();
  absl::Status Check(int error, const char* call) const;
  absl::Status Pin();
  void Unpin();
  absl::Status Copy(uint64_t bytes, bool to_device);
  absl::Status RunGds(const TransferShape& shape, uint64_t threads, aio::File& file, bool read);

  std::unique_ptr<Cuda> cuda_;
  std::shared_ptr<aio::CuFile> cufile_;  // gds only
  GpuPath path_ = GpuPath::kBounce;
  int device_ = 0;
  std::span<std::byte> host_;
  bool pinned_ = false;
  void* memory_ = nullptr;  // on the device
  void* stream_ = nullptr;
};

// The number of a device label ("0", "cuda:1"); kInvalidArgument for any other.
absl::StatusOr<int> GpuNumber(const std::string& label);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_DS_DS_IO_GPU_H_
