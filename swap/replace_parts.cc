#include "swap/replace_parts.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_files.h"
#include "swap/inspect.h"
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

absl::StatusOr<bool> IsWhole(const std::string& directory) {
  ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(absl::StrCat(directory, kWhole)));
  return kind == PathKind::kDirectory;
}

// With the one first in which the new parts count: who starts again may name the directories in another
// order.
absl::StatusOr<std::vector<std::string>> WholeFirst(std::vector<std::string> directories) {
  for (size_t d = 0; d < directories.size(); ++d) {
    ASSIGN_OR_RETURN(const bool whole, IsWhole(directories[d]));
    if (!whole) continue;
    std::swap(directories.front(), directories[d]);
    break;
  }
  return directories;
}

// The names of new parts below a directory, of which `from` has them: "/rank-K", or "" of one.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& from) {
  ASSIGN_OR_RETURN(const std::vector<std::string> ranks, RankPartsIn(from));
  std::vector<std::string> names;
  for (const std::string& part : ranks) names.push_back(part.substr(from.size()));
  if (names.empty()) names.emplace_back();
  return names;
}

// Where each directory has its new parts from the moment on at which they count.
std::vector<std::string> Froms(const std::vector<std::string>& directories) {
  std::vector<std::string> froms = NextDirectories(directories);
  froms.front() = absl::StrCat(directories.front(), kWhole);
  return froms;
}

uint32_t DirectoriesOf(const PlainFile& store) {
  const auto super = LoadSuperblock(store);
  return super.ok() ? super->shape.directories() : 0;  // its creation was cut short
}

// Each new part is there with all of its directories, in `froms` or, where `moved`, in its place. What is
// missing may be in a directory that was not given or is not mounted, and would be dropped there later.
absl::Status CheckAllThere(const std::vector<std::string>& directories, const std::vector<std::string>& froms,
                           bool moved) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(froms.front()));
  for (const std::string& name : names) {
    std::optional<Uuid> uuid;
    for (size_t d = 0; d < directories.size(); ++d) {
      const std::string made = StorePath(froms[d] + name);
      ASSIGN_OR_RETURN(const bool there, PathExists(made));
      const std::string path = there || !moved ? made : StorePath(directories[d] + name);
      const auto file = PlainFile::Open(path);
      if (!file.ok() && !absl::IsNotFound(file.status())) return file.status();
      const auto super = file.ok() ? LoadSuperblock(*file) : file.status();
      if (super.ok() && super->shape.directories() == directories.size() &&
          super->shape.uuid == uuid.value_or(super->shape.uuid)) {
        uuid = super->shape.uuid;
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          path, " is not what a change of the number of ranks, which was cut short, has made for the ",
          directories.size(),
          " directories that were given: give all state directories of the run, each mounted where it was, "
          "or go on from a checkpoint in another state directory"));
    }
  }
  return absl::OkStatus();
}

// What stands in these places is to be removed: all of it is of one run, and nothing is there twice.
absl::Status CheckOfOneRun(const std::vector<std::string>& places) {
  std::optional<Uuid> uuid;
  std::map<std::pair<std::string, uint32_t>, std::string> seen;  // places, by part and directory
  for (const std::string& place : places) {
    const Finding found = Probe(place);
    if (found.directories == 0) continue;
    if (found.uuid != uuid.value_or(found.uuid)) {
      return absl::FailedPreconditionError(absl::StrCat(
          StorePath(place), " is of another run (", UuidText(found.uuid), ") than the parts beside it (",
          UuidText(*uuid), "), and is not removed with them: move it away"));
    }
    uuid = found.uuid;
    const auto [other, is_new] = seen.emplace(std::pair(found.identity, found.directory), place);
    if (is_new) continue;
    return absl::FailedPreconditionError(absl::StrCat(StorePath(place), " is a copy of what is in ",
                                                      other->second,
                                                      ", and is not removed with it: move one of them away"));
  }
  return absl::OkStatus();
}

absl::StatusOr<dev_t> DeviceOf(const std::string& directory) {
  struct stat info;
  if (::stat(directory.c_str(), &info) != 0)
    return MakeIoError({.op = "look at directory", .path = directory, .error = errno});
  return info.st_dev;
}

// A part can be moved from one to the other and be removed there, and both at once with all others: what
// cannot be done is found while the old parts are the run.
absl::Status CheckMoves(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(CheckDirectory(to));
  ASSIGN_OR_RETURN(const dev_t device, DeviceOf(from));
  ASSIGN_OR_RETURN(const dev_t other, DeviceOf(to));
  if (device != other) {
    return absl::FailedPreconditionError(absl::StrCat(
        to, " is on another file system than ", from,
        ": the parts of a run can take the places of those of another number of ranks only where all of a "
        "directory are on one; go on in another `state_dir` that is empty, with `resume` and "
        "this one or a checkpoint as `checkpoint_dir`"));
  }
  if (::access(to.c_str(), W_OK | X_OK) != 0)
    return MakeIoError({.op = "write to directory", .path = to, .error = errno});
  return absl::OkStatus();
}

absl::Status CheckMoves(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directory));
    for (const std::string& place : places) RETURN_IF_ERROR(CheckMoves(directory, place));
  }
  return absl::OkStatus();
}

// New parts that do not count. What is not ours in there stays, and the directory with it. A part of which
// another directory's is missing stays, too: that one may not have been given, and have it as one that
// counts.
absl::Status Drop(const std::vector<std::string>& directories) {
  std::set<std::string> names;
  for (const std::string& next : NextDirectories(directories)) {
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(next));
    if (kind != PathKind::kDirectory) continue;
    ASSIGN_OR_RETURN(const std::vector<std::string> ranks, RankPartsIn(next));
    for (const std::string& part : ranks) names.insert(part.substr(next.size()));
    names.insert("");
  }
  for (auto name = names.rbegin(); name != names.rend(); ++name) {  // the directory itself last
    std::vector<std::string> places = NextDirectories(directories);
    for (std::string& place : places) place += *name;
    ASSIGN_OR_RETURN(const std::vector<PlainFile> stores, TakeAll(places));
    for (const PlainFile& store : stores) {
      const uint32_t of = DirectoriesOf(store);
      if (of != 0 && (of != directories.size() || of != stores.size())) continue;
      if (::unlink(store.path().c_str()) != 0)
        return MakeIoError({.op = "remove", .path = store.path(), .error = errno});
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
  const std::vector<std::string> froms = Froms(directories);
  ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(froms.front()));
  std::vector<std::string> kept;
  for (size_t d = 0; d < directories.size(); ++d) {
    for (const std::string& name : names) {
      const std::string store = StorePath(froms[d] + name), to = directories[d] + name;
      kept.push_back(to);
      ASSIGN_OR_RETURN(const bool there, PathExists(store));
      if (!there) continue;  // it is in its place
      RETURN_IF_ERROR(MakeDirectories(to));
      at_change();
      RETURN_IF_ERROR(Rename(store, StorePath(to)));
      RETURN_IF_ERROR(SyncDirectory(to));
    }
  }
  RETURN_IF_ERROR(MoveDescription(directories.front(), names.front().empty(), at_change));
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directories));
  for (const std::string& place : places) {
    if (std::find(kept.begin(), kept.end(), place) != kept.end()) continue;
    ASSIGN_OR_RETURN(const bool there, PathExists(StorePath(place)));
    if (there) {
      at_change();
      if (::unlink(StorePath(place).c_str()) != 0)
        return MakeIoError({.op = "remove", .path = StorePath(place), .error = errno});
    }
    const bool of_state = std::find(directories.begin(), directories.end(), place) != directories.end();
    if (!of_state) (void)::rmdir(place.c_str());  // what else is in it stays
  }
  for (const std::string& directory : directories) RETURN_IF_ERROR(SyncDirectory(directory));
  at_change();
  RETURN_IF_ERROR(Rename(froms.front(), absl::StrCat(directories.front(), kNext)));
  at_change();
  return Drop(directories);
}

// Of all of them, in one order however they are named. False: another process has one.
absl::StatusOr<bool> LockAll(const std::vector<std::string>& directories,
                             std::vector<std::unique_ptr<DirectoryLock>>* locks) {
  std::map<std::pair<dev_t, ino_t>, std::string> all;
  for (const std::string& directory : directories) {
    struct stat info;
    if (::stat(directory.c_str(), &info) == 0) {
      all.emplace(std::pair(info.st_dev, info.st_ino), directory);
    } else if (errno != ENOENT && errno != ENOTDIR) {
      return MakeIoError({.op = "look at directory", .path = directory, .error = errno});
    }
  }
  for (const auto& [inode, directory] : all) {
    auto lock = std::make_unique<DirectoryLock>();
    ASSIGN_OR_RETURN(const bool locked, lock->Take(directory, kOthersPatience));
    if (!locked) return false;
    locks->push_back(std::move(lock));
  }
  return true;
}

// With the locks.
absl::Status Finish(const std::vector<std::string>& given) {
  ASSIGN_OR_RETURN(const std::vector<std::string> directories, WholeFirst(given));
  ASSIGN_OR_RETURN(const bool counts, IsWhole(directories.front()));
  if (!counts) return Drop(directories);
  RETURN_IF_ERROR(CheckAllThere(directories, Froms(directories), /*moved=*/true));
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

std::vector<std::string> PlacesBefore(const std::string& directory) {
  return {absl::StrCat(directory, kNext), absl::StrCat(directory, kWhole)};
}

absl::StatusOr<bool> IsReplacementCutShort(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(const bool whole, IsWhole(directory));
    if (whole) return true;
  }
  return false;
}

absl::Status FinishReplacement(const std::vector<std::string>& directories) {
  if (directories.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(bool any, IsReplacementCutShort(directories));
  for (const std::string& next : NextDirectories(directories)) {
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(next));
    any = any || kind == PathKind::kDirectory;
  }
  if (!any) return absl::OkStatus();
  std::vector<std::unique_ptr<DirectoryLock>> locks;
  ASSIGN_OR_RETURN(const bool locked, LockAll(directories, &locks));
  return locked ? Finish(directories) : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PartsReplacement>> PartsReplacement::Begin(
    std::vector<std::string> directories) {
  std::unique_ptr<PartsReplacement> begun(new PartsReplacement(std::move(directories)));
  for (const std::string& directory : begun->directories_) RETURN_IF_ERROR(MakeDirectories(directory));
  const std::string& first = begun->directories_.front();
  begun->counts_ = true;  // until it is locked, what is there is not this one's to drop
  ASSIGN_OR_RETURN(const bool locked, LockAll(begun->directories_, &begun->locks_));
  if (!locked) {
    return absl::FailedPreconditionError(
        absl::StrCat(first, ": another process changes its number of ranks just now: let that one end"));
  }
  RETURN_IF_ERROR(Finish(begun->directories_));
  begun->counts_ = false;
  RETURN_IF_ERROR(CheckMoves(begun->directories_));
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(begun->directories_));
  RETURN_IF_ERROR(CheckOfOneRun(places));
  begun->seen_ = SeeCommits(places);
  return begun;
}

absl::Status PartsReplacement::Commit(const std::function<void()>& at_change) {
  const AtChange change = at_change ? at_change : [] {};
  ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesIn(directories_));
  ASSIGN_OR_RETURN(const std::vector<PlainFile> old, TakeAll(places));
  RETURN_IF_ERROR(CheckSeen(places, seen_));
  const std::string& first = directories_.front();
  const std::vector<std::string> froms = NextDirectories(directories_);
  RETURN_IF_ERROR(CheckAllThere(directories_, froms, /*moved=*/false));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(froms.front()));
  for (const std::string& directory : directories_) {
    for (const std::string& name : names) RETURN_IF_ERROR(MakeDirectories(directory + name, &made_));
  }
  RETURN_IF_ERROR(CheckMoves(directories_));
  for (const std::string& directory : directories_) RETURN_IF_ERROR(SyncDirectory(directory));
  change();
  RETURN_IF_ERROR(Rename(absl::StrCat(first, kNext), absl::StrCat(first, kWhole)));
  counts_ = true;
  RETURN_IF_ERROR(SyncDirectory(first));
  return RollForward(directories_, change);
}

PartsReplacement::~PartsReplacement() {
  if (counts_) return;
  (void)Drop(directories_);
  for (auto made = made_.rbegin(); made != made_.rend(); ++made) (void)::rmdir(made->c_str());
}

absl::Status CheckNoneInHalves(const std::vector<std::string>& directories) {
  std::set<std::string> names = {""};
  for (const std::string& directory : directories) {
    const absl::StatusOr<std::vector<std::string>> parts = RankPartsIn(directory);
    if (absl::IsNotFound(parts.status())) continue;
    RETURN_IF_ERROR(parts.status());
    for (const std::string& part : *parts) names.insert(part.substr(directory.size()));
  }
  for (const std::string& name : names) {
    const std::string* has = nullptr;
    const std::string* lacks = nullptr;
    for (const std::string& directory : directories) {
      ASSIGN_OR_RETURN(const bool there, PathExists(StorePath(directory + name)));
      (there ? has : lacks) = &directory;
    }
    if (has == nullptr || lacks == nullptr) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(*has, name, " has a half of the state whose other half is not in ", *lacks,
                     ": bring that drive back, or, if it is lost, go on from the checkpoint in other state "
                     "directories"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::swap
