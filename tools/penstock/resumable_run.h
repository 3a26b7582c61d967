// What `--resume` goes on from: the state, the newest checkpoint, or nothing yet.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RESUMABLE_RUN_H_
#define PENSTOCK_TOOLS_PENSTOCK_RESUMABLE_RUN_H_

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/config.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// For a start that does not resume: an error if the directories hold a run, before anything is measured.
absl::Status CheckFree(const std::vector<std::string>& dirs);

// Finds what --resume goes on from; null if there is nothing yet. Where training `starts` it may make a run
// of a checkpoint; where it does not, *restores says that it would.
absl::StatusOr<nlohmann::json> FindResumable(const TrainOptions& flags, const run::Config& config,
                                             bool starts, bool* restores, TrainSettings* settings);

// With --resume-ranks any, before FindResumable: makes the run in `directories`, which are those of all
// ranks, one of as many ranks as there are, where it was made by others. Where training does not start,
// *restores says that it would, and the record is returned; else null. `would_start`: whether it would, asked
// before the state is made anew: a start that is refused leaves the run as it is.
absl::StatusOr<nlohmann::json> TakeOtherRanks(const run::Config& config,
                                              const std::vector<std::string>& directories, bool starts,
                                              const std::function<absl::Status()>& would_start,
                                              bool* restores, TrainSettings* settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RESUMABLE_RUN_H_
