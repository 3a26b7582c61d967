#include "zero/compute/cuda/driver_completions.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

absl::Status CheckDriver(CUresult error, absl::string_view call) {
  if (error == CUDA_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(call, ": ", kernels::cuda::DriverErrorText(error));
  return error == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

DriverCompletions::DriverCompletions(const kernels::cuda::Driver& driver, CUcontext context)
    : driver_(driver), context_(context), thread_([this] { Work(); }) {}

DriverCompletions::~DriverCompletions() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  there_.notify_all();
  thread_.join();
  for (CUevent event : free_) (void)driver_.EventDestroy(event);
}

absl::Status DriverCompletions::Record(CUstream stream, CUevent* event) {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      *event = free_.back();
      free_.pop_back();
    }
  }
  if (*event == nullptr) {
    // The waiting thread sleeps: the cores are wanted for updates.
    absl::Status status = CheckDriver(
        driver_.EventCreate(event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    if (!status.ok()) {
      *event = nullptr;
      return status;
    }
  }
  absl::Status status = CheckDriver(driver_.EventRecord(*event, stream), "cuEventRecord");
  if (!status.ok()) (void)driver_.EventDestroy(std::exchange(*event, nullptr));
  return status;
}

void DriverCompletions::Add(absl::Status enqueued, CUstream stream, Done done) {
  Waiting added{.stream = stream, .event = nullptr, .status = std::move(enqueued), .done = std::move(done)};
  if (added.status.ok()) added.status = Record(stream, &added.event);
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(added));
  }
  there_.notify_one();
}

void DriverCompletions::Work() {
  (void)driver_.CtxSetCurrent(context_);
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
      next.status.Update(CheckDriver(driver_.StreamSynchronize(next.stream), "cuStreamSynchronize"));
    } else {
      next.status.Update(CheckDriver(driver_.EventSynchronize(next.event), "the device"));
      const std::lock_guard lock(mutex_);
      free_.push_back(next.event);
    }
    next.done(std::move(next.status));
  }
}

}  // namespace penstock::zero
