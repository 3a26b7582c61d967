#include "tools/base/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace penstock::tools {
namespace {

absl::Status Failed(const std::string& what, const std::string& path, const char* op, int error) {
  const std::string text = absl::StrCat(what, " ", path, ": ", op, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT)
    return absl::ResourceExhaustedError(absl::StrCat(text, ": make room, or give another place"));
  if (error == ENOENT || error == ENOTDIR || error == EACCES || error == EISDIR || error == EROFS)
    return absl::InvalidArgumentError(absl::StrCat(text, ": give another place"));
  return absl::ErrnoToStatus(error, absl::StrCat(what, " ", path, ": ", op));
}

absl::Status WriteAll(int fd, const std::string& what, const std::string& path, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed(what, path, "write", errno);
    text.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteWholeFile(const std::string& what, const std::string& path, std::string_view text) {
  struct stat info {};
  const bool there = stat(path.c_str(), &info) == 0;
  if (there && S_ISDIR(info.st_mode)) return Failed(what, path, "open", EISDIR);
  const bool renames = !there || S_ISREG(info.st_mode);
  if (there && renames && access(path.c_str(), W_OK) != 0) return Failed(what, path, "open", errno);
  const std::string beside = renames ? absl::StrCat(path, ".new-", getpid()) : path;
  const int fd = open(beside.c_str(), O_WRONLY | O_CREAT | (renames ? O_TRUNC : 0) | O_CLOEXEC, 0666);
  if (fd < 0) return Failed(what, path, "open", errno);
  absl::Status status = WriteAll(fd, what, path, text);
  // Who replaces a file keeps the rights that its reader has.
  if (there && renames && fchmod(fd, info.st_mode & 07777) != 0)
    status.Update(Failed(what, path, "chmod", errno));
  if (close(fd) != 0) status.Update(Failed(what, path, "close", errno));
  if (status.ok() && renames && std::rename(beside.c_str(), path.c_str()) != 0)
    status = Failed(what, path, "rename", errno);
  if (!status.ok() && renames) (void)unlink(beside.c_str());
  return status;
}

}  // namespace penstock::tools
