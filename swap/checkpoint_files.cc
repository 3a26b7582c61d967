#include "swap/checkpoint_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/file.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

constexpr const char* kLatest = "latest";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial";
constexpr int kLeftoverPatienceMs = 1000;

std::vector<std::string> Entries(const std::string& directory) {
  std::vector<std::string> names;
  DIR* dir = ::opendir(directory.c_str());
  if (dir == nullptr) return names;
  while (const dirent* entry = ::readdir(dir)) names.emplace_back(entry->d_name);
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

// The step of a checkpoint's name; false for any other name.
bool StepOf(const std::string& name, uint64_t* step) {
  if (name.size() <= kPrefix.size() || name.compare(0, kPrefix.size(), kPrefix) != 0) return false;
  const std::string digits = name.substr(kPrefix.size());
  if (digits.size() > 19 || digits.find_first_not_of("0123456789") != std::string::npos) return false;
  *step = std::strtoull(digits.c_str(), nullptr, 10);
  return true;
}

// There is something of that name, and no directory: a link, whose target is none of ours, or a file.
bool InTheWay(const std::string& directory) {
  struct stat info;
  return ::lstat(directory.c_str(), &info) == 0 && !S_ISDIR(info.st_mode);
}

constexpr std::string_view kRankPrefix = "rank-";

std::string PartialName(const std::string& name) {
  return absl::StrCat(".", name, absl::string_view(kPartial.data(), kPartial.size()));
}

// Where the parts of a checkpoint are: the directories of its ranks, or its own.
std::vector<std::string> PartsOf(const std::string& directory) {
  std::vector<std::string> parts;
  for (const std::string& name : Entries(directory)) {
    const bool digits = name.size() > kRankPrefix.size() &&
                        name.find_first_not_of("0123456789", kRankPrefix.size()) == std::string::npos;
    if (digits && name.compare(0, kRankPrefix.size(), kRankPrefix) == 0)
      parts.push_back(absl::StrCat(directory, "/", name));
  }
  if (parts.empty()) parts.push_back(directory);
  return parts;
}

bool HoldsStore(const std::string& directory) {
  return ::access(StorePath(directory).c_str(), F_OK) == 0 ||
         ::access(StorePath(RankDirectory(directory, 0)).c_str(), F_OK) == 0;
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

// It belongs to whoever was faster.
absl::Status NotThereAnyMore(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat(path, " was replaced or moved away just now and is not removed"));
}

// Removes a checkpoint's directory that holds store files of ours, or nothing, and nothing else. Anything
// else stays. It loses its name first, so that what a kill leaves of it is no checkpoint.
absl::Status RemoveStoreDirectory(std::string directory, int lock_patience_ms = 0,
                                  const Rest& rest = nullptr) {
  if (InTheWay(directory)) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " is no directory of ours and is not removed: move it away"));
  }
  std::vector<PlainFile> files;
  std::vector<std::string> names;  // below the directory
  for (const std::string& part : PartsOf(directory)) {
    const std::string path = StorePath(part);
    auto file = PlainFile::Open(path);
    if (absl::IsNotFound(file.status())) continue;
    RETURN_IF_ERROR(file.status());
    if (file->Classify() == FileKind::kForeign) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " was not made by this program and is not removed"));
    }
    ASSIGN_OR_RETURN(const auto locked, file->TryLock(/*exclusive=*/true, lock_patience_ms));
    if (!locked) return absl::FailedPreconditionError(absl::StrCat(path, " is in use"));
    if (!file->IsAt(path)) return NotThereAnyMore(path);
    files.push_back(*std::move(file));
    names.push_back(path.substr(directory.size()));
  }
  const size_t slash = directory.rfind('/');
  const std::string name = directory.substr(slash + 1);
  if (uint64_t step = 0; StepOf(name, &step)) {
    const std::string unnamed = absl::StrCat(directory.substr(0, slash + 1), PartialName(name));
    if (::rename(directory.c_str(), unnamed.c_str()) == 0) directory = unnamed;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string path = absl::StrCat(directory, names[i]);
    if (!files[i].IsAt(path)) return NotThereAnyMore(path);
    if (::unlink(path.c_str()) != 0) return ErrnoError(errno, "remove", path);
  }
  std::vector<std::string> directories = PartsOf(directory);
  if (directories.front() != directory) directories.push_back(directory);
  for (const std::string& each : directories) {
    if (::rmdir(each.c_str()) != 0 && errno != ENOENT) return ErrnoError(errno, "remove directory", each);
  }
  if (rest) {
    for (const PlainFile& file : files) FreeInPieces(file, rest);
  }
  return absl::OkStatus();
}

absl::Status Held(CheckpointLock* lock) { return lock != nullptr ? lock->Check() : absl::OkStatus(); }

// Removes all but the newest `keep` (0: none is removed), and not the one at `spare`.
void KeepNewest(const std::string& parent, uint32_t keep, const std::string& spare, CheckpointLock* lock,
                const Rest& rest) {
  if (keep == 0) return;
  // The names of those that stay come first: one that a killed run gave may not be on the disk yet.
  if (!aio::SyncDirectory(parent).ok()) return;
  const auto all = ListCheckpoints(parent);
  for (size_t i = 0; i + keep < all.size(); ++i) {
    // One that somebody reads just now stays until next time.
    if (!Held(lock).ok()) return;
    if (all[i].path != spare) (void)RemoveStoreDirectory(all[i].path, 0, rest);
  }
}

// A small file that appears whole or not at all.
absl::Status WriteSmallFile(const std::string& directory, const std::string& name, const std::string& text) {
  const std::string temporary = absl::StrCat(directory, "/", PartialName(name));
  const std::string path = absl::StrCat(directory, "/", name);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoError(errno, "create", temporary);
  const ssize_t written = ::write(fd, text.data(), text.size());
  const int write_error = written < 0 ? errno : written != static_cast<ssize_t>(text.size()) ? ENOSPC : 0;
  const int sync_error = write_error == 0 && ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  const int error = write_error != 0 ? write_error : sync_error;
  if (error != 0 || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int cause = error != 0 ? error : errno;
    (void)::unlink(temporary.c_str());
    return ErrnoError(cause, "write", path);
  }
  return aio::SyncDirectory(directory);
}

}  // namespace

std::string RankDirectory(const std::string& directory, int rank) {
  const bool ends = !directory.empty() && directory.back() == '/';
  return absl::StrCat(directory, ends ? "" : "/", "rank-", rank);
}

std::string CheckpointName(uint64_t step) { return absl::StrFormat("step-%08u", step); }

std::vector<CheckpointEntry> ListCheckpoints(const std::string& parent) {
  std::vector<CheckpointEntry> found;
  for (const std::string& name : Entries(parent)) {
    CheckpointEntry entry;
    if (!StepOf(name, &entry.step)) continue;
    entry.name = name;
    entry.path = absl::StrCat(parent, "/", name);
    if (HoldsStore(entry.path)) found.push_back(std::move(entry));
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

absl::StatusOr<std::string> FindCheckpoint(const std::string& path) {
  if (HoldsStore(path)) return path;
  const auto all = ListCheckpoints(path);
  if (all.empty()) return absl::NotFoundError(absl::StrCat(path, " holds no checkpoint"));
  return all.back().path;
}

void RemovePartialCheckpoints(const std::string& parent) {
  for (const std::string& name : Entries(parent)) {
    if (name == PartialName(kLatest)) (void)::unlink(absl::StrCat(parent, "/", name).c_str());
    uint64_t step = 0;
    if (name.size() <= kPartial.size() + 1 || name[0] != '.') continue;
    if (name.compare(name.size() - kPartial.size(), kPartial.size(), kPartial) != 0) continue;
    if (!StepOf(name.substr(1, name.size() - 1 - kPartial.size()), &step)) continue;
    // The last writes of a killed run may not be over yet. What stays in use is another run's, and not ours
    // to judge.
    (void)RemoveStoreDirectory(absl::StrCat(parent, "/", name), kLeftoverPatienceMs);
  }
}

void KeepNewestCheckpoints(const std::string& parent, uint32_t keep) {
  KeepNewest(parent, keep, "", nullptr, nullptr);
}

absl::Status RemoveCheckpoints(const std::string& parent) {
  RemovePartialCheckpoints(parent);
  absl::Status first;
  for (const CheckpointEntry& entry : ListCheckpoints(parent)) first.Update(RemoveStoreDirectory(entry.path));
  (void)::unlink(absl::StrCat(parent, "/", kLatest).c_str());
  return first;
}

PartialCheckpoint::PartialCheckpoint(std::string parent, uint64_t step, int rank, CheckpointLock* lock)
    : lock_(lock),
      parent_(std::move(parent)),
      name_(CheckpointName(step)),
      whole_(absl::StrCat(parent_, "/", PartialName(name_))),
      directory_(rank < 0 ? whole_ : RankDirectory(whole_, rank)) {}

PartialCheckpoint::PartialCheckpoint(PartialCheckpoint&& other) noexcept
    : made_in_(other.made_in_),
      lock_(other.lock_),
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

absl::StatusOr<PartialCheckpoint> PartialCheckpoint::Create(const std::string& parent, uint64_t step,
                                                            int rank, CheckpointLock* lock) {
  RETURN_IF_ERROR(Held(lock));
  RETURN_IF_ERROR(MakeDirectories(parent));
  const std::string path = absl::StrCat(parent, "/", CheckpointName(step));
  if (::access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(path, " is there already"));
  }
  if (rank < 0) RemovePartialCheckpoints(parent);
  PartialCheckpoint partial(parent, step, rank, lock);
  for (const std::string& directory : {partial.whole_, partial.directory_}) {
    if (!InTheWay(directory)) continue;
    partial.directory_.clear();
    return absl::AlreadyExistsError(absl::StrCat(directory, " is in the way: move it away"));
  }
  return partial;
}

absl::Status PartialCheckpoint::Publish(uint32_t keep, const Rest& rest) {
  const std::string path = absl::StrCat(parent_, "/", name_);
  if (absl::Status held = Held(lock_); !held.ok()) {
    directory_.clear();  // it went with the directory: what has its name is somebody else's
    return held;
  }
  if (::rename(whole_.c_str(), path.c_str()) != 0) return ErrnoError(errno, "rename to", path);
  directory_.clear();
  RETURN_IF_ERROR(aio::SyncDirectory(parent_));
  // From here on there is a checkpoint, and those that are kept no longer go. `latest` is a note for people:
  // where there is no room for it, there may be afterwards; none is better than one that names what is gone.
  const auto note = [&] { return WriteSmallFile(parent_, kLatest, name_ + "\n").ok(); };
  const bool noted = note();
  KeepNewest(parent_, keep, path, lock_, rest);
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
