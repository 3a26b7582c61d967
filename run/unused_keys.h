// Keys that are accepted and change nothing, because of where the run trains: a line for each.
#ifndef PENSTOCK_RUN_UNUSED_KEYS_H_
#define PENSTOCK_RUN_UNUSED_KEYS_H_

#include <string>
#include <string_view>
#include <vector>

#include "run/config.h"
#include "run/given_values.h"

namespace penstock::run {

// Those of a device's memory, where the engine uses none. where: "with --device cpu", "from Python with
// device='cpu'". Of what is given by a flag that is the name.
std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where,
                                          const GivenValues& flags = {});

// Those of what ranks exchange, where one process trains; those of a drive, where there is none; and a plan
// that is made again, where there can be none.
std::vector<std::string> UnusedPlaceKeys(const Config& config, int world, OffloadDevice offload,
                                         const GivenValues& flags = {});

// All that have no effect from Python, whatever its device.
std::vector<std::string> KeysUnusedFromPython(const Config& config);

// All that have no effect on the command line, whatever its device.
std::vector<std::string> KeysUnusedOnCommandLine(const Config& config);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_UNUSED_KEYS_H_
