#include "tools/penstock/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/read_at.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/cpu_features.h"
#include "run/config.h"
#include "run/record/recorded_config.h"
#include "run/record/recorded_options.h"
#include "run/settings.h"
#include "swap/inspect.h"
#include "tools/base/version.h"
#include "tools/state/state_reader.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/engine/engine.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/secret_file.h"
#include "zero/ranks/sharded_state.h"
#include "zero/ranks/tcp_mesh.h"

namespace penstock::tools {
namespace {

// Of the file that runs: ranks of two builds would not compute the same.
std::string ProgramDigest() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return absl::StrCat(kVersion, "/", absl::Hex(kernels::Checksum(bytes.data(), bytes.size())));
}

// The flags, without what each rank may have of its own. Of data the contents are compared, by AgreeOnRun.
nlohmann::json SharedFlags(const TrainOptions& flags) {
  nlohmann::json json = {{"program", ProgramDigest()}};
  for (const auto& [flag, value] : GivenFlags(flags)) {
    if (!run::FindFlag(flag).first->of_rank) json[flag] = value;
  }
  // All are given the same directories, of which each has its own part, and the same kind of device.
  json["--state-dir"] = flags.state_dirs;
  json["--device"] = flags.device.value_or("cpu");
  json["--data"] = flags.data.size();
  json["--eval-data"] = flags.eval_data.has_value();
  return json;
}

constexpr uint64_t kPieceBytes = 64 << 10, kPieces = 1024;

absl::StatusOr<nlohmann::json> TextJson(const models::Dataset& data) {
  ASSIGN_OR_RETURN(uint64_t digest, ContentDigest(data.path()));
  return nlohmann::json{{"tokens", data.tokens()},
                        {"vocabulary", data.vocab()},
                        {"content", absl::StrCat(absl::Hex(digest))},
                        {"examples", absl::StrCat(absl::Hex(data.examples_digest()))}};
}

absl::StatusOr<nlohmann::json> TextsJson(const models::DataMixture& data) {
  if (data.texts().size() == 1) return TextJson(*data.texts().front());
  nlohmann::json json = nlohmann::json::array();
  for (size_t i = 0; i < data.texts().size(); ++i) {
    ASSIGN_OR_RETURN(nlohmann::json text, TextJson(*data.texts()[i]));
    text["sequences of a thousand"] = data.sequences_in_cycle()[i];
    json.push_back(std::move(text));
  }
  return json;
}

// Of weights: a file, or those of a directory.
absl::StatusOr<nlohmann::json> WeightsJson(const std::string& path) {
  std::vector<std::string> paths = {path};
  ASSIGN_OR_RETURN(const bool is_directory, IsDirectory(path));
  if (is_directory) {
    paths.clear();
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(path));
    for (const std::string& name : names) {
      const std::string kind = std::filesystem::path(name).extension();
      if (kind == ".safetensors" || kind == ".json") paths.push_back(absl::StrCat(path, "/", name));
    }
  }
  nlohmann::json json = nlohmann::json::object();
  for (const std::string& each : paths) {
    ASSIGN_OR_RETURN(uint64_t digest, ContentDigest(each));
    json[std::filesystem::path(each).filename().string()] = absl::StrCat(absl::Hex(digest));
  }
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
                                              : "as many",
                                  ", or with another number by --resume --resume-ranks any");
  return absl::FailedPreconditionError(text);
}

// The first directory of the run's state, as all ranks are given it.
std::string SharedDirectory(const TrainOptions& flags) {
  if (!flags.state_dirs.empty()) return flags.state_dirs.front();
  if (flags.config.has_value()) {
    // A config that is wrong is refused later, on all ranks.
    if (const auto parsed = run::LoadConfig(*flags.config); parsed.ok()) {
      const auto configured = run::StateDirectoriesOf(parsed->config);
      if (configured.ok() && !configured->paths.empty()) return configured->paths.front();
    }
  }
  return kDefaultStateDir;
}

std::string StepText(int64_t step) { return step < 0 ? "nothing" : absl::StrCat("step ", step); }

}  // namespace

absl::StatusOr<std::shared_ptr<zero::Comm>> ConnectRanks(const TrainOptions& flags,
                                                         std::vector<std::string>* made) {
  ASSIGN_OR_RETURN(zero::RankEnvironment environment, zero::ReadRankEnvironment());
  if (environment.world == 1) return std::shared_ptr<zero::Comm>();
  zero::CommOptions options;
  if (flags.rank_timeout.has_value()) {
    if (!(*flags.rank_timeout >= 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rank-timeout ", *flags.rank_timeout, ": must be at least 1 second"));
    }
    options.patience_seconds = *flags.rank_timeout;
    options.meeting_seconds = 10 * *flags.rank_timeout;
  }
  std::string secret = zero::ProcessEnvironment(zero::kSecretVariable).value_or("");
  if (secret.empty()) {
    ASSIGN_OR_RETURN(secret, zero::SecretIn(SharedDirectory(flags), made));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<zero::Comm> connected,
                   zero::ConnectTcp(environment, {.comm = options, .secret = std::move(secret)}));
  std::shared_ptr<zero::Comm> comm = std::move(connected);
  if (absl::Status same = zero::AgreeOnOptions(*comm, SharedFlags(flags)); !same.ok()) {
    comm->Abort(same);
    return same;
  }
  return comm;
}

namespace {

absl::StatusOr<uint64_t> DigestOf(int fd, const std::string& path) {
  const off_t found = ::lseek(fd, 0, SEEK_END);
  if (found < 0) return MakeIoError({.op = "seek", .path = path, .error = errno});
  const auto length = static_cast<uint64_t>(found);
  kernels::Checksummer sum;
  sum.Update(&length, sizeof(length));
  std::vector<char> piece(kPieceBytes);
  const bool whole = length <= kPieces * kPieceBytes;
  const uint64_t pieces = whole ? (length + kPieceBytes - 1) / kPieceBytes : kPieces;
  const uint64_t stride = whole ? kPieceBytes : (length - kPieceBytes) / (kPieces - 1);
  for (uint64_t i = 0; i < pieces; ++i) {
    const uint64_t offset = !whole && i + 1 == pieces ? length - kPieceBytes : i * stride;
    const uint64_t bytes = std::min(kPieceBytes, length - offset);
    ASSIGN_OR_RETURN(const size_t done, ReadAt(fd, path, offset, piece.data(), bytes));
    if (done < bytes) {
      return absl::DataLossError(absl::StrCat("read ", path, ", ", length, " bytes: ends at byte ",
                                              offset + done, "; every rank needs the whole file"));
    }
    sum.Update(piece.data(), bytes);
  }
  return sum.Digest();
}

}  // namespace

absl::StatusOr<uint64_t> ContentDigest(const std::string& path) {
  ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  absl::StatusOr<uint64_t> digest = DigestOf(fd, path);
  ::close(fd);
  return digest;
}

absl::StatusOr<std::vector<std::string>> AgreeOnRun(zero::Comm& comm, const TrainOptions& flags,
                                                    const TrainSettings& settings,
                                                    const models::DataMixture& data,
                                                    const models::DataMixture* eval_data) {
  const zero::EngineOptions& engine = settings.engine;
  nlohmann::json same = engine.resume.run;
  // What a host has, and what the text below says better.
  same.erase("blas");
  same.erase("data_fingerprint");
  if (same.contains("tokenizer")) same["tokenizer"].erase("path");
  same.erase("model_directory");
  same.erase(run::kRecordedConfigKey);  // paths of each host; what matters of it is below
  const zero::TileFormat format = zero::FormatOf(engine);
  same["--dtype"] = std::string(zero::DTypeName(format.weights));
  same["--threads"] = engine.intra_op_threads;
  same["--offload"] = static_cast<int>(engine.storage.offload);
  same["--eval-every"] = settings.eval_every;
  same["--checkpoint-every"] = engine.storage.checkpoints.every;
  same["--checkpoint-keep"] = engine.storage.checkpoints.keep;
  if (engine.optimizer.new_loss_scale.has_value())
    same["new loss scale"] = engine.optimizer.new_loss_scale->ToJson();
  same["goes on"] = settings.resumes;
  same["overwrites"] = engine.storage.overwrite;
  same["changes"] = engine.resume.run_changes;
  same["changes"].erase(run::kRecordedConfigKey);
  same["optimizer states"] = std::string(zero::StateTypeName(format.states));
  same["loss scale"] = engine.optimizer.loss_scale.ToJson();
  if (engine.optimizer.schedule.has_value()) same["scheduler"] = engine.optimizer.schedule->ToJson();
  same["sync"] = static_cast<int>(engine.storage.sync);
  same["durability"] = static_cast<int>(engine.storage.durability);
  same["settings"] = run::SharedValues(settings.config);
  ASSIGN_OR_RETURN(same["--data"], TextsJson(data));
  if (eval_data != nullptr) {
    ASSIGN_OR_RETURN(same["--eval-data"]["texts"], TextsJson(*eval_data));
    same["--eval-data"]["windows"] = eval_data->EvalWindows();
  }
  if (flags.init_from.has_value() && !settings.resumes) {
    ASSIGN_OR_RETURN(same["--init-from"], WeightsJson(*flags.init_from));
  }
  same.erase("threads");
  RETURN_IF_ERROR(zero::AgreeOnOptions(comm, same));

  std::vector<std::string> lines = {absl::StrCat(comm.world(), " ranks: ", comm.name())};
  const std::string own = absl::StrCat(zero::DescribeBlas().name, ", kernels ", kernels::DescribeCpu());
  ASSIGN_OR_RETURN(std::vector<std::string> all,
                   comm.AllTexts(zero::Channel::kSetup, {.name = "the processor"}, own));
  for (size_t k = 1; k < all.size(); ++k) {
    if (all[k] == all.front()) continue;
    lines.push_back(absl::StrCat("unlike processors: rank ", k, " computes with ", all[k], ", rank 0 with ",
                                 all.front(),
                                 ": the same bits come again only with each rank on such a host"));
    break;
  }
  return lines;
}

absl::Status CheckRankDirectories(const std::vector<std::string>& dirs, int world) {
  if (dirs.empty()) return absl::OkStatus();
  const swap::Finding found = swap::Probe(world == 1 ? zero::RankDirectories(dirs, 0) : dirs);
  RETURN_IF_ERROR(found.unread);
  if (found.holding != swap::Holding::kRun && found.holding != swap::Holding::kInUse &&
      found.holding != swap::Holding::kDamaged)
    return absl::OkStatus();
  if (world > 1) return OfOtherRanks(dirs, 1);
  const absl::StatusOr<zero::ShardDirectories> parts = zero::FindShards(dirs);
  return OfOtherRanks(dirs, parts.ok() ? static_cast<int64_t>(parts->size()) : 0);
}

absl::StatusOr<int64_t> StepIn(const std::vector<std::string>& dirs) {
  ASSIGN_OR_RETURN(const zero::ShardDirectories parts, zero::FindShards(dirs));
  ASSIGN_OR_RETURN(const std::vector<swap::Inspection> inspections, zero::InspectShards(parts));
  return static_cast<int64_t>(inspections.front().record.step);
}

absl::StatusOr<nlohmann::json> OldestRecord(zero::Comm& comm, const nlohmann::json& run, int64_t step) {
  ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm.AllTexts(zero::Channel::kSetup, {.name = "the run's record"}, nlohmann::json({step, run}).dump()));
  std::optional<int64_t> least;
  nlohmann::json oldest;
  for (const std::string& text : all) {
    const nlohmann::json theirs = ParseOrNull(text);
    if (!theirs.is_array() || theirs.size() != 2) continue;
    const std::optional<int64_t> at = zero::JsonAs<int64_t>(theirs[0]);
    if (!at.has_value() || (least.has_value() && *at >= *least)) continue;
    least = at;
    oldest = theirs[1];
  }
  if (!least.has_value()) return absl::DataLossError("no rank's record of the run can be read");
  return oldest;
}

absl::StatusOr<GoOn> AgreeOnResume(zero::Comm& comm, const absl::StatusOr<nlohmann::json>& run,
                                   const std::vector<std::string>& dirs, const std::string& checkpoint) {
  constexpr int64_t kDamaged = -3, kOverwritten = -2, kNone = -1;  // in the place of a step
  int64_t step = run.ok() ? kNone : kOverwritten, ranks = comm.world(), versions = 0;
  if (run.ok() && !run->is_null()) {
    ASSIGN_OR_RETURN(swap::Inspection inspection, swap::Inspect(dirs));
    step = static_cast<int64_t>(inspection.record.step);
    versions = inspection.shape.slots;
    const nlohmann::json identity = ParseOrNull(inspection.shape.identity);
    ranks = zero::JsonField<int64_t>(identity, "ranks").value_or(1);
  }
  const int64_t kept = checkpoint.empty() ? kNone : StepIn({checkpoint}).value_or(kDamaged);
  std::vector<int64_t> all_ranks, all_kept, all_versions, steps;
  ASSIGN_OR_RETURN(all_ranks, zero::AllNumbers(comm, "the number of ranks", ranks));
  ASSIGN_OR_RETURN(all_kept, zero::AllNumbers(comm, "the checkpoint", kept));
  ASSIGN_OR_RETURN(all_versions, zero::AllNumbers(comm, "the versions", versions));
  ASSIGN_OR_RETURN(steps, zero::AllNumbers(comm, "the step", step));
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
  // Never a reason to start over, which would remove those before it.
  if (kept == kDamaged) {
    return absl::DataLossError(
        absl::StrCat(checkpoint,
                     " is damaged, or a rank's part of it is missing: move it away to go on "
                     "from an older one, or start over with --overwrite"));
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
