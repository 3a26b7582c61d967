#include "tools/penstock/train_options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/cpu_features.h"
#include "models/weight_import.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_lock.h"
#include "swap/inspect.h"
#include "tools/base/size.h"
#include "tools/penstock/device_flags.h"
#include "tools/penstock/optimizer_flags.h"
#include "tools/penstock/ranks.h"
#include "tools/penstock/recorded_options.h"
#include "tools/penstock/state_reader.h"
#include "zero/compute/block.h"
#include "zero/config/config.h"
#include "zero/config/json_difference.h"
#include "zero/config/json_field.h"
#include "zero/config/plan_bounds.h"
#include "zero/engine/restore.h"
#include "zero/memory/threads.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {
namespace {

constexpr const char* kDefaultStateDir = "penstock-state";
constexpr int64_t kMostThreads = 1024;

absl::Status Wrong(const std::string& line) { return absl::InvalidArgumentError(line); }

// A number that must lie in a range; the flag's name goes into the message.
template <typename T>
absl::Status Check(const char* flag, T value, T least, T most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Wrong(absl::StrCat(flag, " ", value, ": must be between ", least, " and ", most));
}

absl::StatusOr<zero::OffloadDevice> ParseOffload(const std::string& text) {
  if (text == "none") return zero::OffloadDevice::kNone;
  if (text == "cpu") return zero::OffloadDevice::kCpu;
  if (text == "nvme") return zero::OffloadDevice::kNvme;
  return Wrong(absl::StrCat("--offload ", text, ": must be none, cpu or nvme"));
}

// The type to compute in, as a name.
absl::StatusOr<std::string> ChooseDtype(const TrainOptions& flags, const zero::Config& config,
                                        std::vector<std::string>* notes) {
  const bool fast_bf16 = kernels::GetCpuFeatures().avx512_bf16;
  std::string dtype = flags.dtype.value_or("auto");
  if (dtype == "auto" && config.fp16.enabled.value_or(false)) dtype = "fp16";
  if (dtype == "auto" && config.bf16.has_value()) dtype = *config.bf16 ? "bf16" : "fp32";
  if (dtype == "auto") dtype = fast_bf16 ? "bf16" : "fp32";
  if (!zero::ParseDType(dtype).has_value()) {
    return Wrong(absl::StrCat("--dtype ", dtype, ": must be bf16, fp16, fp32 or auto"));
  }
  if (dtype == "bf16" && !fast_bf16) {
    notes->push_back(
        "bf16 was asked for, but this processor has no bf16 instructions: fp32 is up to 200 times faster "
        "here");
  }
  return dtype;
}

// How long a killed run may hold its lock: the kernel still finishes its writes.
constexpr int kLockPatienceMs = 2000;

// A run of one version that was killed: nothing to go on from, and nothing to keep either.
absl::Status Overwritten(const std::string& text) { return absl::OutOfRangeError(text); }
bool IsOverwritten(const absl::Status& status) { return absl::IsOutOfRange(status); }

// What the flags of a run were, as its record has them: numbers that a run can have.
absl::Status CheckRun(const nlohmann::json& run, const std::string& dir) {
  struct Range {
    const char* name;
    int64_t least, most;
  };
  const auto damaged = [&](const char* name) {
    return absl::DataLossError(absl::StrCat(dir, ": the run's record is damaged: its ", name, " is ",
                                            run[name].dump(), "; go on from a checkpoint"));
  };
  for (const Range& range :
       {Range{"steps", 1, int64_t{1} << 40}, Range{"batch", 1, 1 << 20}, Range{"accumulate", 1, 1 << 20},
        Range{"seq", 1, 1 << 24}, Range{"vocab", 0, int64_t{1} << 32}, Range{"seed", 0, int64_t{1} << 62},
        Range{"threads", 1, kMostThreads}, Range{"ranks", 1, 1 << 20}}) {
    if (!run.contains(range.name)) continue;
    const std::optional<int64_t> value = zero::JsonField<int64_t>(run, range.name);
    if (value.has_value() && *value >= range.least && *value <= range.most) continue;
    return damaged(range.name);
  }
  for (const char* name : {"dtype", "run_id", "sync", "durability", "data_order"}) {
    if (run.contains(name) && !run[name].is_string()) return damaged(name);
  }
  if (run.contains("lr") && !run["lr"].is_number()) return damaged("lr");
  if (run.contains("config") && !run["config"].is_object()) return damaged("config");
  for (const char* name : {"run_id_since", "data_fingerprint"}) {
    if (run.contains(name) && !run[name].is_number_integer()) return damaged(name);
  }
  return absl::OkStatus();
}

// What the state directories hold, for a run that is to be resumed: its record's "run", null where there is
// none yet.
absl::StatusOr<nlohmann::json> FindRun(const std::vector<std::string>& given) {
  std::vector<std::string> dirs = given;
  // All ranks' records say the same about the run.
  if (const auto parts = zero::FindShards(given); parts.ok()) {
    dirs = parts->front();
  } else if (absl::IsDataLoss(parts.status())) {
    return parts.status();
  }
  const swap::Finding found = swap::Probe(dirs);
  switch (found.holding) {
    case swap::Holding::kNothing:
    case swap::Holding::kNeverCommitted:
      return nlohmann::json();
    case swap::Holding::kRun:
    case swap::Holding::kInUse:  // the kernel may still finish a killed run's writes: opening waits for them
      break;
    case swap::Holding::kForeign:
      return absl::FailedPreconditionError(found.text);
    case swap::Holding::kDamaged:
      return absl::DataLossError(found.text);
    case swap::Holding::kOverwritten:
      return Overwritten(found.text);
  }
  absl::StatusOr<swap::Inspection> inspection = swap::Inspect(dirs);
  if (absl::IsNotFound(inspection.status())) return nlohmann::json();
  if (!inspection.ok()) return inspection.status();
  if (inspection->record.overwriting) {
    const swap::Finding later = swap::Probe(dirs, kLockPatienceMs);
    if (later.holding == swap::Holding::kInUse) return absl::FailedPreconditionError(later.text);
    return Overwritten(later.text);
  }
  const nlohmann::json payload = nlohmann::json::parse(inspection->record.payload, nullptr, false);
  if (!payload.is_object() || !payload.contains("run") || !payload["run"].is_object() ||
      !payload["run"].contains("model")) {
    return absl::FailedPreconditionError(absl::StrCat(
        dirs.front(), " holds a run that was not made by penstock train; it cannot be resumed here"));
  }
  nlohmann::json run = payload["run"];
  RETURN_IF_ERROR(CheckRun(run, dirs.front()));
  const nlohmann::json identity = nlohmann::json::parse(inspection->shape.identity, nullptr, false);
  if (const auto dtype = zero::JsonField<std::string>(identity, "dtype")) run["dtype"] = *dtype;
  run["schedule"] = payload.value("schedule", nlohmann::json());
  run["loss_scale"] = payload.value("loss_scale", nlohmann::json());
  // Runs from before there was a choice of optimizers.
  if (run.contains("adamw") && !run.contains("optimizer")) {
    run["optimizer"] = run["adamw"] == false ? "Adam" : "AdamW";
  }
  return run;
}

// As config and record have them.
constexpr const char *kSyncPower = "power", *kSyncProcess = "process";
constexpr const char *kEachStep = "step", *kAtCheckpoints = "checkpoint";

std::optional<std::string> SyncSaid(const zero::Config& config) {
  if (!config.penstock.sync.has_value()) return std::nullopt;
  return config.penstock.sync == zero::SyncMode::kPower ? kSyncPower : kSyncProcess;
}

std::optional<std::string> DurabilitySaid(const zero::Config& config) {
  if (config.penstock.versions == 1) return kAtCheckpoints;
  if (!config.penstock.durability.has_value()) return std::nullopt;
  return config.penstock.durability == zero::Durability::kStep ? kEachStep : kAtCheckpoints;
}

void SetDurability(const std::string& sync, const std::string& durability, zero::EngineOptions* engine) {
  engine->storage.sync = sync == kSyncPower ? swap::Sync::kPower : swap::Sync::kProcess;
  engine->storage.durability =
      durability == kAtCheckpoints ? zero::Durability::kCheckpoint : zero::Durability::kStep;
}

// What a checkpoint's run is restored with: as it was made, but for what the config says.
void RestoreDurability(const zero::Config& config, const nlohmann::json& run, zero::EngineOptions* engine) {
  SetDurability(SyncSaid(config).value_or(run.value("sync", kSyncProcess)),
                DurabilitySaid(config).value_or(run.value("durability", kEachStep)), engine);
}

bool HasOneVersion(const zero::EngineOptions& engine) {
  if (engine.storage.offload != zero::OffloadDevice::kNvme) return false;
  const auto shards = zero::FindShards(engine.storage.state_dirs);
  if (!shards.ok()) return false;
  const absl::StatusOr<swap::Inspection> inspection = swap::Inspect(shards->front());
  return inspection.ok() && inspection->shape.slots == 1;
}

// The commit by which it is decided whether a run goes on from there: what is overwritten is that or nothing.
swap::CommitSeen SeenIn(const std::vector<std::string>& dirs) {
  const absl::StatusOr<swap::Inspection> found = swap::Inspect(dirs);
  if (!found.ok()) return {};
  return {found->shape.uuid, found->record.sequence};
}

// A store keeps as many versions as it was made for.
absl::Status CheckVersions(const zero::Config& config, const zero::EngineOptions& engine) {
  if (!config.penstock.versions.has_value() || engine.storage.offload != zero::OffloadDevice::kNvme)
    return absl::OkStatus();
  const auto shards = zero::FindShards(engine.storage.state_dirs);
  if (!shards.ok()) return absl::OkStatus();
  const absl::StatusOr<swap::Inspection> found = swap::Inspect(shards->front());
  if (!found.ok() || *config.penstock.versions == found->shape.slots) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--config: penstock.versions ", *config.penstock.versions, ": ", engine.storage.state_dirs.front(),
      " was made for ", found->shape.slots, found->shape.slots == 1 ? " version" : " versions",
      " of everything; leave it as it was, or go on from a checkpoint with another --state-dir"));
}

absl::Status ResolveDurability(const zero::Config& config, const RecordedOptions& kept,
                               TrainSettings* settings) {
  if (settings->resumes) {
    RETURN_IF_ERROR(CheckVersions(config, settings->engine));
  }
  ASSIGN_OR_RETURN(const std::string sync,
                   kept.Of<std::string>("sync", "config", SyncSaid(config), kSyncProcess));
  // A store of one version commits with its checkpoints only, whatever the config says by now.
  const bool one_version = settings->resumes && HasOneVersion(settings->engine);
  if (one_version && config.penstock.durability == zero::Durability::kStep) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--config: penstock.durability \"step\": ", settings->engine.storage.state_dirs.front(),
        " has one version of everything, and commits with its checkpoints only; leave it out, or "
        "start another run with \"versions\": 2 in another --state-dir"));
  }
  std::string durability = kAtCheckpoints;
  if (!one_version) {
    ASSIGN_OR_RETURN(durability,
                     kept.Of<std::string>("durability", "config", DurabilitySaid(config), kEachStep));
  }
  SetDurability(sync, durability, &settings->engine);
  settings->kept.update({{"sync", sync}, {"durability", durability}});
  return absl::OkStatus();
}

void NoteDurability(const zero::Config& config, TrainSettings* settings) {
  const zero::EngineOptions& engine = settings->engine;
  if (engine.storage.offload == zero::OffloadDevice::kNvme) return;
  if (config.penstock.durability == zero::Durability::kStep) {
    settings->notes.push_back(
        "penstock.durability \"step\": of no effect without offload to nvme: state in memory is kept by "
        "checkpoints");
  }
  if (engine.storage.versions > 0) {
    settings->notes.push_back("penstock.versions: of no effect without offload to nvme");
  }
}

// Where a run without a drive keeps its checkpoints, unless told.
std::string DefaultCheckpoints(const std::vector<std::string>& state_dirs) {
  return absl::StrCat(state_dirs.empty() ? kDefaultStateDir : state_dirs.front(), "/", kCheckpointsBeside);
}

// A path that names one checkpoint, not a directory of them.
bool IsOneCheckpoint(const std::string& path) { return swap::FindCheckpoint(path).value_or("") == path; }

// A run that would be replaced or refused is told of before anything is measured.
absl::Status CheckFree(const std::vector<std::string>& dirs) {
  const swap::Finding found = swap::Probe(dirs);
  if (found.holding == swap::Holding::kNothing || found.holding == swap::Holding::kForeign)
    return absl::OkStatus();  // whoever makes the state says what is wrong with others
  const bool in_use = found.holding == swap::Holding::kInUse;
  return absl::AlreadyExistsError(
      absl::StrCat(dirs.front(), " holds a run already", in_use ? ", which another process is training" : "",
                   ": go on with it (--resume), replace it (--overwrite), or give another --state-dir"));
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
    if (!flags.checkpoint_every.has_value()) return Wrong("--checkpoint-keep needs --checkpoint-every N");
    checkpoints.keep = *flags.checkpoint_keep;
    RETURN_IF_ERROR(Check<int64_t>("--checkpoint-keep", checkpoints.keep, 1, int64_t{1} << 31));
  }
  if (flags.checkpoint_every.has_value()) {
    checkpoints.every = *flags.checkpoint_every;
    if (checkpoints.parent.empty()) return Wrong("--checkpoint-every needs --checkpoint-dir DIR");
    RETURN_IF_ERROR(Check<int64_t>("--checkpoint-every", checkpoints.every, 1, int64_t{1} << 40));
  }
  for (const std::string& directory : flags.state_dirs) {
    std::error_code error;
    if (checkpoints.any() && std::filesystem::equivalent(directory, checkpoints.parent, error)) {
      return Wrong(absl::StrCat("--checkpoint-dir ", checkpoints.parent,
                                " is the state directory: give checkpoints one of their own"));
    }
  }
  return absl::OkStatus();
}

// "kept" of "kept/step-00000001".
std::string ParentOf(const std::string& checkpoint) {
  const size_t name = checkpoint.find_last_not_of('/');
  const size_t slash = checkpoint.rfind('/', name);
  return slash == std::string::npos ? "." : checkpoint.substr(0, std::max<size_t>(1, slash));
}

// The runs that --overwrite replaces, as far as they can be read.
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

// The directory of checkpoints becomes this run's before it is looked at. All ranks wait for rank 0, which
// has it for all.
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

// A new run replaces no checkpoints unless it is told to.
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

// Going on from the one checkpoint that --checkpoint-dir names: new ones go beside it.
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

// --model says what the weights of --init-from are used for: said where they were made for another function.
void NoteAnotherFunction(const std::string& weights, TrainSettings* settings) {
  const absl::StatusOr<nlohmann::json> published = models::ConfigOfWeights(weights);
  if (!published.ok() || published->is_null()) return;
  const absl::StatusOr<models::GptConfig> theirs = models::GptConfigFromJson(*published);
  if (!theirs.ok()) {
    settings->notes.push_back(absl::StrCat("--init-from ", weights,
                                           ": by its config.json these are weights of "
                                           "another model (",
                                           std::string(theirs.status().message()),
                                           "); --model is taken at its word"));
    return;
  }
  const nlohmann::ordered_json a = settings->model.ToPublished(), b = theirs->ToPublished();
  std::vector<std::string> differences;
  for (const char* key : {"activation_function", "layer_norm_epsilon", "scale_attn_weights",
                          "scale_attn_by_inverse_layer_idx", "resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    if (a[key] != b[key])
      differences.push_back(absl::StrCat(key, " ", a[key].dump(), ", not ", b[key].dump()));
  }
  if (differences.empty()) return;
  settings->notes.push_back(absl::StrCat("--init-from ", weights,
                                         ": --model computes something else than its "
                                         "config.json: ",
                                         absl::StrJoin(differences, "; "),
                                         "; without --model that one is taken"));
}

// What cannot be looked at is none.
bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

// Before the directory of checkpoints is taken, which makes it: that a run without a drive was in the place
// that the flags name. One that was killed before it kept anything has left that directory.
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

// Finds what --resume goes on from; null if there is nothing yet. Where training `starts` it may make a run
// of a checkpoint; where it does not, *restores says that it would.
absl::StatusOr<nlohmann::json> FindResumable(const TrainOptions& flags, const zero::Config& config,
                                             bool starts, bool* restores, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const std::string& checkpoints = engine.storage.checkpoints.parent;
  absl::StatusOr<std::string> newest = absl::NotFoundError("");
  if (!checkpoints.empty()) newest = swap::FindCheckpoint(checkpoints);
  if (!newest.ok() && !absl::IsNotFound(newest.status())) return newest.status();
  if (!newest.ok() && !checkpoints.empty()) {
    // Of several ranks, without the part of the first.
    if (const absl::Status parts = zero::FindShards({checkpoints}).status(); absl::IsDataLoss(parts))
      return parts;
  }
  if (newest.ok()) {
    RETURN_IF_ERROR(KeepBeside(*newest, settings));
  }
  if (engine.storage.offload != zero::OffloadDevice::kNvme) {
    // Nothing outlives the process but what was kept: a checkpoint, or the state of a run with a drive.
    settings->goes_back = true;
    engine.storage.state_dirs = newest.ok() ? std::vector<std::string>{*newest} : flags.state_dirs;
    if (engine.storage.state_dirs.empty()) {
      settings->decisions.push_back(absl::StrCat("no checkpoint in ", checkpoints, ": starting over"));
      return nlohmann::json();
    }
    absl::StatusOr<nlohmann::json> run = FindRun(engine.storage.state_dirs);
    if (absl::IsFailedPrecondition(run.status()) && !newest.ok() &&
        !swap::Inspect(engine.storage.state_dirs).ok() &&
        IsDirectory(DefaultCheckpoints(engine.storage.state_dirs))) {
      run = nlohmann::json();  // of a run in memory that was killed before it kept anything
    }
    if (run.ok() && !run->is_null()) {
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
  const std::string in_memory = DefaultCheckpoints(engine.storage.state_dirs);
  if (checkpoints.empty() && engine.comm == nullptr && !swap::ListCheckpoints(in_memory).empty() &&
      !swap::Inspect(engine.storage.state_dirs).ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(in_memory,
                     " holds the checkpoints of a run without a drive, and there is no state beside "
                     "them: go on with --offload cpu, or with --checkpoint-dir ",
                     in_memory, " and another --state-dir"));
  }
  engine.storage.overwrites_only = SeenIn(engine.storage.state_dirs);  // before it is looked at more closely
  absl::StatusOr<nlohmann::json> run = FindRun(engine.storage.state_dirs);
  const bool overwritten = IsOverwritten(run.status());
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
      ASSIGN_OR_RETURN(*run, OldestRecord(*engine.comm, *run, StepIn(engine.storage.state_dirs)));
    }
  }
  if (from_checkpoint && !starts) {
    settings->notes.push_back(
        absl::StrCat("training restores ", engine.storage.state_dirs.front(), " from ", *newest));
    *restores = true;
    return FindRun({*newest});
  }
  if (from_checkpoint) {
    // The state is gone, and a checkpoint is left.
    ASSIGN_OR_RETURN(const nlohmann::json kept, FindRun({*newest}));
    RestoreDurability(config, kept, &engine);
    const absl::Status restored = zero::RestoreRun(*newest, engine);
    if (!restored.ok()) return restored;
    settings->notes.push_back(
        absl::StrCat("restored ", engine.storage.state_dirs.front(), " from ", *newest));
    settings->goes_back = true;
    return FindRun(engine.storage.state_dirs);
  }
  if (run->is_null()) {
    settings->decisions.push_back(
        absl::StrCat("no step was ever committed in ", engine.storage.state_dirs.front(), ": starting over"));
    return run;
  }
  if (newest.ok()) {
    const int64_t state = StepIn(engine.storage.state_dirs);
    if (StepIn({*newest}) > state) {
      settings->notes.push_back(
          absl::StrCat(engine.storage.state_dirs.front(), " goes on from its step ", state, ", though ",
                       *newest, " is newer: to go on from that one, give a --state-dir that is empty"));
    }
  }
  return run;
}

// A run that goes on with another number of ranks: its steps have as many sequences as before, unless the
// flags say what each rank does.
absl::Status SpreadBatch(const zero::BatchRequest& request, const nlohmann::json& run,
                         TrainSettings* settings) {
  const int64_t world = settings->engine.world(), before = run.value("ranks", int64_t{1});
  const int64_t batch = run.value("batch", kDefaultBatch), accumulate = run.value("accumulate", int64_t{1});
  const int64_t sequences = before * batch * accumulate;
  settings->batch = request.micro_batch.value_or(batch);
  settings->accumulate = request.accumulation.value_or(accumulate);
  if (!request.accumulation.has_value() && sequences % (world * settings->batch) == 0) {
    settings->accumulate = sequences / (world * settings->batch);
  } else if (!request.micro_batch.has_value() && sequences % (world * settings->accumulate) == 0) {
    settings->batch = sequences / (world * settings->accumulate);
  }
  const int64_t now = world * settings->batch * settings->accumulate;
  const bool told = request.micro_batch.has_value() && request.accumulation.has_value();
  if (now != sequences && !told) {
    return Wrong(absl::StrCat("a step of this run has ", sequences, " sequences (", before,
                              " ranks, --batch ", batch, ", --accumulate ", accumulate, "), which ", world,
                              " ranks cannot share evenly that way: say --batch and --accumulate of each"));
  }
  settings->notes.push_back(absl::StrCat(
      "made by ", before, before == 1 ? " rank" : " ranks", ", goes on with ", world, ": --batch ",
      settings->batch, " --accumulate ", settings->accumulate, " of each",
      now == sequences ? ", the same sequences in every step"
                       : absl::StrCat("; a step has ", now, " sequences from here on, not ", sequences)));
  settings->engine.resume.run_changes.update(
      {{"ranks", world}, {"batch", settings->batch}, {"accumulate", settings->accumulate}});
  return absl::OkStatus();
}

absl::Status ResolveBatchSizes(const TrainOptions& flags, const zero::Config& config,
                               const RecordedOptions& kept, const nlohmann::json& run, Changes* changes,
                               TrainSettings* settings) {
  zero::BatchRequest request;
  request.train_batch = config.train_batch_size;
  request.micro_batch = flags.batch.has_value() ? flags.batch : config.micro_batch_per_rank;
  request.accumulation = flags.accumulate.has_value() ? flags.accumulate : config.gradient_accumulation_steps;
  // Flags win: with both of them the file's product has nothing left to say.
  if (flags.batch.has_value() && flags.accumulate.has_value()) request.train_batch.reset();
  for (const auto& status : {Check<int64_t>("--batch", request.micro_batch.value_or(1), 1, 1 << 20),
                             Check<int64_t>("--accumulate", request.accumulation.value_or(1), 1, 1 << 20)}) {
    if (!status.ok()) return status;
  }
  if (settings->resumes && run.value("ranks", int64_t{1}) != settings->engine.world())
    return SpreadBatch(request, run, settings);
  // Without a key that was there, all three are as in a file that never had it.
  if (settings->resumes &&
      (kept.Removed("train_batch") || kept.Removed("batch") || kept.Removed("accumulate"))) {
    ASSIGN_OR_RETURN(const zero::BatchSizes sizes,
                     zero::ResolveBatch(request, settings->engine.world(), kDefaultBatch));
    settings->batch = sizes.micro_batch;
    settings->accumulate = sizes.accumulation;
    const auto change = [&](const char* name, int64_t before, int64_t now) {
      if (before == now) return;
      changes->run[name] = now;
      changes->Tell(name, absl::StrCat(before), absl::StrCat(now), "batch sizes that --config has lost");
    };
    change("batch", run.value("batch", kDefaultBatch), settings->batch);
    change("accumulate", run.value("accumulate", int64_t{1}), settings->accumulate);
    return absl::OkStatus();
  }
  // What the product of a step was is in the record: the file's is of matter where it is another.
  const int64_t before = run.is_null() ? 0
                                       : run.value("batch", kDefaultBatch) *
                                             run.value("accumulate", int64_t{1}) * settings->engine.world();
  const bool derives = !settings->resumes || kept.ConfigChanges("train_batch", before);
  if (!derives) request.train_batch.reset();
  if (settings->resumes && request.train_batch.has_value() && !request.micro_batch.has_value() &&
      !request.accumulation.has_value()) {
    const int64_t batch = run.value("batch", kDefaultBatch);
    if (*request.train_batch % (batch * settings->engine.world()) == 0) request.micro_batch = batch;
  }
  ASSIGN_OR_RETURN(zero::BatchSizes sizes,
                   zero::ResolveBatch(request, settings->engine.world(),
                                      settings->resumes ? run.value("batch", kDefaultBatch) : kDefaultBatch));
  if (settings->resumes && derives && request.train_batch.has_value()) {
    settings->batch = sizes.micro_batch;
    settings->accumulate = sizes.accumulation;
    changes->run.update({{"batch", settings->batch}, {"accumulate", settings->accumulate}});
    changes->Tell("train_batch", absl::StrCat(before),
                  absl::StrCat(sizes.train_batch, ", --batch ", settings->batch, " --accumulate ",
                               settings->accumulate),
                  "train_batch_size in --config");
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(settings->batch, kept.Of("batch", "batch", request.micro_batch, sizes.micro_batch));
  ASSIGN_OR_RETURN(settings->accumulate,
                   kept.Of("accumulate", "accumulate", request.accumulation, sizes.accumulation));
  return absl::OkStatus();
}

bool GoesByOptimizersRate(const zero::SchedulerConfig& scheduler) {
  switch (scheduler.type) {
    case zero::SchedulerType::kWarmupCosineLr:
      return true;
    case zero::SchedulerType::kWarmupLr:
    case zero::SchedulerType::kWarmupDecayLr:
      return !scheduler.warmup_max_lr.has_value();
    default:
      return false;
  }
}

int64_t DefaultWarmup(int64_t steps) { return std::min<int64_t>(100, steps / 10); }

// What a schedule's last step of its own is; 0: it has none.
int64_t HorizonOf(const zero::LrSchedule& schedule) {
  if (const auto* cosine = std::get_if<zero::WarmupThenCosine>(&schedule.spec())) return cosine->horizon;
  if (const auto* decay = std::get_if<zero::WarmupDecayLr>(&schedule.spec())) return decay->total_num_steps;
  if (const auto* cosine = std::get_if<zero::WarmupCosineLr>(&schedule.spec()))
    return cosine->total_num_steps;
  return 0;
}

// The config's scheduler, apart from what the run's other flags make of it: to tell whether the file
// changed.
std::optional<nlohmann::json> SchedulerSaid(const zero::Config& config) {
  if (!config.scheduler.has_value()) return std::nullopt;
  constexpr int64_t kAnySteps = 1'000'000;
  const absl::StatusOr<zero::LrSchedule> schedule =
      zero::MakeSchedule(*config.scheduler, /*lr=*/1, kAnySteps);
  return schedule.ok() ? schedule->ToJson() : nlohmann::json();
}

// What --config says of fp16's loss scale, key by key.
std::optional<nlohmann::json> LossScaleSaid(const zero::Fp16Config& config) {
  nlohmann::json said = nlohmann::json::object();
  const auto add = [&said](const char* key, const auto& value) {
    if (value.has_value()) said[key] = *value;
  };
  add("loss_scale", config.loss_scale);
  add("initial_scale_power", config.initial_scale_power);
  add("loss_scale_window", config.loss_scale_window);
  add("hysteresis", config.hysteresis);
  add("consecutive_hysteresis", config.consecutive_hysteresis);
  add("min_loss_scale", config.min_loss_scale);
  if (said.empty()) return std::nullopt;
  return said;
}

// All that the config says of a run, before flags and defaults take its open places.
void NoteConfig(const zero::Config& config, const RecordedOptions& kept) {
  kept.BeginConfig();
  kept.NoteConfig("train_batch", config.train_batch_size);
  kept.NoteConfig("batch", config.micro_batch_per_rank);
  kept.NoteConfig("accumulate", config.gradient_accumulation_steps);
  kept.NoteConfig("clip", config.gradient_clipping);
  kept.NoteConfig("optimizer_states", config.penstock.optimizer_states);
  kept.NoteConfig("sync", SyncSaid(config));
  kept.NoteConfig("durability", DurabilitySaid(config));
  kept.NoteConfig("scheduler", SchedulerSaid(config));
  kept.NoteConfig("loss_scale", LossScaleSaid(config.fp16));
  if (config.bf16.has_value())
    kept.NoteConfig("dtype", std::optional<std::string>(*config.bf16 ? "bf16" : "fp32"));
  if (config.fp16.enabled.value_or(false)) kept.NoteConfig("dtype", std::optional<std::string>("fp16"));
  NoteOptimizer(config.optimizer, kept);
}

// Keys that the config has lost since the run was made are as in a file that never had them.
void FillRemoved(const zero::ParsedConfig& parsed, const RecordedOptions& kept, int64_t steps,
                 zero::Config* config) {
  if (!parsed.deepspeeds) return;  // the program's own defaults
  zero::Config filled = *config;
  zero::FillDefaults(parsed.autos, steps, std::max<int64_t>(1, DefaultWarmup(steps)), &filled);
  const auto take = [&kept](const char* name, auto& to, const auto& from) {
    if (kept.Removed(name)) to = from;
  };
  take("clip", config->gradient_clipping, filled.gradient_clipping);
  take("lr", config->optimizer.lr, filled.optimizer.lr);
  take("weight_decay", config->optimizer.weight_decay, filled.optimizer.weight_decay);
  take("beta1", config->optimizer.beta1, filled.optimizer.beta1);
  take("beta2", config->optimizer.beta2, filled.optimizer.beta2);
  take("eps", config->optimizer.eps, filled.optimizer.eps);
  take("momentum", config->optimizer.momentum, filled.optimizer.momentum);
}

// The loss scale of a run that goes on, where its config says something else of it than before.
absl::Status ReviseLossScale(const RecordedOptions& kept, const nlohmann::json& run, Changes* changes,
                             zero::EngineOptions* engine) {
  const nlohmann::json recorded = run.value("loss_scale", nlohmann::json());
  if (engine->dtype != torch::kHalf || !recorded.is_object()) return absl::OkStatus();
  if (!kept.ConfigChanges("loss_scale", nullptr) && !kept.Removed("loss_scale")) return absl::OkStatus();
  const nlohmann::json asked = engine->optimizer.loss_scale.ToJson();
  for (const auto& [key, now] : asked.items()) {
    const nlohmann::json before = recorded.value(key, nlohmann::json());
    if (before == now) continue;
    changes->Tell(absl::StrCat("loss scale: ", key), before.dump(), now.dump(),
                  kept.SourceOf("loss_scale", ""));
    engine->optimizer.new_loss_scale = engine->optimizer.loss_scale;
  }
  return absl::OkStatus();
}

// Of a run for whose schedule nobody gives a scheduler.
absl::StatusOr<zero::LrSchedule> OwnSchedule(const TrainOptions& flags, const zero::ParsedConfig& parsed,
                                             double lr, int64_t steps) {
  // DeepSpeed's rate is constant then.
  if (parsed.deepspeeds && !parsed.config.scheduler.has_value() && !flags.warmup.has_value()) {
    return zero::LrSchedule::Create(zero::Constant{.lr = lr});
  }
  const int64_t warmup = flags.warmup.value_or(DefaultWarmup(steps));
  RETURN_IF_ERROR(Check<int64_t>("--warmup", warmup, 0, int64_t{1} << 40));
  return zero::LrSchedule::Create(
      zero::WarmupThenCosine{.lr = lr, .min_lr = lr / 10, .warmup = warmup, .horizon = steps});
}

// The schedule of a run that goes on, where its user changes it: its own with another peak rate or warm-up,
// its horizon as it was, or the one that the config has anew.
absl::Status ReviseSchedule(const TrainOptions& flags, const zero::ParsedConfig& parsed,
                            const RecordedOptions& kept, const nlohmann::json& run, Changes* changes,
                            TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const zero::Config& config = parsed.config;
  const double lr = zero::LearningRate(engine.optimizer.algorithm);
  const nlohmann::json recorded = run.value("schedule", nlohmann::json());
  absl::StatusOr<zero::LrSchedule> schedule = absl::NotFoundError("it has none");
  if (!recorded.is_null()) {
    schedule = zero::LrSchedule::FromJson(recorded);
    if (!schedule.ok()) return schedule.status();
  }
  bool changed = false;
  absl::StatusOr<zero::LrSchedule> of_config = absl::NotFoundError("the config has none");
  if (config.scheduler.has_value()) {
    zero::Config filled = config;
    filled.optimizer.lr = lr;  // the run's own, or what was just given
    if (parsed.deepspeeds) {
      zero::FillDefaults(parsed.autos, settings->steps, std::max<int64_t>(1, DefaultWarmup(settings->steps)),
                         &filled);
    }
    of_config = zero::MakeSchedule(*filled.scheduler, lr, settings->steps);
    if (!of_config.ok()) return of_config.status();
    const bool recorded_too = run.contains("config") && run["config"].contains("scheduler");
    const absl::StatusOr<zero::LrSchedule> as_made =
        zero::MakeSchedule(*config.scheduler, run.value("lr", lr), run.value("steps", settings->steps));
    const bool as_recorded = !recorded_too && as_made.ok() && as_made->ToJson() == recorded;
    if (kept.ConfigChanges("scheduler", nullptr) && !as_recorded) {
      changes->Tell("scheduler", recorded.dump(), of_config->ToJson().dump(), "scheduler in --config");
      schedule = of_config;
      changed = true;
    }
  }
  if (kept.Removed("scheduler")) {
    ASSIGN_OR_RETURN(schedule, OwnSchedule(flags, parsed, lr, settings->steps));
    changes->Tell("scheduler", recorded.dump(), schedule->ToJson().dump(), kept.SourceOf("scheduler", ""));
    changed = true;
  }
  // A flag also wins over a scheduler that the config has anew.
  const bool lr_changes = changed ? flags.lr.has_value() : changes->run.contains("lr");
  if (schedule.ok() && (lr_changes || flags.warmup.has_value())) {
    zero::LrScheduleSpec spec = schedule->spec();
    const double old_lr = run.value("lr", lr);
    const auto refused = [&] {
      return Wrong(absl::StrCat(lr_changes ? kept.SourceOf("lr", "lr") : "--warmup",
                                ": the rates of this run are those of its scheduler ",
                                std::string(schedule->name()), ": give another scheduler in --config"));
    };
    const auto warm = [&](int64_t* steps) {
      if (!flags.warmup.has_value() || *flags.warmup == *steps) return;
      changes->Tell("warmup", absl::StrCat(*steps), absl::StrCat(*flags.warmup), "--warmup");
      *steps = *flags.warmup;
    };
    if (auto* constant = std::get_if<zero::Constant>(&spec)) {
      if (flags.warmup.has_value()) {
        return Wrong("--warmup: this run trains at a constant rate: give a scheduler in --config");
      }
      constant->lr = lr;
    } else if (auto* cosine = std::get_if<zero::WarmupThenCosine>(&spec)) {
      if (lr_changes) {
        cosine->min_lr = cosine->lr > 0 ? cosine->min_lr / cosine->lr * lr : lr / 10;
        cosine->lr = lr;
      }
      warm(&cosine->warmup);
    } else if (auto* of_ratio = std::get_if<zero::WarmupCosineLr>(&spec)) {
      if (lr_changes) of_ratio->lr = lr;
      warm(&of_ratio->warmup_num_steps);
    } else {
      auto* decay = std::get_if<zero::WarmupDecayLr>(&spec);
      auto* warmup = decay != nullptr ? &decay->warmup : std::get_if<zero::WarmupLr>(&spec);
      if (warmup == nullptr) return refused();
      // One that names its rate itself goes by the flag alone.
      if (lr_changes && (kept.by_flag("lr") || warmup->warmup_max_lr == old_lr)) warmup->warmup_max_lr = lr;
      warm(&warmup->warmup_num_steps);
    }
    schedule = zero::LrSchedule::Create(spec);
    if (!schedule.ok()) return schedule.status();
    changed = changed || schedule->ToJson() != recorded;
  } else if (!schedule.ok() && flags.warmup.has_value()) {
    return Wrong("--warmup: this run trains at a constant rate: give a scheduler in --config");
  }
  if (changed) engine.optimizer.new_schedule = *schedule;
  if (!schedule.ok()) return absl::OkStatus();
  const int64_t horizon = HorizonOf(*schedule);
  if (horizon > 0 && settings->steps > horizon) {
    settings->notes.push_back(absl::StrFormat(
        "the schedule of this run was made for %d steps: those after it train at a rate of %g (--lr, or "
        "another scheduler in --config, changes that)",
        horizon, schedule->At(settings->steps).lr));
  }
  return absl::OkStatus();
}

// Flags win, also over rates that the scheduler names itself.
bool KeepsScheduler(const TrainOptions& flags, const zero::SchedulerConfig& scheduler) {
  return (!flags.warmup.has_value() || scheduler.warmup_num_steps == flags.warmup) &&
         (!flags.lr.has_value() || GoesByOptimizersRate(scheduler) || scheduler.warmup_max_lr == flags.lr);
}

// DeepSpeed's answer to a file without offload is none; a --state-dir asks for a drive.
absl::StatusOr<zero::OffloadDevice> ChooseOffload(const TrainOptions& flags, const zero::ParsedConfig& parsed,
                                                  std::vector<std::string>* filled) {
  if (flags.offload.has_value()) return ParseOffload(*flags.offload);
  const std::optional<zero::OffloadDevice> given = zero::CombinedOffload(parsed.config.zero);
  if (given.has_value()) return *given;
  if (!parsed.deepspeeds || !flags.state_dirs.empty()) return zero::OffloadDevice::kNvme;
  // A run that is there goes on where it is.
  if (flags.resume) {
    const swap::Holding holding = swap::Probe(std::vector<std::string>{kDefaultStateDir}).holding;
    if (holding == swap::Holding::kRun || holding == swap::Holding::kInUse) return zero::OffloadDevice::kNvme;
  }
  filled->push_back("zero_optimization.offload_optimizer: none (--offload nvme trains from a drive)");
  return zero::OffloadDevice::kNone;
}

// Flags go into the places that the file leaves open, and DeepSpeed's values into the rest of those.
void FillFromFlagsAndDeepSpeed(const TrainOptions& flags, const TrainSettings& settings,
                               zero::ParsedConfig* parsed, std::vector<std::string>* filled) {
  zero::Config& config = parsed->config;
  zero::OptimizerConfig& optimizer = config.optimizer;
  const auto fill = [](auto& open, const auto& flag) {
    if (!open.has_value()) open = flag;
  };
  fill(optimizer.lr, flags.lr);
  fill(optimizer.weight_decay, flags.weight_decay);
  fill(config.gradient_clipping, flags.clip);
  fill(config.micro_batch_per_rank, flags.batch);
  fill(config.gradient_accumulation_steps, flags.accumulate);
  const bool typed = flags.dtype.value_or("auto") != "auto";
  if (typed && !config.bf16.has_value()) config.bf16 = *flags.dtype == "bf16";
  const bool warms_up = config.scheduler.has_value() &&
                        config.scheduler->type != zero::SchedulerType::kLrRangeTest &&
                        config.scheduler->type != zero::SchedulerType::kOneCycle;
  if (warms_up && flags.warmup.has_value() && !config.scheduler->warmup_num_steps.has_value()) {
    config.scheduler->warmup_num_steps = flags.warmup;
  }
  if (warms_up && flags.lr.has_value() && GoesByOptimizersRate(*config.scheduler)) {
    config.scheduler->warmup_max_lr = flags.lr;
  }
  const std::vector<std::string> open = zero::FillDefaults(
      parsed->autos, settings.steps, std::max<int64_t>(1, DefaultWarmup(settings.steps)), &config);
  // Of a schedule that flags replace nothing is said.
  const bool replaced =
      config.scheduler.has_value() ? !KeepsScheduler(flags, *config.scheduler) : flags.warmup.has_value();
  for (const std::string& line : open) {
    if (!(replaced && absl::StartsWith(line, "scheduler"))) filled->push_back(line);
  }
}

absl::Status ResolveOptimizer(const TrainOptions& flags, const zero::ParsedConfig& parsed,
                              const RecordedOptions& kept, const nlohmann::json& run, Changes* changes,
                              TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const zero::Config& config = parsed.config;
  OptimizerFlags given;
  given.lr = flags.lr;
  given.weight_decay = flags.weight_decay;
  given.states =
      flags.optimizer_states.has_value() ? flags.optimizer_states : config.penstock.optimizer_states;
  ASSIGN_OR_RETURN(engine.optimizer.algorithm,
                   ResolveOptimizerOptions(given, config.optimizer, kept, &settings->kept));
  ASSIGN_OR_RETURN(engine.optimizer.states, ResolveOptimizerStates(given, kept, &settings->kept));
  const std::optional<double> clip = flags.clip.has_value() ? flags.clip : config.gradient_clipping;
  ASSIGN_OR_RETURN(engine.optimizer.clip, kept.Of("clip", "clip", clip, 1.0));
  RETURN_IF_ERROR(Check("--clip", engine.optimizer.clip, 0.0, 1e30));
  ASSIGN_OR_RETURN(zero::LossScaler scaler, zero::MakeLossScaler(config.fp16));
  engine.optimizer.loss_scale = scaler.options();
  const double lr = zero::LearningRate(engine.optimizer.algorithm);
  if (flags.warmup.has_value()) {
    RETURN_IF_ERROR(Check<int64_t>("--warmup", *flags.warmup, 0, int64_t{1} << 40));
  }
  if (settings->resumes) {
    RETURN_IF_ERROR(ReviseLossScale(kept, run, changes, &engine));
    return ReviseSchedule(flags, parsed, kept, run, changes, settings);
  }

  if (config.scheduler.has_value() && KeepsScheduler(flags, *config.scheduler)) {
    ASSIGN_OR_RETURN(zero::LrSchedule schedule, zero::MakeSchedule(*config.scheduler, lr, settings->steps));
    engine.optimizer.schedule = schedule;
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(engine.optimizer.schedule, OwnSchedule(flags, parsed, lr, settings->steps));
  if (config.scheduler.has_value()) {
    settings->notes.push_back(absl::StrFormat(
        "%s takes the place of the config's scheduler: %d steps of warm-up, then a cosine to a "
        "tenth of the rate",
        flags.lr.has_value() ? "--lr" : "--warmup", flags.warmup.value_or(DefaultWarmup(settings->steps))));
  }
  return absl::OkStatus();
}

absl::Status ResolveMemory(const TrainOptions& flags, const zero::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  if (flags.host_memory.has_value()) {
    absl::StatusOr<int64_t> bytes = ParseSize(*flags.host_memory);
    if (!bytes.ok())
      return Wrong(
          absl::StrCat("--host-memory ", *flags.host_memory, ": ", std::string(bytes.status().message())));
    if (*bytes <= 0) return Wrong(absl::StrCat("--host-memory ", *flags.host_memory, ": must be above 0"));
    engine.memory.host_memory_budget_bytes = *bytes;
  } else if (config.penstock.host_memory_bytes.has_value()) {
    engine.memory.host_memory_budget_bytes = *config.penstock.host_memory_bytes;
  } else if (engine.storage.offload == zero::OffloadDevice::kNvme) {
    const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
    engine.memory.host_memory_budget_bytes = DefaultHostMemory(sharing, engine.intra_op_threads);
    settings->notes.push_back(
        absl::StrCat("no --host-memory given: ", sharing == 1 ? "" : "a rank's share of ",
                     "half of what is free, ", FormatBytes(engine.memory.host_memory_budget_bytes)));
  }
  return ResolveDevice(flags, config, settings);
}

// Where a device computes the processor has little to do but updates: two cores are left to what moves.
int64_t UpdateThreads(const zero::EngineOptions& engine) {
  if (!engine.device->has_own_memory()) return 1;
  const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
  return std::max<int64_t>(1, int64_t{zero::DefaultIntraOpThreads()} / sharing - 2);
}

absl::Status ResolveIo(const zero::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  engine.optimizer.order = config.penstock.order.value_or(zero::UpdateOrder::kAuto);
  engine.memory.tile_bytes = config.penstock.tile_bytes.value_or(0);
  const zero::ZeroConfig& zero_config = config.zero;
  if (zero_config.sub_group_size_elements.value_or(0) > 0) {
    // DeepSpeed's unit of an optimizer step is our tile.
    ASSIGN_OR_RETURN(zero::TileFormat format, zero::FormatOf(engine));
    const int64_t bytes = format.precision().UnpaddedBytes(*zero_config.sub_group_size_elements);
    engine.memory.tile_bytes =
        engine.memory.tile_bytes > 0 ? std::min(engine.memory.tile_bytes, bytes) : bytes;
  }
  engine.memory.bounds = zero::PlanBoundsOf(config, engine.world());
  const zero::OffloadOptimizerConfig& offload_optimizer = zero_config.offload_optimizer;
  const bool no_ahead = offload_optimizer.pipeline_read == false;
  const bool no_behind = offload_optimizer.pipeline_write == false;
  if (no_ahead != no_behind) {
    settings->notes.push_back(absl::StrCat(
        "zero_optimization.offload_optimizer.pipeline_", no_ahead ? "read" : "write",
        " false: at most two tiles of optimizer state are in flight at once, one of which may still be read ",
        "ahead or written behind; with pipeline_read and pipeline_write false it is one at a time"));
  }
  for (const auto& [given, key, why] :
       {std::tuple{zero_config.reduce_bucket_size_elements.has_value(),
                   "zero_optimization.reduce_bucket_size", "a block is reduced as one, in small pieces"},
        {zero_config.allgather_bucket_size_elements.has_value(), "zero_optimization.allgather_bucket_size",
         "a block is gathered as one"},
        {config.penstock.io_threads.has_value(), "penstock.io_threads",
         "one thread drives a device at its full speed"}}) {
    if (given) settings->notes.push_back(absl::StrCat(key, ": accepted and ignored: ", why));
  }
  engine.optimizer.workers = static_cast<int>(config.penstock.update_threads.value_or(UpdateThreads(engine)));
  if (config.aio.block_size_bytes.has_value()) {
    engine.storage.io.block_bytes = static_cast<uint64_t>(*config.aio.block_size_bytes);
  }
  if (config.aio.queue_depth.has_value()) {
    const auto depth = static_cast<uint64_t>(*config.aio.queue_depth);
    // DeepSpeed's depth is per thread, for reads and for writes apart.
    const auto threads = static_cast<uint64_t>(config.aio.intra_op_parallelism.value_or(1));
    const uint64_t bytes =
        std::max(depth * threads * engine.storage.io.block_bytes, engine.storage.io.block_bytes);
    engine.storage.io.max_read_bytes_in_flight = std::min(engine.storage.io.max_read_bytes_in_flight, bytes);
    engine.storage.io.max_write_bytes_in_flight =
        std::min(engine.storage.io.max_write_bytes_in_flight, bytes);
    engine.storage.io_depth_is_limit = true;
  }
  engine.storage.gds = config.aio.use_gds.value_or(false);
  return absl::OkStatus();
}

}  // namespace

void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further flags.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option(
      "--model", flags.model,
      "A preset (gpt-tiny, gpt-small, gpt-125m, gpt-350m, gpt-1b, ...) or a config.json [gpt-small]");
  app.add_option("--data", flags.data, "Text (its bytes are the tokens), or nanoGPT's .bin");
  app.add_option("--eval-data", flags.eval_data, "Held-out text, in the same form");
  app.add_option("--eval-every", flags.eval_every, "Evaluate after every so many steps [at the end]");
  app.add_option("--eval-windows", flags.eval_windows,
                 "Evaluate on so many sequences of the held-out text at the most [all of it]");
  app.add_option("--vocab", flags.vocab, "Vocabulary of .bin tokens [256 for text]");
  app.add_option("--config", flags.config, "DeepSpeed's JSON; flags win over it");
  app.add_option("--state-dir", flags.state_dirs,
                 "Where training state lives; several are striped [penstock-state]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--offload", flags.offload, "none, cpu or nvme [nvme]");
  app.add_option("--host-memory", flags.host_memory, "Hard budget, as 512M or 4GiB [half of what is free]");
  app.add_option("--device-memory", flags.device_memory, "Hard budget of the device [what is free on it]");
  app.add_option("--device", flags.device, "cpu or cuda [cpu]");
  app.add_option("--dtype", flags.dtype, "bf16, fp16, fp32 or auto [auto]");
  app.add_option("--steps", flags.steps, "Number of the last step, also on resume [100]");
  app.add_option("--batch", flags.batch, "Sequences in a micro-batch [2]");
  app.add_option("--accumulate", flags.accumulate, "Micro-batches in a step [1]");
  app.add_option("--seq", flags.seq, "Tokens in a sequence [the model's context]");
  app.add_option("--lr", flags.lr, "Peak learning rate [3e-4]");
  app.add_option("--warmup", flags.warmup,
                 "Steps of linear warm-up before the cosine [a tenth of the steps, 100 at most]");
  app.add_option("--clip", flags.clip, "Bound of the global gradient norm, 0 for none [1.0]");
  app.add_option("--weight-decay", flags.weight_decay, "Weight decay [0.01 for AdamW]");
  app.add_option("--optimizer-states", flags.optimizer_states,
                 "What the optimizer's states are kept in: fp32, bf16 or 8bit [fp32]");
  app.add_option("--seed", flags.seed, "Of initial values, data order and dropout [1]");
  app.add_option("--threads", flags.threads, "Intra-op threads, recorded with the run [one per core]");
  app.add_flag(
      "--resume", flags.resume,
      "Continue the run in --state-dir; with --offload none or cpu, and where that directory is "
      "empty, from the newest checkpoint. Flags that were given another value (--lr, --warmup, --clip, "
      "--weight-decay, --batch, --accumulate, --seq, --data) change the run from the next step on, and "
      "so do changed keys of --config: that is told and recorded");
  app.add_flag("--overwrite", flags.overwrite,
               "Replace the run in --state-dir, and the checkpoints in --checkpoint-dir");
  app.add_option(
      "--init-from", flags.init_from,
      "Initial weights: safetensors in Hugging Face's GPT-2 layout, a file, an index or a directory");
  app.add_option("--checkpoint-dir", flags.checkpoint_dir,
                 "Where checkpoints are kept; with --offload none or cpu the last step always is "
                 "[checkpoints/ in --state-dir]");
  app.add_option("--checkpoint-every", flags.checkpoint_every,
                 "Keep a checkpoint after every so many steps, written while training goes on");
  app.add_option("--checkpoint-keep", flags.checkpoint_keep, "Keep only the newest so many [all]");
  if (plans) {
    app.add_flag("--json", flags.json, "Print JSON");
    return;
  }
  app.add_option("--rank-timeout", flags.rank_timeout,
                 "Seconds without a sign of life after which another rank counts as lost; ten times as many "
                 "for all to come, sixty times for one that lives and does not go on [30]");
  app.footer(
      "Several processes train together where the environment says so: RANK, WORLD_SIZE, LOCAL_RANK, "
      "MASTER_ADDR and "
      "MASTER_PORT as torchrun sets them, or what mpirun and srun set. Each has --batch sequences, and its "
      "part of the "
      "state in rank-K/ of --state-dir; rank 0 writes report, log and progress.");
  app.add_option("--report", flags.report, "Write the run's report, a JSON file");
  app.add_option("--log", flags.log, "Append a JSON line for every committed step and every evaluation");
  app.add_option("--trace", flags.trace, "Write a trace for Perfetto or chrome://tracing");
  app.add_flag("--check", flags.check, "Only check the flags and the config");
  app.add_flag("--quiet", flags.quiet, "No progress");
}

zero::Batch ExampleBatch(int64_t batch, int64_t seq) {
  return {torch::zeros({batch, seq}, torch::kInt64), torch::zeros({batch, seq}, torch::kInt64)};
}

absl::StatusOr<TrainSettings> ResolveTrainOptions(const TrainOptions& flags, bool needs_data,
                                                  std::shared_ptr<zero::Comm> comm) {
  TrainSettings settings;
  zero::EngineOptions& engine = settings.engine;
  engine.comm = std::move(comm);
  zero::ParsedConfig parsed;
  parsed.deepspeeds = false;  // without a file the program's own defaults hold
  if (flags.config.has_value()) {
    ASSIGN_OR_RETURN(parsed, zero::LoadConfig(*flags.config));
    settings.notes = parsed.notes;
  }
  zero::Config& config = parsed.config;
  std::vector<std::string> filled;  // what the file leaves open, as DeepSpeed has it
  if (needs_data && !flags.data.has_value()) return Wrong("--data FILE is needed: the text to learn");
  if (flags.resume && flags.overwrite) return Wrong("--resume and --overwrite: one or the other");

  zero::OffloadDevice offload = zero::OffloadDevice::kNvme;
  ASSIGN_OR_RETURN(offload, ChooseOffload(flags, parsed, &filled));
  engine.storage.offload = offload;
  if (offload == zero::OffloadDevice::kNvme) {
    engine.storage.state_dirs = !flags.state_dirs.empty() ? flags.state_dirs : zero::NvmePaths(config.zero);
    if (engine.storage.state_dirs.empty()) engine.storage.state_dirs = {kDefaultStateDir};
    RETURN_IF_ERROR(CheckRankDirectories(engine.storage.state_dirs, engine.world()));
    if (engine.comm != nullptr)
      engine.storage.state_dirs = zero::RankDirectories(engine.storage.state_dirs, engine.rank());
  }
  SetDurability(SyncSaid(config).value_or(kSyncProcess), DurabilitySaid(config).value_or(kEachStep), &engine);
  engine.storage.versions = static_cast<int>(config.penstock.versions.value_or(0));
  NoteDurability(config, &settings);
  const bool starts = needs_data && !flags.resume && !flags.overwrite;
  if (starts && offload == zero::OffloadDevice::kNvme) {
    RETURN_IF_ERROR(CheckFree(engine.storage.state_dirs));
  }
  RETURN_IF_ERROR(ResolveCheckpoints(flags, &settings));
  if (flags.resume) {
    RETURN_IF_ERROR(CheckWasThere(flags, engine));
  }
  if (needs_data) {
    RETURN_IF_ERROR(TakeCheckpoints(&settings));
    RETURN_IF_ERROR(CheckNoCheckpoints(flags, settings));
  }
  if (needs_data && flags.overwrite) NoteReplaced(&settings);
  nlohmann::json run;
  bool restores = false;
  if (flags.resume) {
    ASSIGN_OR_RETURN(run, FindResumable(flags, config, /*starts=*/needs_data, &restores, &settings));
    settings.resumes = !run.is_null();
  }
  engine.resume.enabled = settings.resumes && !restores;  // there is no state to plan for yet
  // A run that was killed before its first commit is started over by --resume.
  engine.storage.overwrite = flags.overwrite || (flags.resume && !settings.resumes);
  std::set<std::string> names;
  for (const auto& [name, given] : {std::pair{"lr", flags.lr.has_value()},
                                    {"clip", flags.clip.has_value()},
                                    {"weight_decay", flags.weight_decay.has_value()},
                                    {"batch", flags.batch.has_value()},
                                    {"accumulate", flags.accumulate.has_value()},
                                    {"seq", flags.seq.has_value()},
                                    {"vocab", flags.vocab.has_value()},
                                    {"seed", flags.seed.has_value()},
                                    {"dtype", flags.dtype.has_value()},
                                    {"optimizer_states", flags.optimizer_states.has_value()}}) {
    if (given) names.insert(name);
  }
  Changes changes;
  const RecordedOptions kept(run, std::move(names), &changes);
  // As the file has it: what fills its open places depends on the run's other flags.
  if (flags.config.has_value()) NoteConfig(config, kept);

  std::string model_name, dtype;
  if (settings.resumes && !flags.model.has_value()) {
    ASSIGN_OR_RETURN(settings.model, models::GptConfigFromJson(run["model"]));
  } else if (flags.init_from.has_value() && !flags.model.has_value()) {
    nlohmann::json published;
    ASSIGN_OR_RETURN(published, models::ConfigOfWeights(*flags.init_from));
    if (published.is_null()) {
      return Wrong(absl::StrCat("--init-from ", *flags.init_from,
                                ": no config.json tells what model that is: give --model as well"));
    }
    absl::StatusOr<models::GptConfig> model = models::GptConfigFromJson(published, &settings.notes);
    if (!model.ok()) {
      return Wrong(
          absl::StrCat("--init-from ", *flags.init_from, ": ", std::string(model.status().message())));
    }
    settings.model = *model;
  } else {
    ASSIGN_OR_RETURN(settings.model,
                     models::ParseGptConfig(flags.model.value_or("gpt-small"), &settings.notes));
    if (flags.init_from.has_value()) NoteAnotherFunction(*flags.init_from, &settings);
  }
  settings.data_path = flags.data.value_or("");
  settings.eval_path = flags.eval_data.value_or("");
  settings.eval_every = flags.eval_every.value_or(0);
  if (flags.eval_every.has_value()) {
    if (settings.eval_path.empty()) return Wrong("--eval-every needs --eval-data FILE");
    RETURN_IF_ERROR(Check<int64_t>("--eval-every", settings.eval_every, 1, int64_t{1} << 40));
  }
  settings.eval_windows = flags.eval_windows.value_or(0);
  if (flags.eval_windows.has_value()) {
    if (settings.eval_path.empty()) return Wrong("--eval-windows needs --eval-data FILE");
    RETURN_IF_ERROR(Check<int64_t>("--eval-windows", settings.eval_windows, 1, int64_t{1} << 40));
  }
  if (flags.vocab.has_value()) {
    RETURN_IF_ERROR(Check<int64_t>("--vocab", *flags.vocab, 1, int64_t{1} << 32));
  }
  ASSIGN_OR_RETURN(settings.vocab, kept.Of<int64_t>("vocab", "vocab", flags.vocab, 0));
  if (settings.vocab > 0) settings.model.vocab = settings.vocab;
  if (settings.resumes && flags.model.has_value()) {
    const absl::StatusOr<models::GptConfig> made = models::GptConfigFromJson(run["model"]);
    const std::string difference =
        made.ok() ? zero::JsonDifference(made->ToJson(), settings.model.ToJson()) : std::string();
    if (!difference.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--model ", *flags.model, ": ",
                       engine.storage.state_dirs.empty() ? "" : engine.storage.state_dirs.front(),
                       " holds a run of another model (", difference,
                       "); leave the flag out, or start another run in another --state-dir"));
    }
  }

  settings.steps = flags.steps.value_or(settings.resumes ? run.value("steps", int64_t{100}) : 100);
  RETURN_IF_ERROR(Check<int64_t>("--steps", settings.steps, 1, int64_t{1} << 40));
  // On resume the record has what was filled when the run was created.
  if (settings.resumes) FillRemoved(parsed, kept, settings.steps, &config);
  if (parsed.deepspeeds && !settings.resumes) FillFromFlagsAndDeepSpeed(flags, settings, &parsed, &filled);
  if (!filled.empty()) {
    settings.notes.push_back(absl::StrCat("what ", *flags.config,
                                          " leaves open is as in DeepSpeed, and what is \"auto\" as in "
                                          "Hugging Face's Trainer: ",
                                          absl::StrJoin(filled, ", ")));
  }
  RETURN_IF_ERROR(ResolveBatchSizes(flags, config, kept, run, &changes, &settings));
  if (flags.seq.has_value()) {
    if (absl::Status status = Check<int64_t>("--seq", *flags.seq, 1, settings.model.context); !status.ok()) {
      return Wrong(absl::StrCat(std::string(status.message()), " (the model's context)"));
    }
  }
  ASSIGN_OR_RETURN(settings.seq, kept.Of("seq", "seq", flags.seq, settings.model.context));

  int64_t seed = 1;
  ASSIGN_OR_RETURN(seed, kept.Of<int64_t>("seed", "seed", flags.seed, 1));
  RETURN_IF_ERROR(Check<int64_t>("--seed", seed, 0, int64_t{1} << 62));
  engine.seed = static_cast<uint64_t>(seed);
  if (flags.threads.has_value()) {
    RETURN_IF_ERROR(Check<int64_t>("--threads", *flags.threads, 1, kMostThreads));
  }
  const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
  const int64_t threads =
      flags.threads.value_or(std::max<int64_t>(1, zero::DefaultIntraOpThreads() / sharing));
  const int64_t kept_threads = run.is_null() ? threads : run.value("threads", threads);
  if (flags.threads.has_value() && kept_threads != threads) {
    settings.notes.push_back(absl::StrCat("--threads ", threads, ": the run goes on with the ", kept_threads,
                                          " that it was created with, so that its bits stay the same"));
  }
  engine.intra_op_threads = static_cast<int>(kept_threads);

  ASSIGN_OR_RETURN(dtype, ChooseDtype(flags, config, &settings.notes));
  std::optional<std::string> said = flags.dtype;
  if (said == "auto") said.reset();
  if (!said.has_value() && !flags.dtype.has_value() && changes.config.contains("dtype")) said = dtype;
  if (settings.resumes) {
    ASSIGN_OR_RETURN(dtype, kept.Of("dtype", "dtype", said, run.value("dtype", dtype)));
  }
  engine.dtype = zero::TorchDtype(*zero::ParseDType(dtype));
  RETURN_IF_ERROR(ResolveOptimizer(flags, parsed, kept, run, &changes, &settings));
  RETURN_IF_ERROR(ResolveDurability(config, kept, &settings));
  settings.kept["data_order"] = models::kSequenceOrder;
  if (const std::string order =
          settings.resumes ? run.value("data_order", models::kSequenceOrder) : models::kSequenceOrder;
      order != models::kSequenceOrder) {
    changes.run["data_order"] = models::kSequenceOrder;
    changes.Tell("the order of the data", order, models::kSequenceOrder, "this version of the program");
  }
  RETURN_IF_ERROR(ResolveMemory(flags, config, &settings));
  RETURN_IF_ERROR(ResolveIo(config, &settings));

  if (flags.init_from.has_value() && settings.resumes) {
    settings.notes.push_back("--init-from: of no effect, since the run goes on with its own weights");
  } else if (flags.init_from.has_value()) {
    std::unique_ptr<models::WeightImport> opened;
    ASSIGN_OR_RETURN(opened, models::WeightImport::Open(*flags.init_from, settings.model));
    engine.initial_values = [weights = std::shared_ptr<models::WeightImport>(std::move(opened))](
                                int block, int64_t first, int64_t elements, float* to) {
      return weights->Read(block, first, elements, to);
    };
  }

  engine.micro_batches = static_cast<int>(settings.accumulate);
  // Inputs and targets, as whole numbers of 64 bits: made before anything else is known of the run.
  int64_t tokens = 0;
  const int64_t most = std::max(engine.memory.host_memory_budget_bytes, int64_t{64} << 20);
  if (__builtin_mul_overflow(settings.batch, settings.seq, &tokens) || tokens > most / 16) {
    return absl::FailedPreconditionError(
        absl::StrCat("--batch ", settings.batch, " --seq ", settings.seq,
                     ": the tokens alone are more than the host memory budget of ",
                     FormatBytes(engine.memory.host_memory_budget_bytes), " has room for"));
  }
  engine.example = ExampleBatch(settings.batch, settings.seq);
  engine.resume.run = {{"model", settings.model.ToJson()},
                       {"steps", settings.steps},
                       {"batch", settings.batch},
                       {"accumulate", settings.accumulate},
                       {"seq", settings.seq},
                       {"vocab", settings.vocab},
                       {"seed", seed},
                       {"threads", engine.intra_op_threads},
                       {"clip", engine.optimizer.clip},
                       {"blas", zero::DescribeBlas().name}};
  if (engine.world() > 1) engine.resume.run["ranks"] = engine.world();
  if (engine.storage.checkpoints.any()) {
    // For whoever wants to read the model while it is trained.
    std::error_code error;
    std::string parent = std::filesystem::absolute(engine.storage.checkpoints.parent, error);
    if (error) parent = engine.storage.checkpoints.parent;
    engine.resume.run["checkpoint_dir"] = parent;
    changes.run["checkpoint_dir"] = parent;
  }
  engine.resume.run.update(settings.kept);
  if (flags.config.has_value()) {
    engine.resume.run["config"] = changes.config;
    if (settings.resumes && run.value("config", nlohmann::json::object()) != changes.config)
      changes.run["config"] = changes.config;
  }
  if (settings.resumes) {
    // Of runs from before these were recorded.
    for (const char* name : {"sync", "durability", "data_order"}) {
      if (!run.contains(name)) changes.run[name] = settings.kept[name];
    }
    if (settings.steps != run.value("steps", settings.steps)) changes.run["steps"] = settings.steps;
    engine.resume.run_changes.update(changes.run);
    settings.changes = std::move(changes.told);
    settings.recorded = std::move(run);
  }
  return settings;
}

}  // namespace penstock::tools
