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
  while (file.fd_ < 0) {
    std::string name = RandomNameBeside(path, ".new");
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, options.mode);
    if (file.fd_ >= 0) file.temporary_ = std::move(name);
    if (file.fd_ < 0 && errno != EEXIST && errno != EINTR) return Failed("create", name, errno);
  }
  if (there && S_ISREG(old.st_mode) && options.keep_mode && ::fchmod(file.fd_, old.st_mode & 07777) != 0) {
    return Failed("chmod", file.temporary_, errno);
  }
  return file;
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

absl::Status AtomicFile::Commit() {
  int synced = 0;
  do {
    synced = options_.durable ? ::fsync(fd_) : 0;
  } while (synced != 0 && errno == EINTR);
  const int sync_error = synced != 0 ? errno : 0;
  // NFS and quotas tell of a full disk here; the descriptor is gone either way.
  const int close_error = ::close(std::exchange(fd_, -1)) != 0 && errno != EINTR ? errno : 0;
  if (sync_error != 0) return Failed("fsync", path_, sync_error);
  if (close_error != 0) return Failed("close", path_, close_error);
  // link() fails where the name is taken, whoever took it meanwhile; rename() replaces.
  const int moved = options_.replace ? ::rename(temporary_.c_str(), path_.c_str())
                                     : ::link(temporary_.c_str(), path_.c_str());
  if (moved != 0) return Failed(options_.replace ? "rename to" : "create", path_, errno);
  if (!options_.replace) (void)::unlink(temporary_.c_str());
  temporary_.clear();
  return options_.durable ? SyncDirectory(DirectoryOf(path_)) : absl::OkStatus();
}

absl::Status ReplaceFile(const std::string& path, std::string_view text, const AtomicFileOptions& options) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, options));
  RETURN_IF_ERROR(file.Write(text));
  return file.Commit();
}

}  // namespace penstock
