// A plan for people and as JSON: where everything lives, what moves, what the step will take, what bounds it,
// and what else would change that.
#ifndef PENSTOCK_TOOLS_PAGES_PLAN_TEXT_H_
#define PENSTOCK_TOOLS_PAGES_PLAN_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tiering/advice/what_if.h"
#include "tiering/simulate/simulate.h"
#include "tools/machine/machine_probe.h"
#include "zero/engine/engine.h"
#include "zero/memory/host_memory.h"

namespace penstock::tools {

int64_t FreeBytes(const std::string& directory);  // of the file system that it is or will be on; -1: unknown

// Everything that the text of one plan says.
struct PlanFacts {
  const zero::EnginePlan& plan;
  const zero::EngineOptions& options;
  const Machine& machine;
  const tiering::Prediction& prediction;
  double rated_bytes_written = 600e12;  // of one drive: its TBW rating
};

// What the whole process will take beside what there is for it: a line. kFailedPrecondition: more than the
// control group above it will ever give, which would kill it; says how much would do.
absl::StatusOr<std::string> ProcessMemoryText(const zero::EnginePlan& plan,
                                              const zero::EngineOptions& options,
                                              const zero::HostMemory& memory);

// The plan in one line.
std::string PlanLine(const zero::EnginePlan& plan, const tiering::Prediction& prediction);
// What a run prints when it starts.
std::string PlanText(const PlanFacts& facts);
// The rest of `penstock plan`: tiers by kind, lanes, why, wear, what-ifs.
std::string PlanDetails(const PlanFacts& facts, const std::vector<tiering::WhatIf>& what_ifs);
nlohmann::json PlanJson(const PlanFacts& facts, const std::vector<tiering::WhatIf>& what_ifs);

// The line of a run that has seen its first steps: "from the first steps: ...".
std::string CalibratedText(const tiering::Prediction& prediction, const tiering::MachineModel& machine,
                           bool drive_seen);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_PLAN_TEXT_H_
