// What is told of work on a CUDA stream, and when, with stand-ins for CUDA's runtime: a stream does what is
// enqueued only when it is waited for, and calls fail when they are told to.
#include "zero/compute/libtorch/cuda_completions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

// Of every stream: a place in it is the number of what was enqueued before.
struct Stream {
  std::mutex mutex;
  std::deque<std::function<void()>> queue;
  int64_t enqueued = 0;
  void Enqueue(std::function<void()> work) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    ++enqueued;
  }
  void DoUntil(int64_t place) {
    std::lock_guard lock(mutex);
    for (; !queue.empty() && enqueued - static_cast<int64_t>(queue.size()) < place; queue.pop_front())
      queue.front()();
  }
  int64_t place() {
    std::lock_guard lock(mutex);
    return enqueued;
  }
};
struct Event {
  Stream* stream = nullptr;
  int64_t place = 0;
};

std::atomic<bool> creation_fails{false}, record_fails{false}, wait_fails{false};
std::atomic<int> events{0};

Stream* Of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
Event* Of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "said by the stand-in"; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (creation_fails) return cudaErrorMemoryAllocation;
  ++events;
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --events;
  delete Of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (record_fails) return cudaErrorUnknown;
  *Of(event) = {Of(stream), Of(stream)->place()};
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Of(event)->stream->DoUntil(Of(event)->place);
  return wait_fails ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Of(stream)->DoUntil(Of(stream)->place());
  return wait_fails ? cudaErrorLaunchFailure : cudaSuccess;
}
}  // extern "C"

namespace penstock::zero::cuda_completions_test {
namespace {

using testing::HasSubstr;

class CudaCompletionsTest : public testing::Test {
 protected:
  ~CudaCompletionsTest() override {
    creation_fails = record_fails = wait_fails = false;
    completions_.reset();
    EXPECT_EQ(events, 0);
  }
  cudaStream_t stream() { return reinterpret_cast<cudaStream_t>(&stream_); }
  // A copy, and what is told of it; `copied` says whether it was over then.
  absl::Status Copy(absl::Status enqueued = absl::OkStatus()) {
    bool over = false;
    stream_.Enqueue([&] { over = true; });
    std::promise<absl::Status> told;
    completions_->Add(std::move(enqueued), stream(), [&](absl::Status status) {
      copied_ = over;
      told.set_value(std::move(status));
    });
    return told.get_future().get();
  }

  Stream stream_;
  bool copied_ = false;
  std::unique_ptr<CudaCompletions> completions_ = std::make_unique<CudaCompletions>(0);
};

TEST_F(CudaCompletionsTest, ACopyIsToldWhenItIsOver) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Copy().ok());
    EXPECT_TRUE(copied_);
  }
  EXPECT_EQ(events, 1) << "one event, again and again";
}

TEST_F(CudaCompletionsTest, WhereNoEventIsRecordedBehindACopyTheErrorIsToldWhenTheCopyIsOver) {
  for (std::atomic<bool>* fails : {&record_fails, &creation_fails}) {
    *fails = true;
    const absl::Status status = Copy();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("cudaEvent"));
    EXPECT_TRUE(copied_);
    *fails = false;
  }
  EXPECT_TRUE(Copy().ok());
}

TEST_F(CudaCompletionsTest, WhatCouldNotBeEnqueuedIsToldBehindWhatWas) {
  const absl::Status status = Copy(absl::InternalError("copy of 8 bytes: refused"));
  EXPECT_EQ(status.message(), "copy of 8 bytes: refused");
  EXPECT_TRUE(copied_);
}

TEST_F(CudaCompletionsTest, WhatTheDeviceSaysIsTold) {
  wait_fails = true;
  EXPECT_THAT(std::string(Copy().message()), HasSubstr("the device: said by the stand-in"));
}

TEST_F(CudaCompletionsTest, TheyAreToldInTheOrderOfTheirStreamWhicheverOfThemFails) {
  std::mutex mutex;
  std::vector<int> order;
  std::promise<void> all;
  for (int i = 0; i < 8; ++i) {
    record_fails = i % 3 == 1;
    completions_->Add(absl::OkStatus(), stream(), [&, i](const absl::Status& status) {
      std::lock_guard lock(mutex);
      EXPECT_EQ(status.ok(), i % 3 != 1);
      order.push_back(i);
      if (i == 7) all.set_value();
    });
  }
  all.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(CudaCompletionsTest, WaitingForAStreamWaitsForWhatWasEnqueuedAlsoAfterAnError) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, 0), cudaSuccess);
  for (const bool refused : {false, true}) {
    for (const bool unrecorded : {false, true}) {
      bool over = false;
      stream_.Enqueue([&] { over = true; });
      record_fails = unrecorded;
      const absl::Status enqueued = refused ? absl::InternalError("sum: refused") : absl::OkStatus();
      const absl::Status status = WaitForStream(enqueued, stream(), event, "sum");
      EXPECT_EQ(status.ok(), !refused && !unrecorded) << status;
      EXPECT_TRUE(!refused || status == enqueued) << status;
      EXPECT_TRUE(over);
    }
  }
  (void)cudaEventDestroy(event);
}

}  // namespace
}  // namespace penstock::zero::cuda_completions_test
