// When work on a CUDA stream is over, over CUDA's runtime: reported from a thread of its own, or waited for
// asleep.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "zero/compute/stream_completions.h"

namespace penstock::zero {

// kResourceExhausted: no memory; kInternal: any other error. Both name the call.
absl::Status CheckCuda(cudaError_t error, absl::string_view call);

// Waits, asleep, for what is enqueued on `stream`, by an event of cudaEventBlockingSync. `enqueued`: the
// status of enqueuing it, which part of it may have outlived; it is returned if it is an error.
absl::Status WaitForStream(absl::Status enqueued, cudaStream_t stream, cudaEvent_t event,
                           absl::string_view what);

struct CudaEvents {
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  void Enter() const { (void)cudaSetDevice(device); }  // who is called back may go on with it
  absl::Status Create(cudaEvent_t* event) const {
    return CheckCuda(cudaEventCreateWithFlags(event, cudaEventBlockingSync | cudaEventDisableTiming),
                     "cudaEventCreate");
  }
  absl::Status Record(cudaEvent_t event, cudaStream_t stream) const {
    return CheckCuda(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  absl::Status Wait(cudaEvent_t event) const { return CheckCuda(cudaEventSynchronize(event), "the device"); }
  absl::Status WaitForStream(cudaStream_t stream) const {
    return CheckCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  void Destroy(cudaEvent_t event) const { (void)cudaEventDestroy(event); }

  int device = 0;
};

class CudaCompletions : public StreamCompletions<CudaEvents> {
 public:
  explicit CudaCompletions(int device) : StreamCompletions({device}) {}
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_CUDA_COMPLETIONS_H_
