#include "zero/engine/change_ranks.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/format.h"
#include "swap/inspect.h"
#include "swap/replace_parts.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/restore.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {
namespace {

absl::Status OnAll(Comm* comm, const absl::Status& mine) {
  return comm == nullptr ? mine : AgreeOnStatus(*comm, Channel::kSetup, mine);
}

absl::StatusOr<std::vector<std::string>> Texts(Comm* comm, const char* what, const std::string& mine) {
  if (comm == nullptr) return std::vector<std::string>{mine};
  return comm->AllTexts(Channel::kSetup, {what}, mine);
}

// Of what a run can be made of: the run, and its commit. Two ranks that have the same text see the same.
absl::StatusOr<std::string> CommitIn(const std::vector<std::string>& directories) {
  ASSIGN_OR_RETURN(const ShardDirectories parts, FindShards(directories));
  ASSIGN_OR_RETURN(const std::vector<swap::Inspection> inspections, InspectShards(parts));
  const swap::Record& record = inspections.front().record;
  for (const swap::Inspection& each : inspections) {
    if (each.record.overwriting) {
      return absl::DataLossError(absl::StrCat(each.paths.front(),
                                              " keeps one version of its state, and was ended ",
                                              "while that was written over"));
    }
  }
  const swap::Uuid& uuid = inspections.front().shape.uuid;
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size()), " ",
                      record.sequence, " ", record.step);
}

// A part that could not be read just now is not gone: EIO, EACCES, EMFILE and others may pass.
absl::Status Unread(size_t rank, const std::string& why) {
  const int error = ErrnoOf(absl::DataLossError(why));
  if (error == 0 || error == ENOENT || error == ENOTDIR) return absl::OkStatus();
  return absl::Status(
      IoErrorCode(error),
      absl::StrCat("rank ", rank, " could not read all parts, and none of them is taken for gone: ", why));
}

// `seen`: OK where all ranks have the same commit in `where`; else why it cannot be gone on from: "" where a
// rank has no place to look at. Returns the error of a rank that could not read it.
absl::Status SeeOnAll(Comm* comm, const char* what, const std::vector<std::string>& where,
                      absl::Status* seen) {
  std::string mine;
  if (!where.empty()) {
    const absl::StatusOr<std::string> commit = CommitIn(where);
    mine = commit.ok() ? absl::StrCat("+", *commit) : absl::StrCat("-", commit.status().message());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> all, Texts(comm, what, mine));
  *seen = absl::OkStatus();
  if (std::count(all.begin(), all.end(), "") > 0) {
    *seen = absl::DataLossError("");
    return absl::OkStatus();
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == '-') RETURN_IF_ERROR(Unread(rank, all[rank].substr(1)));
  }
  for (size_t rank = 0; rank < all.size() && seen->ok(); ++rank) {
    if (all[rank].front() == '-') {
      *seen = absl::DataLossError(all[rank].substr(1));
    } else if (all[rank] != all.front()) {
      *seen =
          absl::DataLossError(absl::StrCat("rank ", rank, " and rank 0 see two states in ", where.front()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FinishChangeOfRanks(Comm* comm, const std::vector<std::string>& directories) {
  // One after the other: they may see one directory, which the first of them is done with.
  const int world = comm == nullptr ? 1 : comm->world(), rank = comm == nullptr ? 0 : comm->rank();
  const absl::Status first = rank == 0 ? swap::FinishReplacement(directories) : absl::OkStatus();
  RETURN_IF_ERROR(OnAll(comm, first));
  if (world == 1) return absl::OkStatus();
  return OnAll(comm, rank == 0 ? absl::OkStatus() : swap::FinishReplacement(directories));
}

absl::StatusOr<OtherRanks> FindOtherRanks(Comm* comm, const std::vector<std::string>& directories,
                                          const std::string& checkpoint) {
  const int64_t world = comm == nullptr ? 1 : comm->world();
  const absl::StatusOr<int64_t> mine = RanksIn(directories, comm == nullptr ? 0 : comm->rank());
  RETURN_IF_ERROR(OnAll(comm, mine.status()));
  std::vector<int64_t> all = {*mine};
  if (comm != nullptr) {
    ASSIGN_OR_RETURN(all, AllNumbers(*comm, "the number of ranks", *mine));
  }
  OtherRanks found;
  bool lacking = false;
  for (const int64_t ranks : all) {
    lacking = lacking || ranks == 0;
    if (ranks != 0 && (found.ranks == 0 || ranks != world)) found.ranks = ranks;
  }
  const bool other = found.ranks != 0 && found.ranks != world;
  if (comm != nullptr && !other) {
    // Where each rank has directories of its own, a change may have come to an end in some of them alone.
    const swap::Finding own = swap::Probe(RankDirectories(directories, comm->rank()));
    RETURN_IF_ERROR(OnAll(comm, own.unread));
    const bool is_gone = own.holding == swap::Holding::kNothing;
    ASSIGN_OR_RETURN(const std::vector<std::string> uuids,
                     Texts(comm, "the run",
                           is_gone                    ? "none"
                           : own.uuid == swap::Uuid{} ? ""  // it cannot be told, and is not gone
                                                      : swap::UuidText(own.uuid)));
    std::set<std::string> runs(uuids.begin(), uuids.end());
    runs.erase("");
    lacking = lacking || runs.size() > 1;
  }
  if (!other && (found.ranks == 0 || !lacking)) return found;
  absl::Status state;
  if (other) {
    RETURN_IF_ERROR(SeeOnAll(comm, "the state", directories, &state));
    int leader = 0;
    if (comm != nullptr) {
      ASSIGN_OR_RETURN(leader, LeaderAt(*comm, directories.front()));
      ASSIGN_OR_RETURN(const std::vector<int64_t> leaders, AllNumbers(*comm, "who sees a directory", leader));
      if (std::count(leaders.begin(), leaders.end(), 0) < world && state.ok()) {
        state = absl::DataLossError(absl::StrCat("not all ranks see one and the same ", directories.front()));
      }
    }
    if (state.ok()) {
      found.from = directories;
      return found;
    }
  }
  absl::Status kept;
  const auto places = checkpoint.empty() ? std::vector<std::string>() : std::vector<std::string>{checkpoint};
  RETURN_IF_ERROR(SeeOnAll(comm, "the checkpoint", places, &kept));
  if (kept.ok()) {
    RETURN_IF_ERROR(OnAll(comm, swap::CheckNoneInHalves(directories)));
    found.from = {checkpoint};
  } else if (other) {
    return absl::DataLossError(
        absl::StrCat(directories.front(), " holds a run of ", found.ranks,
                     found.ranks == 1 ? " rank" : " ranks", ", of which not all is there: ", state.message(),
                     kept.message().empty() ? "; there is no checkpoint to go on from"
                                            : absl::StrCat("; and of the checkpoint: ", kept.message())));
  }
  return found;  // of the same number: who looks for the state says what is missing
}

absl::Status ChangeRanks(const std::vector<std::string>& from, const std::vector<std::string>& directories,
                         EngineOptions options) {
  Comm* const comm = options.comm.get();
  int leader = 0;
  if (comm != nullptr) {
    ASSIGN_OR_RETURN(leader, LeaderAt(*comm, directories.front()));
  }
  std::unique_ptr<swap::PartsReplacement> replacement;
  absl::Status mine;
  if (leader == options.rank()) {
    auto begun = swap::PartsReplacement::Begin(directories);
    mine = begun.status();
    if (begun.ok()) replacement = *std::move(begun);
  }
  RETURN_IF_ERROR(OnAll(comm, mine));
  options.storage.state_dirs = swap::NextDirectories(directories);
  if (comm != nullptr)
    options.storage.state_dirs = RankDirectories(options.storage.state_dirs, options.rank());
  options.storage.overwrites_only.reset();
  mine = RestoreRun(from, options);
  if (comm != nullptr) {
    if (!mine.ok()) comm->Abort(mine);  // or the others would wait
    mine.Update(comm->failure());
  }
  RETURN_IF_ERROR(mine);
  RETURN_IF_ERROR(OnAll(comm, absl::OkStatus()));  // all parts are closed
  if (replacement != nullptr) mine = replacement->Commit();
  return OnAll(comm, mine);
}

}  // namespace penstock::zero
