// Values that are given beside a configuration, and win over it: by flag, or by keyword of
// penstock.initialize.
#ifndef PENSTOCK_RUN_GIVEN_VALUES_H_
#define PENSTOCK_RUN_GIVEN_VALUES_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "run/config.h"

namespace penstock::run {

// By flag ("--host-memory") or keyword ("host_memory"). Null: it was not given. A number may be infinite.
using GivenValues = std::map<std::string, nlohmann::ordered_json>;

// Puts the values of settings that configurations have into *config. The values of all others are the
// caller's. An offload device is that of both offload blocks.
//
// kInvalidArgument, one line that begins with the spelling: there is no such flag or keyword, or the value is
// of a wrong type or out of bounds.
absl::Status TakeGiven(const GivenValues& values, Config* config);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_GIVEN_VALUES_H_
