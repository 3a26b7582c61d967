#include "tools/penstock/durability_keys.h"

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {
namespace {

constexpr const char *kSyncPower = "power", *kSyncProcess = "process";
constexpr const char *kEachStep = "step", *kAtCheckpoints = "checkpoint";

void SetDurability(const std::string& sync, const std::string& durability, zero::EngineOptions* engine) {
  engine->storage.sync = sync == kSyncPower ? swap::Sync::kPower : swap::Sync::kProcess;
  engine->storage.durability =
      durability == kAtCheckpoints ? zero::Durability::kCheckpoint : zero::Durability::kStep;
}

// How many versions of everything the state on the drive was made for; none where there is no state.
absl::StatusOr<std::optional<uint32_t>> VersionsThere(const zero::EngineOptions& engine) {
  if (engine.storage.offload != zero::OffloadDevice::kNvme) return std::nullopt;
  const auto shards = zero::FindShards(engine.storage.state_dirs);
  if (absl::IsNotFound(shards.status()) || absl::IsFailedPrecondition(shards.status())) return std::nullopt;
  RETURN_IF_ERROR(shards.status());
  const absl::StatusOr<swap::Inspection> inspection = swap::Inspect(shards->front());
  if (absl::IsNotFound(inspection.status())) return std::nullopt;
  RETURN_IF_ERROR(inspection.status());
  return inspection->shape.slots;
}

// A store keeps as many versions as it was made for.
absl::Status CheckVersions(const run::Config& config, const zero::EngineOptions& engine,
                           std::optional<uint32_t> there) {
  if (!config.penstock.versions.has_value() || !there.has_value() || *config.penstock.versions == *there)
    return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--config: penstock.versions ", *config.penstock.versions, ": ", engine.storage.state_dirs.front(),
      " was made for ", *there, *there == 1 ? " version" : " versions",
      " of everything; leave it as it was, or go on from a checkpoint with another --state-dir"));
}

}  // namespace

std::optional<std::string> SyncSaid(const run::Config& config) {
  if (!config.penstock.sync.has_value()) return std::nullopt;
  return config.penstock.sync == zero::SyncMode::kPower ? kSyncPower : kSyncProcess;
}

std::optional<std::string> DurabilitySaid(const run::Config& config) {
  if (config.penstock.versions == 1) return kAtCheckpoints;
  if (!config.penstock.durability.has_value()) return std::nullopt;
  return config.penstock.durability == zero::Durability::kStep ? kEachStep : kAtCheckpoints;
}

void TakeDurability(const run::Config& config, zero::EngineOptions* engine) {
  SetDurability(SyncSaid(config).value_or(kSyncProcess), DurabilitySaid(config).value_or(kEachStep), engine);
  engine->storage.versions = static_cast<int>(config.penstock.versions.value_or(0));
}

void RestoreDurability(const run::Config& config, const nlohmann::json& run, zero::EngineOptions* engine) {
  SetDurability(SyncSaid(config).value_or(run.value("sync", kSyncProcess)),
                DurabilitySaid(config).value_or(run.value("durability", kEachStep)), engine);
}

absl::Status ResolveDurability(const run::Config& config, const run::RecordedOptions& recorded,
                               TrainSettings* settings) {
  std::optional<uint32_t> versions;
  if (settings->resumes) {
    ASSIGN_OR_RETURN(versions, VersionsThere(settings->engine));
  }
  RETURN_IF_ERROR(CheckVersions(config, settings->engine, versions));
  ASSIGN_OR_RETURN(const std::string sync, recorded.Of<std::string>("sync", SyncSaid(config), kSyncProcess));
  // A store of one version commits with its checkpoints only, whatever the config says by now.
  const bool one_version = versions == 1u;
  if (one_version && config.penstock.durability == zero::Durability::kStep) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--config: penstock.durability \"step\": ", settings->engine.storage.state_dirs.front(),
        " has one version of everything, and commits with its checkpoints only; leave it out, or "
        "start another run with \"versions\": 2 in another --state-dir"));
  }
  std::string durability = kAtCheckpoints;
  if (!one_version) {
    ASSIGN_OR_RETURN(durability, recorded.Of<std::string>("durability", DurabilitySaid(config), kEachStep));
  }
  SetDurability(sync, durability, &settings->engine);
  settings->to_record.update({{"sync", sync}, {"durability", durability}});
  return absl::OkStatus();
}

void NoteDurability(const run::Config& config, TrainSettings* settings) {
  const zero::EngineOptions& engine = settings->engine;
  if (engine.storage.offload == zero::OffloadDevice::kNvme) return;
  if (config.penstock.durability == zero::Durability::kStep) {
    settings->notes.push_back(
        "penstock.durability \"step\": of no effect without offload to nvme: state in memory is kept by "
        "checkpoints");
  }
  // Beside durability "checkpoint" the config says so itself.
  if (config.penstock.prefer == zero::Prefer::kTime && config.penstock.versions != 1 &&
      config.penstock.durability != zero::Durability::kCheckpoint) {
    settings->notes.push_back(
        "penstock.prefer \"time\": of no effect without offload to nvme: no step reads a drive");
  }
  if (engine.storage.versions > 0) {
    settings->notes.push_back("penstock.versions: of no effect without offload to nvme");
  }
}

}  // namespace penstock::tools
