// Writing to an open file.
#ifndef PENSTOCK_BASE_WRITE_ALL_H_
#define PENSTOCK_BASE_WRITE_ALL_H_

#include <string_view>

namespace penstock {

// Writes all of `bytes` at the file's position. Short and interrupted writes go on. Returns 0, or the errno
// of the write that failed, before which some of the bytes may have been written.
[[nodiscard]] int WriteAll(int fd, std::string_view bytes);

}  // namespace penstock

#endif  // PENSTOCK_BASE_WRITE_ALL_H_
