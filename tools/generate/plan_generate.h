// `penstock plan --generate`: a plan of `penstock generate`, with flags of its own.
#ifndef PENSTOCK_TOOLS_GENERATE_PLAN_GENERATE_H_
#define PENSTOCK_TOOLS_GENERATE_PLAN_GENERATE_H_

#include <ostream>

#include "tools/generate/generate_flags.h"

namespace penstock::tools {

// Whether the arguments of `plan` have --generate.
bool AsksForGeneration(int argc, const char* const* argv);
// `open_device`: as of RunGenerateWith.
int RunPlanGenerate(const OpenGenerateDevice& open_device, int argc, const char* const* argv,
                    std::ostream& out, std::ostream& err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_PLAN_GENERATE_H_
