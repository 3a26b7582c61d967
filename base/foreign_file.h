// Files of another format in the place of one that is read: what they are, and how they are converted.
#ifndef PENSTOCK_BASE_FOREIGN_FILE_H_
#define PENSTOCK_BASE_FOREIGN_FILE_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock {

inline constexpr size_t kForeignHeadBytes = 256;

// The few lines that a repository has in the place of a large file until `git lfs pull` has fetched it.
bool IsGitLfsPointer(std::string_view text);
inline constexpr const char* kGitLfsPointer =
    "is a Git LFS pointer, not the file itself: run `git lfs install && git lfs pull` in its directory";

// What a data file is whose first bytes are `head`, and how it is converted, as a predicate ("is Parquet:
// ..."). Empty: none of the formats that are known and not read. `tokens`: the file is said to hold numbers,
// which a short mark cannot tell from another format's.
std::string DescribeForeignData(std::string_view head, std::string_view path, bool tokens);

}  // namespace penstock

#endif  // PENSTOCK_BASE_FOREIGN_FILE_H_
