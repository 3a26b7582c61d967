// Choices of a training that configurations and records have by name.
#ifndef PENSTOCK_ZERO_CONFIG_MODES_H_
#define PENSTOCK_ZERO_CONFIG_MODES_H_

#include <string_view>

#include "tiering/plan/plan.h"

namespace penstock::zero {

// Where weights and optimizer state live: on the device that computes, in host memory, or on drives.
enum class OffloadDevice { kNone, kCpu, kNvme };
// What a crash may cost: nothing after a step has returned, or the steps since the last checkpoint.
enum class Durability { kStep, kCheckpoint };
// What an update does to a parameter that no gradient came to in its step: updates it as by zeros, or leaves
// it.
enum class MissingGradients { kZeros, kSkip };
using tiering::Prefer;
using tiering::SavedActivations;
using tiering::UpdateOrder;

// The names that the JSON uses: "nvme", "step", "next_forward".
std::string_view Name(OffloadDevice value);
std::string_view Name(Durability value);
std::string_view Name(UpdateOrder value);
std::string_view Name(MissingGradients value);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_MODES_H_
