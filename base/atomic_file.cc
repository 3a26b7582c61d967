#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "base/write_all.h"

namespace penstock {
namespace {

absl::Status Failed(const char* op, const std::string& path, int error) {
  return MakeIoError({.op = op, .path = path, .error = error});
}

uint64_t RandomNumber() {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), GRND_NONBLOCK) == static_cast<ssize_t>(sizeof(number)))
    return number;
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Of a name that a temporary one shows: a file's name has at most 255 bytes.
constexpr size_t kNameBytes = 200;

std::string OwnDescriptor(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

// A descriptor of a file without a name, which one can be given later; -1: not here.
int OpenNameless(const std::string& path, mode_t mode) {
  int fd = -1;
  do {
    fd = ::open(DirectoryOf(path).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  // Without /proc there is no way to name it.
  if (fd >= 0 && ::access(OwnDescriptor(fd).c_str(), F_OK) != 0) ::close(std::exchange(fd, -1));
  return fd;
}

std::string ShortName(const std::string& path) {
  return path.substr(path.rfind('/') + 1).substr(0, kNameBytes);
}

// Removes what has a temporary name, unless somebody writes it, who has it locked from before it got that
// name until it has its own. Nothing else ever has the same random name: between lock and removal no other
// file can take its place. What cannot be locked stays.
void RemoveUnlessWritten(const std::string& path) {
  constexpr int kFlags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  int fd = ::open(path.c_str(), O_RDWR | kFlags);
  if (fd < 0 && errno == EACCES) fd = ::open(path.c_str(), O_RDONLY | kFlags);
  if (fd < 0) return;
  if (TryLockFile(fd, path).value_or(false)) (void)::unlink(path.c_str());
  ::close(fd);
}

// The same of all that killed writers of the file at `path` left beside it. Links, which cannot be locked, go
// where `links`: only ReplaceLink makes any, and makes one anew that was taken away.
void RemoveWhatKillsLeft(const std::string& path, bool links) {
  const std::string directory = DirectoryOf(path), name = ShortName(path);
  const std::vector<std::string> entries = ListDirectory(directory).value_or(std::vector<std::string>());
  for (const std::string& entry : entries) {
    if (NameInTemporary(entry, ".new") != name) continue;
    const std::string left = absl::StrCat(directory, "/", entry);
    if (LinkKindOf(left).value_or(PathKind::kOther) != PathKind::kLink) {
      RemoveUnlessWritten(left);
    } else if (links) {
      (void)::unlink(left.c_str());
    }
  }
}

}  // namespace

std::string RandomNameBeside(const std::string& path, std::string_view suffix) {
  std::string_view name = path;
  while (name.size() > 1 && name.back() == '/') name.remove_suffix(1);
  if (const size_t slash = name.rfind('/'); slash != std::string_view::npos) name.remove_prefix(slash + 1);
  name = name.substr(0, kNameBytes);
  return absl::StrCat(DirectoryOf(path), "/.", std::string(name), ".",
                      absl::Hex(RandomNumber(), absl::kZeroPad16), std::string(suffix));
}

std::string_view NameInTemporary(std::string_view name, std::string_view suffix) {
  constexpr size_t kDigits = 16;
  if (name.size() < 3 + kDigits + suffix.size() || name.front() != '.' || !name.ends_with(suffix)) return "";
  name.remove_suffix(suffix.size());
  const std::string_view digits = name.substr(name.size() - kDigits);
  if (digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) return "";
  name.remove_suffix(kDigits);
  return name.back() == '.' ? name.substr(1, name.size() - 2) : "";
}

AtomicFile::AtomicFile(std::string path, const AtomicFileOptions& options)
    : path_(std::move(path)), options_(options) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : made_in_(other.made_in_),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, std::string())),
      options_(other.options_),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty() && made_in_.here()) (void)::unlink(temporary_.c_str());
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path, const AtomicFileOptions& options) {
  AtomicFile file(path, options);
  struct stat old {};
  const bool there = ::lstat(path.c_str(), &old) == 0;
  if (!there && errno != ENOENT) return Failed("stat", path, errno);
  if (there && S_ISDIR(old.st_mode)) return Failed("replace", path, EISDIR);
  if (there && !options.replace) return Failed("create", path, EEXIST);
  // A device or a pipe is others' too: /dev/null is not what a file takes the place of.
  if (there && !S_ISREG(old.st_mode) && !S_ISLNK(old.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("replace ", path, ": it is ",
                                                      std::string(DescribeKind(old.st_mode)),
                                                      ", and no file takes its place"));
  }
  file.fd_ = OpenNameless(path, options.mode);
  // One that is locked is nobody's leftover; where none can be locked, none is taken for one.
  if (file.fd_ >= 0) (void)TryLockFile(file.fd_, path);
  while (file.fd_ < 0) {
    std::string name = RandomNameBeside(path, ".new");
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, options.mode);
    if (file.fd_ < 0 && errno != EEXIST && errno != EINTR) return Failed("create", path, errno);
    if (file.fd_ < 0) continue;
    file.temporary_ = std::move(name);
    struct stat made {};
    const bool locked = TryLockFile(file.fd_, path).value_or(true);
    if (::fstat(file.fd_, &made) != 0) return Failed("stat", path, errno);
    // It was taken for a leftover before it was locked.
    if (!locked || made.st_nlink == 0) ::close(std::exchange(file.fd_, -1));
  }
  if (there && S_ISREG(old.st_mode) && options.keep_mode && ::fchmod(file.fd_, old.st_mode & 07777) != 0) {
    return Failed("chmod", path, errno);
  }
  return file;
}

std::string AtomicFile::temporary_path() const {
  return temporary_.empty() ? OwnDescriptor(fd_) : temporary_;
}

absl::Status AtomicFile::Write(std::string_view bytes) {
  const int error = WriteAll(fd_, bytes);
  return error == 0 ? absl::OkStatus() : Failed("write", path_, error);
}

absl::Status AtomicFile::Sync() const {
  int synced = 0;
  do {
    synced = ::fsync(fd_);
  } while (synced != 0 && errno == EINTR);
  return synced == 0 ? absl::OkStatus() : Failed("fsync", path_, errno);
}

absl::Status AtomicFile::Settle() {
  if (options_.durable) RETURN_IF_ERROR(Sync());
  while (temporary_.empty()) {
    std::string name = RandomNameBeside(path_, ".new");
    if (::linkat(AT_FDCWD, OwnDescriptor(fd_).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      temporary_ = std::move(name);
    } else if (errno != EEXIST && errno != EINTR) {
      return Failed("create", path_, errno);
    }
  }
  // NFS and quotas tell of a full disk at a close, of a copy of the descriptor too; the lock stays.
  const int copy = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return Failed("close", path_, errno);
  if (::close(copy) != 0 && errno != EINTR) return Failed("close", path_, errno);
  return absl::OkStatus();
}

absl::StatusOr<bool> AtomicFile::Stands() const {
  struct stat ours {
  }, there{};
  if (::fstat(fd_, &ours) != 0) return Failed("stat", path_, errno);
  if (ours.st_size > static_cast<off_t>(kSmallFileBytes)) return false;
  if (::lstat(path_.c_str(), &there) != 0) {
    if (errno == ENOENT) return false;
    return Failed("stat", path_, errno);
  }
  if (!S_ISREG(there.st_mode) || there.st_size != ours.st_size) return false;
  ASSIGN_OR_RETURN(const std::string old, ReadSmallFile(path_));
  ASSIGN_OR_RETURN(const std::string now, ReadSmallFile(temporary_));
  return old == now;
}

absl::Status AtomicFile::Move() {
  if (options_.replace) {
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("rename to", path_, errno);
    temporary_.clear();
    ::close(std::exchange(fd_, -1));
    return absl::OkStatus();
  }
  // Both fail where the name is taken, whoever took it meanwhile. File systems lack the one (NFS) or the
  // other (exFAT).
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
    if (errno == EEXIST) return Failed("create", path_, EEXIST);
    if (::link(temporary_.c_str(), path_.c_str()) != 0) return Failed("create", path_, errno);
    (void)::unlink(temporary_.c_str());
  }
  temporary_.clear();
  ::close(std::exchange(fd_, -1));
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  RETURN_IF_ERROR(Settle());
  RETURN_IF_ERROR(Move());
  RemoveWhatKillsLeft(path_, /*links=*/false);
  return options_.durable ? SyncDirectory(DirectoryOf(path_)) : absl::OkStatus();
}

namespace {

// Old files that are out of the way until it is known whether they are still needed.
class SetAside {
 public:
  // Where there is nothing, nothing is moved.
  absl::Status Take(const std::string& path) {
    std::string name = RandomNameBeside(path, ".old");
    if (::rename(path.c_str(), name.c_str()) == 0) {
      moved_.emplace_back(path, std::move(name));
    } else if (errno != ENOENT) {
      return Failed("rename", path, errno);
    }
    return absl::OkStatus();
  }
  absl::Status Remove() {
    for (; !moved_.empty(); moved_.pop_back()) {
      const std::string& name = moved_.back().second;
      if (::unlink(name.c_str()) != 0) return Failed("remove", name, errno);
    }
    return absl::OkStatus();
  }
  // Those that were taken first, which are read first, get their names last.
  absl::Status Restore() {
    absl::Status status;
    for (; !moved_.empty(); moved_.pop_back()) {
      const auto& [path, name] = moved_.back();
      if (::rename(name.c_str(), path.c_str()) != 0)
        status.Update(Failed("rename back", absl::StrCat(name, " to ", path), errno));
    }
    return status;
  }
  bool empty() const { return moved_.empty(); }

 private:
  std::vector<std::pair<std::string, std::string>> moved_;
};

absl::Status Remove(const std::string& path) {
  return ::unlink(path.c_str()) == 0 || errno == ENOENT ? absl::OkStatus() : Failed("remove", path, errno);
}

// Removes, in a directory that is locked, the old states of `names` that a kill left, and what killed
// processes were writing. What cannot be removed now is left to the next.
void RemoveLeftovers(const std::string& directory, const std::set<std::string>& names) {
  const std::vector<std::string> entries = ListDirectory(directory).value_or(std::vector<std::string>());
  for (const std::string& entry : entries) {
    const std::string path = absl::StrCat(directory, "/", entry);
    if (names.count(std::string(NameInTemporary(entry, ".old"))) != 0) {
      (void)::unlink(path.c_str());
    } else if (!NameInTemporary(entry, ".new").empty()) {
      RemoveUnlessWritten(path);
    }
  }
}

}  // namespace

absl::Status AtomicFile::CommitTogether(std::vector<AtomicFile> files, const std::vector<std::string>& keys,
                                        const Superseded& superseded) {
  // What takes long, before others have to wait.
  for (const AtomicFile& file : files) {
    if (file.options_.durable) RETURN_IF_ERROR(file.Sync());
  }
  const std::string key = files.back().path_, directory = DirectoryOf(key);
  DirectoryLock lock;
  ASSIGN_OR_RETURN(const bool locked, lock.Take(directory, std::chrono::minutes(1)));
  if (!locked) {
    return absl::UnavailableError(absl::StrCat(
        "lock ", directory, ": another process has been replacing files there for a minute; try again"));
  }
  const std::vector<std::string> gone = superseded ? superseded() : std::vector<std::string>();
  std::vector<AtomicFile*> changed;
  for (AtomicFile& file : files) {
    RETURN_IF_ERROR(file.Settle());
    const bool last = &file == &files.back();
    ASSIGN_OR_RETURN(const bool stands, last ? false : file.Stands());
    if (!stands) changed.push_back(&file);
  }
  SetAside old;
  std::vector<std::string> named;
  const auto commit = [&]() -> absl::Status {
    // One file takes the place of an old state in one step.
    const bool alone = changed.size() == 1;
    // Another writer may have made its state meanwhile: it stays.
    for (const std::string& path : keys) {
      if (files.back().options_.replace) break;
      ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(path));
      if (kind != PathKind::kMissing) return Failed("create", path, EEXIST);
    }
    for (const std::string& path : keys) {
      if (!alone) RETURN_IF_ERROR(old.Take(path));
    }
    if (!old.empty()) RETURN_IF_ERROR(SyncDirectory(directory));
    for (AtomicFile* const file : changed) {
      const bool last = file == changed.back();
      if (file->options_.replace && !alone && !last) RETURN_IF_ERROR(old.Take(file->path_));
      if (last && !alone) RETURN_IF_ERROR(SyncDirectory(directory));
      RETURN_IF_ERROR(file->Move());
      if (!alone) named.push_back(file->path_);
    }
    return absl::OkStatus();
  };
  if (absl::Status status = commit(); !status.ok()) {
    for (const std::string& path : named) status.Update(Remove(path));
    if (const absl::Status restored = old.Restore(); !restored.ok()) {
      return absl::Status(status.code(), absl::StrCat(status.message(),
                                                      "; the old files could not be given "
                                                      "their names again: ",
                                                      restored.message()));
    }
    return status;
  }
  RETURN_IF_ERROR(SyncDirectory(directory));
  RETURN_IF_ERROR(old.Remove());
  std::set<std::string> names;
  for (const AtomicFile& file : files) names.insert(ShortName(file.path_));
  for (const auto* const paths : {&keys, &gone}) {
    for (const std::string& path : *paths) {
      names.insert(ShortName(path));
      if (path != key) RETURN_IF_ERROR(Remove(path));
    }
  }
  RemoveLeftovers(directory, names);
  return SyncDirectory(directory);
}

absl::Status ReplaceFile(const std::string& path, std::string_view text, const AtomicFileOptions& options) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, options));
  RETURN_IF_ERROR(file.Write(text));
  return file.Commit();
}

absl::Status ReplaceLink(const std::string& target, const std::string& path) {
  constexpr int kAttempts = 100;  // another one may take the new link for what a kill left
  for (int attempt = 1;; ++attempt) {
    const std::string name = RandomNameBeside(path, ".new");
    if (::symlink(target.c_str(), name.c_str()) != 0) return Failed("create link", path, errno);
    if (::rename(name.c_str(), path.c_str()) == 0) break;
    const int error = errno;
    (void)::unlink(name.c_str());
    if (error != ENOENT || attempt == kAttempts) return Failed("rename to", path, error);
  }
  RemoveWhatKillsLeft(path, /*links=*/true);
  return SyncDirectory(DirectoryOf(path));
}

absl::Status CopyFile(const std::string& from, const std::string& to, const AtomicFileOptions& options) {
  // A pipe is refused and not waited for.
  const int fd = ::open(from.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return Failed("open", from, errno);
  const auto copy = [&]() -> absl::Status {
    struct stat info {};
    if (::fstat(fd, &info) != 0) return Failed("stat", from, errno);
    if (!S_ISREG(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("copy ", from, ": it is ", std::string(DescribeKind(info.st_mode))));
    }
    ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(to, options));
    std::string piece(size_t{1} << 20, '\0');
    while (true) {
      const ssize_t n = ::read(fd, piece.data(), piece.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Failed("read", from, errno);
      if (n == 0) return file.Commit();
      RETURN_IF_ERROR(file.Write(std::string_view(piece.data(), static_cast<size_t>(n))));
    }
  };
  const absl::Status status = copy();
  ::close(fd);
  return status;
}

}  // namespace penstock
