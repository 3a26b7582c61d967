// Small files that are there as a whole or not at all.
#ifndef PENSTOCK_TOOLS_BASE_WHOLE_FILE_H_
#define PENSTOCK_TOOLS_BASE_WHOLE_FILE_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace penstock::tools {

// Puts `text` in place of what `path` holds: whoever reads meanwhile sees the old file or the new one. It is
// written beside it, under its name with ".new-" and the process's number behind, and renamed. What is there
// and is no regular file (/dev/stdout, a pipe) is written to as it is.
//
// Errors name `what` (the flag or the key), the path, the operation and errno; the old file stands, and
// nothing is left beside it. kInvalidArgument: the place cannot be written to (no directory, no right);
// kResourceExhausted: the disk is full.
absl::Status WriteWholeFile(const std::string& what, const std::string& path, std::string_view text);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_WHOLE_FILE_H_
