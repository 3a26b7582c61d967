#include "zero/ranks/set_aside.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "swap/store_files.h"
#include "zero/config/json_field.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {
namespace {

using swap::ErrnoError;

constexpr const char* kBefore = ".penstock.of-";
constexpr const char* kBehind = "-ranks";
constexpr const char* kDropped = ".penstock.dropped-";
constexpr int kMostRanksLookedFor = 64;  // for any that is there

std::string NameOf(int64_t ranks) { return absl::StrCat(kBefore, ranks, kBehind); }

// Of how many ranks a directory of this name has a run; 0: it is another's.
int64_t RanksIn(absl::string_view name) {
  int64_t ranks = 0;
  if (!absl::ConsumePrefix(&name, kBefore) || !absl::ConsumeSuffix(&name, kBehind)) return 0;
  return absl::SimpleAtoi(name, &ranks) && ranks > 0 ? ranks : 0;
}

bool HoldsRun(const std::vector<std::string>& directories) {
  const swap::Holding holding = swap::Probe(directories).holding;
  return holding == swap::Holding::kRun || holding == swap::Holding::kInUse ||
         holding == swap::Holding::kDamaged;
}

absl::StatusOr<int64_t> RanksAside(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(directory));
  for (const std::string& name : names) {
    if (const int64_t ranks = RanksIn(name); ranks > 0) return ranks;
  }
  return 0;
}

absl::Status Move(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return ErrnoError(errno, absl::StrCat("set aside ", from, " as"), to);
}

// The part that lies in `from` goes to `to`, both directories.
absl::Status MovePart(const std::string& from, const std::string& to, bool of_one) {
  ASSIGN_OR_RETURN(const bool there, PathExists(to));
  if (!of_one) return there ? absl::OkStatus() : Move(from, to);
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(from));
  for (const std::string& name : names) {
    if (absl::StartsWith(name, "penstock."))
      RETURN_IF_ERROR(Move(absl::StrCat(from, "/", name), absl::StrCat(to, "/", name)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> SetAsideIn(const std::vector<std::string>& directories) {
  ASSIGN_OR_RETURN(const int64_t ranks, RanksAside(directories.front()));
  std::vector<std::string> aside;
  for (const std::string& directory : directories)
    if (ranks > 0) aside.push_back(absl::StrCat(directory, "/", NameOf(ranks)));
  return aside;
}

absl::StatusOr<int64_t> StepIn(const std::vector<std::string>& directories) {
  ASSIGN_OR_RETURN(const ShardDirectories parts, FindShards(directories));
  ASSIGN_OR_RETURN(const std::vector<swap::Inspection> inspections, InspectShards(parts));
  return static_cast<int64_t>(inspections.front().record.step);
}

// Of the newest commit that all parts have, wherever they are; -1: one is missing or cannot be read.
int64_t StepOfAllParts(const std::vector<std::string>& directories) {
  const absl::StatusOr<std::vector<std::string>> aside = SetAsideIn(directories);
  if (!aside.ok()) return -1;
  return StepIn(aside->empty() ? directories : *aside).value_or(-1);
}

// The number of ranks that a part's identity names.
int64_t RanksOfPart(const std::string& identity) {
  const nlohmann::json json = ParseJsonObject(identity, "").value_or(nlohmann::json::object());
  return JsonField<int64_t>(json, "ranks").value_or(1);
}

// Of the run of `ranks` ranks, `rank` of `world` moves its share: nothing where that is done.
absl::Status SetAside(const std::vector<std::string>& directories, int64_t ranks, int rank, int world) {
  for (const std::string& directory : directories) {
    const std::string aside = absl::StrCat(directory, "/", NameOf(ranks));
    for (int64_t part = rank; part < ranks; part += world) {
      const std::string name = absl::StrCat("rank-", part);
      const std::string from = ranks == 1 ? directory : absl::StrCat(directory, "/", name);
      const swap::Finding found = swap::Probe(from);
      RETURN_IF_ERROR(found.unread);
      if (found.holding == swap::Holding::kInUse) return absl::FailedPreconditionError(found.text);
      if (found.holding == swap::Holding::kNothing || found.holding == swap::Holding::kForeign) continue;
      // What the ranks of now had begun to make is none of its parts.
      if (!found.identity.empty() && RanksOfPart(found.identity) != ranks) continue;
      if (::mkdir(aside.c_str(), 0777) != 0 && errno != EEXIST)
        return ErrnoError(errno, "make the directory", aside);
      RETURN_IF_ERROR(MovePart(from, ranks == 1 ? aside : absl::StrCat(aside, "/", name), ranks == 1));
    }
    ASSIGN_OR_RETURN(const bool there, PathExists(directory));
    if (there) RETURN_IF_ERROR(SyncDirectory(directory));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> RanksOf(const std::vector<std::string>& directories) {
  ASSIGN_OR_RETURN(const int64_t aside, RanksAside(directories.front()));
  if (aside > 0) return aside;
  if (HoldsRun(directories)) return 1;
  const absl::StatusOr<ShardDirectories> parts = FindShards(directories);
  if (parts.ok()) return static_cast<int64_t>(parts->size());
  // Of those that are left each names the number of all.
  for (int rank = 0; rank < kMostRanksLookedFor; ++rank) {
    const std::vector<std::string> part = RankDirectories(directories, rank);
    const swap::Finding found = swap::Probe(part);
    if (!found.identity.empty()) return RanksOfPart(found.identity);
  }
  return 0;
}

namespace {

absl::Status Drop(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(directory));
    for (const std::string& name : names) {
      const int64_t ranks = RanksIn(name);
      if (ranks == 0) continue;
      // It has another name at once, and is removed then: half of it is no run.
      const std::string dropped = absl::StrCat(directory, "/", kDropped, ranks, "-", ::getpid());
      RETURN_IF_ERROR(Move(absl::StrCat(directory, "/", name), dropped));
    }
    if (!names.empty()) RETURN_IF_ERROR(SyncDirectory(directory));
    ASSIGN_OR_RETURN(const std::vector<std::string> left, ListDirectoryIfThere(directory));
    for (const std::string& name : left) {
      if (!absl::StartsWith(name, kDropped)) continue;
      std::error_code error;  // whatever cannot be removed is no run, and only takes room
      std::filesystem::remove_all(absl::StrCat(directory, "/", name), error);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> All(Comm* comm, const char* what, int64_t mine) {
  if (comm == nullptr) return std::vector<int64_t>{mine};
  return AllNumbers(*comm, what, mine);
}

absl::Status OnAll(Comm* comm, const absl::Status& mine) {
  return comm == nullptr ? mine : AgreeOnStatus(*comm, Channel::kSetup, mine);
}

// What all have, or -1.
int64_t Common(const std::vector<int64_t>& numbers) {
  const bool alike = std::count(numbers.begin(), numbers.end(), numbers.front()) == std::ssize(numbers);
  return alike ? numbers.front() : -1;
}

}  // namespace

absl::StatusOr<OtherRanks> SetOtherRanksAside(const std::vector<std::string>& directories,
                                              const std::string& checkpoint, Comm* comm) {
  const int rank = comm == nullptr ? 0 : comm->rank(), world = comm == nullptr ? 1 : comm->world();
  const absl::StatusOr<int64_t> mine = RanksOf(directories);
  RETURN_IF_ERROR(OnAll(comm, mine.status()));
  const absl::StatusOr<std::vector<std::string>> aside = SetAsideIn(directories);
  RETURN_IF_ERROR(OnAll(comm, aside.status()));
  std::vector<int64_t> ranks, asides, states, kept;
  ASSIGN_OR_RETURN(ranks, All(comm, "the number of ranks", *mine));
  ASSIGN_OR_RETURN(asides, All(comm, "what is set aside", aside->empty() ? 0 : 1));
  OtherRanks found;
  found.ranks = *std::max_element(ranks.begin(), ranks.end());
  const bool unfinished = std::count(asides.begin(), asides.end(), 1) > 0;
  if (found.ranks == 0 || (found.ranks == world && !unfinished)) return OtherRanks();
  // A move that was cut short is ended first: until then its parts lie in two places.
  if (unfinished) RETURN_IF_ERROR(OnAll(comm, SetAside(directories, found.ranks, rank, world)));
  ASSIGN_OR_RETURN(states, All(comm, "the step", StepOfAllParts(directories)));
  ASSIGN_OR_RETURN(kept,
                   All(comm, "the checkpoint", checkpoint.empty() ? -1 : StepIn({checkpoint}).value_or(-1)));
  const int64_t of_state = Common(states), of_checkpoint = Common(kept);
  if (of_checkpoint < 0 && *std::max_element(kept.begin(), kept.end()) >= 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("not all ranks see the checkpoint ", checkpoint,
                     ": they need one directory, on a file system that they share"));
  }
  found.step = std::max(of_state, of_checkpoint);
  if (found.step < 0) {
    return absl::DataLossError(absl::StrCat(directories.front(), " held a run of ", found.ranks,
                                            " ranks, whose parts not all of the ", world,
                                            " ranks see, and there is no checkpoint to go on from: bring the "
                                            "missing parts back, or name the directory "
                                            "of checkpoints"));
  }
  RETURN_IF_ERROR(OnAll(comm, SetAside(directories, found.ranks, rank, world)));
  found.from = {checkpoint};
  if (of_state == found.step) {
    ASSIGN_OR_RETURN(found.from, SetAsideIn(directories));
  }
  return found;
}

absl::Status DropSetAside(const std::vector<std::string>& directories, Comm* comm) {
  return OnAll(comm, Drop(directories));
}

}  // namespace penstock::zero
