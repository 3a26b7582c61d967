#include "tools/penstock/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "swap/inspect.h"
#include "tools/penstock/recorded_options.h"
#include "tools/penstock/state_reader.h"
#include "tools/base/version.h"
#include "zero/ranks/sharded_state.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::tools {
namespace {

// Of the file that runs: ranks of two builds would not compute the same.
std::string ProgramDigest() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return absl::StrCat(kVersion, "/", absl::Hex(kernels::Checksum(bytes.data(), bytes.size())));
}

// What each rank may have of its own is left out: memory, threads' places, and where rank 0 writes about the
// run.
nlohmann::json WordsJson(const TrainWords& words) {
  nlohmann::json json = {{"program", ProgramDigest()},
                         {"--state-dir", words.state_dirs},
                         {"--resume", words.resume},
                         {"--overwrite", words.overwrite}};
  const auto add = [&json](const char* flag, const auto& value) {
    if (value.has_value()) json[flag] = *value;
  };
  add("--model", words.model);
  add("--config", words.config);
  add("--offload", words.offload);
  add("--device", words.device);
  add("--dtype", words.dtype);
  add("--eval-every", words.eval_every);
  add("--steps", words.steps);
  add("--batch", words.batch);
  add("--accumulate", words.accumulate);
  add("--seq", words.seq);
  add("--vocab", words.vocab);
  add("--warmup", words.warmup);
  add("--seed", words.seed);
  add("--threads", words.threads);
  add("--checkpoint-every", words.checkpoint_every);
  add("--checkpoint-keep", words.checkpoint_keep);
  add("--checkpoint-dir", words.checkpoint_dir);
  add("--lr", words.lr);
  add("--clip", words.clip);
  add("--weight-decay", words.weight_decay);
  add("--optimizer-states", words.optimizer_states);
  add("--init-from", words.init_from);
  json["--eval-data"] = words.eval_data.has_value();
  return json;
}

// State in `dirs` is of another number of ranks than there are now.
absl::Status OfOtherRanks(const std::vector<std::string>& dirs, int64_t ranks) {
  const std::string many = ranks == 1  ? "one rank"
                           : ranks > 1 ? absl::StrCat(ranks, " ranks")
                                       : "several ranks";
  std::string text = absl::StrCat(dirs.front(), " holds a run of ", many, ": go on with ",
                                  ranks == 1  ? "one"
                                  : ranks > 1 ? absl::StrCat(ranks)
                                              : "as many");
  if (dirs.size() == 1) {
    absl::StrAppend(&text, ", or with another number by --resume --checkpoint-dir ", dirs.front(),
                    " and a --state-dir that is empty");
  } else {
    absl::StrAppend(&text, ", or from a checkpoint (--checkpoint-dir) with a --state-dir that is empty");
  }
  return absl::FailedPreconditionError(text);
}

std::string StepText(int64_t step) { return step < 0 ? "nothing" : absl::StrCat("step ", step); }

}  // namespace

absl::StatusOr<std::shared_ptr<zero::Comm>> ConnectRanks(const TrainWords& words) {
  absl::StatusOr<zero::RankEnvironment> environment = zero::ReadRankEnvironment();
  if (!environment.ok()) return environment.status();
  if (environment->world == 1) return std::shared_ptr<zero::Comm>();
  zero::CommOptions options;
  if (words.rank_timeout.has_value()) {
    if (!(*words.rank_timeout >= 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rank-timeout ", *words.rank_timeout, ": must be at least 1 second"));
    }
    options.patience_seconds = *words.rank_timeout;
  }
  absl::StatusOr<std::unique_ptr<zero::Comm>> connected = zero::ConnectGloo(*environment, options);
  if (!connected.ok()) return connected.status();
  std::shared_ptr<zero::Comm> comm = std::move(*connected);
  if (absl::Status same = zero::AgreeOnWords(*comm, WordsJson(words)); !same.ok()) {
    comm->Abort(same);
    return same;
  }
  return comm;
}

absl::Status CheckRankDirectories(const std::vector<std::string>& dirs, int world) {
  const auto holds = [](const std::vector<std::string>& where) {
    const swap::Holding holding = swap::Probe(where).holding;
    return holding == swap::Holding::kRun || holding == swap::Holding::kInUse ||
           holding == swap::Holding::kDamaged;
  };
  if (dirs.empty()) return absl::OkStatus();
  if (world == 1 && holds(zero::RankDirectories(dirs, 0))) {
    const absl::StatusOr<zero::PartDirectories> parts = zero::FindParts(dirs);
    return OfOtherRanks(dirs, parts.ok() ? static_cast<int64_t>(parts->size()) : 0);
  }
  if (world > 1 && holds(dirs)) return OfOtherRanks(dirs, 1);
  return absl::OkStatus();
}

int64_t StepIn(const std::vector<std::string>& dirs) {
  const absl::StatusOr<zero::PartDirectories> parts = zero::FindParts(dirs);
  if (!parts.ok()) return -1;
  const absl::StatusOr<std::vector<swap::Inspection>> inspections = zero::InspectParts(*parts);
  return inspections.ok() ? static_cast<int64_t>(inspections->front().record.step) : -1;
}

absl::StatusOr<GoOn> AgreeOnResume(zero::Comm& comm, const absl::StatusOr<nlohmann::json>& run,
                                   const std::vector<std::string>& dirs, const std::string& checkpoint) {
  constexpr int64_t kOverwritten = -2, kNone = -1;  // in the place of a step
  int64_t step = run.ok() ? kNone : kOverwritten, ranks = comm.world(), versions = 0;
  if (run.ok() && !run->is_null()) {
    absl::StatusOr<swap::Inspection> inspection = swap::Inspect(dirs);
    if (!inspection.ok()) return inspection.status();
    step = static_cast<int64_t>(inspection->record.step);
    versions = inspection->shape.slots;
    const nlohmann::json identity = ParseOrNull(inspection->shape.identity);
    ranks = identity.is_object() ? identity.value("ranks", int64_t{1}) : 1;
  }
  const int64_t kept = checkpoint.empty() ? kNone : StepIn({checkpoint});
  std::vector<int64_t> all_ranks, all_kept, all_versions, steps;
  PENSTOCK_TAKE(all_ranks, zero::AllNumbers(comm, ranks));
  PENSTOCK_TAKE(all_kept, zero::AllNumbers(comm, kept));
  PENSTOCK_TAKE(all_versions, zero::AllNumbers(comm, versions));
  PENSTOCK_TAKE(steps, zero::AllNumbers(comm, step));
  for (const int64_t theirs : all_ranks) {
    // The directories as all ranks were given them, without the rank's own.
    if (theirs == comm.world()) continue;
    std::vector<std::string> given;
    for (const std::string& dir : dirs) given.push_back(dir.substr(0, dir.rfind('/')));
    return OfOtherRanks(given, theirs);
  }
  const auto least = std::min_element(steps.begin(), steps.end());
  const int64_t most = *std::max_element(steps.begin(), steps.end());
  // Who keeps one version cannot go back to the step that the others have.
  const bool one_version = std::count(all_versions.begin(), all_versions.end(), 1) > 0;
  const bool written_over = *least == kOverwritten || (one_version && *least >= 0 && *least < most);
  if (*least >= 0 && !written_over) return GoOn::kState;
  for (size_t k = 1; k < all_kept.size(); ++k) {
    if (all_kept[k] == all_kept.front()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--checkpoint-dir: rank ", k, " finds ", StepText(all_kept[k]), " there, rank 0 ",
                     StepText(all_kept.front()),
                     ": all ranks need one directory, on a file system that they "
                     "share"));
  }
  const auto rank = least - steps.begin();
  const std::string who = zero::RankName(static_cast<int>(rank), comm.world());
  if (written_over) {
    if (kept >= 0) return GoOn::kCheckpoint;
    return absl::DataLossError(absl::StrCat(
        "the run keeps one version of its state, and ",
        *least == kOverwritten
            ? absl::StrCat(who, " was ended while it was written over")
            : absl::StrCat(who, " has that of step ", *least, " and another that of step ", most),
        ": go on from a checkpoint (--resume --checkpoint-dir DIR), or start over with --overwrite"));
  }
  // Nobody has more than the checkpoint: some were killed while they were restoring it, or before it.
  if (kept >= 0 && most <= kept) return GoOn::kCheckpoint;
  if (most <= 0) return GoOn::kStartOver;
  return absl::DataLossError(absl::StrCat(
      who, " has no run in its rank-", rank, "/ of --state-dir, and others are at step ", most,
      ": bring it back, ",
      kept >= 0
          ? absl::StrCat("go on from step ", kept, " of --checkpoint-dir with a --state-dir that is empty, ")
          : "",
      "or start over with --overwrite"));
}

}  // namespace penstock::tools
