// Pictures of one step of a trace.
#ifndef PENSTOCK_TOOLS_PAGES_STEP_CHARTS_H_
#define PENSTOCK_TOOLS_PAGES_STEP_CHARTS_H_

#include <optional>
#include <string>

#include "tools/pages/trace_view.h"

namespace penstock::tools {

// The lanes of the step, one under the other, with what compute waited for; `whose` names the run.
std::string DrawLanes(const TraceView& view, const std::string& whose);

// What the slots of a tier held over the step, by kind. Empty where the trace says nothing of the tier.
// `bound`: of the slots together, where that is known.
std::string DrawMemory(const TraceView& view, const std::string& tier, const std::string& whose,
                       std::optional<double> bound, const std::string& bound_name);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_STEP_CHARTS_H_
