// The words for zero/config/modes.h. For what reads and writes them: Name and run/.
#ifndef PENSTOCK_ZERO_CONFIG_MODE_NAMES_H_
#define PENSTOCK_ZERO_CONFIG_MODE_NAMES_H_

#include <array>
#include <span>
#include <string_view>

#include "zero/config/modes.h"

namespace penstock::zero {

template <typename Enum>
struct Named {
  Enum value;
  std::string_view name;
};

inline constexpr auto kOffloadDevices = std::to_array<Named<OffloadDevice>>(
    {{OffloadDevice::kNone, "none"}, {OffloadDevice::kCpu, "cpu"}, {OffloadDevice::kNvme, "nvme"}});
inline constexpr auto kDurabilities =
    std::to_array<Named<Durability>>({{Durability::kStep, "step"}, {Durability::kCheckpoint, "checkpoint"}});
inline constexpr auto kUpdateOrders =
    std::to_array<Named<UpdateOrder>>({{UpdateOrder::kAuto, "auto"},
                                       {UpdateOrder::kInNextForward, "next_forward"},
                                       {UpdateOrder::kInBackward, "in_backward"}});
inline constexpr auto kMissingGradients = std::to_array<Named<MissingGradients>>(
    {{MissingGradients::kZeros, "zeros"}, {MissingGradients::kSkip, "skip"}});

inline constexpr auto kSavedActivations =
    std::to_array<Named<SavedActivations>>({{SavedActivations::kAuto, "auto"},
                                            {SavedActivations::kMemory, "memory"},
                                            {SavedActivations::kHost, "host"},
                                            {SavedActivations::kDrive, "drive"}});

// All choices of the type of the argument, whose value does not matter.
constexpr std::span<const Named<OffloadDevice>> NamesOf(OffloadDevice) { return kOffloadDevices; }
constexpr std::span<const Named<Durability>> NamesOf(Durability) { return kDurabilities; }
constexpr std::span<const Named<UpdateOrder>> NamesOf(UpdateOrder) { return kUpdateOrders; }
constexpr std::span<const Named<MissingGradients>> NamesOf(MissingGradients) { return kMissingGradients; }
constexpr std::span<const Named<SavedActivations>> NamesOf(SavedActivations) { return kSavedActivations; }

template <typename Enum>
constexpr std::string_view NameIn(std::span<const Named<Enum>> names, Enum value) {
  for (const auto& [of, name] : names) {
    if (of == value) return name;
  }
  return "?";
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_MODE_NAMES_H_
