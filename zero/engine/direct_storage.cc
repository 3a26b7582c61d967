#include "zero/engine/direct_storage.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/file.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "swap/aligned_buffer.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {
namespace {

constexpr int64_t kProbeBytes = 1 << 20;  // as much as a run asks for at once

// A file that never has a name, on the file system of `directory`, to `there` and checked.
absl::Status Try(const std::string& directory, uint64_t seed, Device& device, aio::DeviceTransfers& transfers,
                 std::byte* there) {
  aio::FileOptions file_options;
  file_options.path = aio::NearestExisting(directory) + "/gds-probe";
  file_options.nameless = true;
  file_options.size = static_cast<uint64_t>(kProbeBytes);
  ASSIGN_OR_RETURN(std::unique_ptr<aio::File> file, aio::File::Open(file_options));
  const swap::AlignedBuffer here(static_cast<uint64_t>(kProbeBytes));
  std::mt19937_64 random(seed);  // what another directory has left there is not taken for this one's
  for (size_t i = 0; i < here.bytes(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(here.data() + i, &word, sizeof(word));
  }
  const auto fails = [&](const char* op, int64_t result) {
    return aio::MakeIoError({.op = op,
                             .path = file->path(),
                             .bytes = static_cast<uint64_t>(kProbeBytes),
                             .error = result < 0 ? static_cast<int>(-result) : EIO});
  };
  if (const ssize_t written = pwrite(file->fd(), here.data(), here.bytes(), 0); written != kProbeBytes) {
    return fails("write", written < 0 ? -errno : written);
  }
  RETURN_IF_ERROR(file->SyncData());
  std::string why;
  const int64_t moved = transfers.Transfer(aio::Op::kRead, *file, 0, there, here.bytes(), &why);
  transfers.Forget(file->fd());
  if (!why.empty()) return absl::FailedPreconditionError(why);
  if (moved != kProbeBytes) return fails("read to the device", moved);
  ASSIGN_OR_RETURN(const uint64_t checksum, device.Checksum(there, here.bytes(), seed));
  if (checksum == kernels::Checksum(here.data(), here.bytes(), seed)) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("what was written beside ", directory, " is not what came to the device"));
}

absl::Status TryAll(const EngineOptions& options, aio::DeviceTransfers& transfers) {
  Device& device = *options.device;
  if (options.storage.state_dirs.empty())
    return absl::FailedPreconditionError("no state directory to try it beside");
  ASSIGN_OR_RETURN(std::byte * there, device.AllocateArena(kProbeBytes));
  uint64_t seed = 0;
  for (const std::string& directory : options.storage.state_dirs) {
    RETURN_IF_ERROR(Try(directory, ++seed, device, transfers, there));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DirectStorage> OpenDirectStorage(const EngineOptions& options,
                                                absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> opened,
                                                bool gathers_by_host) {
  DirectStorage storage;
  if (!options.device->has_own_memory()) return storage;
  if (options.storage.offload != OffloadDevice::kNvme) {
    if (options.storage.gds) storage.how = "no GPUDirect Storage: weights are in memory";
    return storage;
  }
  const std::string by_host = "weights go from the drive to the device by way of pinned host memory";
  if (options.frozen != nullptr) {
    storage.how = absl::StrCat(by_host, ", where what is frozen becomes weights");
    return storage;
  }
  if (gathers_by_host) {
    storage.how = absl::StrCat(by_host, ", where those of all ranks are gathered");
    return storage;
  }
  if (opened.ok()) {
    if (absl::Status tried = TryAll(options, **opened); !tried.ok()) opened = tried;
  }
  std::string why = std::string(opened.status().message());
  if (options.comm != nullptr) {
    ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                     AllNumbers(*options.comm, "direct storage", opened.ok() ? 1 : 0));
    const auto without = std::find(all.begin(), all.end(), 0);
    if (opened.ok() && without != all.end()) {
      why = absl::StrCat("rank ", without - all.begin(), " has none");
      opened = absl::FailedPreconditionError(why);
    }
  }
  if (!opened.ok()) {
    storage.how = options.storage.gds ? absl::StrCat(by_host, "; no GPUDirect Storage: ", why) : by_host;
    return storage;
  }
  storage.transfers = *std::move(opened);
  storage.how = absl::StrCat(
      "weights that only the device needs go straight to it from the drive "
      "(GPUDirect Storage, ",
      std::string(storage.transfers->name()), ")");
  return storage;
}

}  // namespace penstock::zero
