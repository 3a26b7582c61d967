#include "tools/penstock/checkpoint_flags.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_lock.h"
#include "tools/base/output_path.h"
#include "tools/penstock/flag_check.h"
#include "tools/penstock/ranks.h"
#include "tools/penstock/run_record.h"
#include "tools/penstock/state_reader.h"
#include "zero/config/json_field.h"
#include "zero/ranks/agree.h"

namespace penstock::tools {
namespace {

// A path that names one checkpoint, not a directory of them.
bool IsOneCheckpoint(const std::string& path) { return swap::FindCheckpoint(path).value_or("") == path; }

}  // namespace

std::string DefaultCheckpoints(const std::vector<std::string>& state_dirs) {
  return absl::StrCat(state_dirs.empty() ? kDefaultStateDir : state_dirs.front(), "/", kCheckpointsBeside);
}

absl::Status ResolveCheckpoints(const TrainOptions& flags, TrainSettings* settings) {
  zero::CheckpointSchedule& checkpoints = settings->engine.storage.checkpoints;
  checkpoints.parent = flags.checkpoint_dir.value_or("");
  if (settings->engine.storage.offload != zero::OffloadDevice::kNvme) {
    // Nothing else outlives the process.
    checkpoints.at_end = true;
    if (checkpoints.parent.empty()) checkpoints.parent = DefaultCheckpoints(flags.state_dirs);
  }
  if (flags.checkpoint_keep.has_value()) {
    if (!flags.checkpoint_every.has_value()) return WrongFlag("--checkpoint-keep needs --checkpoint-every N");
    checkpoints.keep = *flags.checkpoint_keep;
    RETURN_IF_ERROR(CheckFlag<int64_t>("--checkpoint-keep", checkpoints.keep, 1, int64_t{1} << 31));
  }
  if (flags.checkpoint_every.has_value()) {
    checkpoints.every = *flags.checkpoint_every;
    if (checkpoints.parent.empty()) return WrongFlag("--checkpoint-every needs --checkpoint-dir DIR");
    RETURN_IF_ERROR(CheckFlag<int64_t>("--checkpoint-every", checkpoints.every, 1, int64_t{1} << 40));
  }
  for (const std::string& directory : flags.state_dirs) {
    std::error_code error;
    if (checkpoints.any() && std::filesystem::equivalent(directory, checkpoints.parent, error)) {
      return WrongFlag(absl::StrCat("--checkpoint-dir ", checkpoints.parent,
                                    " is the state directory: give checkpoints one of their own"));
    }
  }
  return absl::OkStatus();
}

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

absl::Status CheckWasThere(const TrainOptions& flags, const zero::EngineOptions& engine) {
  const std::string& checkpoints = engine.storage.checkpoints.parent;
  if (engine.storage.offload == zero::OffloadDevice::kNvme || swap::FindCheckpoint(checkpoints).ok())
    return absl::OkStatus();
  if (flags.state_dirs.empty()) {
    if (flags.checkpoint_dir.has_value() || IsDirectory(checkpoints)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("--resume with --offload none or cpu goes on from a checkpoint, and ", checkpoints,
                     " holds none: say where with --checkpoint-dir"));
  }
  if (IsDirectory(DefaultCheckpoints(flags.state_dirs))) return absl::OkStatus();
  const absl::Status found = FindRun(flags.state_dirs).status();
  return absl::IsFailedPrecondition(found) ? found : absl::OkStatus();
}

absl::Status TakeCheckpoints(TrainSettings* settings) {
  zero::CheckpointSchedule& checkpoints = settings->engine.storage.checkpoints;
  if (!checkpoints.any()) return absl::OkStatus();
  absl::Status taken;
  if (settings->engine.rank() == 0) {
    const bool one = IsOneCheckpoint(checkpoints.parent);
    auto lock = swap::CheckpointLock::Take(one ? ParentOf(checkpoints.parent) : checkpoints.parent);
    taken = lock.status();
    if (lock.ok()) checkpoints.lock = *std::move(lock);
  }
  if (settings->engine.comm == nullptr) return taken;
  return zero::AgreeOnStatus(*settings->engine.comm, zero::Channel::kSetup, taken);
}

absl::Status CheckNoCheckpoints(const TrainOptions& flags, const TrainSettings& settings) {
  const zero::CheckpointSchedule& checkpoints = settings.engine.storage.checkpoints;
  if (!checkpoints.any() || flags.resume) return absl::OkStatus();
  if (IsOneCheckpoint(checkpoints.parent)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--checkpoint-dir ", checkpoints.parent,
                     " is a checkpoint: go on from it (--resume), or give a directory for new ones"));
  }
  if (flags.overwrite) return absl::OkStatus();
  const std::vector<swap::CheckpointEntry> there = swap::ListCheckpoints(checkpoints.parent);
  if (there.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      flags.checkpoint_dir.has_value() ? "--checkpoint-dir " : "", checkpoints.parent,
      " holds checkpoints, the newest of step ", there.back().step,
      ": go on from it (--resume), replace them (--overwrite), or use another directory (--checkpoint-dir)"));
}

void NoteReplaced(TrainSettings* settings) {
  const zero::EngineOptions& engine = settings->engine;
  std::vector<std::vector<std::string>> places;
  if (engine.storage.offload == zero::OffloadDevice::kNvme) places.push_back(engine.storage.state_dirs);
  if (engine.storage.checkpoints.any()) {
    if (const auto newest = swap::FindCheckpoint(engine.storage.checkpoints.parent); newest.ok())
      places.push_back({*newest});
  }
  for (const std::vector<std::string>& place : places) {
    const absl::StatusOr<nlohmann::json> run = FindRun(place);
    if (run.ok() && run->is_object())
      settings->replaces.insert(zero::JsonField<std::string>(*run, "run_id").value_or(""));
  }
}

absl::Status KeepBeside(const std::string& checkpoint, TrainSettings* settings) {
  zero::CheckpointSchedule& schedule = settings->engine.storage.checkpoints;
  if (!schedule.any() || schedule.parent != checkpoint) return absl::OkStatus();
  schedule.parent = ParentOf(checkpoint);
  const std::vector<swap::CheckpointEntry> there = swap::ListCheckpoints(schedule.parent);
  const int64_t step = StepIn({checkpoint});
  if (!schedule.at_end || there.empty() || static_cast<int64_t>(there.back().step) <= step)
    return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--checkpoint-dir ", checkpoint, " is of step ", step, ", and ", there.back().path,
                   ", which is newer, lies where new ones would go: go on with --state-dir ", checkpoint,
                   " and a --checkpoint-dir for the new ones"));
}

}  // namespace penstock::tools
