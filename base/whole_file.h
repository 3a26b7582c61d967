// Small files that are there as a whole or not at all.
#ifndef PENSTOCK_BASE_WHOLE_FILE_H_
#define PENSTOCK_BASE_WHOLE_FILE_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock {

// Puts `text` in place of what `path` holds (ReplaceFile of base/atomic_file.h): a reader sees the old file
// or the new one. What is no regular file (a pipe, a device) is written to as it is, and so is a descriptor
// of this process that the path names (/dev/stdout, /proc/self/fd/1), whatever it is of. `durable`: synced;
// false for what is written anew every step.
//
// Errors name `what` (the flag or the key), the path, the operation and errno; the old file stands, and
// nothing is left beside it. kInvalidArgument: the place cannot be written to (no directory, no right);
// kResourceExhausted: the disk is full. A pipe that nothing reads is an error, and is not waited for.
absl::Status WriteWholeFile(const std::string& what, const std::string& path, std::string_view text,
                            bool durable = true);

// Opens a pipe, a device or a descriptor of this process (/dev/stdout) that `path` names for writing; the
// descriptor is the caller's. A pipe that nothing reads is kInvalidArgument, and is not waited for. Writes to
// one that is read wait for its reader, as those of every program do.
absl::StatusOr<int> OpenSpecialFile(const std::string& what, const std::string& path);

// Takes away what an earlier run left at `path`, so that nobody reads it as what this one will write. What is
// no regular file stays. Errors as above.
absl::Status RemoveOldFile(const std::string& what, const std::string& path);

// CheckIsNoModelFile, and that `path` holds nothing, or an earlier result: an object of JSON with these keys.
// What is no regular file, and a descriptor of this process (/dev/stdout), is not looked at. kInvalidArgument
// names `what` and the path.
absl::Status CheckIsOwnJson(const std::string& what, const std::string& path,
                            const std::vector<std::string>& keys);

// kInvalidArgument: `path` is one of the files that are read, by this name or another.
absl::Status CheckIsNoInput(const std::string& what, const std::string& path,
                            const std::vector<std::string>& inputs);

// kInvalidArgument: one of the files that are written (flag, path) is one of those that are read, or two of
// them are one. Those without a path are not looked at; a pipe or device may be several.
absl::Status CheckDistinctFiles(
    const std::vector<std::pair<std::string, std::optional<std::string>>>& outputs,
    const std::vector<std::string>& inputs);

}  // namespace penstock

#endif  // PENSTOCK_BASE_WHOLE_FILE_H_
