// The errors of base/io_error.h by the names that users of the I/O engine know.
#ifndef PENSTOCK_AIO_IO_ERROR_H_
#define PENSTOCK_AIO_IO_ERROR_H_

#include "base/io_error.h"

namespace penstock::aio {

using penstock::ErrnoOf;
using penstock::ErrnoText;
using penstock::IoError;
using penstock::IoErrorCode;
using penstock::IsRetryableDeviceError;
using penstock::IsTransientError;
using penstock::MakeIoError;
using penstock::OneLine;

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_IO_ERROR_H_
