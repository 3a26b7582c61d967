// What this machine offers to a run: asked of the kernel and tried, not guessed from versions.
#ifndef PENSTOCK_TOOLS_MACHINE_ENV_PROBE_H_
#define PENSTOCK_TOOLS_MACHINE_ENV_PROBE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::tools {

enum class EnvState {
  kOk,
  kLimited,  // there, but it costs something
  kMissing,
};

struct EnvItem {
  std::string section;  // "kernel", "io", "directory", "memory", "cpu", "torch", "cuda"
  std::string name;     // snake_case, unique in its section
  std::string value;    // for people; units said
  EnvState state = EnvState::kOk;
  std::string cost;  // kLimited and kMissing: what is lost, and the way out
};

// Probes the machine and `directory`, where a file of 1 MiB is made, written, read back through each I/O
// backend and removed. kInvalidArgument when the directory does not exist, is none, or cannot be written.
// Takes well under a second where no GPU has to wake up.
absl::StatusOr<std::vector<EnvItem>> ProbeEnvironment(const std::string& directory);

// ---- Parts, exposed for tests.
// ----------------------------------------------------------------------------------------

// The choice in brackets of a sysfs setting: "always [madvise] never" gives "madvise"; "" where there is
// none.
std::string BracketedChoice(std::string_view setting);

// The value of a line "Key:   123 kB" of /proc/meminfo, in bytes (or as it stands, without kB); -1 where it
// is missing.
int64_t MemInfoValue(std::string_view meminfo, std::string_view key);

// The path of the first mapped file whose name contains `part`, from the text of /proc/self/maps; "" if none.
std::string MappedFile(std::string_view maps, std::string_view part);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_ENV_PROBE_H_
