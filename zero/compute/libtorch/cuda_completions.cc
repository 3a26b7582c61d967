#include "zero/compute/libtorch/cuda_completions.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

absl::Status CheckCuda(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // told here: LibTorch, which asks for the last one, must not find it again
  const std::string text =
      absl::StrCat(call, ": ", cudaGetErrorString(error), " (", static_cast<int>(error), ")");
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

absl::Status WaitForStream(absl::Status enqueued, cudaStream_t stream, cudaEvent_t event,
                           absl::string_view what) {
  if (enqueued.ok()) enqueued = CheckCuda(cudaEventRecord(event, stream), "cudaEventRecord");
  if (enqueued.ok()) return CheckCuda(cudaEventSynchronize(event), what);
  enqueued.Update(CheckCuda(cudaStreamSynchronize(stream), what));
  return enqueued;
}

}  // namespace penstock::zero
