// A plan for people and as JSON: where everything lives, what moves, what the step will take and what bounds
// it.
#ifndef PENSTOCK_TOOLS_PLAN_TEXT_H_
#define PENSTOCK_TOOLS_PLAN_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "aio/profile.h"
#include "tiering/simulate.h"
#include "zero/engine.h"

namespace penstock::tools {

// The drives of the state directories together, by a short probe beside them (their nearest existing parents)
// that takes no more memory than `memory_bytes` (0: no bound). Where nothing can be measured, an assumed
// drive and why.
struct MeasuredDrives {
  aio::DeviceProfile profile;
  std::string note;  // empty: measured
};
MeasuredDrives MeasureDrives(const std::vector<std::string>& directories, int64_t memory_bytes,
                             int64_t file_bytes);

// The step of this plan on this machine.
absl::StatusOr<tiering::Prediction> Predict(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                                            const aio::DeviceProfile& drives);

int64_t FreeBytes(const std::string& directory);  // of the file system that it is or will be on; -1: unknown

std::string PlanText(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                     const tiering::Prediction& prediction, const MeasuredDrives& drives);
nlohmann::json PlanJson(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                        const tiering::Prediction& prediction, const MeasuredDrives& drives);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PLAN_TEXT_H_
