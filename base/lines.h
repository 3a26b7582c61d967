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

// The lines of a regular file, one after the other.
//
// Threads: one. Errors as ForEachLine, and those of opening; kFailedPrecondition: not a regular file.
class LineReader {
 public:
  static absl::StatusOr<LineReader> Open(const std::string& path);
  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  ~LineReader();

  // Puts the next line into `line`, without its newline. Returns false at the end of the file. What stands
  // there without a newline is a line, too, of which torn() says so.
  absl::StatusOr<bool> Next(std::string* line);
  bool torn() const { return torn_; }

 private:
  LineReader(std::string path, int fd);

  std::string path_;
  int fd_ = -1;
  uint64_t offset_ = 0;  // of the next read
  std::string buffer_;
  size_t begin_ = 0;  // of what of it was not handed out
  bool torn_ = false;
};

}  // namespace penstock

#endif  // PENSTOCK_BASE_LINES_H_
