// --checkpoint-dir, --checkpoint-every and --checkpoint-keep: whose the directory is, and what stands in it
// already.
#ifndef PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/engine/engine_options.h"

namespace penstock::tools {

// Where a run without a drive keeps its checkpoints, unless told.
std::string DefaultCheckpoints(const std::vector<std::string>& state_dirs);

absl::Status ResolveCheckpoints(const TrainOptions& flags, TrainSettings* settings);

// Of --resume, before the directory of checkpoints is taken, which makes it: that a run without a drive was
// in the place that the flags name. One that was killed before it kept anything has left that directory.
absl::Status CheckWasThere(const TrainOptions& flags, const zero::EngineOptions& engine);

// The directory of checkpoints becomes this run's before it is looked at. All ranks wait for rank 0, which
// has it for all.
absl::Status TakeCheckpoints(TrainSettings* settings);

// A new run replaces no checkpoints without --overwrite.
absl::Status CheckNoCheckpoints(const TrainOptions& flags, const TrainSettings& settings);

// What --overwrite replaces: what existed when this process was started, and nothing that another one has
// committed or kept since. Must be called before any lock is waited for. The ids of the runs, as far as they
// can be read, go into settings->replaces.
absl::Status SeeReplaced(TrainSettings* settings);
// kFailedPrecondition: something else is there now.
absl::Status CheckReplaced(const TrainSettings& settings);

// Going on from the one checkpoint that --checkpoint-dir names: new ones go beside it.
void KeepBeside(const std::string& checkpoint, TrainSettings* settings);

// Of a run that goes on from `step` in `from`: kFailedPrecondition where it would keep checkpoints beside
// newer ones, whose places they would take, and from which a later --resume would go on.
absl::Status CheckNoneNewer(const std::string& from, int64_t step, const TrainSettings& settings);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_
