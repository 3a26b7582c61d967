// How an errno of a transfer or a file call becomes an absl::Status that names the thing, the place and the
// way out.
#ifndef PENSTOCK_BASE_IO_ERROR_H_
#define PENSTOCK_BASE_IO_ERROR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace penstock {

// Everything that is known about a failed operation. Fields that do not apply stay at their defaults and are
// left out of the text.
struct IoError {
  std::string_view op = {};  // "read", "open", "fallocate"
  std::string_view path = {};
  std::string_view device = {};  // "vda"
  uint64_t offset = 0;
  uint64_t bytes = 0;  // asked for; 0: the message names neither offset nor length
  uint64_t done_bytes = 0;
  int error = 0;  // errno
};

// ENOSPC, EDQUOT, EFBIG, ENOMEM, EMFILE, ENFILE: kResourceExhausted.  EIO and the device errors that mean the
// same (EREMOTEIO, EBADMSG, ENODATA, EUCLEAN, ENXIO, ENODEV): kDataLoss.  ETIMEDOUT, EAGAIN, EINTR, EBUSY:
// kUnavailable. ENOENT: kNotFound.  EEXIST: kAlreadyExists.  EACCES, EPERM, EROFS: kPermissionDenied. EINVAL:
// kInvalidArgument. EBADF, ELOOP, EISDIR, ENOTDIR, EOPNOTSUPP: kFailedPrecondition.  ECANCELED: kCancelled.
// The rest: kInternal.
absl::StatusCode IoErrorCode(int error);

// "read /nvme/tiles.0 (vda): offset 4096, 1048576 bytes, 0 done: Input/output error (errno 5); <the way
// out>".
absl::Status MakeIoError(const IoError& error);

// The errno that such a status names, the last one where there are several; 0 where it names none.
int ErrnoOf(const absl::Status& status);

// "Input/output error (errno 5)".
std::string ErrnoText(int error);

// What became of a C++ stream, after `what`: errno's error, or where the stream did not leave one, kUnknown;
// never OK.
absl::Status StreamError(std::string_view what);

// Text from outside as a part of a message of one line: control characters become '?', and what is longer
// than `most` bytes is cut off with "...".
std::string OneLine(std::string_view text, size_t most = 200);

// Worth one more try of the same read or write, never of a sync: the device may have had a moment (EIO,
// ETIMEDOUT, EREMOTEIO, ENODATA).
bool IsRetryableDeviceError(int error);
// The kernel asks for it: EINTR, EAGAIN, and ENOMEM or EBUSY in passing.
bool IsTransientError(int error);

}  // namespace penstock

#endif  // PENSTOCK_BASE_IO_ERROR_H_
