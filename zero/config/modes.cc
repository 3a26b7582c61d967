#include "zero/config/modes.h"

namespace penstock::zero {

std::string_view Name(OffloadDevice value) {
  switch (value) {
    case OffloadDevice::kNone:
      return "none";
    case OffloadDevice::kCpu:
      return "cpu";
    case OffloadDevice::kNvme:
      return "nvme";
  }
  return "?";
}

std::string_view Name(Durability value) { return value == Durability::kStep ? "step" : "checkpoint"; }

std::string_view Name(SyncMode value) { return value == SyncMode::kProcess ? "process" : "power"; }

std::string_view Name(UpdateOrder value) {
  switch (value) {
    case UpdateOrder::kAuto:
      return "auto";
    case UpdateOrder::kInNextForward:
      return "next_forward";
    case UpdateOrder::kInBackward:
      return "in_backward";
  }
  return "?";
}

}  // namespace penstock::zero
