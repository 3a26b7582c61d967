// When work on a CUDA stream is over: told from a thread of its own, or waited for asleep.
//
// An event that cannot be recorded does not undo what was enqueued before it. Then the stream itself is
// waited for: an error is reported when nothing of the work can touch its memory any more, and not before.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace penstock::zero {

// kResourceExhausted: no memory; kInternal: any other error. Both name the call.
absl::Status CheckCuda(cudaError_t error, absl::string_view call);

// Waits, asleep, for what is enqueued on `stream`, by an event of cudaEventBlockingSync. `enqueued`: the
// status of enqueuing it, which part of it may have outlived; it is returned if it is an error.
absl::Status WaitForStream(absl::Status enqueued, cudaStream_t stream, cudaEvent_t event,
                           absl::string_view what);

// Calls back when what was enqueued on a stream up to a moment is over, in order, from a thread of its own.
// From any thread.
class CudaCompletions {
 public:
  using Done = std::function<void(absl::Status)>;

  explicit CudaCompletions(int device);
  // After the last call back.
  ~CudaCompletions();
  CudaCompletions(const CudaCompletions&) = delete;
  CudaCompletions& operator=(const CudaCompletions&) = delete;

  // `done` gets `enqueued` if it is an error, else what the device says of the work.
  void Add(absl::Status enqueued, cudaStream_t stream, Done done);

 private:
  struct Waiting {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;  // null: the stream is waited for
    absl::Status status;          // why
    Done done;
  };
  absl::Status Record(cudaStream_t stream, cudaEvent_t* event);
  void Work();

  const int device_;
  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<Waiting> waiting_;
  std::vector<cudaEvent_t> free_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_
