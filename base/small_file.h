// Small files that are read whole: configurations, indexes, marks, lists.
#ifndef PENSTOCK_BASE_SMALL_FILE_H_
#define PENSTOCK_BASE_SMALL_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace penstock {

inline constexpr uint64_t kSmallFileBytes = uint64_t{16} << 20;

// Returns all bytes of the regular file at `path`; symbolic links are followed. Never waits for another
// process and never allocates more than `limit_bytes` + 64 KiB: a pipe, a device and a directory are refused
// without being read, and so is a longer file, sparse or not.
//
// Errors name operation, path and errno. kNotFound: no file at `path`. kFailedPrecondition: not a regular
// file. kInvalidArgument: longer than `limit_bytes`. The others are those of IoErrorCode: a failed read is an
// error and never a shorter text.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t limit_bytes = kSmallFileBytes);

// Opens the regular file at `path` for reading, by a descriptor that the caller closes: for files that are
// read piece by piece. Never waits for another process; errors as above.
absl::StatusOr<int> OpenRegularFile(const std::string& path);

}  // namespace penstock

#endif  // PENSTOCK_BASE_SMALL_FILE_H_
