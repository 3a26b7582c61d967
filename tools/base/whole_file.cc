#include "tools/base/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/io_error.h"
#include "base/status_macros.h"

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

// The descriptor of this process that the path names, itself or by one link: /dev/stdout, /dev/fd/1.
std::optional<int> OwnDescriptor(const std::string& path) {
  std::error_code error;
  std::filesystem::path name = path;
  // /proc/self/fd/1 is a link too, to what the descriptor is of.
  if (name.parent_path() == "/dev") {
    if (const auto target = std::filesystem::read_symlink(name, error); !error) name = target;
  }
  int fd = -1;
  if (!absl::SimpleAtoi(name.filename().string(), &fd)) return std::nullopt;
  const auto directory = std::filesystem::canonical(name.parent_path(), error);
  if (error || directory != std::filesystem::canonical("/proc/self/fd", error)) return std::nullopt;
  return fd;
}

// By whatever names. What is not there yet goes by its path.
bool AreOneFile(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;  // none is named
  struct stat one {};
  struct stat other {};
  const bool there = stat(a.c_str(), &one) == 0, other_there = stat(b.c_str(), &other) == 0;
  if (there != other_there) return false;
  if (there) return S_ISREG(one.st_mode) && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
  std::error_code unused;
  return std::filesystem::weakly_canonical(a, unused) == std::filesystem::weakly_canonical(b, unused);
}

}  // namespace

absl::Status WriteWholeFile(const std::string& what, const std::string& path, std::string_view text,
                            bool durable) {
  if (const std::optional<int> own = OwnDescriptor(path)) return WriteAll(*own, what, path, text);
  struct stat info {};
  const bool there = stat(path.c_str(), &info) == 0;
  if (there && S_ISDIR(info.st_mode)) return Failed(what, path, "open", EISDIR);
  if (there && access(path.c_str(), W_OK) != 0) return Failed(what, path, "open", errno);
  if (!there || S_ISREG(info.st_mode)) {
    const absl::Status status = ReplaceFile(path, text, {.durable = durable});
    return status.ok() ? status : Failed(what, path, "write", ErrnoOf(status));
  }
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return Failed(what, path, "open", errno);
  absl::Status status = WriteAll(fd, what, path, text);
  if (close(fd) != 0) status.Update(Failed(what, path, "close", errno));
  return status;
}

absl::Status CheckIsNoInput(const std::string& what, const std::string& path,
                            const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    if (!AreOneFile(path, input)) continue;
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": this would replace ",
                                                   input == path ? "a file" : absl::StrCat(input, ","),
                                                   " that is read: give another name"));
  }
  return absl::OkStatus();
}

absl::Status CheckDistinctFiles(
    const std::vector<std::pair<std::string, std::optional<std::string>>>& outputs,
    const std::vector<std::string>& inputs) {
  for (auto one = outputs.begin(); one != outputs.end(); ++one) {
    if (!one->second.has_value()) continue;
    RETURN_IF_ERROR(CheckIsNoInput(one->first, *one->second, inputs));
    for (auto other = outputs.begin(); other != one; ++other) {
      if (!other->second.has_value() || !AreOneFile(*one->second, *other->second)) continue;
      return absl::InvalidArgumentError(absl::StrCat(other->first, " ", *other->second, " and ", one->first,
                                                     " ", *one->second,
                                                     " are one file: give one of them another name"));
    }
  }
  return absl::OkStatus();
}

absl::Status RemoveOldFile(const std::string& what, const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return absl::OkStatus();
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return Failed(what, path, "unlink", errno);
  return absl::OkStatus();
}

}  // namespace penstock::tools
