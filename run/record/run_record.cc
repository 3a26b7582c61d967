#include "run/record/run_record.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "zero/config/json_field.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::run {
namespace {

// How long a killed run may hold its lock: the kernel still finishes its writes.
constexpr int kLockPatienceMs = 2000;

absl::Status Overwritten(const std::string& text) { return absl::OutOfRangeError(text); }

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
  using Json = nlohmann::json;
  struct Kind {
    const char* name;
    bool (Json::*is)() const noexcept;
  };
  for (const Kind& kind :
       {Kind{"dtype", &Json::is_string}, Kind{"run_id", &Json::is_string}, Kind{"sync", &Json::is_string},
        Kind{"durability", &Json::is_string}, Kind{"data_order", &Json::is_string},
        Kind{"model_directory", &Json::is_string}, Kind{"lr", &Json::is_number},
        Kind{"eval_split", &Json::is_number}, Kind{"config", &Json::is_object},
        Kind{"run_id_since", &Json::is_number_integer}, Kind{"data_fingerprint", &Json::is_number_integer}}) {
    if (run.contains(kind.name) && !(run[kind.name].*kind.is)()) return damaged(kind.name);
  }
  if (run.contains("data_weights") && !zero::JsonField<std::vector<double>>(run, "data_weights").has_value())
    return damaged("data_weights");
  return absl::OkStatus();
}

}  // namespace

absl::Status FitConfigToStore(const zero::StorageOptions& storage, Config* config) {
  if (storage.offload != OffloadDevice::kNvme) return absl::OkStatus();
  // Of a store that cannot be read, what opens it says why.
  const auto parts = zero::FindShards(storage.state_dirs);
  if (!parts.ok()) return absl::OkStatus();
  const absl::StatusOr<swap::Inspection> inspection = swap::Inspect(parts->front());
  if (!inspection.ok()) return absl::OkStatus();
  const uint32_t there = inspection->shape.slots;
  PenstockConfig& own = config->penstock;
  if (own.versions.value_or(there) != there) {
    return absl::FailedPreconditionError(absl::StrCat(
        "penstock.versions ", *own.versions, ": ", storage.state_dirs.front(), " was made for ", there,
        there == 1 ? " version" : " versions",
        " of everything; leave it as it was, or go on from a checkpoint with another `state_dir`"));
  }
  if (there > 1) return absl::OkStatus();
  if (own.durability == Durability::kStep) {
    return absl::FailedPreconditionError(
        absl::StrCat("penstock.durability \"step\": ", storage.state_dirs.front(),
                     " has one version of everything, and commits with its checkpoints only; leave it out, "
                     "or start another run with \"versions\": 2 in another `state_dir`"));
  }
  own.durability = Durability::kCheckpoint;
  return absl::OkStatus();
}

std::string RecordedTokenizer(const nlohmann::json& run) {
  if (!run.is_object() || !run.contains("tokenizer") || !run["tokenizer"].is_object()) return "";
  return zero::JsonField<std::string>(run["tokenizer"], "path").value_or("");
}

bool IsOverwritten(const absl::Status& status) { return absl::IsOutOfRange(status); }

absl::StatusOr<nlohmann::json> FindRun(const std::vector<std::string>& given) {
  std::vector<std::string> dirs = given;
  // All ranks' records say the same about the run.
  if (const auto parts = zero::FindShards(given); parts.ok()) {
    dirs = parts->front();
  } else if (!absl::IsNotFound(parts.status()) && !absl::IsFailedPrecondition(parts.status())) {
    return parts.status();
  }
  // One that is overwritten is told by its code: IsOverwritten.
  const absl::StatusOr<bool> there = swap::HoldsRun(swap::Probe(dirs));
  if (absl::IsPermissionDenied(there.status()))
    return absl::FailedPreconditionError(there.status().message());
  RETURN_IF_ERROR(there.status());
  if (!*there) return nlohmann::json();
  absl::StatusOr<swap::Inspection> inspection = swap::Inspect(dirs);
  if (absl::IsNotFound(inspection.status())) return nlohmann::json();
  RETURN_IF_ERROR(inspection.status());
  if (inspection->record.overwriting) {
    const swap::Finding later = swap::Probe(dirs, kLockPatienceMs);
    if (later.holding == swap::Holding::kInUse) return absl::FailedPreconditionError(later.text);
    return Overwritten(later.text);
  }
  const std::string& text = inspection->record.payload;
  const absl::StatusOr<nlohmann::json> parsed = ParseJson(text.empty() ? "null" : text, "");
  if (!parsed.ok() && text.front() == '{') {
    return absl::DataLossError(absl::StrCat(dirs.front(), ": the run's record is damaged: ",
                                            parsed.status().message(), "; go on from a checkpoint"));
  }
  const nlohmann::json payload = parsed.ok() ? *parsed : nlohmann::json();
  if (!payload.is_object() || !payload.contains("run") || !payload["run"].is_object() ||
      !payload["run"].contains("model")) {
    return absl::FailedPreconditionError(absl::StrCat(
        dirs.front(), " holds a run that was not made by penstock train; it cannot be resumed here"));
  }
  nlohmann::json run = payload["run"];
  RETURN_IF_ERROR(CheckRun(run, dirs.front()));
  const nlohmann::json identity = ParseJson(inspection->shape.identity, "").value_or(nlohmann::json());
  if (const auto dtype = zero::JsonField<std::string>(identity, "dtype")) run["dtype"] = *dtype;
  run["schedule"] = payload.value("schedule", nlohmann::json());
  run["loss_scale"] = payload.value("loss_scale", nlohmann::json());
  // How far it came, which no option of it is.
  const nlohmann::json last = payload.value("step", nlohmann::json());
  run["last_step"] = inspection->record.step;
  run["written_bytes"] = zero::JsonField<int64_t>(last, "written_bytes").value_or(0);
  // Runs from before there was a choice of optimizers.
  if (run.contains("adamw") && !run.contains("optimizer")) {
    run["optimizer"] = run["adamw"] == false ? "Adam" : "AdamW";
  }
  return run;
}

}  // namespace penstock::run
