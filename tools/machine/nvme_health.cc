#include "tools/machine/nvme_health.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace penstock::tools {
namespace {

constexpr size_t kLogBytes = 512;
constexpr double kUnitBytes = 512'000;

uint64_t Little64(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (size_t i = 8; i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

double Units(std::span<const std::byte> bytes) {
  const auto low = static_cast<double>(Little64(bytes)),
             high = static_cast<double>(Little64(bytes.subspan(8)));
  return (low + std::ldexp(high, 64)) * kUnitBytes;
}

}  // namespace

NvmeHealth ParseSmartLog(std::span<const std::byte> log) {
  NvmeHealth health;
  health.percent_spare = std::to_integer<int>(log[3]);
  health.percent_used = std::to_integer<int>(log[5]);
  health.read_bytes = Units(log.subspan(32));
  health.written_bytes = Units(log.subspan(48));
  health.media_errors = Little64(log.subspan(160));
  return health;
}

std::string WearText(const NvmeHealth& health) {
  std::string text = absl::StrFormat("%.4g TB written, %d%% of its life used, %d%% of its spare left",
                                     health.written_bytes * 1e-12, health.percent_used, health.percent_spare);
  if (health.media_errors > 0) absl::StrAppend(&text, ", ", health.media_errors, " media errors");
  return text;
}

absl::StatusOr<NvmeHealth> ReadNvmeHealth(const std::string& controller) {
  const int fd = open(controller.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat(controller, ": open"));
  std::array<std::byte, kLogBytes> log{};
  constexpr uint8_t kGetLogPage = 0x02, kSmartLog = 0x02;
  nvme_admin_cmd command{};
  command.opcode = kGetLogPage;
  command.nsid = 0xffffffff;  // of the whole controller
  command.addr = reinterpret_cast<uint64_t>(log.data());
  command.data_len = kLogBytes;
  command.cdw10 = kSmartLog | (kLogBytes / 4 - 1) << 16;
  const int result = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &command);
  const int error = errno;
  close(fd);
  if (result < 0) return absl::ErrnoToStatus(error, absl::StrCat(controller, ": SMART log"));
  if (result > 0)
    return absl::UnavailableError(absl::StrCat(controller, ": SMART log: status ", result, " of the drive"));
  return ParseSmartLog(log);
}

std::vector<std::string> NvmeControllers() {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator it("/sys/class/nvme", error), end; !error && it != end;
       it.increment(error))
    paths.push_back("/dev/" + it->path().filename().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace penstock::tools
