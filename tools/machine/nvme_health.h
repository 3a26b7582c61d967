// What NVMe drives say of their own wear: the SMART log page of their controllers.
#ifndef PENSTOCK_TOOLS_MACHINE_NVME_HEALTH_H_
#define PENSTOCK_TOOLS_MACHINE_NVME_HEALTH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::tools {

struct NvmeHealth {
  double written_bytes = 0, read_bytes = 0;  // by hosts, since it was made
  int percent_used = 0;                      // of what its maker expects it to last; may be above 100
  int percent_spare = 0;                     // of its spare blocks
  uint64_t media_errors = 0;
};

// "12.3 TB written, 3% of its life used, 100% of its spare left".
std::string WearText(const NvmeHealth& health);

// Log page 0x02 of NVMe: 512 bytes, little-endian, counts of 128 bits in units of 512,000 bytes. `log` has at
// least as many.
NvmeHealth ParseSmartLog(std::span<const std::byte> log);

// Of a controller, "/dev/nvme0", by an admin command that reads and changes nothing. kPermissionDenied: it
// takes root; kUnavailable: the drive, or what plays one, does not answer it.
absl::StatusOr<NvmeHealth> ReadNvmeHealth(const std::string& controller);

// "/dev/nvme0", ...: those of this machine.
std::vector<std::string> NvmeControllers();

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_NVME_HEALTH_H_
