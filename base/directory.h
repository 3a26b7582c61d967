// What a path names, and what a directory holds: answers in which a failure is never an absence.
//
// std::filesystem's functions with an error_code, access() and opendir() make it easy to take EIO or EACCES
// for "there is nothing". These do not: nothing but ENOENT and ENOTDIR means that a path names nothing.
#ifndef PENSTOCK_BASE_DIRECTORY_H_
#define PENSTOCK_BASE_DIRECTORY_H_

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock {

enum class PathKind { kMissing, kRegular, kDirectory, kLink, kOther };

// Returns what `path` names. kMissing: nothing (ENOENT, ENOTDIR). Every other failure of stat is an error.
// KindOf follows symbolic links (a link to nothing is kMissing); LinkKindOf answers kLink for them.
absl::StatusOr<PathKind> KindOf(const std::string& path);
absl::StatusOr<PathKind> LinkKindOf(const std::string& path);

// Returns whether `path` names anything, links followed.
absl::StatusOr<bool> PathExists(const std::string& path);
// Returns whether `path` names a directory, links followed.
absl::StatusOr<bool> IsDirectory(const std::string& path);
// Returns whether `path` names a regular file, links followed.
absl::StatusOr<bool> IsRegularFile(const std::string& path);

// Returns whether both paths name something, and the same file or directory, links followed.
absl::StatusOr<bool> IsSameFile(const std::string& a, const std::string& b);

// Returns the names in `directory` but for "." and "..", sorted. kNotFound: no directory there. A listing
// that fails in its midst is an error: never a shorter list.
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& directory);

// The same, where a missing directory is an empty one.
absl::StatusOr<std::vector<std::string>> ListDirectoryIfThere(const std::string& directory);

// Makes the creation, renaming and removal of the entries of `directory` durable (fsync). A file system that
// cannot sync a directory (EINVAL) counts as done.
absl::Status SyncDirectory(const std::string& directory);

// The directory part of a path: "a" of "a/b", "." of "b", "/" of "/b". Slashes at the end do not count.
std::string DirectoryOf(std::string_view path);

// "a directory", "a pipe", ... of a mode of stat, for messages.
std::string_view DescribeKind(mode_t mode);

}  // namespace penstock

#endif  // PENSTOCK_BASE_DIRECTORY_H_
