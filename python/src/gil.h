// The interpreter's lock, given up or taken for the time of a scope.
//
// A daemon thread may want it back when the interpreter ends, and never gets it: until Python 3.13 such a
// thread is ended by pthread_exit, whose unwinding must not meet a destructor or a function that does not
// throw, or the process is aborted. Here the thread stays where it is until the process has ended, as it does
// in Python 3.14.
#ifndef PENSTOCK_PYTHON_GIL_H_
#define PENSTOCK_PYTHON_GIL_H_

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace penstock::python {

[[noreturn]] inline void StayUntilTheProcessEnds() noexcept {
  while (true) (void)::pause();
}

// Other threads of Python run while this object exists. The thread must hold the lock.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      StayUntilTheProcessEnds();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// This thread, which any may be, holds the lock while this object exists.
class GilHeld {
 public:
  GilHeld() : state_(Ensure()) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  static PyGILState_STATE Ensure() noexcept {
    try {
      return PyGILState_Ensure();
    } catch (const abi::__forced_unwind&) {
      StayUntilTheProcessEnds();
    }
  }

  const PyGILState_STATE state_;
};

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_GIL_H_
