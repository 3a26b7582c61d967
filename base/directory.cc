#include "base/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/io_error.h"
#include "base/status_macros.h"

namespace penstock {
namespace {

// Returns whether `path` names anything, described in `info`.
absl::StatusOr<bool> Stat(const std::string& path, bool follow, struct stat* info) {
  int result = 0;
  do {
    result = follow ? ::stat(path.c_str(), info) : ::lstat(path.c_str(), info);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return MakeIoError({.op = "stat", .path = path, .error = errno});
}

absl::StatusOr<PathKind> Kind(const std::string& path, bool follow) {
  struct stat info {};
  ASSIGN_OR_RETURN(const bool there, Stat(path, follow, &info));
  if (!there) return PathKind::kMissing;
  if (S_ISREG(info.st_mode)) return PathKind::kRegular;
  if (S_ISDIR(info.st_mode)) return PathKind::kDirectory;
  return S_ISLNK(info.st_mode) ? PathKind::kLink : PathKind::kOther;
}

struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};

}  // namespace

absl::StatusOr<PathKind> KindOf(const std::string& path) { return Kind(path, /*follow=*/true); }
absl::StatusOr<PathKind> LinkKindOf(const std::string& path) { return Kind(path, /*follow=*/false); }

absl::StatusOr<bool> PathExists(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  return kind != PathKind::kMissing;
}

absl::StatusOr<bool> IsDirectory(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  return kind == PathKind::kDirectory;
}

absl::StatusOr<bool> IsRegularFile(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  return kind == PathKind::kRegular;
}

absl::StatusOr<bool> IsSameFile(const std::string& a, const std::string& b) {
  struct stat of_a {
  }, of_b{};
  ASSIGN_OR_RETURN(const bool a_there, Stat(a, /*follow=*/true, &of_a));
  ASSIGN_OR_RETURN(const bool b_there, Stat(b, /*follow=*/true, &of_b));
  return a_there && b_there && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& directory) {
  const auto failed = [&](const char* op) {
    return MakeIoError({.op = op, .path = directory, .error = errno});
  };
  int fd = -1;
  do {
    fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return failed("open directory");
  const std::unique_ptr<DIR, CloseDirectory> open(::fdopendir(fd));
  if (open == nullptr) {
    absl::Status status = failed("open directory");
    ::close(fd);
    return status;
  }
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* const entry = ::readdir(open.get());
    if (entry == nullptr && errno == EINTR) continue;
    if (entry == nullptr && errno != 0) return failed("list");
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::vector<std::string>> ListDirectoryIfThere(const std::string& directory) {
  absl::StatusOr<std::vector<std::string>> names = ListDirectory(directory);
  if (absl::IsNotFound(names.status())) return std::vector<std::string>();
  return names;
}

absl::Status SyncDirectory(const std::string& directory) {
  int fd = -1;
  do {
    fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return MakeIoError({.op = "open directory", .path = directory, .error = errno});
  int result = 0;
  do {
    result = ::fsync(fd);
  } while (result != 0 && errno == EINTR);
  const int error = result != 0 && errno != EINVAL ? errno : 0;
  ::close(fd);
  return error == 0 ? absl::OkStatus() : MakeIoError({.op = "fsync", .path = directory, .error = error});
}

std::string DirectoryOf(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  path = path.substr(0, slash);
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return path.empty() ? "/" : std::string(path);
}

std::string_view DescribeKind(mode_t mode) {
  if (S_ISREG(mode)) return "a regular file";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISCHR(mode)) return "a character device";
  return "of an unknown kind";
}

}  // namespace penstock
