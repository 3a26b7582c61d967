#include "aio/queue_inbox.h"

#include <utility>

namespace penstock::aio {

void DeviceQueue::Inbox::Add(Request* first, Request* last, bool urgent) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    requests_.Append(first, last);
    full_.store(true, std::memory_order_seq_cst);
  }
  // While the device is kept busy anyway, new work of no urgency is found at the next turn without a system
  // call.
  if (!urgent && sleep_.load(std::memory_order_seq_cst) == Sleep::kBusy) return;
  Wake();
}

void DeviceQueue::Inbox::RequestCancel() {
  cancels_.store(true, std::memory_order_seq_cst);
  Wake();
}

void DeviceQueue::Inbox::RunOnQueue(Call call, void* argument) {
  std::unique_lock<std::mutex> lock(mutex_);
  call_done_.wait(lock, [&] { return call_ == nullptr; });
  call_ = call;
  argument_ = argument;
  full_.store(true, std::memory_order_seq_cst);
  lock.unlock();
  Wake();
  lock.lock();
  call_done_.wait(lock, [&] { return call_ != call || argument_ != argument; });
}

void DeviceQueue::Inbox::Wake() {
  if (sleeper_ == nullptr) return;
  if (sleep_.exchange(Sleep::kAwake) == Sleep::kAwake) return;
  sleeper_->Wake();
  sleep_.notify_one();  // without a backend it sleeps on this
}

DeviceQueue::Inbox::Delivery DeviceQueue::Inbox::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  full_.store(false, std::memory_order_relaxed);
  return {std::exchange(requests_, {}).first, call_, argument_};
}

void DeviceQueue::Inbox::CallIsDone() {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_ = nullptr;
  call_done_.notify_all();
}

bool DeviceQueue::Inbox::PrepareToSleep(bool busy, bool idle) {
  sleep_.store(busy ? Sleep::kBusy : Sleep::kIdle, std::memory_order_seq_cst);
  const bool ends = stopping_.load(std::memory_order_seq_cst) && idle;
  return !(full_.load(std::memory_order_seq_cst) || cancels_.load(std::memory_order_seq_cst) || ends);
}

void DeviceQueue::Inbox::SleepWithoutBackend() { sleep_.wait(Sleep::kIdle, std::memory_order_seq_cst); }

}  // namespace penstock::aio
