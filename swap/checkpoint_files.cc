#include "swap/checkpoint_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

constexpr const char* kLatest = "latest";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial";
constexpr std::string_view kReplaced = ".superseded";  // (.replaced is of the Python package)
constexpr int kLeftoverPatienceMs = 1000;

// The names in a directory; none where nothing or something else has its name.
absl::StatusOr<std::vector<std::string>> Entries(const std::string& directory) {
  ASSIGN_OR_RETURN(const bool there, IsDirectory(directory));
  if (!there) return std::vector<std::string>();
  return ListDirectoryIfThere(directory);
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// The step of a checkpoint's name; false for any other name.
bool StepOf(const std::string& name, uint64_t* step) {
  if (name.size() <= kPrefix.size() || name.compare(0, kPrefix.size(), kPrefix) != 0) return false;
  std::string digits = name.substr(kPrefix.size());
  if (const size_t point = digits.find('.'); point != std::string::npos) {
    const std::string number = digits.substr(point + 1);
    if (!IsNumber(number) || number.size() > 9 || number[0] == '0' || number == "1") return false;
    digits.resize(point);
  }
  if (!IsNumber(digits) || digits.size() > 19) return false;
  *step = std::strtoull(digits.c_str(), nullptr, 10);
  return true;
}

// Of Python's front end, in the part of a rank (CheckpointNaming::file_name).
bool IsClientState(std::string_view name) {
  return name.starts_with("client_state-") && name.ends_with(".pt");
}

// There is something of that name, and no directory: a link, whose target is none of ours, or a file.
absl::StatusOr<bool> InTheWay(const std::string& directory) {
  ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(directory));
  return kind != PathKind::kMissing && kind != PathKind::kDirectory;
}

constexpr std::string_view kRankPrefix = "rank-";

std::string PartialName(const std::string& name) {
  return absl::StrCat(".", name, absl::string_view(kPartial.data(), kPartial.size()));
}

// Of a checkpoint that another one takes the name of.
std::string ReplacedName(const std::string& name) {
  return absl::StrCat(".", name, absl::string_view(kReplaced.data(), kReplaced.size()));
}

// The checkpoint's name in ".NAME" + `suffix`; empty: it is no such name.
std::string NameWithin(std::string_view name, std::string_view suffix) {
  uint64_t step = 0;
  if (name.size() <= suffix.size() + 1 || name[0] != '.' || !name.ends_with(suffix)) return "";
  std::string within(name.substr(1, name.size() - 1 - suffix.size()));
  return StepOf(within, &step) ? within : "";
}

// Where the parts of a checkpoint are: the directories of its ranks, or its own.
absl::StatusOr<std::vector<std::string>> PartsOf(const std::string& directory) {
  ASSIGN_OR_RETURN(std::vector<std::string> parts, RankPartsIn(directory));
  if (parts.empty()) parts.push_back(directory);
  return parts;
}

// The store of a checkpoint, or of its first rank; empty: there is none.
absl::StatusOr<std::string> StoreIn(const std::string& directory) {
  for (const std::string& part : {directory, RankDirectory(directory, 0)}) {
    std::string path = StorePath(part);
    ASSIGN_OR_RETURN(const bool there, PathExists(path));
    if (there) return path;
  }
  return std::string();
}

absl::StatusOr<bool> HoldsStore(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string path, StoreIn(directory));
  return !path.empty();
}

// Gives the space of a file without a name back from its end. A file system that is told to free gigabytes at
// once keeps all who write to it waiting (ext4 with `discard`: 50 ms each half a gigabyte); by pieces nobody
// notices. What somebody has open is left for them to read to its end, and what has a name, another one or
// one that it was given just now, is theirs. What fails here is freed with the descriptor.
void FreeInPieces(const PlainFile& file, const Rest& rest) {
  constexpr uint64_t kPiece = uint64_t{16} << 20;
  if (file.bytes() <= kPiece || file.names() > 0 || !file.IsOpenHereOnly()) return;
  for (uint64_t left = file.bytes(); left > 0;) {
    left -= std::min(left, kPiece);
    const auto start = std::chrono::steady_clock::now();
    if (!file.Cut(left).ok()) return;
    rest(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
}

// The uuid that a store's superblock has; of one that cannot be read, or has none, zeros.
Uuid UuidIn(const absl::StatusOr<PlainFile>& file) {
  if (!file.ok()) return {};
  const auto super = LoadSuperblock(*file);
  return super.ok() ? super->shape.uuid : Uuid{};
}

// It belongs to whoever was faster.
absl::Status NotThereAnyMore(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat(path, " was replaced or moved away just now and is not removed"));
}

// A checkpoint's directory that holds store files of ours, or nothing, and nothing else: until it is
// destroyed nobody else opens these for more than a look.
class LockedCheckpoint {
 public:
  static absl::StatusOr<LockedCheckpoint> Take(const std::string& directory, int patience_ms = 0) {
    ASSIGN_OR_RETURN(const bool in_the_way, InTheWay(directory));
    if (in_the_way) {
      return absl::FailedPreconditionError(
          absl::StrCat(directory, " is no directory of a checkpoint and is not removed: move it away"));
    }
    LockedCheckpoint taken(directory);
    ASSIGN_OR_RETURN(const std::vector<std::string> parts, PartsOf(directory));
    for (const std::string& part : parts) {
      const std::string path = StorePath(part);
      auto file = PlainFile::Open(path);
      if (absl::IsNotFound(file.status())) continue;
      RETURN_IF_ERROR(file.status());
      ASSIGN_OR_RETURN(const FileKind kind, file->Classify());
      if (kind == FileKind::kForeign) {
        return absl::FailedPreconditionError(
            absl::StrCat(path, " was not made by this program and is not removed"));
      }
      ASSIGN_OR_RETURN(const auto locked, file->TryLock(/*exclusive=*/true, patience_ms));
      if (!locked) return absl::FailedPreconditionError(absl::StrCat(path, " is in use"));
      ASSIGN_OR_RETURN(const bool at_its_place, file->IsAt(path));
      if (!at_its_place) return NotThereAnyMore(path);
      taken.files_.push_back(*std::move(file));
      taken.names_.push_back(path.substr(directory.size()));
    }
    return taken;
  }

  // kFailedPrecondition: the directory has a file or directory that is not a checkpoint's.
  static absl::Status CheckNothingElse(const std::string& directory) {
    ASSIGN_OR_RETURN(const std::vector<std::string> directories, DirectoriesOf(directory));
    const std::set<std::string> own(directories.begin(), directories.end());
    for (const std::string& each : directories) {
      ASSIGN_OR_RETURN(const std::vector<std::string> entries, Entries(each));
      for (const std::string& entry : entries) {
        const std::string path = absl::StrCat(each, "/", entry);
        ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(path));
        const bool file = path == StorePath(each) || GoesWithStore(entry);
        if (own.contains(path) ? kind == PathKind::kDirectory : file && kind == PathKind::kRegular) continue;
        return absl::FailedPreconditionError(
            absl::StrCat(path, " is not of the checkpoint that it lies in: move it away"));
      }
    }
    return absl::OkStatus();
  }

  // kFailedPrecondition: something else is in it, and all of it stays. It loses its name first, so that what
  // a kill leaves of it is no checkpoint.
  absl::Status Remove(const Rest& rest = nullptr) {
    RETURN_IF_ERROR(CheckNothingElse(directory_));
    const size_t slash = directory_.rfind('/');
    const std::string name = directory_.substr(slash + 1);
    if (uint64_t step = 0; StepOf(name, &step)) {
      const std::string unnamed = absl::StrCat(directory_.substr(0, slash + 1), PartialName(name));
      if (::rename(directory_.c_str(), unnamed.c_str()) == 0) directory_ = unnamed;
    }
    for (size_t i = 0; i < files_.size(); ++i) {
      const std::string path = absl::StrCat(directory_, names_[i]);
      ASSIGN_OR_RETURN(const bool at_its_place, files_[i].IsAt(path));
      if (!at_its_place) return NotThereAnyMore(path);
      if (::unlink(path.c_str()) != 0) return MakeIoError({.op = "remove", .path = path, .error = errno});
    }
    ASSIGN_OR_RETURN(const std::vector<std::string> directories, DirectoriesOf(directory_));
    for (const std::string& each : directories) {
      ASSIGN_OR_RETURN(const std::vector<std::string> left, Entries(each));
      for (const std::string& entry : left) {
        if (GoesWithStore(entry)) (void)::unlink(absl::StrCat(each, "/", entry).c_str());
      }
      if (::rmdir(each.c_str()) != 0 && errno != ENOENT)
        return MakeIoError({.op = "remove directory", .path = each, .error = errno});
    }
    if (rest) {
      for (const PlainFile& file : files_) FreeInPieces(file, rest);
    }
    return absl::OkStatus();
  }

 private:
  explicit LockedCheckpoint(std::string directory) : directory_(std::move(directory)) {}

  // Those of the parts, and the checkpoint's own last.
  static absl::StatusOr<std::vector<std::string>> DirectoriesOf(const std::string& directory) {
    ASSIGN_OR_RETURN(std::vector<std::string> directories, PartsOf(directory));
    if (directories.front() != directory) directories.push_back(directory);
    return directories;
  }
  // What is written beside a store; also under the name that a kill leaves it just before it has its own.
  static bool GoesWithStore(const std::string& entry) {
    return entry == kDescriptionFile || IsClientState(entry) ||
           NameInTemporary(entry, ".new") == kDescriptionFile;
  }

  std::string directory_;
  std::vector<PlainFile> files_;
  std::vector<std::string> names_;  // below the directory
};

absl::Status RemoveStoreDirectory(const std::string& directory, int lock_patience_ms = 0,
                                  const Rest& rest = nullptr) {
  ASSIGN_OR_RETURN(LockedCheckpoint taken, LockedCheckpoint::Take(directory, lock_patience_ms));
  return taken.Remove(rest);
}

// Whether the checkpoint of this name is one of `seen`, and not another that has its name by now.
absl::StatusOr<bool> IsAmong(std::span<const CheckpointSeen> seen, const std::string& parent,
                             const std::string& name) {
  for (const CheckpointSeen& each : seen) {
    if (each.name != name) continue;
    ASSIGN_OR_RETURN(const std::string path, StoreIn(absl::StrCat(parent, "/", name)));
    return !path.empty() && UuidIn(PlainFile::Open(path)) == each.uuid;
  }
  return false;
}

absl::Status Held(CheckpointLock* lock) { return lock != nullptr ? lock->Check() : absl::OkStatus(); }

// Removes `replaced`, and of the others all but the newest `keep` (0: all stay), and not the one at `spare`.
// On an error nothing was removed.
absl::Status KeepNewest(const std::string& parent, uint32_t keep, std::span<const CheckpointSeen> replaced,
                        const std::string& spare, CheckpointLock* lock, const Rest& rest) {
  if (keep == 0 && replaced.empty()) return absl::OkStatus();
  // The names of those that stay come first: one that a killed run gave may not be on the disk yet.
  if (absl::Status synced = SyncDirectory(parent); !synced.ok())
    return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, ListCheckpoints(parent));
  std::vector<std::string> old, superseded;
  for (const CheckpointEntry& entry : all) {
    ASSIGN_OR_RETURN(const bool is_replaced, IsAmong(replaced, parent, entry.name));
    (is_replaced ? superseded : old).push_back(entry.path);
  }
  old.resize(keep == 0 || old.size() < keep ? 0 : old.size() - keep);
  // The newest of an older run first: it is the one that a run would go on from.
  old.insert(old.begin(), superseded.rbegin(), superseded.rend());
  for (const std::string& path : old) {
    // One that somebody reads just now stays until next time.
    if (!Held(lock).ok()) break;
    if (path != spare) (void)RemoveStoreDirectory(path, 0, rest);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> RankPartsIn(const std::string& directory) {
  std::vector<std::string> parts;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, Entries(directory));
  for (const std::string& name : names) {
    if (name.starts_with(kRankPrefix) && IsNumber(name.substr(kRankPrefix.size())))
      parts.push_back(absl::StrCat(directory, "/", name));
  }
  return parts;
}

std::string RankDirectory(const std::string& directory, int rank) {
  const bool ends = !directory.empty() && directory.back() == '/';
  return absl::StrCat(directory, ends ? "" : "/", "rank-", rank);
}

std::string CheckpointName(uint64_t step, int number) {
  return absl::StrCat(absl::StrFormat("step-%08u", step), number > 1 ? absl::StrCat(".", number) : "");
}

absl::StatusOr<std::vector<CheckpointEntry>> ListCheckpoints(const std::string& parent) {
  std::vector<CheckpointEntry> found;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, Entries(parent));
  for (const std::string& name : names) {
    CheckpointEntry entry;
    if (!StepOf(name, &entry.step)) continue;
    entry.name = name;
    entry.path = absl::StrCat(parent, "/", name);
    ASSIGN_OR_RETURN(const bool whole, HoldsStore(entry.path));
    if (whole) found.push_back(std::move(entry));
  }
  std::sort(found.begin(), found.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return std::make_tuple(a.step, a.name.size(), a.name) < std::make_tuple(b.step, b.name.size(), b.name);
  });
  return found;
}

absl::StatusOr<std::string> FindCheckpoint(const std::string& path) {
  ASSIGN_OR_RETURN(const bool itself, HoldsStore(path));
  if (itself) return path;
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, ListCheckpoints(path));
  if (all.empty()) return absl::NotFoundError(absl::StrCat(path, " holds no checkpoint"));
  return all.back().path;
}

absl::Status CheckOutsideStores(const std::string& directory) {
  std::error_code error;
  const std::filesystem::path itself = std::filesystem::weakly_canonical(directory, error);
  if (error) return MakeIoError({.op = "look at directory", .path = directory, .error = error.value()});
  for (std::filesystem::path at = itself;; at = at.parent_path()) {
    uint64_t step = 0;
    if (at == itself || StepOf(at.filename(), &step)) {
      ASSIGN_OR_RETURN(const std::string store, StoreIn(at));
      if (!store.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(
            directory, at == itself ? " holds" : " lies in the directory of", " a state or checkpoint (",
            store, "), to which nothing else is written: give another directory"));
      }
    }
    if (at == at.parent_path()) return absl::OkStatus();
  }
}

namespace {

// Whether a directory was renamed, or its entries changed, after a time; false where no time is given.
absl::StatusOr<bool> ChangedAfter(const std::string& directory, std::optional<int64_t> until_ns) {
  if (!until_ns.has_value()) return false;
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0)
    return MakeIoError({.op = "look at directory", .path = directory, .error = errno});
  return int64_t{info.st_ctim.tv_sec} * 1'000'000'000 + info.st_ctim.tv_nsec > *until_ns;
}

}  // namespace

absl::StatusOr<std::vector<CheckpointSeen>> SeeCheckpoints(const std::string& parent,
                                                           std::optional<int64_t> until_ns) {
  std::vector<CheckpointSeen> seen;
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, ListCheckpoints(parent));
  for (const CheckpointEntry& entry : all) {
    ASSIGN_OR_RETURN(const std::string path, StoreIn(entry.path));
    const auto file = PlainFile::Open(path);
    // It is a checkpoint since its directory got its name.
    ASSIGN_OR_RETURN(const bool named_after, ChangedAfter(entry.path, until_ns));
    if (named_after || (file.ok() && file->ModifiedAfter(until_ns))) continue;
    seen.push_back({entry.name, UuidIn(file)});
  }
  return seen;
}

absl::Status RemovePartialCheckpoints(const std::string& parent) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, Entries(parent));
  for (const std::string& name : names) {
    // A new `latest` of an older version, whose writer was killed before it got its name.
    if (name == PartialName(kLatest)) (void)::unlink(absl::StrCat(parent, "/", name).c_str());
    const std::string path = absl::StrCat(parent, "/", name);
    if (const std::string whole = NameWithin(name, kReplaced); !whole.empty()) {
      // A kill between two renames: it has its name again, unless the new one has it.
      const std::string place = absl::StrCat(parent, "/", whole);
      ASSIGN_OR_RETURN(const bool taken, PathExists(place));
      ASSIGN_OR_RETURN(const bool whole_one, HoldsStore(path));
      if (!taken && whole_one) {
        RETURN_IF_ERROR(Rename(path, place));
      } else {
        (void)RemoveStoreDirectory(path, kLeftoverPatienceMs);
      }
    }
    if (NameWithin(name, kPartial).empty()) continue;
    // The last writes of a killed run may not be over yet. What stays in use is another run's, and not ours
    // to judge.
    (void)RemoveStoreDirectory(path, kLeftoverPatienceMs);
  }
  return absl::OkStatus();
}

absl::Status KeepNewestCheckpoints(const std::string& parent, uint32_t keep,
                                   std::span<const CheckpointSeen> replaced, const std::string& spare) {
  return KeepNewest(parent, keep, replaced, spare, nullptr, nullptr);
}

absl::Status CheckSeen(const std::string& parent, std::span<const CheckpointSeen> seen) {
  ASSIGN_OR_RETURN(const std::vector<CheckpointSeen> there, SeeCheckpoints(parent));
  for (const CheckpointSeen& each : there) {
    if (std::find(seen.begin(), seen.end(), each) != seen.end()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(parent, "/", each.name,
                     ": another process has kept this checkpoint while this one started, and it is not "
                     "replaced: start this one again, or give another `checkpoint_dir`"));
  }
  return absl::OkStatus();
}

struct ReplacedCheckpoints::Locked {
  std::vector<LockedCheckpoint> all;
};

ReplacedCheckpoints::ReplacedCheckpoints(std::string parent)
    : parent_(std::move(parent)), locked_(std::make_unique<Locked>()) {}
ReplacedCheckpoints::ReplacedCheckpoints(ReplacedCheckpoints&&) noexcept = default;
ReplacedCheckpoints& ReplacedCheckpoints::operator=(ReplacedCheckpoints&&) noexcept = default;
ReplacedCheckpoints::~ReplacedCheckpoints() = default;

absl::StatusOr<ReplacedCheckpoints> ReplacedCheckpoints::Lock(const std::string& parent,
                                                              std::span<const CheckpointSeen> seen) {
  RETURN_IF_ERROR(CheckSeen(parent, seen));
  ReplacedCheckpoints replaced(parent);
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, ListCheckpoints(parent));
  for (const CheckpointEntry& entry : all) {
    ASSIGN_OR_RETURN(LockedCheckpoint taken, LockedCheckpoint::Take(entry.path));
    RETURN_IF_ERROR(LockedCheckpoint::CheckNothingElse(entry.path));
    replaced.locked_->all.push_back(std::move(taken));
  }
  return replaced;
}

absl::Status ReplacedCheckpoints::Remove() {
  RETURN_IF_ERROR(RemovePartialCheckpoints(parent_));
  const bool any = !locked_->all.empty();
  // The newest first: it is the one that a run would go on from. Where one cannot be removed the others stay.
  for (; !locked_->all.empty(); locked_->all.pop_back()) RETURN_IF_ERROR(locked_->all.back().Remove());
  if (any) (void)::unlink(absl::StrCat(parent_, "/", kLatest).c_str());
  return absl::OkStatus();
}

PartialCheckpoint::PartialCheckpoint(std::string parent, std::string name, int rank, CheckpointLock* lock,
                                     std::span<const CheckpointSeen> replaces)
    : lock_(lock),
      replaces_(replaces),
      parent_(std::move(parent)),
      name_(std::move(name)),
      whole_(absl::StrCat(parent_, "/", PartialName(name_))),
      directory_(rank < 0 ? whole_ : RankDirectory(whole_, rank)) {}

PartialCheckpoint::PartialCheckpoint(PartialCheckpoint&& other) noexcept
    : made_in_(other.made_in_),
      lock_(other.lock_),
      replaces_(other.replaces_),
      parent_(std::move(other.parent_)),
      name_(std::move(other.name_)),
      whole_(std::move(other.whole_)),
      directory_(std::exchange(other.directory_, std::string())) {}

PartialCheckpoint::~PartialCheckpoint() {
  // Should this fail too, the next checkpoint or the next start tries again.
  if (directory_.empty() || !made_in_.here()) return;
  (void)RemoveStoreDirectory(directory_);
  if (directory_ != whole_) (void)::rmdir(whole_.c_str());  // the last rank's succeeds
}

absl::StatusOr<PartialCheckpoint> PartialCheckpoint::Create(const std::string& parent,
                                                            const std::string& name, int rank,
                                                            CheckpointLock* lock,
                                                            std::span<const CheckpointSeen> replaces) {
  RETURN_IF_ERROR(Held(lock));
  RETURN_IF_ERROR(MakeDirectories(parent));
  // Of several ranks the first one knows what is replaced, and publishes.
  if (rank <= 0) {
    const std::string path = absl::StrCat(parent, "/", name);
    ASSIGN_OR_RETURN(const bool there, PathExists(path));
    ASSIGN_OR_RETURN(const bool replaced, IsAmong(replaces, parent, name));
    if (there && !replaced) return absl::AlreadyExistsError(absl::StrCat(path, " is there already"));
  }
  if (rank < 0) {
    RETURN_IF_ERROR(RemovePartialCheckpoints(parent));
  }
  const std::string whole = absl::StrCat(parent, "/", PartialName(name));
  for (const std::string& directory : {whole, rank < 0 ? whole : RankDirectory(whole, rank)}) {
    ASSIGN_OR_RETURN(const bool in_the_way, InTheWay(directory));
    if (in_the_way) return absl::AlreadyExistsError(absl::StrCat(directory, " is in the way: move it away"));
  }
  PartialCheckpoint partial(parent, name, rank, lock, replaces);
  if (rank >= 0) (void)RemoveStoreDirectory(partial.directory_, kLeftoverPatienceMs);
  // What stays there would be part of this one.
  ASSIGN_OR_RETURN(const std::vector<std::string> left, Entries(partial.directory_));
  if (left.empty()) return partial;
  const std::string path = absl::StrCat(partial.directory_, "/", left.front());
  partial.HandOver();
  return absl::AlreadyExistsError(absl::StrCat(path, " is in the way: move it away"));
}

absl::Status PartialCheckpoint::TakeIn(const std::string& path, const std::string& name) const {
  RETURN_IF_ERROR(Rename(path, absl::StrCat(directory_, "/", name)));
  return SyncDirectory(directory_);
}

absl::StatusOr<std::string> PartialCheckpoint::TakeNameOf(const std::string& path) const {
  // The old one must not be somebody's who reads it just now.
  ASSIGN_OR_RETURN(const LockedCheckpoint old, LockedCheckpoint::Take(path));
  RETURN_IF_ERROR(LockedCheckpoint::CheckNothingElse(path));
  if (::renameat2(AT_FDCWD, whole_.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) return whole_;
  if (errno != EINVAL && errno != ENOSYS)
    return MakeIoError({.op = "rename to", .path = path, .error = errno});
  // A file system without exchanges, NFS for one.
  std::string aside = absl::StrCat(parent_, "/", ReplacedName(name_));
  RETURN_IF_ERROR(Rename(path, aside));
  if (absl::Status renamed = Rename(whole_, path); !renamed.ok()) {
    renamed.Update(Rename(aside, path));
    return renamed;
  }
  return aside;
}

absl::Status PartialCheckpoint::Publish(uint32_t keep, const Rest& rest,
                                        const std::optional<CheckpointNaming>& naming) {
  const std::string path = absl::StrCat(parent_, "/", name_);
  if (absl::Status held = Held(lock_); !held.ok()) {
    directory_.clear();  // it went with the directory: what has its name is somebody else's
    return held;
  }
  RETURN_IF_ERROR(LockedCheckpoint::CheckNothingElse(whole_));
  ASSIGN_OR_RETURN(const bool replaced, IsAmong(replaces_, parent_, name_));
  std::string old;  // what had the name, where it is now
  if (replaced) {
    ASSIGN_OR_RETURN(old, TakeNameOf(path));
  } else {
    RETURN_IF_ERROR(Rename(whole_, path));
  }
  directory_.clear();
  RETURN_IF_ERROR(SyncDirectory(parent_));
  if (naming.has_value()) {
    if (!naming->tag.empty() && naming->tag != name_)
      RETURN_IF_ERROR(ReplaceLink(name_, absl::StrCat(parent_, "/", naming->tag)));
    if (naming->latest) RETURN_IF_ERROR(ReplaceFile(absl::StrCat(parent_, "/", kLatest), name_));
  }
  // From here on there is a checkpoint, and those that are kept no longer go. `latest` is a note for people:
  // where there is no room for it, there may be afterwards; none is better than one that names what is gone.
  const auto note = [&] {
    if (naming.has_value()) return true;
    return ReplaceFile(absl::StrCat(parent_, "/", kLatest), name_ + "\n", {.mode = 0600}).ok();
  };
  const bool noted = note();
  // The checkpoint is there whether or not older ones can be found just now: those stay until the next one.
  (void)KeepNewest(parent_, keep, replaces_, path, lock_, rest);
  if (!old.empty()) (void)RemoveStoreDirectory(old, 0, rest);
  if (!noted && !note()) (void)::unlink(absl::StrCat(parent_, "/", kLatest).c_str());
  return absl::OkStatus();
}

Layout LayoutWithoutScratch(const StoreShape& shape) {
  Layout layout;
  for (const TilePlacement& tile : shape.tiles) {
    layout.tiles.push_back(tile.layout);
    layout.tiles.back().scratch_bytes = 0;
  }
  return layout;
}

}  // namespace penstock::swap
