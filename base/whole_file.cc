#include "base/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/output_path.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "base/write_all.h"

namespace penstock {
namespace {

absl::Status Failed(const std::string& what, const std::string& path, const char* op, int error) {
  const std::string text = absl::StrCat(what, " ", path, ": ", op, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT)
    return absl::ResourceExhaustedError(absl::StrCat(text, ": make room, or give another place"));
  if (error == ENOENT || error == ENOTDIR || error == EACCES || error == EISDIR || error == EROFS)
    return absl::InvalidArgumentError(absl::StrCat(text, ": give another place"));
  return absl::ErrnoToStatus(error, absl::StrCat(what, " ", path, ": ", op));
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

// Returns whether both paths name one regular file, by links too. Files that do not exist yet are compared by
// path.
absl::StatusOr<bool> AreOneFile(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;  // none is named
  ASSIGN_OR_RETURN(const PathKind one, KindOf(a));
  ASSIGN_OR_RETURN(const PathKind other, KindOf(b));
  if (one == PathKind::kRegular && other == PathKind::kRegular) return IsSameFile(a, b);
  if (one != PathKind::kMissing || other != PathKind::kMissing) return false;
  std::error_code unused;
  return std::filesystem::weakly_canonical(a, unused) == std::filesystem::weakly_canonical(b, unused);
}

}  // namespace

absl::StatusOr<int> OpenSpecialFile(const std::string& what, const std::string& path) {
  if (const std::optional<int> descriptor = OwnDescriptor(path)) {
    const int copy = fcntl(*descriptor, F_DUPFD_CLOEXEC, 0);
    return copy >= 0 ? absl::StatusOr<int>(copy) : Failed(what, path, "open", errno);
  }
  // O_NONBLOCK for the opening alone: a pipe without a reader would be waited for.
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == ENXIO) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", path, ": a pipe that nothing reads, or no device: start its reader first"));
  }
  if (fd < 0) return Failed(what, path, "open", errno);
  const int own = fcntl(fd, F_GETFL);
  if (own >= 0 && fcntl(fd, F_SETFL, own & ~O_NONBLOCK) == 0) return fd;
  absl::Status failed = Failed(what, path, "open", errno);
  close(fd);
  return failed;
}

absl::Status WriteWholeFile(const std::string& what, const std::string& path, std::string_view text,
                            bool durable) {
  const auto write_to = [&](int fd) {
    const int error = WriteAll(fd, text);
    return error == 0 ? absl::OkStatus() : Failed(what, path, "write", error);
  };
  if (const std::optional<int> own = OwnDescriptor(path)) return write_to(*own);
  RETURN_IF_ERROR(CheckIsNoModelFile(what, path));
  const absl::StatusOr<PathKind> kind = KindOf(path);
  if (!kind.ok()) return Failed(what, path, "stat", ErrnoOf(kind.status()));
  const bool there = *kind != PathKind::kMissing;
  if (*kind == PathKind::kDirectory) return Failed(what, path, "open", EISDIR);
  if (there && access(path.c_str(), W_OK) != 0) return Failed(what, path, "open", errno);
  if (!there || *kind == PathKind::kRegular) {
    const absl::Status status = ReplaceFile(path, text, {.durable = durable});
    return status.ok() ? status : Failed(what, path, "write", ErrnoOf(status));
  }
  ASSIGN_OR_RETURN(const int fd, OpenSpecialFile(what, path));
  absl::Status status = write_to(fd);
  if (close(fd) != 0) status.Update(Failed(what, path, "close", errno));
  return status;
}

absl::Status CheckIsOwnJson(const std::string& what, const std::string& path,
                            const std::vector<std::string>& keys) {
  if (OwnDescriptor(path).has_value()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckIsNoModelFile(what, path));
  absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (absl::IsNotFound(text.status()) || absl::IsFailedPrecondition(text.status())) return absl::OkStatus();
  if (!text.ok() && !absl::IsInvalidArgument(text.status())) {
    return absl::Status(text.status().code(), absl::StrCat(what, " ", path, ": ", text.status().message()));
  }
  if (text.ok() && text->empty()) return absl::OkStatus();
  const absl::StatusOr<nlohmann::json> json =
      text.ok() ? ParseJsonObject(*text, path) : absl::StatusOr<nlohmann::json>(text.status());
  if (json.ok() &&
      std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return json->contains(key); }))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", path,
                   ": holds something else than an earlier result, which this would replace: give another "
                   "file, or move that one away"));
}

absl::Status CheckIsNoInput(const std::string& what, const std::string& path,
                            const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    const absl::StatusOr<bool> one_file = AreOneFile(path, input);
    if (!one_file.ok()) return Failed(what, path, "stat", ErrnoOf(one_file.status()));
    if (!*one_file) continue;
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
      if (!other->second.has_value()) continue;
      const absl::StatusOr<bool> one_file = AreOneFile(*one->second, *other->second);
      if (!one_file.ok()) return Failed(one->first, *one->second, "stat", ErrnoOf(one_file.status()));
      if (!*one_file) continue;
      return absl::InvalidArgumentError(absl::StrCat(other->first, " ", *other->second, " and ", one->first,
                                                     " ", *one->second,
                                                     " are one file: give one of them another name"));
    }
  }
  return absl::OkStatus();
}

absl::Status RemoveOldFile(const std::string& what, const std::string& path) {
  const absl::StatusOr<bool> regular = IsRegularFile(path);
  if (!regular.ok()) return Failed(what, path, "stat", ErrnoOf(regular.status()));
  if (!*regular) return absl::OkStatus();
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return Failed(what, path, "unlink", errno);
  return absl::OkStatus();
}

}  // namespace penstock
