#include "base/io_error.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace penstock {
namespace {

// What the reader can do about it; empty where the message says it all.
std::string_view WayOut(int error) {
  switch (error) {
    case ENOSPC:
      return "free space on this file system or choose another directory";
    case EDQUOT:
      return "the quota of this user is used up";
    case EFBIG:
      return "the file system or `ulimit -f` allows no file of this length";
    case EMFILE:
      return "raise `ulimit -n`";
    case EIO:
    case EREMOTEIO:
    case EBADMSG:
    case EUCLEAN:
      return "the device could not do it: see dmesg and its health log";
    case ENXIO:
    case ENODEV:
      return "the device is gone";
    case EROFS:
      return "the file system is read-only, perhaps after an error: see dmesg";
    case EBADF:
      return "the descriptor was closed or has the wrong mode";
    case ELOOP:
      return "the last part of the path is a symbolic link, which is not followed";
    default:
      return "";
  }
}

}  // namespace

absl::StatusCode IoErrorCode(int error) {
  switch (error) {
    case 0:
      return absl::StatusCode::kOk;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EIO:
    case EREMOTEIO:
    case EBADMSG:
    case ENODATA:
    case EUCLEAN:
    case ENXIO:
    case ENODEV:
      return absl::StatusCode::kDataLoss;
    case ETIMEDOUT:
    case EAGAIN:
    case EINTR:
    case EBUSY:
      return absl::StatusCode::kUnavailable;
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case EINVAL:
    case ENAMETOOLONG:
      return absl::StatusCode::kInvalidArgument;
    case EBADF:
    case ELOOP:
    case EISDIR:
    case ENOTDIR:
    case EOPNOTSUPP:
    case ESPIPE:
      return absl::StatusCode::kFailedPrecondition;
    case ECANCELED:
      return absl::StatusCode::kCancelled;
    default:
      return absl::StatusCode::kInternal;
  }
}

std::string ErrnoText(int error) {
  char buffer[128];
  // The GNU variant: returns the text, which need not be in the buffer.
  return absl::StrCat(strerror_r(error, buffer, sizeof(buffer)), " (errno ", error, ")");
}

absl::Status MakeIoError(const IoError& error) {
  std::string text = absl::StrCat(std::string(error.op), " ", std::string(error.path));
  if (!error.device.empty()) absl::StrAppend(&text, " (", std::string(error.device), ")");
  if (error.bytes != 0) {
    absl::StrAppend(&text, ": offset ", error.offset, ", ", error.bytes, " bytes, ", error.done_bytes,
                    " done");
  }
  absl::StrAppend(&text, ": ", ErrnoText(error.error));
  const std::string_view way_out = WayOut(error.error);
  if (!way_out.empty()) absl::StrAppend(&text, "; ", std::string(way_out));
  // Whoever asks for an error gets one, also where errno was lost on the way.
  const absl::StatusCode code = IoErrorCode(error.error);
  return absl::Status(code != absl::StatusCode::kOk ? code : absl::StatusCode::kInternal, text);
}

int ErrnoOf(const absl::Status& status) {
  const std::string_view text(status.message().data(), status.message().size());
  constexpr std::string_view kMark = "(errno ";
  const size_t at = text.rfind(kMark);
  if (at == std::string_view::npos) return 0;
  int error = 0;
  const char* const begin = text.data() + at + kMark.size();
  const auto [end, failure] = std::from_chars(begin, text.data() + text.size(), error);
  return failure == std::errc() && end != text.data() + text.size() && *end == ')' ? error : 0;
}

absl::Status StreamError(std::string_view what) {
  const int error = errno;
  if (error != 0) return absl::ErrnoToStatus(error, std::string(what));
  return absl::UnknownError(absl::StrCat(std::string(what), ": failed, and the system did not say why"));
}

std::string OneLine(std::string_view text, size_t most) {
  std::string line(text.substr(0, most));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > most) line += "...";
  return line;
}

bool IsRetryableDeviceError(int error) {
  return error == EIO || error == ETIMEDOUT || error == EREMOTEIO || error == ENODATA;
}

bool IsTransientError(int error) {
  return error == EINTR || error == EAGAIN || error == EBUSY || error == ENOMEM;
}

}  // namespace penstock
