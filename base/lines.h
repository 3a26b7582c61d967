// The lines of a text file that only grows, as its owner finds them again.
#ifndef PENSTOCK_BASE_LINES_H_
#define PENSTOCK_BASE_LINES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace penstock {

inline constexpr uint64_t kMostLineBytes = uint64_t{64} << 20;

// Calls `take` with every line of the open file `fd` that ends with a newline, without it, from the file's
// beginning until `take` returns false. Returns the bytes of the lines that were taken, newlines included:
// where a file ends within a line, less than its length. The descriptor's offset is neither used nor moved.
//
// Errors name operation, `path`, offset and errno. A read that fails is an error and never the end. So is a
// line of more than kMostLineBytes (kInvalidArgument).
absl::StatusOr<uint64_t> ForEachLine(int fd, const std::string& path,
                                     const std::function<bool(std::string_view line)>& take);

}  // namespace penstock

#endif  // PENSTOCK_BASE_LINES_H_
