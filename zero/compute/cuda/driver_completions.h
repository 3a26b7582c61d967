// When work on a stream of a CUDA device is over, over the driver alone.
#ifndef PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_
#define PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/driver.h"
#include "zero/compute/stream_completions.h"

namespace penstock::zero {

// kResourceExhausted: no memory; kInternal: any other error. Both name the call.
absl::Status CheckDriver(CUresult error, absl::string_view call);

struct DriverEvents {
  using Stream = CUstream;
  using Event = CUevent;

  void Enter() const { (void)driver.CtxSetCurrent(context); }
  absl::Status Create(CUevent* event) const {
    return CheckDriver(driver.EventCreate(event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                       "cuEventCreate");
  }
  absl::Status Record(CUevent event, CUstream stream) const {
    return CheckDriver(driver.EventRecord(event, stream), "cuEventRecord");
  }
  absl::Status Wait(CUevent event) const { return CheckDriver(driver.EventSynchronize(event), "the device"); }
  absl::Status WaitForStream(CUstream stream) const {
    return CheckDriver(driver.StreamSynchronize(stream), "cuStreamSynchronize");
  }
  void Destroy(CUevent event) const { (void)driver.EventDestroy(event); }

  const kernels::cuda::Driver& driver;  // outlives the completions, and so does the context
  CUcontext context;
};

class DriverCompletions : public StreamCompletions<DriverEvents> {
 public:
  DriverCompletions(const kernels::cuda::Driver& driver, CUcontext context)
      : StreamCompletions({driver, context}) {}
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_CUDA_DRIVER_COMPLETIONS_H_
