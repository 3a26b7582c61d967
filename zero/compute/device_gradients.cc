#include "zero/compute/device_gradients.h"

#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/loaded_library.h"
#include "base/status_macros.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr unsigned kPortable = 1;   // cudaHostRegisterPortable: of every device
constexpr int kDeviceToHost = 2;    // cudaMemcpyDeviceToHost
constexpr int64_t kAlignment = 64;  // of each gradient, as the kernels like it

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

struct DeviceGradients::Runtime {
  int (*SetDevice)(int) = nullptr;
  int (*GetDevice)(int*) = nullptr;
  int (*HostRegister)(void*, size_t, unsigned) = nullptr;
  int (*HostUnregister)(void*) = nullptr;
  int (*MemcpyAsync)(void*, const void*, size_t, int, void*) = nullptr;
  int (*StreamSynchronize)(void*) = nullptr;
  int (*GetLastError)() = nullptr;
  const char* (*GetErrorString)(int) = nullptr;
  // The error is told here, or does not matter: the caller's next look at its own errors must not find it.
  int Cleared(int error) const {
    if (error != 0) GetLastError();
    return error;
  }
};

DeviceGradients::DeviceGradients() = default;

DeviceGradients::~DeviceGradients() {
  if (pinned_) runtime_->Cleared(runtime_->HostUnregister(memory_.data()));
}

absl::Status DeviceGradients::Load() {
  if (runtime_ != nullptr) return absl::OkStatus();
  // The owner's own, which is loaded, before one that lies about: a second runtime has no part in its
  // streams.
  const aio::LoadedLibrary owners(aio::kCudaRuntime, RTLD_NOLOAD);
  const aio::LoadedLibrary library = owners.loaded() ? owners : aio::LoadedLibrary(aio::kCudaRuntime);
  if (!library.loaded()) {
    return absl::FailedPreconditionError(
        "gradients on a device: no CUDA runtime (libcudart.so) was found; give them in host memory");
  }
  auto runtime = std::make_unique<Runtime>();
  std::string missing;
  library.Find("cudaSetDevice", runtime->SetDevice, missing);
  library.Find("cudaGetDevice", runtime->GetDevice, missing);
  library.Find("cudaHostRegister", runtime->HostRegister, missing);
  library.Find("cudaHostUnregister", runtime->HostUnregister, missing);
  library.Find("cudaMemcpyAsync", runtime->MemcpyAsync, missing);
  library.Find("cudaStreamSynchronize", runtime->StreamSynchronize, missing);
  library.Find("cudaGetLastError", runtime->GetLastError, missing);
  library.Find("cudaGetErrorString", runtime->GetErrorString, missing);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradients on a device: the CUDA runtime here has no ", missing));
  }
  runtime_ = std::move(runtime);
  return absl::OkStatus();
}

absl::Status DeviceGradients::Reserve(int64_t bytes) {
  if (memory_.bytes() >= bytes) return absl::OkStatus();
  if (pinned_) runtime_->Cleared(runtime_->HostUnregister(memory_.data()));
  pinned_ = false;
  memory_ = HostBuffer();
  ASSIGN_OR_RETURN(memory_, HostBuffer::Of(bytes, "gradients from a device"));
  // A copy to memory that is not pinned is right as well, and slower.
  pinned_ =
      runtime_->Cleared(runtime_->HostRegister(memory_.data(), static_cast<size_t>(bytes), kPortable)) == 0;
  return absl::OkStatus();
}

absl::Status DeviceGradients::Check(int error, const char* call, int device, int64_t bytes) const {
  if (runtime_->Cleared(error) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("gradients on device ", device, ", ", bytes, " bytes: ", call,
                                             ": ", runtime_->GetErrorString(error), " (error ", error, ")"));
}

absl::Status DeviceGradients::ToHost(const DeviceStream& from, std::vector<Gradient>* gradients) {
  int64_t bytes = 0;
  for (Gradient& gradient : *gradients) {
    if (!gradient.value.on_device) continue;
    bytes += Aligned(gradient.value.bytes());
    if (gradient.value.bytes() == 0) gradient.value.on_device = false;  // it lies nowhere
  }
  if (bytes == 0) return absl::OkStatus();
  RETURN_IF_ERROR(Load());
  int callers = 0;  // the thread is not ours: its device is as it was
  RETURN_IF_ERROR(Check(runtime_->GetDevice(&callers), "cudaGetDevice", from.device, bytes));
  if (callers == from.device) return Copy(from, bytes, gradients);
  RETURN_IF_ERROR(Check(runtime_->SetDevice(from.device), "cudaSetDevice", from.device, bytes));
  absl::Status status = Copy(from, bytes, gradients);
  status.Update(Check(runtime_->SetDevice(callers), "cudaSetDevice", callers, bytes));
  return status;
}

absl::Status DeviceGradients::Copy(const DeviceStream& from, int64_t bytes,
                                   std::vector<Gradient>* gradients) {
  RETURN_IF_ERROR(Reserve(bytes));
  absl::Status status;
  std::byte* to = memory_.data();
  for (Gradient& gradient : *gradients) {
    if (!gradient.value.on_device || !status.ok()) continue;
    const int64_t of_it = gradient.value.bytes();
    status = Check(runtime_->MemcpyAsync(to, gradient.value.data, static_cast<size_t>(of_it), kDeviceToHost,
                                         from.stream),
                   "cudaMemcpyAsync", from.device, of_it);
    gradient.value.data = to;
    gradient.value.on_device = false;
    to += Aligned(of_it);
  }
  // Also after an error: copies that were begun write here.
  status.Update(Check(runtime_->StreamSynchronize(from.stream), "cudaStreamSynchronize", from.device, bytes));
  return status;
}

}  // namespace penstock::zero
