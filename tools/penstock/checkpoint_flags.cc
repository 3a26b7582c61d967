#include "tools/penstock/checkpoint_flags.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "run/record/run_record.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_lock.h"
#include "tools/base/flag_check.h"
#include "tools/base/process_start.h"
#include "tools/penstock/ranks.h"
#include "tools/state/state_reader.h"
#include "zero/config/json_field.h"
#include "zero/ranks/agree.h"

namespace penstock::tools {
namespace {

// A path that names one checkpoint, not a directory of them.
absl::StatusOr<bool> IsOneCheckpoint(const std::string& path) {
  const absl::StatusOr<std::string> found = swap::FindCheckpoint(path);
  if (absl::IsNotFound(found.status())) return false;
  RETURN_IF_ERROR(found.status());
  return *found == path;
}

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
    if (!checkpoints.any()) break;
    ASSIGN_OR_RETURN(const bool same, IsSameFile(directory, checkpoints.parent));
    if (same) {
      return WrongFlag(absl::StrCat("--checkpoint-dir ", checkpoints.parent,
                                    " is the state directory: give checkpoints one of their own"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckWasThere(const TrainOptions& flags, const zero::EngineOptions& engine) {
  const std::string& checkpoints = engine.storage.checkpoints.parent;
  if (engine.storage.offload == zero::OffloadDevice::kNvme) return absl::OkStatus();
  absl::Status kept = swap::FindCheckpoint(checkpoints).status();
  if (!absl::IsNotFound(kept)) return kept;
  if (flags.state_dirs.empty()) {
    ASSIGN_OR_RETURN(const bool there, IsDirectory(checkpoints));
    if (flags.checkpoint_dir.has_value() || there) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("--resume with --offload none or cpu goes on from a checkpoint, and ", checkpoints,
                     " holds none: say where with --checkpoint-dir"));
  }
  ASSIGN_OR_RETURN(const bool there, IsDirectory(DefaultCheckpoints(flags.state_dirs)));
  if (there) return absl::OkStatus();
  const absl::Status found = run::FindRun(flags.state_dirs).status();
  return absl::IsFailedPrecondition(found) ? found : absl::OkStatus();
}

absl::Status TakeCheckpoints(TrainSettings* settings) {
  zero::CheckpointSchedule& checkpoints = settings->engine.storage.checkpoints;
  if (!checkpoints.any()) return absl::OkStatus();
  absl::Status taken;
  if (settings->engine.rank() == 0) {
    const absl::StatusOr<bool> one = IsOneCheckpoint(checkpoints.parent);
    taken = one.status();
    if (taken.ok()) {
      auto lock = swap::CheckpointLock::Take(*one ? ParentOf(checkpoints.parent) : checkpoints.parent);
      taken = lock.status();
      if (lock.ok()) checkpoints.lock = *std::move(lock);
    }
  }
  if (settings->engine.comm == nullptr) return taken;
  return zero::AgreeOnStatus(*settings->engine.comm, zero::Channel::kSetup, taken);
}

absl::Status CheckNoCheckpoints(const TrainOptions& flags, const TrainSettings& settings) {
  const zero::CheckpointSchedule& checkpoints = settings.engine.storage.checkpoints;
  if (!checkpoints.any() || flags.resume) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool one, IsOneCheckpoint(checkpoints.parent));
  if (one) {
    return absl::FailedPreconditionError(
        absl::StrCat("--checkpoint-dir ", checkpoints.parent,
                     " is a checkpoint: go on from it (--resume), or give a directory for new ones"));
  }
  if (flags.overwrite) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<swap::CheckpointEntry> there, swap::ListCheckpoints(checkpoints.parent));
  if (there.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      flags.checkpoint_dir.has_value() ? "--checkpoint-dir " : "", checkpoints.parent,
      " holds checkpoints, the newest of step ", there.back().step,
      ": go on from it (--resume), replace them (--overwrite), or use another directory (--checkpoint-dir)"));
}

absl::Status SeeReplaced(TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  zero::CheckpointSchedule& checkpoints = engine.storage.checkpoints;
  const std::optional<int64_t> started_ns = ProcessStartNs();
  std::vector<std::vector<std::string>> places;
  if (engine.storage.offload == zero::OffloadDevice::kNvme) {
    places.push_back(engine.storage.state_dirs);
    engine.storage.overwrites_only = swap::SeeCommits(engine.storage.state_dirs, started_ns);
  }
  if (checkpoints.any()) {
    ASSIGN_OR_RETURN(checkpoints.replaces, swap::SeeCheckpoints(checkpoints.parent, started_ns));
    if (const auto newest = swap::FindCheckpoint(checkpoints.parent); newest.ok())
      places.push_back({*newest});
  }
  for (const std::vector<std::string>& place : places) {
    const absl::StatusOr<nlohmann::json> run = run::FindRun(place);
    if (run.ok() && run->is_object())
      settings->replaces.insert(zero::JsonField<std::string>(*run, "run_id").value_or(""));
  }
  return absl::OkStatus();
}

absl::Status CheckReplaced(const TrainSettings& settings) {
  const zero::StorageOptions& storage = settings.engine.storage;
  if (storage.overwrites_only.has_value()) {
    RETURN_IF_ERROR(swap::CheckSeen(storage.state_dirs, *storage.overwrites_only));
  }
  if (!storage.checkpoints.replaces.has_value()) return absl::OkStatus();
  return swap::CheckSeen(storage.checkpoints.parent, *storage.checkpoints.replaces);
}

void KeepBeside(const std::string& checkpoint, TrainSettings* settings) {
  zero::CheckpointSchedule& schedule = settings->engine.storage.checkpoints;
  if (schedule.any() && schedule.parent == checkpoint) schedule.parent = ParentOf(checkpoint);
}

absl::Status CheckNoneNewer(const std::string& from, int64_t step, const TrainSettings& settings) {
  const zero::CheckpointSchedule& schedule = settings.engine.storage.checkpoints;
  if (!schedule.any()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<swap::CheckpointEntry> there, swap::ListCheckpoints(schedule.parent));
  if (there.empty() || static_cast<int64_t>(there.back().step) <= step) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      from, " is of step ", step, ", and ", there.back().path,
      ", which is newer, lies where new checkpoints would go: move what is newer away, or ",
      settings.on_nvme()
          ? "give another --checkpoint-dir for the new ones (one that is to be restored first: "
            "without --checkpoint-every)"
          : absl::StrCat("go on with --state-dir ", from, " and a --checkpoint-dir for the new ones")));
}

}  // namespace penstock::tools
