#include "errors.h"

#include <nanobind/stl/string.h>

#include <cerrno>

#include "aio/io_error.h"
#include "run/settings.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

// Where a status names no errno: the one that an operating system would have chosen.
int ErrnoFor(const absl::Status& status) {
  if (const int error = aio::ErrnoOf(status); error != 0) return error;
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return ENOENT;
    case absl::StatusCode::kAlreadyExists:
      return EEXIST;
    case absl::StatusCode::kPermissionDenied:
      return EACCES;
    case absl::StatusCode::kResourceExhausted:
      return ENOSPC;
    case absl::StatusCode::kOutOfRange:
      return ENODATA;
    case absl::StatusCode::kCancelled:
      return ECANCELED;
    case absl::StatusCode::kFailedPrecondition:
      return EINVAL;
    case absl::StatusCode::kUnavailable:  // of other ranks: a ConnectionAbortedError
      return ECONNABORTED;
    default:
      return EIO;
  }
}

PyObject* short_file_error = nullptr;  // lives as long as the process

}  // namespace

std::string MessageOf(const absl::Status& status) {
  return run::Spelt(std::string(status.message()), run::Door::kPython);
}

void Raise(const absl::Status& status, const Place& place) {
  const std::string text = MessageOf(status);
  const int error = ErrnoFor(status);
  if (status.code() == absl::StatusCode::kInvalidArgument && aio::ErrnoOf(status) == 0) {
    throw nb::value_error(text.c_str());
  }
  if (error == ENOMEM) {
    PyErr_SetString(PyExc_MemoryError, text.c_str());
    throw nb::python_error();
  }
  nb::handle type = status.code() == absl::StatusCode::kOutOfRange ? nb::handle(short_file_error)
                                                                   : nb::handle(PyExc_OSError);
  // With an errno, OSError makes its own subclass: FileNotFoundError and the like.
  nb::object exception = type(error, text);
  if (!place.path.empty()) exception.attr("filename") = place.path;
  if (place.transfer) {
    exception.attr("offset") = place.offset;
    exception.attr("length") = place.length;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

void BindErrors(nb::module_& module) {
  nb::object bases = nb::make_tuple(nb::handle(PyExc_OSError), nb::handle(PyExc_EOFError));
  short_file_error = PyErr_NewExceptionWithDoc(
      "penstock.ShortFileError",
      "A read went past the end of its file: fewer bytes are there than the buffer takes.\n\n"
      "`filename`, `offset` and `length` (bytes) tell what was asked for; `errno` is ENODATA.",
      bases.ptr(), nullptr);
  if (short_file_error == nullptr) throw nb::python_error();
  module.attr("ShortFileError") = nb::handle(short_file_error);
}

}  // namespace penstock::python
