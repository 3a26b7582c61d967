// The words that configurations have for their choices. Internal to run/.
#ifndef PENSTOCK_RUN_CONFIG_NAMES_H_
#define PENSTOCK_RUN_CONFIG_NAMES_H_

#include <array>
#include <span>

#include "run/config.h"
#include "swap/store.h"
#include "zero/config/mode_names.h"

namespace penstock::run {

using zero::Named;
using zero::NamesOf;

inline constexpr auto kOptimizerTypes =
    std::to_array<Named<OptimizerType>>({{OptimizerType::kAdam, "Adam"},
                                         {OptimizerType::kAdamW, "AdamW"},
                                         {OptimizerType::kAdagrad, "Adagrad"},
                                         {OptimizerType::kLion, "Lion"},
                                         {OptimizerType::kSgd, "SGD"},
                                         {OptimizerType::kLamb, "Lamb"}});
inline constexpr auto kSchedulerTypes =
    std::to_array<Named<SchedulerType>>({{SchedulerType::kLrRangeTest, "LRRangeTest"},
                                         {SchedulerType::kOneCycle, "OneCycle"},
                                         {SchedulerType::kWarmupLr, "WarmupLR"},
                                         {SchedulerType::kWarmupDecayLr, "WarmupDecayLR"},
                                         {SchedulerType::kWarmupCosineLr, "WarmupCosineLR"}});
inline constexpr auto kPrefers =
    std::to_array<Named<Prefer>>({{Prefer::kWear, "wear"}, {Prefer::kTime, "time"}});
inline constexpr auto kPlacements =
    std::to_array<Named<ConfigPlacement>>({{ConfigPlacement::kAuto, "auto"},
                                           {ConfigPlacement::kCpu, "cpu"},
                                           {ConfigPlacement::kCuda, "cuda"},
                                           {ConfigPlacement::kConst, "const"}});
inline constexpr auto kSyncs =
    std::to_array<Named<swap::Sync>>({{swap::Sync::kProcess, "process"}, {swap::Sync::kPower, "power"}});
inline constexpr auto kWarmupTypes = std::to_array<Named<zero::WarmupType>>(
    {{zero::WarmupType::kLog, "log"}, {zero::WarmupType::kLinear, "linear"}});

// All choices of the type of the argument, whose value does not matter.
constexpr std::span<const Named<OptimizerType>> NamesOf(OptimizerType) { return kOptimizerTypes; }
constexpr std::span<const Named<SchedulerType>> NamesOf(SchedulerType) { return kSchedulerTypes; }
constexpr std::span<const Named<Prefer>> NamesOf(Prefer) { return kPrefers; }
constexpr std::span<const Named<swap::Sync>> NamesOf(swap::Sync) { return kSyncs; }
constexpr std::span<const Named<ConfigPlacement>> NamesOf(ConfigPlacement) { return kPlacements; }
constexpr std::span<const Named<zero::WarmupType>> NamesOf(zero::WarmupType) { return kWarmupTypes; }

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_CONFIG_NAMES_H_
