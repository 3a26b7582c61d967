#include "tools/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "swap/inspect.h"
#include "tools/version.h"
#include "zero/rank_setup.h"

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
    return absl::FailedPreconditionError(
        absl::StrCat(dirs.front(),
                     " holds a run of several ranks (rank-0/ and others): go on with as many, or use "
                     "another --state-dir"));
  }
  if (world > 1 && holds(dirs)) {
    return absl::FailedPreconditionError(
        absl::StrCat(dirs.front(), " holds a run of one rank: go on with one, or use another --state-dir"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> AllResume(zero::Comm& comm, const nlohmann::json& run,
                               const std::vector<std::string>& dirs) {
  int64_t step = -1;
  if (!run.is_null()) {
    absl::StatusOr<swap::Inspection> inspection = swap::Inspect(dirs);
    if (!inspection.ok()) return inspection.status();
    step = static_cast<int64_t>(inspection->record.step);
  }
  absl::StatusOr<std::vector<int64_t>> steps = zero::AllNumbers(comm, step);
  if (!steps.ok()) return steps.status();
  const auto least = std::min_element(steps->begin(), steps->end());
  const int64_t most = *std::max_element(steps->begin(), steps->end());
  if (*least >= 0) return true;
  if (most <= 0) return false;
  return absl::DataLossError(absl::StrCat(
      zero::RankName(static_cast<int>(least - steps->begin()), comm.world()), " has no run in its rank-",
      least - steps->begin(), "/ of --state-dir, and others are at step ", most,
      ": bring it back, or start over with --overwrite"));
}

}  // namespace penstock::tools
