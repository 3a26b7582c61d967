// The verbs of `penstock`, one file each: argv[0] is the verb, argv[1..] its flags; each returns the exit
// code.
#ifndef PENSTOCK_TOOLS_BASE_VERBS_H_
#define PENSTOCK_TOOLS_BASE_VERBS_H_

#include <ostream>

namespace penstock::tools {

int RunTrain(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunPlan(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
// Needs no model, no state and no LibTorch.
int RunReport(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunInspect(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunVerify(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunExport(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunPack(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunGenerate(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunExportCheckpoint(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunImportCheckpoint(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
int RunSample(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_VERBS_H_
