// The id of a run: what tells its log, its monitors and its record from those of every other run.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RUN_ID_H_
#define PENSTOCK_TOOLS_PENSTOCK_RUN_ID_H_

#include <string>

#include "absl/status/statusor.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

struct RunId {
  std::string id;
  bool recorded = false;  // the run has had it; else it is from before there were ids, or new
};

// As recorded, as the log of --log has it, or a new one; the same on all ranks, which all call this. Becomes
// part of the record that `settings` will write.
absl::StatusOr<RunId> IdentifyRun(const TrainOptions& flags, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RUN_ID_H_
