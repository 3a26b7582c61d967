// Reading at a place of an open file.
#ifndef PENSTOCK_BASE_READ_AT_H_
#define PENSTOCK_BASE_READ_AT_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace penstock {

// Reads `bytes` at `offset` of the file into `to`, or as many as there are before the file's end, and returns
// how many. Short and interrupted reads go on. Errors: MakeIoError's of "read" and `path`. Thread-safe: the
// file's position is neither used nor moved.
absl::StatusOr<size_t> ReadAt(int fd, std::string_view path, uint64_t offset, void* to, size_t bytes);

}  // namespace penstock

#endif  // PENSTOCK_BASE_READ_AT_H_
