#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"

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

}  // namespace

std::string RandomNameBeside(const std::string& path, std::string_view suffix) {
  std::string_view name = path;
  while (name.size() > 1 && name.back() == '/') name.remove_suffix(1);
  if (const size_t slash = name.rfind('/'); slash != std::string_view::npos) name.remove_prefix(slash + 1);
  // The name of a file has at most 255 bytes.
  name = name.substr(0, 200);
  return absl::StrCat(DirectoryOf(path), "/.", std::string(name), ".",
                      absl::Hex(RandomNumber(), absl::kZeroPad16), std::string(suffix));
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
  file.fd_ = OpenNameless(path, options.mode);
  while (file.fd_ < 0) {
    std::string name = RandomNameBeside(path, ".new");
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, options.mode);
    if (file.fd_ >= 0) file.temporary_ = std::move(name);
    if (file.fd_ < 0 && errno != EEXIST && errno != EINTR) return Failed("create", path, errno);
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
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed("write", path_, errno);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Sync() {
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
  // NFS and quotas tell of a full disk here; the descriptor is gone either way.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) return Failed("close", path_, errno);
  return absl::OkStatus();
}

absl::Status AtomicFile::Move() {
  if (options_.replace) {
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("rename to", path_, errno);
    temporary_.clear();
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
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  RETURN_IF_ERROR(Settle());
  RETURN_IF_ERROR(Move());
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

}  // namespace

absl::Status AtomicFile::CommitTogether(std::vector<AtomicFile> files, const std::vector<std::string>& keys) {
  for (AtomicFile& file : files) RETURN_IF_ERROR(file.Settle());
  const std::string key = files.back().path_, directory = DirectoryOf(key);
  SetAside old;
  std::vector<std::string> named;
  const auto commit = [&]() -> absl::Status {
    // One file takes the place of an old state in one step.
    const bool alone = files.size() == 1;
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
    for (AtomicFile& file : files) {
      const bool last = &file == &files.back();
      if (file.options_.replace && !alone && !last) RETURN_IF_ERROR(old.Take(file.path_));
      if (last && !alone) RETURN_IF_ERROR(SyncDirectory(directory));
      RETURN_IF_ERROR(file.Move());
      if (!alone) named.push_back(file.path_);
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
  for (const std::string& path : keys) {
    if (path != key) RETURN_IF_ERROR(Remove(path));
  }
  return SyncDirectory(directory);
}

absl::Status ReplaceFile(const std::string& path, std::string_view text, const AtomicFileOptions& options) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, options));
  RETURN_IF_ERROR(file.Write(text));
  return file.Commit();
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
