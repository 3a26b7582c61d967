#include "run/watch/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "base/write_all.h"

namespace penstock::run {

AppendFile::AppendFile(std::string what, std::string path, int fd)
    : what_(std::move(what)), path_(std::move(path)), fd_(fd) {}

AppendFile::~AppendFile() {
  UnlockFile(fd_);
  close(fd_);
}

absl::Status AppendFile::Failed(const char* op) const {
  return StreamError(absl::StrCat(what_, ": ", path_, ": ", op));
}

absl::StatusOr<std::unique_ptr<AppendFile>> AppendFile::Open(std::string what, std::string path) {
  // O_NONBLOCK: a FIFO that nobody reads must be refused, not waited for.
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) return StreamError(absl::StrCat(what, ": ", path, ": open"));
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    absl::Status failed = StreamError(absl::StrCat(what, ": ", path, ": look at"));
    close(fd);
    return failed;
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": ", path, " is no regular file: move it away, or give another output_path"));
  }
  const absl::StatusOr<bool> locked = TryLockFile(fd, path);
  if (!locked.ok() && !CannotLock(locked.status())) {
    close(fd);
    return locked.status();
  }
  if (locked.ok() && !*locked) {
    close(fd);
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": ", path, " is written by another training: give another job_name or output_path"));
  }
  return std::unique_ptr<AppendFile>(new AppendFile(std::move(what), std::move(path), fd));
}

absl::Status AppendFile::Append(std::string_view bytes) {
  const int error = WriteAll(fd_, bytes);
  if (error == ENOSPC || error == EDQUOT) {
    return absl::ResourceExhaustedError(absl::StrCat(what_, ": ", path_, ": the disk is full: ", bytes.size(),
                                                     " bytes are too many: make room and go on with "
                                                     "`resume`, or switch it off"));
  }
  errno = error;
  return error == 0 ? absl::OkStatus() : Failed("write");
}

absl::Status AppendFile::Cut(int64_t bytes) const {
  if (ftruncate(fd_, bytes) != 0) return Failed("cut off what comes again");
  return absl::OkStatus();
}

absl::StatusOr<int64_t> AppendFile::Size() const {
  const off_t size = lseek(fd_, 0, SEEK_END);
  if (size < 0) return Failed("seek");
  return size;
}

absl::StatusOr<int64_t> AppendFile::Walk(
    const std::function<absl::StatusOr<int64_t>(std::string_view)>& take) const {
  constexpr size_t kPiece = 1 << 16;
  std::string seen;
  int64_t read = 0, taken = 0;
  while (seen.size() < static_cast<size_t>(kMostUnitBytes)) {
    const size_t before = seen.size();
    seen.resize(before + kPiece);
    const ssize_t n = pread(fd_, seen.data() + before, kPiece, read);
    seen.resize(before + static_cast<size_t>(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed("read");
    if (n == 0) break;
    read += n;
    size_t at = 0;
    while (at < seen.size()) {
      ASSIGN_OR_RETURN(const int64_t bytes, take(std::string_view(seen).substr(at)));
      if (bytes == kMore) break;
      if (bytes == kStop) return taken;
      at += static_cast<size_t>(bytes);
      taken += bytes;
    }
    seen.erase(0, at);
  }
  return taken;
}

absl::Status MakeDirectory(const std::string& what, const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) {
    ASSIGN_OR_RETURN(const bool there, IsDirectory(path));
    if (there) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", path, ": the directory cannot be made: ",
                                                 error ? error.message() : "something else is there",
                                                 ": give another output_path"));
}

}  // namespace penstock::run
