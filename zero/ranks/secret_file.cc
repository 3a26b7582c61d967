#include "zero/ranks/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "zero/ranks/handshake.h"

namespace penstock::zero {
namespace {

constexpr size_t kSecretDigits = 64;
constexpr const char* kAnotherWay = "give all ranks one secret in PENSTOCK_RANKS_SECRET instead";

// kNotFound: there is none.
absl::StatusOr<std::string> ReadSecret(const std::string& path) {
  // Through one descriptor, so that what is judged is what is read.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
  struct stat info {};
  std::array<char, kSecretDigits + 2> text{};
  const bool stated = ::fstat(fd, &info) == 0;
  ssize_t read = -1;
  if (stated && S_ISREG(info.st_mode)) {
    do {
      read = ::read(fd, text.data(), text.size());
    } while (read < 0 && errno == EINTR);
  }
  const int error = errno;
  ::close(fd);
  if (!stated) return MakeIoError({.op = "stat", .path = path, .error = error});
  if (S_ISREG(info.st_mode) && read < 0) return MakeIoError({.op = "read", .path = path, .error = error});
  if (info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(path,
                     ": the secret of the ranks must be this user's own and closed to all others "
                     "(chmod 600): correct that, remove it, or ",
                     kAnotherWay));
  }
  std::string_view digits(text.data(), static_cast<size_t>(std::max<ssize_t>(read, 0)));
  if (!digits.empty() && digits.back() == '\n') digits.remove_suffix(1);
  if (digits.size() != kSecretDigits ||
      digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": not the secret of ranks, 64 hexadecimal digits: remove it, or ", kAnotherWay));
  }
  return std::string(digits);
}

}  // namespace

absl::StatusOr<std::string> SecretIn(const std::string& directory, std::vector<std::string>* made) {
  const std::string path = absl::StrCat(directory, "/", kSecretFile);
  absl::StatusOr<std::string> there = ReadSecret(path);
  if (!absl::IsNotFound(there.status())) return there;
  std::error_code error;
  std::vector<std::string> missing;  // the deepest first
  for (std::string at = directory; !PathExists(at).value_or(true); at = DirectoryOf(at))
    missing.push_back(at);
  std::filesystem::create_directories(directory, error);
  if (error) return MakeIoError({.op = "create", .path = directory, .error = error.value()});
  if (made != nullptr && !missing.empty()) {
    made->assign(missing.rbegin(), missing.rend());
    made->push_back(path);
  }
  const HashBytes random = RandomBytes();
  const std::string digits =
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(random.data()), random.size()));
  const absl::Status written =
      ReplaceFile(path, digits + "\n", {.mode = 0600, .keep_mode = false, .replace = false, .durable = true});
  if (!written.ok() && !absl::IsAlreadyExists(written))
    return absl::Status(written.code(), absl::StrCat(written.message(), "; ", kAnotherWay));
  if (made != nullptr && made->empty() && written.ok()) made->push_back(path);
  return ReadSecret(path);  // of whichever process was the first
}

void RemoveSecret(const std::vector<std::string>& made) {
  if (made.empty()) return;
  const absl::StatusOr<std::vector<std::string>> there = ListDirectory(DirectoryOf(made.back()));
  if (!there.ok()) return;
  for (const std::string& name : *there) {
    if (name != kSecretFile) return;
  }
  // Of another rank of the same start, where this one made the directory alone.
  (void)::unlink(made.back().c_str());
  for (auto directory = std::next(made.rbegin()); directory != made.rend(); ++directory) {
    if (::rmdir(directory->c_str()) != 0) return;
  }
}

}  // namespace penstock::zero
