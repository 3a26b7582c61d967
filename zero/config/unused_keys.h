// Keys that are accepted and change nothing, for reasons that the table of keys cannot know: a line for each.
#ifndef PENSTOCK_ZERO_CONFIG_UNUSED_KEYS_H_
#define PENSTOCK_ZERO_CONFIG_UNUSED_KEYS_H_

#include <string>
#include <string_view>
#include <vector>

#include "zero/config/config.h"

namespace penstock::zero {

// Whoever trains by the configuration.
std::vector<std::string> UnusedKeys(const Config& config);

// Those of a device's memory, where no device holds state. where: "with --device cpu", "from Python".
std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_UNUSED_KEYS_H_
