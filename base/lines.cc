#include "base/lines.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/small_file.h"
#include "base/status_macros.h"

namespace penstock {

absl::StatusOr<uint64_t> ForEachLine(int fd, const std::string& path,
                                     const std::function<bool(std::string_view line)>& take) {
  constexpr size_t kPieceBytes = 64 << 10;
  std::string seen;  // from the first byte that is not taken
  uint64_t taken = 0, read = 0;
  size_t searched = 0;
  while (true) {
    const size_t before = seen.size();
    seen.resize(before + kPieceBytes);
    const ssize_t n = ::pread(fd, seen.data() + before, kPieceBytes, static_cast<off_t>(read));
    seen.resize(before + (n > 0 ? static_cast<size_t>(n) : 0));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return MakeIoError({.op = "read", .path = path, .offset = read, .bytes = kPieceBytes, .error = errno});
    if (n == 0) return taken;
    read += static_cast<uint64_t>(n);
    size_t from = 0;
    for (size_t end = seen.find('\n', searched); end != std::string::npos; end = seen.find('\n', from)) {
      if (!take(std::string_view(seen).substr(from, end - from))) return taken;
      taken += end + 1 - from;
      from = end + 1;
    }
    seen.erase(0, from);
    searched = seen.size();
    if (searched > kMostLineBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the line at byte ", taken, " is longer than ", kMostLineBytes, " bytes"));
    }
  }
}

LineReader::LineReader(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

LineReader::LineReader(LineReader&& other) noexcept { *this = std::move(other); }

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(offset_, other.offset_);
  std::swap(buffer_, other.buffer_);
  std::swap(begin_, other.begin_);
  std::swap(torn_, other.torn_);
  return *this;
}

LineReader::~LineReader() {
  if (fd_ >= 0) ::close(fd_);
}

absl::StatusOr<LineReader> LineReader::Open(const std::string& path) {
  ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  return LineReader(path, fd);
}

absl::StatusOr<bool> LineReader::Next(std::string* line) {
  constexpr size_t kPieceBytes = 64 << 10;
  line->clear();
  while (true) {
    const size_t end = buffer_.find('\n', begin_);
    line->append(buffer_, begin_, end - begin_);
    if (end != std::string::npos) {
      begin_ = end + 1;
      return true;
    }
    if (line->size() > kMostLineBytes) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": the line before byte ", offset_,
                                                     " is longer than ", kMostLineBytes, " bytes"));
    }
    buffer_.resize(kPieceBytes);
    begin_ = 0;
    ssize_t n = 0;
    do {
      n = ::pread(fd_, buffer_.data(), kPieceBytes, static_cast<off_t>(offset_));
    } while (n < 0 && errno == EINTR);
    const int error = errno;
    buffer_.resize(n > 0 ? static_cast<size_t>(n) : 0);
    if (n < 0) {
      return MakeIoError(
          {.op = "read", .path = path_, .offset = offset_, .bytes = kPieceBytes, .error = error});
    }
    offset_ += static_cast<uint64_t>(n);
    if (n > 0) continue;
    torn_ = !line->empty();
    return torn_;
  }
}

}  // namespace penstock
