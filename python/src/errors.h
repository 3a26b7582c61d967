// An absl::Status as the Python exception that a caller expects.
#ifndef PENSTOCK_PYTHON_ERRORS_H_
#define PENSTOCK_PYTHON_ERRORS_H_

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::python {

// Where a failed transfer was: becomes filename, offset and length of the exception.
struct Place {
  std::string path;
  bool transfer = false;  // offset and length are set
  uint64_t offset = 0;
  uint64_t length = 0;
};

// Its message, in which settings are spelt as keywords (run::Spelt).
std::string MessageOf(const absl::Status& status);

// Throws: ValueError for what was never right, ShortFileError for a read past the end of a file, MemoryError,
// KeyboardInterrupt never, and OSError with its errno for the rest. With the GIL held.
[[noreturn]] void Raise(const absl::Status& status, const Place& place = {});

inline void RaiseUnlessOk(const absl::Status& status, const Place& place = {}) {
  if (!status.ok()) Raise(status, place);
}
template <class T>
T ValueOrRaise(absl::StatusOr<T> value, const Place& place = {}) {
  if (!value.ok()) Raise(value.status(), place);
  return std::move(*value);
}

// Makes ShortFileError, a subclass of OSError and EOFError, and adds it to the module.
void BindErrors(nanobind::module_& module);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_ERRORS_H_
