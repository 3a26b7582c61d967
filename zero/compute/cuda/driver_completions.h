// When work on a stream of a CUDA device is over: told from a thread of its own. Over the driver alone, as
// zero/compute/libtorch/cuda_completions.h over CUDA's runtime.
//
// An event that cannot be recorded does not undo what was enqueued before it. Then the stream itself is
// waited for: an error is reported when nothing of the work can touch its memory any more, and not before.
#ifndef PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_
#define PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/driver.h"

namespace penstock::zero {

// kResourceExhausted: no memory; kInternal: any other error. Both name the call.
absl::Status CheckDriver(CUresult error, absl::string_view call);

// Calls back when what was enqueued on a stream up to a moment is over, in order, from a thread of its own.
// From any thread, with the device's context current.
class DriverCompletions {
 public:
  using Done = std::function<void(absl::Status)>;

  // The driver and the context outlive it.
  DriverCompletions(const kernels::cuda::Driver& driver, CUcontext context);
  // After the last call back.
  ~DriverCompletions();
  DriverCompletions(const DriverCompletions&) = delete;
  DriverCompletions& operator=(const DriverCompletions&) = delete;

  // `done` gets `enqueued` if it is an error, else what the device says of the work.
  void Add(absl::Status enqueued, CUstream stream, Done done);

 private:
  struct Waiting {
    CUstream stream = nullptr;
    CUevent event = nullptr;  // null: the stream is waited for
    absl::Status status;      // why
    Done done;
  };
  absl::Status Record(CUstream stream, CUevent* event);
  void Work();

  const kernels::cuda::Driver& driver_;
  const CUcontext context_;
  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<Waiting> waiting_;
  std::vector<CUevent> free_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_
