#include "swap/replace_parts.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_files.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

constexpr const char* kNext = "/.penstock.next";
constexpr const char* kWhole = "/.penstock.whole";
constexpr int kPatienceMs = 10'000;  // a killed process may still hold its files
constexpr std::chrono::milliseconds kOthersPatience(2000);

using AtChange = std::function<void()>;

// The places of stores in a directory: itself, and rank-K/ as far as they are there.
absl::StatusOr<std::vector<std::string>> PlacesIn(const std::string& directory) {
  ASSIGN_OR_RETURN(std::vector<std::string> places, RankPartsIn(directory));
  places.push_back(directory);
  return places;
}

absl::StatusOr<std::vector<std::string>> PlacesIn(const std::vector<std::string>& directories) {
  std::vector<std::string> all;
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directory));
    all.insert(all.end(), places.begin(), places.end());
  }
  return all;
}

// The store files in these places, each locked.
absl::StatusOr<std::vector<PlainFile>> TakeAll(const std::vector<std::string>& places) {
  std::vector<PlainFile> taken;
  for (const std::string& place : places) {
    ASSIGN_OR_RETURN(std::optional<PlainFile> file, TakeOldFile(StorePath(place), kPatienceMs));
    if (file.has_value()) taken.push_back(*std::move(file));
  }
  return taken;
}

// New parts that do not count. What is not ours in there stays, and the directory with it.
absl::Status Drop(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    const std::string next = absl::StrCat(directory, kNext);
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(next));
    if (kind != PathKind::kDirectory) continue;
    ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(next));
    ASSIGN_OR_RETURN(const std::vector<PlainFile> stores, TakeAll(places));
    for (const PlainFile& store : stores) {
      if (::unlink(store.path().c_str()) != 0) return MakeIoError({.op = "remove", .path = store.path(), .error = errno});
    }
    for (const std::string& place : places) (void)::rmdir(place.c_str());
  }
  return absl::OkStatus();
}

// The description of the parameters is in the first part.
absl::Status MoveDescription(const std::string& first, bool of_one, const AtChange& at_change) {
  const std::string ranks = RankDirectory(first, 0);
  const std::string from = absl::StrCat(of_one ? ranks : first, "/", kDescriptionFile);
  ASSIGN_OR_RETURN(const bool there, PathExists(from));
  if (!there) return absl::OkStatus();
  at_change();
  const std::string& to = of_one ? first : ranks;
  RETURN_IF_ERROR(Rename(from, absl::StrCat(to, "/", kDescriptionFile)));
  return SyncDirectory(to);
}

// From the moment on at which the new parts count. Each change may be the last before a kill: what is still
// to be done is seen from what is there. Which places have new parts is what the first directory's
// `.penstock.whole` has, in which all rank-K/ stay until everything is done.
absl::Status RollForward(const std::vector<std::string>& directories, const AtChange& at_change) {
  const std::string whole = absl::StrCat(directories.front(), kWhole);
  ASSIGN_OR_RETURN(const std::vector<std::string> ranks, RankPartsIn(whole));
  std::vector<std::string> names;  // below a directory
  for (const std::string& part : ranks) names.push_back(part.substr(whole.size()));
  if (ranks.empty()) names.emplace_back();
  std::vector<std::string> kept;
  for (const std::string& directory : directories) {
    const std::string from = directory == directories.front() ? whole : absl::StrCat(directory, kNext);
    for (const std::string& name : names) {
      const std::string store = StorePath(from + name), to = directory + name;
      kept.push_back(to);
      ASSIGN_OR_RETURN(const bool there, PathExists(store));
      if (!there) continue;  // it is in its place
      RETURN_IF_ERROR(MakeDirectories(to));
      at_change();
      RETURN_IF_ERROR(Rename(store, StorePath(to)));
      RETURN_IF_ERROR(SyncDirectory(to));
    }
  }
  RETURN_IF_ERROR(MoveDescription(directories.front(), ranks.empty(), at_change));
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directories));
  for (const std::string& place : places) {
    if (std::find(kept.begin(), kept.end(), place) != kept.end()) continue;
    ASSIGN_OR_RETURN(const bool there, PathExists(StorePath(place)));
    if (there) {
      at_change();
      if (::unlink(StorePath(place).c_str()) != 0) return MakeIoError({.op = "remove", .path = StorePath(place), .error = errno});
    }
    const bool of_state = std::find(directories.begin(), directories.end(), place) != directories.end();
    if (!of_state) (void)::rmdir(place.c_str());  // what else is in it stays
  }
  for (const std::string& directory : directories) RETURN_IF_ERROR(SyncDirectory(directory));
  at_change();
  RETURN_IF_ERROR(Rename(whole, absl::StrCat(directories.front(), kNext)));
  at_change();
  return Drop(directories);
}

// With the lock.
absl::Status Finish(const std::vector<std::string>& directories) {
  ASSIGN_OR_RETURN(const bool counts, IsReplacementCutShort(directories.front()));
  if (!counts) return Drop(directories);
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directories));
  ASSIGN_OR_RETURN(const std::vector<PlainFile> old, TakeAll(places));
  return RollForward(directories, [] {});
}

}  // namespace

std::vector<std::string> NextDirectories(const std::vector<std::string>& directories) {
  std::vector<std::string> next;
  for (const std::string& directory : directories) next.push_back(absl::StrCat(directory, kNext));
  return next;
}

absl::StatusOr<bool> IsReplacementCutShort(const std::string& first_directory) {
  ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(absl::StrCat(first_directory, kWhole)));
  return kind == PathKind::kDirectory;
}

absl::Status FinishReplacement(const std::vector<std::string>& directories) {
  if (directories.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(bool any, IsReplacementCutShort(directories.front()));
  for (const std::string& next : NextDirectories(directories)) {
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(next));
    any = any || kind == PathKind::kDirectory;
  }
  if (!any) return absl::OkStatus();
  DirectoryLock lock;
  ASSIGN_OR_RETURN(const bool locked, lock.Take(directories.front(), kOthersPatience));
  return locked ? Finish(directories) : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PartsReplacement>> PartsReplacement::Begin(
    std::vector<std::string> directories) {
  std::unique_ptr<PartsReplacement> begun(new PartsReplacement(std::move(directories)));
  for (const std::string& directory : begun->directories_) RETURN_IF_ERROR(MakeDirectories(directory));
  const std::string& first = begun->directories_.front();
  ASSIGN_OR_RETURN(const bool locked, begun->lock_.Take(first, kOthersPatience));
  if (!locked) {
    begun->counts_ = true;  // what is there is not this one's to drop
    return absl::FailedPreconditionError(
        absl::StrCat(first, ": another process changes its number of ranks just now: let that one end"));
  }
  RETURN_IF_ERROR(Finish(begun->directories_));
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(begun->directories_));
  begun->seen_ = SeeCommits(places);
  return begun;
}

absl::Status PartsReplacement::Commit(const std::function<void()>& at_change) {
  const AtChange change = at_change ? at_change : [] {};
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directories_));
  ASSIGN_OR_RETURN(const std::vector<PlainFile> old, TakeAll(places));
  RETURN_IF_ERROR(CheckSeen(places, seen_));
  const std::string& first = directories_.front();
  for (const std::string& directory : directories_) RETURN_IF_ERROR(SyncDirectory(directory));
  change();
  RETURN_IF_ERROR(Rename(absl::StrCat(first, kNext), absl::StrCat(first, kWhole)));
  counts_ = true;
  RETURN_IF_ERROR(SyncDirectory(first));
  return RollForward(directories_, change);
}

PartsReplacement::~PartsReplacement() {
  if (!counts_) (void)Drop(directories_);
}

}  // namespace penstock::swap
