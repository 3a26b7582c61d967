#include "tools/penstock/resumable_run.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "models/families/family.h"
#include "run/record/run_record.h"
#include "run/settings.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tools/penstock/checkpoint_flags.h"
#include "tools/penstock/lora_flags.h"
#include "tools/penstock/ranks.h"
#include "zero/config/json_field.h"
#include "zero/engine/change_ranks.h"
#include "zero/engine/restore.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {
namespace {

// Whether the directories hold no state, and what a run without a drive that was killed before it kept
// anything leaves: the directory for its checkpoints.
absl::StatusOr<bool> KeptNothing(const std::vector<std::string>& dirs) {
  const absl::Status state = swap::Inspect(dirs).status();
  if (!absl::IsNotFound(state)) return false;
  return IsDirectory(DefaultCheckpoints(dirs));
}

// What a run is made of anew: as it was made, but for what the config says.
absl::Status TakeOptions(run::Config config, const nlohmann::json& run, zero::EngineOptions* engine) {
  RETURN_IF_ERROR(run::Settle(
      [&run](const char* name, const nlohmann::json& given,
             const nlohmann::json& otherwise) -> absl::StatusOr<nlohmann::json> {
        return !given.is_null() ? given : run.is_object() ? run.value(name, otherwise) : otherwise;
      },
      &config));
  run::SetOptions(config, engine);
  return absl::OkStatus();
}

// Without a drive: from a checkpoint, or from the state of a run with a drive.
absl::StatusOr<nlohmann::json> FindWithoutDrive(const TrainOptions& flags,
                                                const absl::StatusOr<std::string>& newest,
                                                TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  // Nothing outlives the process but what was kept: a checkpoint, or the state of a run with a drive.
  settings->goes_back = true;
  engine.storage.state_dirs = newest.ok() ? std::vector<std::string>{*newest} : flags.state_dirs;
  if (engine.storage.state_dirs.empty()) {
    settings->decisions.push_back(
        absl::StrCat("no checkpoint in ", engine.storage.checkpoints.parent, ": starting over"));
    return nlohmann::json();
  }
  absl::StatusOr<nlohmann::json> run = run::FindRun(engine.storage.state_dirs);
  if (absl::IsFailedPrecondition(run.status()) && !newest.ok()) {
    ASSIGN_OR_RETURN(const bool nothing, KeptNothing(engine.storage.state_dirs));
    if (nothing) run = nlohmann::json();
  }
  if (run.ok() && !run->is_null()) {
    ASSIGN_OR_RETURN(const int64_t step, StepIn(engine.storage.state_dirs));
    RETURN_IF_ERROR(CheckNoneNewer(engine.storage.state_dirs.front(), step, *settings));
    settings->notes.push_back(absl::StrCat("going on from ", engine.storage.state_dirs.front()));
  } else if (run.ok() && newest.ok()) {
    // It is there, and cannot be read as one: never a reason to start over, which removes those before it.
    return absl::DataLossError(absl::StrCat(
        *newest, " is damaged: move it away to go on from an older one, or start over with --overwrite"));
  } else if (run.ok()) {
    settings->decisions.push_back(
        absl::StrCat("nothing to go on from in ", engine.storage.state_dirs.front(), ": starting over"));
    engine.storage.state_dirs.clear();
  }
  return run;
}

// From the state on the drive, or, where that is gone, from the newest checkpoint.
absl::StatusOr<nlohmann::json> FindOnDrive(const run::Config& config,
                                           const absl::StatusOr<std::string>& newest, bool starts,
                                           bool* restores, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const std::string in_memory = DefaultCheckpoints(engine.storage.state_dirs);
  std::vector<swap::CheckpointEntry> kept_in_memory;
  if (engine.storage.checkpoints.parent.empty() && engine.comm == nullptr) {
    ASSIGN_OR_RETURN(kept_in_memory, swap::ListCheckpoints(in_memory));
  }
  if (!kept_in_memory.empty() && absl::IsNotFound(swap::Inspect(engine.storage.state_dirs).status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(in_memory,
                     " holds the checkpoints of a run without a drive, and there is no state beside "
                     "them: go on with --offload cpu, or with --checkpoint-dir ",
                     in_memory, " and another --state-dir"));
  }
  // Before it is looked at more closely: what is overwritten is that or nothing.
  engine.storage.overwrites_only = swap::SeeCommits(engine.storage.state_dirs);
  absl::StatusOr<nlohmann::json> run = run::FindRun(engine.storage.state_dirs);
  const bool overwritten = run::IsOverwritten(run.status());
  const bool alone = engine.comm == nullptr;
  if (!run.ok() && !(overwritten && (newest.ok() || !alone))) return run;
  bool from_checkpoint = newest.ok() && (overwritten || run->is_null());
  if (!alone) {
    GoOn from = GoOn::kState;
    ASSIGN_OR_RETURN(from, AgreeOnResume(*engine.comm, run, engine.storage.state_dirs, newest.value_or("")));
    from_checkpoint = from == GoOn::kCheckpoint;
    if (from == GoOn::kStartOver) run = nlohmann::json();
    // What the run is told by the record that all go on from, which is the oldest of those that are there.
    if (from == GoOn::kState) {
      ASSIGN_OR_RETURN(const int64_t step, StepIn(engine.storage.state_dirs));
      ASSIGN_OR_RETURN(*run, OldestRecord(*engine.comm, *run, step));
    }
  }
  if (from_checkpoint) {
    ASSIGN_OR_RETURN(const int64_t step, StepIn({*newest}));
    RETURN_IF_ERROR(CheckNoneNewer(*newest, step, *settings));
  }
  if (from_checkpoint && !starts) {
    settings->notes.push_back(
        absl::StrCat("training restores ", engine.storage.state_dirs.front(), " from ", *newest));
    *restores = true;
    return run::FindRun({*newest});
  }
  if (from_checkpoint) {
    // The state is gone, and a checkpoint is left.
    ASSIGN_OR_RETURN(const nlohmann::json kept, run::FindRun({*newest}));
    if (!alone && kept.is_object()) {
      const auto model = models::ModelFromJson(kept["model"]);  // one that is unknown is told of later
      if (model.ok()) RETURN_IF_ERROR(CheckOneProcess(**model, engine.world()));
    }
    RETURN_IF_ERROR(TakeOptions(config, kept, &engine));
    RETURN_IF_ERROR(zero::RestoreRun(*newest, engine));
    settings->notes.push_back(
        absl::StrCat("restored ", engine.storage.state_dirs.front(), " from ", *newest));
    settings->goes_back = true;
    return run::FindRun(engine.storage.state_dirs);
  }
  if (run->is_null()) {
    settings->decisions.push_back(
        absl::StrCat("no step was ever committed in ", engine.storage.state_dirs.front(), ": starting over"));
    return run;
  }
  if (newest.ok()) {
    ASSIGN_OR_RETURN(const int64_t state, StepIn(engine.storage.state_dirs));
    RETURN_IF_ERROR(CheckNoneNewer(engine.storage.state_dirs.front(), state, *settings));
    const absl::StatusOr<int64_t> kept = StepIn({*newest});
    if (!kept.ok()) {
      settings->notes.push_back(
          absl::StrCat("the newest checkpoint cannot be read: ", std::string(kept.status().message())));
    } else if (*kept > state) {
      settings->notes.push_back(
          absl::StrCat(engine.storage.state_dirs.front(), " goes on from its step ", state, ", though ",
                       *newest, " is newer: to go on from that one, give a --state-dir that is empty"));
    }
  }
  return run;
}

std::string IdOf(const nlohmann::json& run) {
  return run.is_object() ? zero::JsonField<std::string>(run, "run_id").value_or("") : "";
}

// kFailedPrecondition: the run of the checkpoint at `newest` is another than that of a part that is still
// there and can be read.
absl::Status CheckOfRun(const nlohmann::json& run, const std::string& newest,
                        const std::vector<std::string>& directories, int64_t ranks) {
  const std::string id = IdOf(run);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::vector<std::string> part =
        ranks == 1 ? directories : zero::RankDirectories(directories, static_cast<int>(rank));
    const absl::StatusOr<nlohmann::json> there = run::FindRun(part);
    const std::string other = there.ok() ? IdOf(*there) : "";
    if (id.empty() || other.empty() || other == id) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(part.front(), " is a part of run ", other, ", other parts of which are gone, and ",
                     newest, " a checkpoint of run ", id,
                     ": give the `checkpoint_dir` of the former, or a `state_dir` "
                     "that is empty to go on with the latter"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<nlohmann::json> TakeOtherRanks(const run::Config& config,
                                              const std::vector<std::string>& directories, bool starts,
                                              const std::function<absl::Status()>& would_start,
                                              bool* restores, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  std::string newest;
  if (!engine.storage.checkpoints.parent.empty()) {
    absl::StatusOr<std::string> found = swap::FindCheckpoint(engine.storage.checkpoints.parent);
    if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
    newest = found.value_or("");
  }
  ASSIGN_OR_RETURN(const zero::OtherRanks other,
                   zero::FindOtherRanks(engine.comm.get(), directories, newest));
  if (other.from.empty()) return nlohmann::json();
  const bool from_checkpoint = other.from != directories;
  const std::string what = absl::StrCat(
      directories.front(), ", a run of ", other.ranks, other.ranks == 1 ? " rank" : " ranks", ", for ",
      engine.world(), from_checkpoint ? absl::StrCat(", from ", newest, ", since parts of it are gone") : "");
  ASSIGN_OR_RETURN(nlohmann::json run, run::FindRun(other.from));
  if (from_checkpoint) {
    // Each rank may have directories of its own.
    absl::Status of_run = CheckOfRun(run, newest, directories, other.ranks);
    if (engine.comm != nullptr) of_run = zero::AgreeOnStatus(*engine.comm, zero::Channel::kSetup, of_run);
    RETURN_IF_ERROR(of_run);
  }
  if (!starts) {
    settings->notes.push_back(absl::StrCat("training cuts anew ", what));
    *restores = true;
    return run;
  }
  RETURN_IF_ERROR(would_start());
  if (run.is_object()) {
    const auto model = models::ModelFromJson(run["model"]);  // one that is unknown is told of later
    if (model.ok()) RETURN_IF_ERROR(CheckOneProcess(**model, engine.world()));
  }
  if (from_checkpoint) {
    ASSIGN_OR_RETURN(const int64_t step, StepIn(other.from));
    RETURN_IF_ERROR(CheckNoneNewer(newest, step, *settings));
    settings->goes_back = true;
  }
  zero::EngineOptions made = engine;
  RETURN_IF_ERROR(TakeOptions(config, run, &made));
  RETURN_IF_ERROR(zero::ChangeRanks(other.from, directories, std::move(made)));
  settings->notes.push_back(absl::StrCat("cut anew ", what));
  return nlohmann::json();
}

absl::Status CheckFree(const std::vector<std::string>& dirs) {
  const swap::Finding found = swap::Probe(dirs);
  RETURN_IF_ERROR(found.unread);
  if (found.holding == swap::Holding::kNothing || found.holding == swap::Holding::kForeign)
    return absl::OkStatus();  // whoever makes the state says what is wrong with others
  const bool in_use = found.holding == swap::Holding::kInUse;
  return absl::AlreadyExistsError(
      absl::StrCat(dirs.front(), " holds a run already", in_use ? ", which another process is training" : "",
                   ": go on with it (--resume), replace it (--overwrite), or give another --state-dir"));
}

absl::StatusOr<nlohmann::json> FindResumable(const TrainOptions& flags, const run::Config& config,
                                             bool starts, bool* restores, TrainSettings* settings) {
  const std::string& checkpoints = settings->engine.storage.checkpoints.parent;
  absl::StatusOr<std::string> newest = absl::NotFoundError("");
  if (!checkpoints.empty()) newest = swap::FindCheckpoint(checkpoints);
  if (!newest.ok() && !absl::IsNotFound(newest.status())) return newest.status();
  if (!newest.ok() && !checkpoints.empty()) {
    // Of several ranks, without the part of the first; or it is not known whether parts are there.
    if (absl::Status parts = zero::FindShards({checkpoints}).status();
        !absl::IsNotFound(parts) && !absl::IsFailedPrecondition(parts))
      RETURN_IF_ERROR(parts);
  }
  if (newest.ok()) KeepBeside(*newest, settings);
  return settings->engine.storage.offload == zero::OffloadDevice::kNvme
             ? FindOnDrive(config, newest, starts, restores, settings)
             : FindWithoutDrive(flags, newest, settings);
}

}  // namespace penstock::tools
