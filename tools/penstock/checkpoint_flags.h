// --checkpoint-dir, --checkpoint-every and --checkpoint-keep: whose the directory is, and what stands in it
// already.
#ifndef PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_

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

// A new run replaces no checkpoints unless it is told to.
absl::Status CheckNoCheckpoints(const TrainOptions& flags, const TrainSettings& settings);

// The runs that --overwrite replaces, as far as they can be read, into settings->replaces.
void NoteReplaced(TrainSettings* settings);

// Going on from the one checkpoint that --checkpoint-dir names: new ones go beside it.
absl::Status KeepBeside(const std::string& checkpoint, TrainSettings* settings);

// What cannot be looked at is none.
bool IsDirectory(const std::string& path);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_CHECKPOINT_FLAGS_H_
