// What has threads, or is known to them, and is owned by Python objects: destroyed without the GIL, and left
// alone in a forked child, where the threads that it would wait for do not exist.
#ifndef PENSTOCK_PYTHON_OWNED_H_
#define PENSTOCK_PYTHON_OWNED_H_

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "gil.h"

namespace penstock::python {

template <class T>
class Owned {
 public:
  explicit Owned(std::unique_ptr<T> value) : value_(std::move(value)) {}
  ~Owned() {
    if (!here()) {
      (void)value_.release();
      return;
    }
    const GilReleased released;
    value_.reset();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  T& get() const { return *value_; }
  bool here() const { return getpid() == process_; }
  void CheckHere() const {
    if (!here()) {
      throw std::runtime_error(
          "this object belongs to the parent process: a forked child must make its own (with "
          "multiprocessing, in the "
          "worker, or use the start method 'spawn')");
    }
  }

 private:
  const pid_t process_ = getpid();
  std::unique_ptr<T> value_;
};

template <class T>
std::shared_ptr<Owned<T>> MakeOwned(std::unique_ptr<T> value) {
  return std::make_shared<Owned<T>>(std::move(value));
}

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_OWNED_H_
