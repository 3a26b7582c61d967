#include "zero/compute/cuda/driver_completions.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

absl::Status CheckDriver(CUresult error, absl::string_view call) {
  if (error == CUDA_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(call, ": ", kernels::cuda::DriverErrorText(error));
  return error == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

}  // namespace penstock::zero
