#include "tools/base/output_path.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace penstock::tools {

absl::Status CheckWritable(const char* flag, const std::optional<std::string>& path, bool replaced) {
  if (!path.has_value()) return absl::OkStatus();
  const auto cannot = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", *path, ": cannot be written: ", why, ": give another file"));
  };
  struct stat info {};
  if (stat(path->c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return cannot("it is a directory");
    if (access(path->c_str(), W_OK) != 0) return cannot(std::strerror(errno));
    if (!replaced || !S_ISREG(info.st_mode)) return absl::OkStatus();
  }
  const std::filesystem::path given = std::filesystem::path(*path).parent_path();
  const std::string parent = given.empty() ? std::string(1, '.') : given.string();
  if (path->empty() || stat(parent.c_str(), &info) != 0) return cannot(absl::StrCat(parent, " is not there"));
  if (!S_ISDIR(info.st_mode)) return cannot(absl::StrCat(parent, " is not a directory"));
  if (access(parent.c_str(), W_OK | X_OK) != 0)
    return cannot(absl::StrCat(parent, ": ", std::strerror(errno)));
  return absl::OkStatus();
}

std::string ParentOf(const std::string& path) {
  const size_t name = path.find_last_not_of('/');
  const size_t slash = path.rfind('/', name);
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(1, slash));
}

}  // namespace penstock::tools
