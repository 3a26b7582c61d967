// A plan as one page: where everything would live, what a step would take and why.
#ifndef PENSTOCK_TOOLS_PAGES_PLAN_PAGE_H_
#define PENSTOCK_TOOLS_PAGES_PLAN_PAGE_H_

#include <nlohmann/json.hpp>
#include <string>

#include "tools/pages/trace_view.h"

namespace penstock::tools {

// The HTML of a plan. `plan`: what `penstock plan --json` prints; what is missing in it is left out. `step`:
// of the simulated program.
std::string PlanPage(const std::string& model, const nlohmann::json& plan, const TraceView& step);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_PLAN_PAGE_H_
