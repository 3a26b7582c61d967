// When this process was started: what other processes did later is news to it.
#ifndef PENSTOCK_TOOLS_BASE_PROCESS_START_H_
#define PENSTOCK_TOOLS_BASE_PROCESS_START_H_

#include <cstdint>
#include <optional>

namespace penstock::tools {

// Returns when this process was started, in nanoseconds since the epoch, rounded up to the kernel's tick (10
// ms). Empty: the kernel does not say.
std::optional<int64_t> ProcessStartNs();

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_PROCESS_START_H_
