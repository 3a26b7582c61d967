#include "zero/compute/libtorch/cuda_completions.h"

#include <string>
#include <utility>

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

CudaCompletions::CudaCompletions(int device) : device_(device), thread_([this] { Work(); }) {}

CudaCompletions::~CudaCompletions() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  there_.notify_all();
  thread_.join();
  for (cudaEvent_t event : free_) (void)cudaEventDestroy(event);
}

absl::Status CudaCompletions::Record(cudaStream_t stream, cudaEvent_t* event) {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      *event = free_.back();
      free_.pop_back();
    }
  }
  if (*event == nullptr) {
    // The waiting thread sleeps: the cores are wanted for updates.
    absl::Status status = CheckCuda(
        cudaEventCreateWithFlags(event, cudaEventBlockingSync | cudaEventDisableTiming), "cudaEventCreate");
    if (!status.ok()) {
      *event = nullptr;
      return status;
    }
  }
  absl::Status status = CheckCuda(cudaEventRecord(*event, stream), "cudaEventRecord");
  if (!status.ok()) (void)cudaEventDestroy(std::exchange(*event, nullptr));
  return status;
}

void CudaCompletions::Add(absl::Status enqueued, cudaStream_t stream, Done done) {
  Waiting added{.stream = stream, .event = nullptr, .status = std::move(enqueued), .done = std::move(done)};
  if (added.status.ok()) added.status = Record(stream, &added.event);
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(added));
  }
  there_.notify_one();
}

void CudaCompletions::Work() {
  (void)cudaSetDevice(device_);  // whoever is called back here may go on with it
  for (;;) {
    Waiting next;
    {
      std::unique_lock lock(mutex_);
      there_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    if (next.event == nullptr) {
      next.status.Update(CheckCuda(cudaStreamSynchronize(next.stream), "cudaStreamSynchronize"));
    } else {
      next.status.Update(CheckCuda(cudaEventSynchronize(next.event), "the device"));
      std::lock_guard lock(mutex_);
      free_.push_back(next.event);
    }
    next.done(std::move(next.status));
  }
}

}  // namespace penstock::zero
